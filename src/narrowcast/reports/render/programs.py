"""The programs of an explanation's graphs as text."""

from __future__ import annotations

from rich.console import RenderableType
from rich.markup import escape

from narrowcast.programs.program import print_program
from narrowcast.reports.results.explanation import Explanation


def program_parts(explanation: Explanation) -> list[RenderableType]:
    """The programs of every graph before and after the passes, in their text form."""
    parts: list[RenderableType] = []
    for graph in explanation.graphs:
        for title, program in (
            ("as captured", graph.before),
            ("with explicit casts", graph.after),
            ("joint graph, as autograd made it", graph.joint_before),
            ("joint graph, after the passes", graph.joint_after),
        ):
            if program is not None:
                parts += [f"[bold]graph {graph.number}: {title}[/bold]", escape(print_program(program))]
    return parts
