"""What was placed, as text: candidates predicted and measured, and each call's formats with what they cost."""

from __future__ import annotations

from rich.console import RenderableType
from rich.markup import escape

from narrowcast.core.goals import MEMORY
from narrowcast.output.console import in_bytes, short_file, table
from narrowcast.programs.placement.place import GIVEN, PlacedCall, Placement
from narrowcast.reports.results.graphs import CandidateTime, CompiledGraph


def placement_parts(graphs: tuple[CompiledGraph, ...]) -> list[RenderableType]:
    """For each graph whose formats were placed its candidates, and the calls that could choose, the costliest first."""
    parts: list[RenderableType] = []
    for graph in graphs:
        if graph.placement is not None:
            parts += [_candidates(graph), _totals(graph, graph.placement), _calls(graph.placement)]
    return parts


def _candidates(graph: CompiledGraph) -> RenderableType:
    kept = "the one kept" + (", chosen earlier" if graph.from_disk else "")
    title = f"graph {graph.number}, goal {graph.goal}: candidates ({kept}: {graph.chosen})"
    holds = any(c.peak is not None for c in graph.candidates)
    made = table(
        title, "candidate", ">casts", *([">held at most"] if holds else []), ">predicted ms", ">measured ms",
        ">spread", ">predicted/measured", ">measured call by call",
    )  # fmt: skip
    for c in graph.candidates:
        casts = "" if c.casts is None else str(c.casts)
        held = [in_bytes(c.peak.bytes) if c.peak is not None else ""] if holds else []
        made.add_row(c.name, casts, *held, f"{c.predicted_ns / 1e6:.3f}", *_measured(c), f"{c.sure * 100:.0f} %")
    return made


def _measured(candidate: CandidateTime) -> tuple[str, str, str]:
    if candidate.dropped:
        return f"dropped: {candidate.dropped}", "", ""
    if not candidate.measured_ns:
        return "ruled out" if candidate.casts is None else "not timed", "", ""
    ratio = candidate.predicted_ns / candidate.measured_ns
    return f"{candidate.measured_ns / 1e6:.3f}", f"{candidate.spread * 100:.0f} %", f"{ratio:.2f}"


def _totals(graph: CompiledGraph, placement: Placement) -> str:
    saved = placement.policy_cost - placement.cost
    timed = next((c for c in graph.candidates if c.name == graph.chosen and c.measured_ns), None)
    parts = [
        f"  {placement.raised} of {len(placement.calls)} calls run higher than the policy asks; predicted "
        f"{_ms(placement.cost)} against {_ms(placement.policy_cost)} as the policy says (saved: {_ms(saved)})",
        f"  {_proof(graph, placement)}; choosing took {graph.candidates_seconds:.1f} s",
    ]
    parts += [f"  {line}" for line in _held(graph)]
    returned, written_bytes = graph.returned
    if returned and placement.raised == len(placement.calls):
        parts.append(
            f"  every call runs high; results keep the formats that the policy gives them: {returned} casts of "
            f"results, {in_bytes(written_bytes)} written"
        )
    if timed is not None and timed.measured_ns:
        off = timed.predicted_ns / timed.measured_ns
        wrong = " [red]The cost model is wrong here by more than half.[/red]" if not 0.5 < off < 2 else ""
        parts.append(f"  predicted {_ms(timed.predicted_ns)}, measured {_ms(timed.measured_ns)}.{wrong}")
    return "\n".join(parts) + "\n"


def _held(graph: CompiledGraph) -> list[str]:
    """What the chosen candidate is predicted to hold at most, of what, and where; where memory is what counts."""
    peaks = {c.name: c.peak for c in graph.candidates if c.peak is not None}
    peak = peaks.get(graph.chosen)
    if peak is None:
        return []
    backward = "the backward of " if peak.in_backward else ""
    where = f", reached in {backward}{peak.op.removeprefix('aten.')}" if peak.op else ""
    line = f", {short_file(peak.site.file)}:{peak.site.line}" if peak.op and peak.site.file else ""
    parts = [f"{in_bytes(peak.kept)} kept for the backward"] if peak.kept else []
    parts += [f"{in_bytes(peak.workspace)} of its kernel's own"] if peak.workspace else []
    of_these = f" (of these {', '.join(parts)})" if parts else ""
    policy = peaks.get("policy")
    against = f"; {in_bytes(policy.bytes)} as the policy says" if policy is not None and policy is not peak else ""
    return [f"predicted to hold at most {in_bytes(peak.bytes)} at once{of_these}{where}{line}{against}"]


def _proof(graph: CompiledGraph, placement: Placement) -> str:
    if graph.goal == MEMORY:  # no bound: its time is not what was minimised
        return f"the one of {len(graph.candidates)} that holds fewest bytes at once in the time that it may take"
    if placement.method == GIVEN:
        return "kept because it was measured to be fastest, whatever the cost model says"
    proof = f"{placement.method}, gap {placement.gap * 100:.1f} %"
    if placement.kept_bytes is not None and placement.policy_kept_bytes is not None:
        kept, policy = in_bytes(placement.kept_bytes), in_bytes(placement.policy_kept_bytes)
        return f"predicted to keep {kept} for the backward and in casts, {policy} as the policy says; {proof}"
    return proof


def _calls(placement: Placement) -> RenderableType:
    ordered = sorted(placement.calls, key=lambda call: (-max(call.costs), call.step))
    made = table("calls that could choose, the costliest first", "op", "module", "line", "shape", "may be",
                 ">us in each", "chosen", ">saved us")  # fmt: skip
    for call in ordered:
        made.add_row(
            call.op.removeprefix("aten."), escape(call.site.module_path or "(root)"), _line(call),
            "x".join(map(str, call.shape)) if call.shape is not None else "", " ".join(f.name for f in call.formats),
            " ".join(f"{cost / 1e3:.1f}" for cost in call.costs), call.chosen.name, f"{call.saved / 1e3:.1f}",
        )  # fmt: skip
    return made


def _line(call: PlacedCall) -> str:
    return f"{short_file(call.site.file)}:{call.site.line}" if call.site.file else ""


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.3f} ms"
