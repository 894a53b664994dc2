"""What a goal chose, on the page of an explanation: formats, candidates, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence

from narrowcast.core.goals import MEMORY
from narrowcast.output.console import in_bytes, short_place
from narrowcast.output.words import counted
from narrowcast.programs.placement.place import GIVEN, PlacedCall, Placement
from narrowcast.reports.documents.model import Bar, Figure, Node, Table
from narrowcast.reports.documents.tables import table
from narrowcast.reports.documents.words import in_time, in_unit, place
from narrowcast.reports.results.graphs import CompiledGraph

Placed = Sequence[tuple[CompiledGraph, Placement]]


def placed_graphs(graphs: Sequence[CompiledGraph]) -> Placed:
    """Return the graphs whose formats were chosen by cost."""
    return [(graph, graph.placement) for graph in graphs if graph.placement is not None]


def _calls(placed: Placed) -> list[PlacedCall]:
    return [call for _, placement in placed for call in placement.calls]


def verdict(placed: Placed) -> str:
    """Return the verdict, `Goal fast: 50 of 53 calls run higher than the policy asks; ...`; empty for no placement."""
    if not placed:
        return ""
    calls = _calls(placed)
    raised = sum(call.chosen != call.formats[0] for call in calls)
    text = f"Goal {placed[0][0].goal}: {raised} of {counted(len(calls), 'call')} run higher than the policy asks"
    chosen, policy = (in_unit(cost, placed[0][1].unit) for cost in _costs(placed))
    time = _measured(placed)
    timed = "not timed" if time is None else f"measured {in_time(time)}"
    return f"{text}; predicted {chosen}, against {policy} as the policy says; {timed}"


def _costs(placed: Placed) -> tuple[float, float]:
    """Return the costs of the placement and of the policy's own, over all graphs, casts included."""
    return sum(float(p.cost) for _, p in placed), sum(float(p.policy_cost) for _, p in placed)


def figures(placed: Placed) -> list[Figure]:
    """Return the predicted costs, and the measured times of the candidates that are kept."""
    if not placed:
        return []
    (chosen, policy), unit, time = _costs(placed), placed[0][1].unit, _measured(placed)
    kept = f"kept: {', '.join(dict.fromkeys(graph.chosen for graph, _ in placed))}"
    others = [f"{name} {in_time(other)}" for name, other in _others(placed).items()]
    kept += f"; the others: {', '.join(others)}" if others else ""
    measured = Figure("measured", "not timed", kept) if time is None else Figure("measured", time, kept, unit="ns")
    return [Figure("predicted", chosen, f"as the policy says: {in_unit(policy, unit)}", unit=unit), measured]


def _measured(placed: Placed) -> float | None:
    """Return the time of the candidates that are kept, of all graphs; None if one was not timed."""
    kept = [c.measured_ns for graph, _ in placed for c in graph.candidates if c.name == graph.chosen and c.measured_ns]
    return sum(kept) if len(kept) == len(placed) else None


def _others(placed: Placed) -> dict[str, float]:
    """Return the times of the other candidates by name, of all graphs, if they were timed in each."""
    times = [{c.name: c.measured_ns for c in graph.candidates if c.measured_ns} for graph, _ in placed]
    kept = {graph.chosen for graph, _ in placed}
    every = [name for name in times[0] if name not in kept and all(name in of_graph for of_graph in times)]
    return {name: sum(of_graph[name] for of_graph in times) for name in every}


def bars(placed: Placed) -> list[Bar]:
    """Return the time of the calls that could choose, by the format that the policy asks for; casts left out."""
    if not placed or placed[0][1].unit != "ns":
        return []
    sums: dict[str, float] = {}
    for call in _calls(placed):
        name = call.formats[0].name
        sums[name] = sums.get(name, 0.0) + float(call.costs[0])
    return [Bar("Time, as the policy says", "ns", tuple(sorted(sums.items(), key=lambda part: -part[1])))]


def notes(placed: Placed) -> list[str]:
    """Return for each graph what is proved of its choice, what it may hold at most, and where that is wrong."""
    return [note for graph, placement in placed for note in _notes(graph, placement)]


def _notes(graph: CompiledGraph, placement: Placement) -> list[str]:
    timed = next((c for c in graph.candidates if c.name == graph.chosen and c.measured_ns), None)
    earlier = ", chosen earlier" if graph.from_disk else ""
    kept = f"{graph.chosen} is kept{earlier}: {_proof(graph, placement)}"
    took = f"choosing took {graph.candidates_seconds:.1f} s"
    notes = [f"Graph {graph.number}, goal {graph.goal}: {kept}; {took}", *_held(graph)]
    returned, written_bytes = graph.returned
    if returned and placement.raised == len(placement.calls):
        high = "Every call runs high; results keep the formats that the policy gives them"
        notes.append(f"{high}: {counted(returned, 'cast')} of results, {in_bytes(written_bytes)} written")
    if timed is not None and timed.measured_ns and not 0.5 < timed.predicted_ns / timed.measured_ns < 2:
        notes.append("The cost model is wrong here by more than half")
    return notes


def _proof(graph: CompiledGraph, placement: Placement) -> str:
    if graph.goal == MEMORY:  # no bound: its time is not what was minimised
        return f"of {len(graph.candidates)} it holds fewest bytes at once in the time that it may take"
    if placement.method == GIVEN:
        return "it was measured to be fastest, whatever the cost model says"
    proof = f"{placement.method}, gap {placement.gap * 100:.1f} %"
    if placement.kept_bytes is not None and placement.policy_kept_bytes is not None:
        kept, policy = in_bytes(placement.kept_bytes), in_bytes(placement.policy_kept_bytes)
        return f"predicted to keep {kept} for the backward and in casts, {policy} as the policy says; {proof}"
    return proof


def _held(graph: CompiledGraph) -> list[str]:
    """Return what the chosen candidate is predicted to hold at most, of what, and where, if memory is what counts."""
    peaks = {c.name: c.peak for c in graph.candidates if c.peak is not None}
    peak = peaks.get(graph.chosen)
    if peak is None:
        return []
    backward = "the backward of " if peak.in_backward else ""
    where = f", reached in {backward}{peak.op.removeprefix('aten.')}" if peak.op else ""
    line = f", {short_place(place(peak.site.file, peak.site.line))}" if peak.op and peak.site.file else ""
    parts = [f"{in_bytes(peak.kept)} kept for the backward"] if peak.kept else []
    parts += [f"{in_bytes(peak.workspace)} of its kernel's own"] if peak.workspace else []
    of_these = f" (of these {', '.join(parts)})" if parts else ""
    policy = peaks.get("policy")
    against = f"; {in_bytes(policy.bytes)} as the policy says" if policy is not None and policy is not peak else ""
    return [f"It is predicted to hold at most {in_bytes(peak.bytes)} at once{of_these}{where}{line}{against}"]


def tables(placed: Placed) -> list[Table]:
    """Return each call that could choose, the costliest first, and each way that was considered."""
    ordered = sorted(_calls(placed), key=lambda call: (-max(call.costs), call.step))
    calls = [
        [c.site.module_path, c.op, c.formats[0].name, c.chosen.name, "x".join(map(str, c.shape or ())),
         ", ".join(f"{format.name} {in_time(cost)}" for format, cost in zip(c.formats, c.costs, strict=True)), c.saved,
         place(c.site.file, c.site.line)]
        for c in ordered
    ]  # fmt: skip
    columns = "module:module, op:op, policy says:format, chosen:format, shape, costs, saved:ns, line:line"
    ways = [
        [graph.number, c.name, c.name == graph.chosen, c.casts, c.predicted_ns, c.measured_ns or None,
         c.spread if c.measured_ns else None, round(c.predicted_ns / c.measured_ns, 2) if c.measured_ns else None,
         c.sure, None if c.peak is None else c.peak.bytes,
         c.dropped or ("" if c.measured_ns else "ruled out" if c.casts is None else "not timed")]
        for graph, _ in placed
        for c in graph.candidates
    ]  # fmt: skip
    ways_columns = (
        "graph:number, candidate, kept, casts besides weights:number, predicted:ns, measured:ns, spread:share, "
    )
    ways_columns += "predicted over measured:number, measured call by call:share, held at most:bytes, dropped"
    return [
        *table("placement", "Calls that could choose, the costliest first", columns, calls),
        *table("candidates", "Candidates: each way that was considered", ways_columns, ways),
    ]


def add_costs(nodes: Sequence[Node], placement: Placement) -> None:
    """Add to nodes what each placed call costs in the format that was chosen."""
    costs: dict[tuple[str, str, int], list[float]] = {}
    for call in placement.calls:
        cost = dict(zip(call.formats, call.costs, strict=True)).get(call.chosen)
        if cost is not None:
            costs.setdefault((call.site.module_path, call.op, call.site.line), []).append(cost)
    for node in nodes:
        known = costs.get((node.path, node.op, node.line))
        if known and node.ns is None and node.direction == "forward":
            node.ns = known.pop(0)
