"""Casts along a run: when each is made, and what it moves."""

from __future__ import annotations

from narrowcast.reports.documents.model import Edge, Graph, Series

MOST_ARROWS = 5
"""So many kinds of casts have lines of their own, those that move most."""


def cast_series(graph: Graph) -> list[Series]:
    """The bytes that casts move, over the time at which their calls run, or over the order of the calls.

    The time is known where each forward call with a format has one: calls run one after the other, and a cast is made
    when its call begins. Nothing where there are fewer than two casts.
    """
    moved: dict[int, dict[str, int]] = {}
    whole: dict[str, int] = {}
    for edge in graph.edges:
        if edge.src != edge.dst and edge.bytes:
            at = moved.setdefault(edge.end, {})
            name = _arrow(edge)
            at[name] = at.get(name, 0) + edge.bytes
            whole[name] = whole.get(name, 0) + edge.bytes
    if len(moved) < 2:
        return []
    nodes = sorted(moved)
    shown = sorted(whole, key=lambda name: -whole[name])[:MOST_ARROWS]
    lines: list[tuple[str, list[float | None]]] = [(name, [moved[n].get(name) for n in nodes]) for name in shown]
    begins = _begins(graph)
    if begins is None:
        xs, x, unit, note = [float(n + 1) for n in nodes], "call, in order", "whole", ""
    else:
        xs, x, unit, note = [begins[n] for n in nodes], "time", "ns", TIMED
    return [Series("Casts along the run", x, "bytes", xs, lines, unit, "bytes", True, nodes, kind="stems", note=note)]


TIMED = (
    "The time is that of the calls before, one after the other, as it was measured or predicted for each; calls that "
    "could not choose their format, and casts, are not in it."
)


def _arrow(edge: Edge) -> str:
    return f"{edge.src} to {edge.dst}"


def _begins(graph: Graph) -> list[float] | None:
    """When each call begins, in nanoseconds from the first; None where no time is known."""
    if not any(node.ns for node in graph.nodes):
        return None
    now, found = 0.0, []
    for node in graph.nodes:
        found.append(now)
        now += node.ns or 0.0
    return found
