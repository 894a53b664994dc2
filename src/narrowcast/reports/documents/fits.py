"""The page of what would fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narrowcast.core.ops import named
from narrowcast.reports.documents.ledgers import shares
from narrowcast.reports.documents.model import Figure, Graph, Node, Page, Table, Todo
from narrowcast.reports.documents.rules import Shown, call_rule
from narrowcast.reports.documents.tables import finding_table, table
from narrowcast.reports.documents.words import number, split_identity

Data = Mapping[str, Any]
FORMATS = ("fp16", "bf16", "e4m3fn", "e5m2")
UNSCALED = "unscaled"


def fit_page(data: Data) -> Page:
    """The page of what would fit: a box for each call, with the first format that it fits without a scale."""
    rows = [row for row in data["rows"] if row["scale"] == UNSCALED]
    losing = [row for row in rows if row["overflow"] > 0 or row["underflow"] > data["tolerance"]]
    lost = {name: {row["id"] for row in losing if row["format"] == name} for name in FORMATS}
    nodes = {key: _node(key, place) for key, place in data["places"].items()}
    for key, node in nodes.items():
        node.computes = next((name for name in FORMATS if key not in lost[name]), "fp32")
    worst = sorted((row for row in losing if row["format"] == "fp16"), key=lambda r: (-r["overflow"], -r["underflow"]))
    for row in reversed(worst):  # of several tensors of a call the worst is said
        nodes[row["id"]].finding = f"{row['argument']} does not fit fp16: {_loss(row)}"
    unfit = len(lost["fp16"])
    verdict = f"{unfit} of {len(nodes)} calls do not fit fp16" if unfit else "Everything fits fp16"
    page = Page("fit", "Would it fit?", verdict, "bad" if unfit else "good")
    page.graph = Graph(list(nodes.values()), [], note=f"A call has the first of {', '.join(FORMATS)} that it fits.")
    page.facts = [("calls", str(len(nodes))), ("may underflow", f"{data['tolerance']:.0%} of a tensor")]
    page.figures = [
        Figure(name, len(found), "calls would lose something", "bad" if found else "good")
        for name, found in lost.items()
    ]
    page.bars = [
        bar for bar in [shares(nodes.values(), "calls", "Calls by the first format that they fit")] if bar.parts
    ]
    page.todos = [_todo(nodes[key]) for key in dict.fromkeys(row["id"] for row in worst)][:3]
    page.notes = list(data["notes"])
    page.tables = [*finding_table(list(nodes.values()), map(_rule, nodes.values())), *_tensor_table(rows, nodes)]
    return page


def _node(identity: str, place: str) -> Node:
    path, op, label, direction = split_identity(identity)
    file, _, line = place.rpartition(":")
    return Node(path, op, label, 1, direction, file=file, line=int(line))


def _loss(row: Data) -> str:
    if row["overflow"]:
        return f"{row['overflow']:.2g} of it overflow, by {-float(row['headroom_bits']):.1f} bits"
    return f"{row['underflow']:.2g} of it underflow"


def _todo(node: Node) -> Todo:
    what = f"Keep {node.op} in {node.path or 'the root'} in fp32 beside fp16"
    return Todo(what, node.finding, _rule(node, node.finding), node.path)


def _rule(node: Node, reason: str = "") -> Shown:
    """The rule that keeps the call in fp32 beside fp16; none for one of the backward, or that is another op in fp16."""
    is_same_op = node.op.split(".")[1] not in named("multiplies.recurrent")
    return call_rule(node.op, node.path, "full" * (is_same_op and node.direction == "forward"), reason)


def _tensor_table(rows: list[Data], nodes: Mapping[str, Node]) -> list[Table]:
    """A row for each tensor of a call, with what each format would lose of it."""
    found: dict[tuple[str, str], dict[str, Data]] = {}
    for row in rows:
        found.setdefault((row["id"], row["argument"]), {})[row["format"]] = row
    cells = []
    for (key, argument), by_format in found.items():
        node = nodes[key]
        headroom = number(by_format["fp16"]["headroom_bits"])
        lost = [by_format[name][kind] for name in FORMATS for kind in ("overflow", "underflow")]
        cells.append([node.path, node.op, node.label, argument, headroom, *lost])
    kinds = ", ".join(f"{name} {kind}:share" for name in FORMATS for kind in ("overflow", "underflow"))
    columns = f"module:module, op:op, call, tensor, headroom in fp16:bits, {kinds}"
    rules = [_rule(nodes[key]) for key, _ in found]
    title = "Each tensor: what each format would lose of it, without a scale"
    return table("fit", title, columns, cells, rules, list(nodes.values()))
