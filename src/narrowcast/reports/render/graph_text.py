"""The graphs of an explanation as text: what the passes did, where graphs break, what differs from eager, programs."""

from __future__ import annotations

from rich.console import RenderableType
from rich.markup import escape

from narrowcast.output.console import short_file, table
from narrowcast.programs.program import Program, print_program
from narrowcast.reports.results.explanation import Explanation
from narrowcast.reports.results.graphs import CompiledGraph, GraphRow


def graph_parts(explanation: Explanation) -> list[RenderableType]:
    """Tables about the graphs; what is a fault comes first."""
    rows = explanation.graph_rows()
    captured = [row for row in rows if row.calls]
    parts: list[RenderableType] = [*_differences(explanation), *([_graphs(captured)] if captured else [])]
    if any(row.joint_before for row in rows):
        parts.append(_joint(rows))
    return [*parts, *_breaks(rows)]


def program_parts(explanation: Explanation) -> list[RenderableType]:
    """The programs of every graph before and after the passes, in their text form."""
    parts: list[RenderableType] = []
    for graph in explanation.graphs:
        for title, program in _programs(graph):
            parts += [f"[bold]graph {graph.number}: {title}[/bold]", escape(print_program(program))]
    return parts


def _programs(graph: CompiledGraph) -> list[tuple[str, Program]]:
    named = [
        ("as captured", graph.before),
        ("with explicit casts", graph.after),
        ("joint graph, as autograd made it", graph.joint_before),
        ("joint graph, after the passes", graph.joint_after),
    ]
    return [(title, program) for title, program in named if program is not None]


def _differences(explanation: Explanation) -> list[RenderableType]:
    if not explanation.differences:
        return []
    made = table("BUG: eager and the graph decide differently; please report this", "op", "module", "computes in",
                 ">calls in eager", ">in the graph")  # fmt: skip
    for d in explanation.differences:
        made.add_row(d.op, escape(d.module_path or "(root)"), d.computes, str(d.eager), str(d.graph))
    return [made]


def _graphs(rows: list[GraphRow]) -> RenderableType:
    made = table("graphs: casts that eager makes, and what the passes left of them", "graph", "begins at", ">calls",
                 ">casts in eager", ">shared", ">folded", ">dropped", ">casts left")  # fmt: skip
    for row in rows:
        made.add_row(
            str(row.number), escape(short_site(row.site)), str(row.calls), str(row.assigned), str(row.shared),
            str(row.folded), str(row.dropped), str(row.casts),
        )  # fmt: skip
    return made


def _joint(rows: list[GraphRow]) -> RenderableType:
    made = table("casts after autograd, forward and backward together", "graph", ">as autograd made them",
                 ">after the passes", ">of these in the backward")  # fmt: skip
    for row in rows:
        if row.joint_before:
            made.add_row(str(row.number), str(row.joint_before), str(row.joint_after), str(row.backward))
    return made


def _breaks(rows: list[GraphRow]) -> list[RenderableType]:
    """Graph breaks and fallbacks, each with its place and reason."""
    found = [(row, "ends", row.broken_at, row.broken_by) for row in rows if row.broken_by]
    found += [(row, "runs as eager would run it", row.site, row.fallback) for row in rows if row.fallback]
    if not found:
        return []
    made = table("what is not captured: it runs as eager code, in the same region", "graph", "", "where", "why")
    for row, what, where, why in found:
        made.add_row(str(row.number), what, escape(short_site(where)), escape(why))
    return [made]


def short_site(site: str) -> str:
    """`model.py:12` of a whole path and a line."""
    file, _, line = site.rpartition(":")
    return f"{short_file(file)}:{line}" if file else site
