"""The first screen of an explanation: what ran, the verdict, formats, casts, what is worst, what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from narrowcast.core.ledger.identity import BACKWARD
from narrowcast.output.console import short_file, short_place
from narrowcast.output.screen import LINES, Part, first_screen, shortened, wrapped
from narrowcast.reports.documents.of_results import document_of
from narrowcast.reports.render.ledger_text import LEAST_OF_PATH, cast_part, short_op
from narrowcast.reports.render.overview import overview_parts
from narrowcast.reports.results.differences import CallError
from narrowcast.reports.results.explanation import Explanation
from narrowcast.reports.results.graphs import CompiledGraph
from narrowcast.reports.results.lines import number_text


def explanation_screen(explanation: Explanation, whole: Callable[[], str], width: int, room: int = LINES) -> str:
    """At most `room` lines of `width` columns."""
    ran = explanation.ran_on
    if explanation.front_end != "eager":
        captured = sum(graph.is_captured for graph in explanation.graphs)
        ran = f"front end {explanation.front_end}, {captured} graphs; {ran}"
    head = (
        f"{explanation.subject} under policy {explanation.policy} ({explanation.digest[:8]}) on "
        f"{explanation.device_type} in {explanation.low}; {ran}"
    )
    rows = [*_graphs(explanation, width), cast_part(explanation.ledger.kinds(), width)]
    if explanation.comparison is not None:
        rows.insert(0, _errors(explanation.comparison.worst, width))
    parts = overview_parts(document_of(explanation), head, rows, width)
    return first_screen(parts, whole, width, room)


def _errors(worst: Iterable[CallError], width: int) -> Part:
    lines = []
    for row in worst:
        figures = f"{number_text(row.own):>8} {number_text(row.total):>8}  {row.computes or '-'}  "
        at = f"  {short_place(row.file, row.line)}  {row.verdict}"
        op = f" {short_op(row.id.op)} #{row.id.number}{' backward' * (row.id.direction == BACKWARD)}"
        room = max(width - len(figures) - len(op) - len(at), LEAST_OF_PATH)
        lines.append(figures + shortened(row.id.module_path or "(root)", room) + op + at)
    heading = ["", f"{'own':>8} {'total':>8}  errors against fp32 of the calls most to blame"]
    return Part([*heading, *lines] if lines else [], 4, 2, least=4)


def _graphs(explanation: Explanation, width: int) -> list[Part]:
    """What is a fault, what was chosen, what the passes left, what is not captured."""
    if not explanation.graphs:
        return []
    faults = [f"BUG: {d.op} in {d.module_path or '(root)'} computes in {d.computes} {d.eager} times in eager code, "
              f"{d.graph} times in the graph; please report this" for d in explanation.differences]  # fmt: skip
    chosen = [line for graph in explanation.graphs for line in _placed(graph)]
    rows = [row for row in explanation.graph_rows() if row.calls]
    made, left = sum(row.assigned for row in rows), sum(row.casts for row in rows)
    passes = [f"passes: eager code makes {made} casts, the graphs {left}"] if rows else []
    breaks = [f"graph {row.number} ends at {short_file(row.broken_at)}: {row.broken_by}"
              for row in explanation.graph_rows() if row.broken_by]  # fmt: skip
    breaks += [f"runs as eager code would, {short_file(row.site)}: {row.fallback}"
               for row in explanation.graph_rows() if row.fallback]  # fmt: skip
    lines = [line for said in (*faults, *chosen, *passes, *breaks) for line in wrapped(said, width=width)]
    return [Part(["", *lines], rank=2, heading=1, least=6)]


def _placed(graph: CompiledGraph) -> list[str]:
    """Which formats were chosen in a graph, and by which times."""
    placement = graph.placement
    if placement is None:
        return []
    lines = []
    for candidate in sorted(graph.candidates, key=lambda c: c.name != graph.chosen):
        if candidate.dropped or (candidate.measured_ns is None and candidate.name != graph.chosen):
            continue
        measured = f"measured {candidate.measured_ns / 1e6:.3f} ms" if candidate.measured_ns else "not timed"
        kept = "kept" if candidate.name == graph.chosen else "not kept"
        lines.append(f"  {candidate.name}, {kept}: predicted {candidate.predicted_ns / 1e6:.3f} ms, {measured}")
    higher = f"{placement.raised} of {len(placement.calls)} calls that could choose run higher than the policy asks"
    return [f"graph {graph.number}, goal {graph.goal}: {graph.chosen}; {higher}", *lines]
