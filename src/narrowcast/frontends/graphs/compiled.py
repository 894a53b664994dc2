"""What became of each compiled graph, for those who watch: explanations, tests, benchmarks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch.fx import GraphModule

from narrowcast.core.policy import NOWHERE
from narrowcast.frontends.graphs.read import ReadGraph
from narrowcast.reports.results.graphs import CompiledGraph
from narrowcast.runtime.sites.graph_nodes import node_site


class _WatchedCompile(threading.local):
    def __init__(self) -> None:
        self.lists: list[list[CompiledGraph]] = []


_watching = _WatchedCompile()


@contextmanager
def watch_graphs() -> Iterator[list[CompiledGraph]]:
    """Collect the graphs that are compiled inside, in order. Threads are watched one by one."""
    graphs: list[CompiledGraph] = []
    _watching.lists.append(graphs)
    try:
        yield graphs
    finally:
        _watching.lists.remove(graphs)


def report_graph(graph: GraphModule) -> CompiledGraph:
    """Add a new graph to the lists of those who watch; the caller fills it in."""
    calls = (n for n in graph.graph.nodes if n.op not in ("placeholder", "output") and n.meta.get("stack_trace"))
    first = next((node_site(node.meta) for node in calls), NOWHERE)
    compiled = CompiledGraph(len(_watching.lists[-1]) if _watching.lists else 0, first)
    for graphs in _watching.lists:
        graphs.append(compiled)
    return compiled


def note_reading(report: CompiledGraph, reading: ReadGraph) -> None:
    """Note what was read: the program before anything was decided, its policies, and casts at modules' boundaries."""
    report.before, report.policies, report.boundaries = reading.program, reading.policies, reading.boundaries
    report.hidden = reading.hidden
