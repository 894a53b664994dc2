"""The pages of a captured run, and of what a watch found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narrowcast.output.console import in_bytes
from narrowcast.reports.documents.ledgers import ORDER, format_bars
from narrowcast.reports.documents.model import Exponents, Figure, Graph, Node, Page, Series, Todo
from narrowcast.reports.documents.rules import Shown, high_rule, rule_of_call
from narrowcast.reports.documents.run_flow import RunFlow, flow_of
from narrowcast.reports.documents.tables import edge_cast_table, finding_table, module_table, op_table, table
from narrowcast.reports.documents.times import cast_series
from narrowcast.reports.documents.words import counted, number, split_identity

Data = Mapping[str, Any]
CASTS = "Each cast: read off the formats that came and were read"


def run_page(data: Data) -> Page:
    """The page of a captured run."""
    flow = flow_of(data)
    nodes = flow.nodes
    bad = [n for n in nodes if n.finding]
    facts = data["environment"]
    policy = facts.get("policy") or {}
    verdict = f"{counted(len(bad), 'call')} gave a NaN or an infinity" if bad else "Every value is finite"
    page = Page("run", "A captured run", verdict, "bad" if bad else "good", graph=flow.graph())
    under = f"{policy['name']} ({policy['digest'][:8]})" if policy else "none"
    page.facts = [
        ("device", str(facts.get("device", "?"))),
        ("policy", under),
        ("region", f"{facts.get('device_type', '?')} in {policy['low']}" if policy else "none"),
        ("seed", str(facts.get("seed", "?"))),
    ]
    page.notes = list(data["notes"])
    casts = [e for e in page.graph.edges if e.src != e.dst]
    page.figures = [
        Figure("calls", len(nodes), f"{sum(n.direction == 'backward' for n in nodes)} backward"),
        Figure("casts", len(casts), f"move {in_bytes(sum(e.bytes for e in casts))}"),
        Figure("not finite", len(bad), "calls", "bad" if bad else "good"),
    ]
    page.bars = format_bars(nodes)
    page.todos = [
        Todo(f"Keep {n.op} in {n.path or 'the root'} in fp32", n.finding, high_rule(n), n.path)
        for n in [n for n in bad if high_rule(n)][:3]
    ]
    page.tables = [
        *finding_table(nodes), *op_table(nodes), *edge_cast_table("casts", CASTS, page.graph, page.graph.edges),
        *module_table(nodes), *_tensors(nodes, flow),
    ]  # fmt: skip
    page.series = cast_series(page.graph)
    page.exponents = [
        Exponents(node, name, t["format"], t["exponents"][0], t["exponents"][1:])
        for node, name, t in flow.results
        if len(t["exponents"]) > 1
    ]
    return page


def _tensors(nodes: list[Node], flow: RunFlow) -> list[Any]:
    rows = [
        [nodes[i].path, nodes[i].op, nodes[i].label, name, t["format"], str(t["shape"]), number(t["low"]),
         number(t["high"]), number(t["rms"]), t["zeros"], t["subnormal"], t["saturated"], t["nan"], t["infinite"]]
        for i, name, t in flow.results
    ]  # fmt: skip
    columns = (
        "module:module, op:op, call, result, format:format, shape, lowest:number, highest:number, rms:number, "
        "zeros:share, subnormal:share, saturated:share, nan:share, infinite:share"
    )
    return table("tensors", "What each call gave", columns, rows)


def watch_page(data: Data) -> Page:
    """The page of what a watch found."""
    nodes = []
    for row in data["findings"]:
        path, op, label, direction = split_identity(row["id"])
        seen = [
            (name, f"{f['format']} {f['low']}..{f['high']}") for name, f in {**row["inputs"], **row["outputs"]}.items()
        ]
        node = Node(path, op, label, 1, direction, computes=row["formats"], file=row["file"], line=row["line"])
        node.verdict, node.finding = row["made_by"], f"{row['what']}, step {row['step']}: {row['sentence']}"
        node.facts = tuple((str(name), text) for name, text in seen)
        nodes.append(node)
    made = [n for n in nodes if n.verdict != "trend"]
    verdict = f"{counted(len(made), 'call')} made a NaN or an infinity" if made else "No NaN or infinity was made"
    page = Page("watch", "A watched run", verdict, "bad" if made else "good", graph=Graph(nodes, [], note=ORDER))
    page.facts = [("looked at", f"{data['calls']} calls"), ("steps", str(data["steps"]))]
    page.figures = [
        Figure("findings", len(made), f"{len(nodes) - len(made)} trends", "bad" if made else "good"),
        Figure("passed on", data["spread"], "later calls"),
        Figure("meant", sum(data["meant"].values()), "infinities, as a mask has them"),
    ]
    page.notes = list(data["notes"])
    page.todos = [
        Todo(_advice(row), row["sentence"], _format_rule(row), n.path)
        for row, n in zip(data["findings"], nodes, strict=True)
    ][:3]
    page.tables = [
        *finding_table(nodes, map(_format_rule, data["findings"])),
        *table(
            "meant", "Infinities that were meant", "times:number, why", [[n, why] for why, n in data["meant"].items()]
        ),
    ]
    page.series = _history(data["history"])
    return page


def _format_rule(row: Data) -> Shown:
    """The rule that keeps what a format or a cast ruins in fp32."""
    return rule_of_call(row["forward"] or row["id"], row["formats"] if row["made_by"] in ("cast", "format") else "")


def _advice(row: Data) -> str:
    """What to do: in the words of the finding, unless these are the rule that stands below."""
    rule = _format_rule(row)
    if rule:
        return f"Keep {rule['op']} in {rule.get('module', 'the root')} in fp32"
    return str(row["advice"] or row["sentence"])


def _history(history: list[Data]) -> list[Series]:
    """Figures over training steps: each number that the looks at gradients kept."""
    names = dict.fromkeys(k for row in history for k, v in row.items() if k != "step" and isinstance(v, float))
    if len(history) < 2 or not names:
        return []
    xs = [float(row.get("step", i)) for i, row in enumerate(history, 1)]
    lines = [(name, [number(row.get(name)) for row in history]) for name in names]
    return [Series("Over training steps", "step", "figure", xs, lines, "whole", log=True)]
