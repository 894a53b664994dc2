"""The page of an explanation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from narrowcast.output.console import in_bytes
from narrowcast.reports.documents.comparisons import AT_FAULT, add_errors, error_series, error_todos, output_figures
from narrowcast.reports.documents.ledgers import (
    advice_todos,
    call_node,
    cast_figures,
    cast_todos,
    format_bars,
    ledger_graph,
    ledger_tables,
)
from narrowcast.reports.documents.model import OUTSIDE, Edge, Figure, Graph, Node, Page, Table, Todo
from narrowcast.reports.documents.placements import (
    add_costs,
    placement_bars,
    placement_figures,
    placement_tables,
    placement_verdict,
)
from narrowcast.reports.documents.tables import edge_cast_table, table
from narrowcast.reports.documents.times import cast_series
from narrowcast.reports.documents.words import counted, number, place, spent_text

Data = Mapping[str, Any]
SLOWER = 1.05
VERDICTS = {
    "exact": "Equal to fp32",
    "round-off": "Within round-off of fp32",
    "fault": "Further from fp32 than round-off explains",
    "not finite": "Not finite, where fp32 is",
    "kernel": "Within reach of fp32, but a kernel is off by more than round-off",
    "not judged": "Nothing says how far from fp32 round-off may go",
    "not compared": "The model computes in low formats in fp32, too",
    "nondeterministic": "As far from fp32 as two of its own runs",
}


def explanation_page(data: Data) -> Page:
    """The page of an explanation, as `Explanation.data` gives it."""
    ledger = data["ledger"]
    flows = [flow for flow in data.get("flows", ()) if flow["steps"]]
    graph = flow_graph(flows, ledger) if flows else ledger_graph(ledger)
    comparison = data.get("comparison")
    if comparison is not None:
        add_errors(graph.nodes, comparison.get("calls") or comparison["worst"])
    for placed in data["placements"]:
        add_costs(graph.nodes, placed)
    verdict, tone = _verdict(data)
    page = Page("explanation", data["subject"], verdict, tone, graph=graph)
    page.facts = _facts(data)
    page.notes = [note for note in (data["note"], *ledger.get("notes", ())) if note]
    page.figures = [
        *placement_figures(data["placements"]),
        *_cost_figures(comparison, data.get("gradients", True)),
        *cast_figures(ledger["totals"]),
    ]
    page.figures += [*_backward_figures(data["graphs"]), *output_figures(comparison)]
    page.bars = [*placement_bars(data["placements"]), *format_bars(graph.nodes)]
    page.todos = _todos(data, graph.nodes)[:3]
    page.tables = [*ledger_tables(ledger, graph, data["rules"]), *_graph_tables(data), *_backward_casts(graph)]
    page.series = [*error_series(graph.nodes), *cast_series(graph)]
    return page


def _facts(data: Data) -> list[tuple[str, str]]:
    rules = f", {len(data['rules'])} rules of its own" if data["rules"] else ""
    ran = data["ran_on"] if data["front_end"] == "eager" else f"graphs: {len(data['graphs'])}; {data['ran_on']}"
    return [
        ("model", data["subject"]),
        ("device", data["device_type"]),
        ("policy", f"{data['policy']} ({data['digest'][:8]}{rules})"),
        ("region", f"{data['device_type']} in {data['low']}"),
        ("front end", data["front_end"]),
        ("ran", ran),
    ]


def _verdict(data: Data) -> tuple[str, str]:
    failure, comparison = data["failure"], data.get("comparison")
    totals = data["ledger"]["totals"]
    if failure is not None:
        at = place(failure["file"], failure["line"])
        return (
            f"It raises under {failure['policy']}, and not in fp32: {failure['error']} ({failure['op']}, {at})",
            "bad",
        )
    if comparison is not None and comparison["not_finite"] is not None:
        first = comparison["not_finite"]
        return f"Not finite, where fp32 is: {first['value']} made by {first['op']} in {first['module_path']}", "bad"
    if comparison is not None:
        ratio = comparison["time_ratio"]
        joined = ", but" if ratio > SLOWER and comparison["verdict"] not in AT_FAULT else ", and"
        said = (
            f"{VERDICTS.get(comparison['verdict'], comparison['verdict'])}{joined} it takes {ratio:.2f} times the time"
        )
        return f"{said} of fp32 here", "bad" if ratio > SLOWER or comparison["verdict"] in AT_FAULT else "good"
    chosen = placement_verdict(data["placements"])
    if chosen:
        return chosen, ""
    return (
        f"{totals['casts']} casts move {in_bytes(totals['cast_bytes'])}, {totals['share_of_casts']:.0%} of all bytes",
        "",
    )


def _cost_figures(comparison: Data | None, gradients: bool) -> list[Figure]:
    if comparison is None:
        return []
    ratio, (low, high) = comparison["time_ratio"], comparison["time_quartiles"]
    tone = "bad" if ratio > SLOWER else "good" if ratio < 1 else ""
    memory = comparison["memory_ratio"]
    weights = f" + weights {in_bytes(comparison['weight_bytes'])}" if comparison.get("weight_bytes") else ""
    peaks = f"{in_bytes(comparison['region_peak_bytes'])}{weights}, fp32 {in_bytes(comparison['reference_peak_bytes'])}"
    peaks += "; with gradients" if gradients else "; no_grad"
    found = [
        Figure(
            "time", ratio, f"{_time(comparison['region_ms'])}; quartiles {low:.2f} to {high:.2f}", tone, "times fp32"
        ),
        Figure("peak memory", memory, peaks, "good" if memory < 1 else "", "times fp32"),
    ]
    for name, before in comparison["metric_reference"].items():
        after = comparison["metric_found"].get(name)
        change = f"fp32 {before:.6g}" if isinstance(before, float) else f"fp32 {before}"
        found.append(Figure(name, after if isinstance(after, float) else str(after), change))
    return found


def _spent(comparison: Data) -> str:
    """On what the region's time is spent; nothing of files that do not say it."""
    times = [number(comparison.get(name)) for name in ("casts_ms", "kernels_ms", "reference_kernels_ms", "region_ms")]
    return spent_text(*(math.nan if ms is None else ms for ms in times))


def _time(ms: float) -> str:
    return f"{ms / 1000:.3g} s" if ms >= 1000 else f"{ms:.3g} ms"


def _todos(data: Data, nodes: list[Node]) -> list[Todo]:
    """Most worth doing first: what raises, what is wrong, rules that do nothing, what costs time, then casts."""
    found: list[Todo] = []
    failure, comparison = data["failure"], data.get("comparison")
    if failure is not None:
        runs = [f'Use policy="{a["policy"]}", which runs it.' for a in failure["attempts"] if not a["error"]]
        found.append(
            Todo(runs[0] if runs else "Pin what raises in fp32.", failure["error"], {}, failure["module_path"])
        )
    if comparison is not None:
        found += error_todos(comparison["worst"], faults_only=True)
    found += _break_todos(data["graphs"])
    for row in data["rules"]:
        if not row["calls"]:
            found.append(
                Todo(f"Mend or delete the rule {row['rule']}", f"it matched nothing ({row['origin'] or 'no file'})")
            )
    found += advice_todos(data["ledger"])
    of_casts = cast_todos(data["ledger"], data["front_end"] in ("compile", "export"), data.get("gradients", True))
    if comparison is not None and comparison["time_ratio"] > SLOWER:
        spent = _spent(comparison)
        why = f"a run takes {comparison['time_ratio']:.2f} times what fp32 takes on this machine"
        fast = Todo('Choose formats by measured time: nc.compile(model, goal="fast").', f"{why}{spent and ': '}{spent}")
        more_ms = comparison["region_ms"] - comparison["reference_ms"]
        is_by_casts = (number(comparison.get("casts_ms")) or 0.0) > more_ms / 2
        of_casts = [*of_casts, fast] if is_by_casts and of_casts else [fast, *of_casts]
    found += of_casts
    if comparison is not None:
        found += error_todos(comparison["worst"])[:1]
    elif failure is None:
        what = "Run it for real: explain(..., run=True), or narrowcast explain --run"
        found.append(Todo(what, "nothing is known of errors, time and memory: the model was not compared with fp32"))
    return found


def _break_todos(graphs: list[Data]) -> list[Todo]:
    """Code that is in no graph: it runs as eager code, and this page shows nothing of it."""
    said = "what stands there runs as eager code, in the same region, and is not on this page"
    ends = [f"{g['broken_by']} ({g['broken_at']})" for g in graphs if g["broken_by"]]
    left = [f"{g['fallback']} ({g['site']})" for g in graphs if g["fallback"]]
    found = [Todo(f"See where graphs end: {counted(len(ends), 'break')}", f"{ends[0]}; {said}")] if ends else []
    if left:
        found.append(Todo(f"See what is captured in no graph: {counted(len(left), 'part')}", f"{left[0]}; {said}"))
    return found


def _backward_figures(graphs: list[Data]) -> list[Figure]:
    """Casts of the joint graphs: the ledger is that of the forward."""
    before, after, backward = (sum(g[name] for g in graphs) for name in ("joint_before", "joint_after", "backward"))
    if not before:
        return []
    detail = f"forward and backward: {after}, {before} as autograd made them"
    return [Figure("casts of the backward", backward, detail)]


def _graph_tables(data: Data) -> list[Table]:
    """Graphs, what they decide otherwise than eager code, and what was placed."""
    rows = [
        [g["number"], g["site"], g["calls"], g["assigned"], g["shared"], g["folded"], g["dropped"], g["casts"],
         g["fallback"] or g["broken_by"]]
        for g in data["graphs"]
    ]  # fmt: skip
    columns = (
        "graph:number, begins:line, steps:number, casts assigned:number, shared:number, folded:number, dropped:number, "
        "casts left:number, why it ends"
    )
    found = table("graphs", "Graphs, and what the passes did", columns, rows)
    others = [[d["op"], d["module_path"], d["computes"], d["eager"], d["graph"]] for d in data["differences"]]
    columns = "op:op, module:module, computes:format, eager calls:number, graph calls:number"
    found += table("differences", "Decided otherwise than in eager code", columns, others)
    return [*found, *placement_tables(data["placements"])]


def _backward_casts(graph: Graph) -> list[Table]:
    """The casts of the backward, which are in no ledger: it is written before there is a backward."""
    edges = [e for e in graph.edges if graph.nodes[e.end].direction != "forward"]
    return edge_cast_table("backward casts", "Each cast of the backward, after the passes", graph, edges)


_MAKES = {
    "dgrad": (("makes", "the gradient of an input"),),
    "wgrad": (("makes", "the gradient of a weight"),),
}


def flow_graph(flows: list[Data], ledger: Data) -> Graph:
    """The calls of captured graphs with the values between them; why each computes as it does is in the ledger."""
    kinds: dict[tuple[Any, ...], list[Data]] = {}
    for row in ledger["calls"]:
        kinds.setdefault((row["module_path"], row["op"], row["file"], row["line"]), []).append(row)
    nodes: list[Node] = []
    edges: list[Edge] = []
    for flow in flows:
        first = len(nodes)
        for path, op, file, line, turn, way, came, computes, result, moved, multiplied in flow["steps"]:
            direction = "forward" if way == "forward" else "backward"
            alike = kinds.get((path, op, file, line), [])
            row = next((k for k in alike if k["computes"] == computes), alike[0] if alike else None)
            decided = replace(call_node(row)) if row is not None else Node(path, op)
            label = f"#{turn}" if turn else ""
            nodes.append(
                Node(path, op, label, 1, direction, came, computes, result, decided.action, "", decided.reason, file,
                     line, moved, multiplied, facts=_MAKES.get(way, ()))
            )  # fmt: skip
        for start, end, argument, src, dst, moved, kind, how in flow["edges"]:
            begin = OUTSIDE if start == OUTSIDE else start + first
            edges.append(Edge(begin, end + first, argument, src, dst, moved, kind, how))
    return Graph(nodes, edges, flow=True, note="Views and what only names a part of a tuple are left out.")
