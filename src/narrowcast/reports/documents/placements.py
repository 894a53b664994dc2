"""What a goal chose, on the page of an explanation: formats, candidates, and what they cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from narrowcast.programs.placement.place import PlacedCall, Placement
from narrowcast.reports.documents.model import Bar, Figure, Node, Table
from narrowcast.reports.documents.tables import table
from narrowcast.reports.documents.words import counted, in_unit, place
from narrowcast.reports.results.graphs import CompiledGraph


def _placements(graphs: Sequence[CompiledGraph]) -> list[tuple[CompiledGraph, Placement]]:
    """The graphs of which formats were chosen by cost."""
    return [(graph, graph.placement) for graph in graphs if graph.placement is not None]


def _calls(graphs: Sequence[CompiledGraph]) -> Iterator[PlacedCall]:
    for _, placed in _placements(graphs):
        yield from placed.calls


def placement_verdict(graphs: Sequence[CompiledGraph]) -> str:
    """`Goal fast: 50 of 53 calls run higher than the policy asks; predicted 2.7 s, against ...`; empty without one."""
    found = _placements(graphs)
    if not found:
        return ""
    calls = list(_calls(graphs))
    raised = sum(call.chosen != call.formats[0] for call in calls)
    said = f"Goal {found[0][0].goal}: {raised} of {counted(len(calls), 'call')} run higher than the policy asks"
    chosen, policy = (in_unit(cost, found[0][1].unit) for cost in _costs(graphs))
    return f"{said}; predicted {chosen}, against {policy} as the policy says"


def _costs(graphs: Sequence[CompiledGraph]) -> tuple[float, float]:
    """Of the placement and of the policy's own, over all graphs, casts included."""
    placed = [placement for _, placement in _placements(graphs)]
    return sum(float(p.cost) for p in placed), sum(float(p.policy_cost) for p in placed)


def placement_figures(graphs: Sequence[CompiledGraph]) -> list[Figure]:
    """The predicted costs; and what was measured of the candidates that are kept."""
    placed = _placements(graphs)
    if not placed:
        return []
    (chosen, policy), unit = _costs(graphs), placed[0][1].unit
    found = [Figure("predicted", chosen, f"as the policy says: {in_unit(policy, unit)}", unit=unit)]
    kept = [c for graph, _ in placed for c in graph.candidates if c.name == graph.chosen and c.measured_ns]
    if kept and len(kept) == len(placed):
        names = ", ".join(dict.fromkeys(c.name for c in kept))
        found.append(Figure("measured", sum(c.measured_ns or 0.0 for c in kept), f"kept: {names}", unit="ns"))
    return found


def placement_bars(graphs: Sequence[CompiledGraph]) -> list[Bar]:
    """The time of the calls that could choose, by the format that the policy gives them; casts left out."""
    placed = _placements(graphs)
    if not placed or placed[0][1].unit != "ns":
        return []
    sums: dict[str, float] = {}
    for call in _calls(graphs):
        name = call.formats[0].name
        sums[name] = sums.get(name, 0.0) + float(call.costs[0])
    return [Bar("Time, as the policy says", "ns", tuple(sorted(sums.items(), key=lambda part: -part[1])))]


def placement_tables(graphs: Sequence[CompiledGraph]) -> list[Table]:
    """Each call that could choose, and each way that was considered."""
    calls = [
        [c.site.module_path, c.op, c.formats[0].name, c.chosen.name, c.saved, place(c.site.file, c.site.line)]
        for c in _calls(graphs)
    ]
    columns = "module:module, op:op, policy says:format, chosen:format, saved:ns, line:line"
    ways = [
        [graph.number, c.name, c.name == graph.chosen, c.casts, c.predicted_ns, c.measured_ns or None,
         c.spread if c.measured_ns else None, c.dropped]
        for graph, _ in _placements(graphs)
        for c in graph.candidates
    ]  # fmt: skip
    said = "graph:number, candidate, kept, casts:number, predicted:ns, measured:ns, spread:share, dropped"
    return [
        *table("placement", "Formats chosen by cost", columns, calls),
        *table("candidates", "Each way that was considered", said, ways),
    ]


def add_costs(nodes: Sequence[Node], placement: Placement) -> None:
    """What each placed call costs in the format that was chosen."""
    costs: dict[tuple[str, str, int], list[float]] = {}
    for call in placement.calls:
        cost = dict(zip(call.formats, call.costs, strict=True)).get(call.chosen)
        if cost is not None:
            costs.setdefault((call.site.module_path, call.op, call.site.line), []).append(cost)
    for node in nodes:
        known = costs.get((node.path, node.op, node.line))
        if known and node.ns is None and node.direction == "forward":
            node.ns = known.pop(0)
