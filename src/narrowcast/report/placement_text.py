"""What was placed, as text: candidates predicted and measured, and each call's formats with what they cost."""

from __future__ import annotations

from rich.console import RenderableType
from rich.markup import escape

from narrowcast.console import in_bytes, short_file, table
from narrowcast.passes.memory import FOR_MEMORY
from narrowcast.passes.place import GIVEN, PlacedCall, Placement
from narrowcast.program import Step
from narrowcast.report.graphs import CandidateTime, CompiledGraph

LISTED = 25


def placement_parts(graphs: tuple[CompiledGraph, ...], every: bool = False) -> list[RenderableType]:
    """For each graph whose formats were placed its candidates, and the calls that could choose, the costliest first."""
    parts: list[RenderableType] = []
    for graph in graphs:
        if graph.placement is not None:
            parts += [_candidates(graph), _totals(graph, graph.placement), _calls(graph.placement, every)]
    return parts


def _candidates(graph: CompiledGraph) -> RenderableType:
    kept = "the one kept" + (", chosen earlier" if graph.from_disk else "")
    title = f"graph {graph.number}, goal {graph.goal}: candidates ({kept}: {graph.chosen})"
    made = table(
        title, "candidate", ">casts", ">predicted ms", ">measured ms", ">spread", ">predicted/measured",
        ">measured call by call",
    )  # fmt: skip
    for c in graph.candidates:
        casts = "" if c.casts is None else str(c.casts)
        made.add_row(c.name, casts, f"{c.predicted_ns / 1e6:.3f}", *_measured(c), f"{c.sure * 100:.0f} %")
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
        f"  {_proof(placement)}; choosing took {graph.candidates_seconds:.1f} s",
    ]
    returned = _returned(graph)
    if returned and placement.raised == len(placement.calls):
        size = in_bytes(sum(cast.value.bytes for cast in returned))
        parts.append(
            f"  every call runs high; results keep the formats that the policy gives them: {len(returned)} casts of "
            f"results, {size} written"
        )
    if timed is not None and timed.measured_ns:
        off = timed.predicted_ns / timed.measured_ns
        wrong = " [red]The cost model is wrong here by more than half.[/red]" if not 0.5 < off < 2 else ""
        parts.append(f"  predicted {_ms(timed.predicted_ns)}, measured {_ms(timed.measured_ns)}.{wrong}")
    return "\n".join(parts) + "\n"


def _returned(graph: CompiledGraph) -> list[Step]:
    """The casts that were put on what the graph returns."""
    if graph.before is None or graph.after is None:
        return []
    steps = (graph.after.steps.get(value) for value in graph.after.body.returns)
    return [step for step in steps if step is not None and step.is_cast and step.id not in graph.before.steps]


def _proof(placement: Placement) -> str:
    if placement.method == GIVEN:
        return "kept because it was measured to be fastest, whatever the cost model says"
    if placement.kept_bytes is not None and placement.policy_kept_bytes is not None:
        kept, policy = in_bytes(placement.kept_bytes), in_bytes(placement.policy_kept_bytes)
        sizes = f"predicted to keep {kept} for the backward and in casts, {policy} as the policy says"
        if placement.method == FOR_MEMORY:  # no bound: its time is not what was minimised
            return sizes
        return f"{sizes}; {placement.method}, gap {placement.gap * 100:.1f} %"
    return f"{placement.method}, gap {placement.gap * 100:.1f} %"


def _calls(placement: Placement, every: bool) -> RenderableType:
    ordered = sorted(placement.calls, key=lambda call: (-max(call.costs), call.step))
    shown = ordered if every else ordered[:LISTED]
    title = "calls that could choose"
    if len(shown) < len(ordered):
        title += f": the {len(shown)} costliest of {len(ordered)}"
    made = table(title, "op", "module", "line", "shape", "may be", ">us in each", "chosen", ">saved us")
    for call in shown:
        made.add_row(
            call.op.removeprefix("aten."), escape(call.place.module_path or "(root)"), _line(call),
            "x".join(map(str, call.shape)) if call.shape is not None else "", " ".join(f.name for f in call.formats),
            " ".join(f"{cost / 1e3:.1f}" for cost in call.costs), call.chosen.name, f"{call.saved / 1e3:.1f}",
        )  # fmt: skip
    return made


def _line(call: PlacedCall) -> str:
    return f"{short_file(call.place.file)}:{call.place.line}" if call.place.file else ""


def _ms(ns: float) -> str:
    return f"{ns / 1e6:.3f} ms"
