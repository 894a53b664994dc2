"""The page of headroom: which formats hold the values of a run."""

from __future__ import annotations

import glob
import math
from collections.abc import Collection, Mapping
from operator import attrgetter

from narrowcast.core.ledger.identity import CallId
from narrowcast.core.ops import named
from narrowcast.output.words import counted
from narrowcast.reports.documents.ledgers import shares
from narrowcast.reports.documents.model import Document, Figure, Graph, Node, Shown, Table, Todo, node_at
from narrowcast.reports.documents.rules import agreeing, alike_module, call_rule, keeping, shared_modules
from narrowcast.reports.documents.tables import finding_table, table
from narrowcast.reports.documents.words import number
from narrowcast.reports.results.headroom import FORMATS, SCALES, UNSCALED, Headroom, TensorHeadroom

NAMES = tuple(format.name for format in FORMATS)


def headroom_document(result: Headroom) -> Document:
    """Return the page of headroom: a box for each call, with the first format that it fits without a scale."""
    rows = [row for row in result.rows if row.scale == UNSCALED]
    losing = [row for row in rows if row.overflow > 0 or row.underflow > result.tolerance]
    lost = {name: {row.id for row in losing if row.format == name} for name in NAMES}
    nodes = {call: node_at(call, at) for call, at in result.places.items()}
    for call, node in nodes.items():
        node.computes = next((name for name in NAMES if call not in lost[name]), "fp32")
    worst = sorted((row for row in losing if row.format == "fp16"), key=lambda r: (-r.overflow, -r.underflow))
    for row in reversed(worst):  # of several tensors of a call the worst is said
        nodes[row.id].finding = f"{row.argument} does not fit fp16: {_loss(row)}"
    unfit = len(lost["fp16"])
    verdict = f"{unfit} of {counted(len(nodes), 'call', 'do')} not fit fp16" if unfit else "Everything fits fp16"
    page = Document("headroom", "Format range check", verdict, "" if unfit else "good")
    page.graph = Graph(list(nodes.values()), [], note=f"A call has the first of {', '.join(NAMES)} that it fits.")
    page.facts = [("calls", str(len(nodes))), ("may underflow", f"{result.tolerance:.0%} of a tensor")]
    page.figures = [_figure(result, name, len(calls)) for name, calls in lost.items()]
    page.bars = shares(nodes.values(), "calls", "Calls by the first format that they fit")
    how = "headroom.policy('fp16'), or narrowcast headroom TARGET --policy-out FILE.toml, does that"
    keep = Todo("Keep all of them in fp32", how)
    page.todos = [*([keep] if worst else []), *(_todo(nodes[call]) for call in dict.fromkeys(r.id for r in worst))]
    page.notes = list(result.notes)
    page.tables = [
        *finding_table(list(nodes.values()), map(_rule, nodes.values())),
        *_tensor_table(rows, nodes, lost["fp16"]),
    ]
    return page


def _figure(result: Headroom, format: str, unfit: int) -> Figure:
    scaled = ", ".join(f"{len(result.calls(format, scale))} with a scale {scale}" for scale in SCALES[1:])
    rooms = [row.headroom_bits for row in result.rows if row.format == format and row.scale == UNSCALED]
    detail = f"calls lose values unscaled, {scaled}; minimum headroom {min(rooms, default=math.inf):+.1f} bits"
    return Figure(format, unfit, detail, "bad" if unfit else "good")


def _loss(row: TensorHeadroom) -> str:
    if row.overflow:
        return f"{100 * row.overflow:.3g}% of it overflows, by {-row.headroom_bits:.1f} bits"
    return f"{100 * row.underflow:.3g}% of it underflows"


def _todo(node: Node) -> Todo:
    return Todo(f"{keeping(node.op, node.path)} beside fp16", node.finding, _rule(node, node.finding), node.path)


def _rule(node: Node, reason: str = "") -> Shown:
    """Return the rule that keeps a call in fp32 beside fp16; none for one of the backward, or another op in fp16."""
    is_same_op = node.op.split(".")[1] not in named("multiplies.recurrent")
    return call_rule(node.op, node.path, "full" * (is_same_op and node.direction == "forward"), reason)


def _tensor_table(rows: list[TensorHeadroom], nodes: Mapping[CallId, Node], losing: Collection[CallId]) -> list[Table]:
    """Return a row for each tensor; one for the same tensor of modules that differ by the number of their layer, with
    the module of the minimum headroom, and the largest shares. losing: the calls that do not fit fp16.
    """
    rules = {call: _rule(node) for call, node in nodes.items()}
    shared = set(shared_modules(agreeing(rules.values()), list(nodes.values())))
    by_tensor: dict[tuple[str, ...], dict[CallId, dict[str, TensorHeadroom]]] = {}
    for row in rows:
        call, pattern = row.id, alike_module(glob.escape(row.id.module_path))
        is_alike = (call.op, pattern) in shared or call not in losing or not rules[call]
        key = (pattern if is_alike else call.module_path, call.op, nodes[call].label, call.direction, row.argument)
        by_tensor.setdefault(key, {}).setdefault(call, {})[row.format] = row
    cells, about = [], []
    for (pattern, *_, argument), calls in by_tensor.items():
        worst = min(calls, key=lambda call: calls[call]["fp16"].headroom_bits)
        node, all_rows = nodes[worst], calls.values()
        lost = [max(share(row[name]) for row in all_rows) for name in NAMES for share in (_overflow, _underflow)]
        bits = number(calls[worst]["fp16"].headroom_bits)
        cells.append([node.path, len(calls), node.op, node.label, argument, bits, *lost])
        if len(calls) == 1:
            about.append(rules[worst])
        else:  # one rule, if one is about all of them
            is_shared = bool(rules[worst]) and (node.op, pattern) in shared
            about.append({**rules[worst], "module": pattern} if is_shared else {})
    kinds = ", ".join(f"{name} {kind}:share" for name in NAMES for kind in ("overflow", "underflow"))
    columns = f"module:module, layers:number, op:op, call, tensor, headroom in fp16:bits, {kinds}"
    title = "Each tensor, of alike layers the worst: what each format would lose of it, without a scale"
    return table("headroom", title, columns, cells, about, list(nodes.values()))


_overflow, _underflow = attrgetter("overflow"), attrgetter("underflow")
