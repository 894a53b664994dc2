"""The page of a comparison, and errors on other pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from narrowcast.reports.documents.ledgers import ORDER, shares
from narrowcast.reports.documents.model import Figure, Graph, Node, Page, Series, Todo
from narrowcast.reports.documents.rules import Shown, is_low, rule_of_call
from narrowcast.reports.documents.tables import finding_table, module_table, op_table, table
from narrowcast.reports.documents.words import error_text, number, place, split_identity

Data = Mapping[str, Any]
AT_FAULT = ("fault", "not finite", "kernel")
PASSED_ON = "passed on"


def comparison_page(data: Data) -> Page:
    """The page of what `nc.compare` found."""
    nodes = [_node(row) for row in data["rows"]]
    page = Page("comparison", data["subject"], *_verdict(data), graph=Graph(nodes, [], note=ORDER))
    under = f"{data['policy']} in {data['low']}" if data["policy"] else "the model's own casts"
    page.facts = [
        ("model", data["subject"]),
        ("device", str(data["environment"].get("device", data["device_type"]))),
        ("policy", under),
        ("reference", data["reference"]),
        ("runs", str(data["runs"])),
    ]
    page.notes = list(data["notes"])
    differ = sum(bool(row["total"]) for row in data["rows"])
    faults = sum(row["verdict"] in AT_FAULT for row in data["rows"])
    page.figures = [
        *output_figures(data),
        Figure("faults", faults, "calls beyond round-off", "bad" if faults else "good"),
        Figure("calls", len(nodes), f"{differ} differ, {len(data['unmatched'])} without a partner"),
    ]
    page.bars = [bar for bar in [shares(nodes, "calls", "Calls by format")] if bar.parts]
    page.todos = error_todos(_worst(data["rows"]))[:3]
    rules = [_rule(row) for row in data["rows"]]
    page.tables = [
        *finding_table(nodes, rules), *_error_table(data["rows"], rules, nodes), *op_table(nodes), *module_table(nodes),
        *table("outputs", "Outputs", "output, reference, found, relative error:error, "
               "SQNR:decibels, largest error:error",
               [[o["name"], o["reference"], o["found"], number(o["relative_error"]), number(o["sqnr_db"]),
                 number(o["largest_error"])] for o in data["outputs"]]),
        *table("gradients", "Gradients", "parameter, format:format, relative error:error, cosine:number, "
               "underflow:share, verdict",
               [[g["parameter"], g["format"], number(g["relative_error"]), number(g["cosine"]), number(g["underflow"]),
                 g["verdict"]] for g in data["gradients"]]),
        *table("unmatched", "Calls that only one side made", "call", [[u] for u in data["unmatched"]]),
    ]  # fmt: skip
    page.series = error_series(nodes)
    return page


def _verdict(data: Data) -> tuple[str, str]:
    first = data["not_finite"]
    if first is not None:
        where = f" in {first['module_path']}" if first["module_path"] else ""
        return f"Not finite, where {data['reference']} is: {first['value']} made by {first['op']}{where}", "bad"
    errors = [o["relative_error"] for o in data["outputs"]]
    known = [e for e in map(number, errors) if e is not None]
    error = f"the output is off by {error_text(max(known))}" if known else "no output can be compared"
    band = f"; round-off may make {error_text(data['band'])}" if data["band"] else ""
    return f"{data['verdict'].capitalize()}: {error}{band}", "bad" if data["verdict"] in AT_FAULT else "good"


def _node(row: Data) -> Node:
    path, op, label, direction = split_identity(row["id"])
    node = Node(path, op, label, 1, direction, row["reference"], row["computes"], file=row["file"], line=row["line"])
    _fill(node, row)
    alone = number(row["alone"])
    figures = [("round-off may make", error_text(row["band"])), ("kernel alone", error_text(row["kernel"]))]
    figures += [("moves the output alone by", error_text(alone))] if alone is not None else []
    node.facts = tuple(figures)
    return node


def _fill(node: Node, row: Data) -> None:
    """The errors of a call, on its node; a finding, if it is at fault."""
    node.own, node.inherited, node.total = (number(row[name]) for name in ("own", "inherited", "total"))
    node.verdict = row["verdict"]
    if row["verdict"] in AT_FAULT:
        node.finding = row["why"] or row["verdict"]


def add_errors(nodes: Iterable[Node], rows: Iterable[Data]) -> None:
    """Errors that a comparison found, on the nodes of the same calls."""
    known: dict[tuple[str, str, str, str], Data] = {}
    for row in rows:
        known[split_identity(row["id"])] = row
    for node in nodes:
        found = known.get((node.path, node.op, node.label or "#1", node.direction))
        if found is not None:
            _fill(node, found)


def output_figures(comparison: Data | None) -> list[Figure]:
    """The error of the output that is furthest off."""
    if comparison is None or not comparison["outputs"]:
        return []
    worst = max(comparison["outputs"], key=lambda o: number(o["relative_error"]) or 0.0)
    sqnr = number(worst["sqnr_db"])
    detail = f"{worst['name']}, {sqnr:.1f} dB" if sqnr is not None else worst["name"]
    band = f"; round-off may make {error_text(comparison['band'])}" if comparison["band"] else ""
    tone = "bad" if comparison["verdict"] in AT_FAULT else ""
    return [Figure("output error", worst["relative_error"], detail + band, tone, "relative")]


def error_todos(worst: Iterable[Data], faults_only: bool = False) -> list[Todo]:
    """Keep the calls most to blame in fp32."""
    found = []
    for row in worst:
        at_fault = row["verdict"] in AT_FAULT
        if not is_low(row["computes"]) or at_fault < faults_only or row["verdict"] == PASSED_ON:
            continue
        alone = number(row["alone"])
        why = f"its own error is {error_text(row['own'])}"
        why = f"alone it moves the output by {error_text(alone)}" if alone is not None else why
        why = f"it is at fault: {row['why']}" if at_fault else why
        rule = _rule(row, why.partition(":")[0])
        if rule:
            path, op, _, _ = split_identity(row["forward"] or row["id"])
            found.append(Todo(f"Keep {op} in {path or 'the root'} in fp32", why, rule, path))
    return found


def _rule(row: Data, reason: str = "") -> Shown:
    """The rule that keeps a call, or the forward's call of its backward, in fp32; none for one that is not lower."""
    return rule_of_call(row["forward"] or row["id"], row["computes"], reason)


def _worst(rows: Iterable[Data]) -> list[Data]:
    """The calls most to blame first: at fault, then what moves the output most, then own error."""

    def key(row: Data) -> tuple[float, ...]:
        alone = number(row["alone"])
        return row["verdict"] not in AT_FAULT, -(alone if alone is not None else -1.0), -(number(row["own"]) or 0.0)

    return sorted((row for row in rows if row["own"]), key=key)


def _error_table(rows: Iterable[Data], rules: Iterable[Shown], nodes: Sequence[Node]) -> list[Any]:
    figures = ("own", "inherited", "total", "band", "kernel", "alone")
    columns = "module:module, op:op, call, direction, computes:format, verdict, " + ", ".join(
        f"{f}:error" for f in figures
    )
    ids = [(split_identity(row["id"]), row) for row in rows]
    found = [
        [path, op, label, direction, row["computes"], row["verdict"], *(number(row[f]) for f in figures),
         place(row["file"], row["line"])]
        for (path, op, label, direction), row in ids
    ]  # fmt: skip
    return table("errors", "Each call: its errors", columns + ", line:line", found, rules, nodes)


def error_series(nodes: list[Node]) -> list[Series]:
    """Error by depth: own and inherited, of forward calls in order."""
    at = [i for i, n in enumerate(nodes) if n.own is not None and n.direction == "forward"]
    if len(at) < 2:
        return []
    lines = [
        ("own", [nodes[i].own or None for i in at]),
        ("inherited", [nodes[i].inherited or None for i in at]),
        ("total", [nodes[i].total or None for i in at]),
    ]
    xs = [float(n) for n in range(1, len(at) + 1)]
    return [Series("Error by depth", "call, in order", "relative error", xs, lines, "whole", "relative", True, at)]
