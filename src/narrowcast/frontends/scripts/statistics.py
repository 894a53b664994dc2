"""Norms that write to running statistics: TorchScript does not know that they do, and drops one that nothing reads, and
the call of a method that has one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from narrowcast.frontends.scripts import runtime
from narrowcast.frontends.scripts.region_facts import constant
from narrowcast.runtime.torch_surface.jit import inserting_after

_NORMS = ("aten::batch_norm", "aten::instance_norm")
_MARK = "narrowcast_norm"


def hold(graph: Any, value: Any, after: Any) -> None:
    """Let a node read a value that passes do not drop, in place."""
    mark = graph.create("prim::Print", [value], 0)
    mark.s_("name", _MARK)
    mark.insertAfter(after)


def release(graph: Any) -> None:
    """Take such nodes out."""
    for mark in graph.findAllNodes("prim::Print"):
        if mark.hasAttribute("name") and mark.s("name") == _MARK:
            mark.destroy()


def hold_norms(graph: Any) -> None:
    """Hold what such norms give."""
    for norm in _norms(graph):
        hold(graph, norm.output(), norm)


@contextmanager
def norms_kept(graph: Any) -> Iterator[None]:
    """Passes inside leave such norms in the graph."""
    hold_norms(graph)
    yield
    release(graph)


def keep_norms(graph: Any) -> None:
    """Let something read the norms that nothing reads, in place: TorchScript drops what is unused when it runs, too."""
    for norm in _norms(graph):
        if not norm.output().uses():
            with inserting_after(graph, norm):
                graph.insertGraph(runtime.graph_of(runtime.keep), [norm.output()])


def _norms(graph: Any) -> list[Any]:
    """The norms that have running statistics, and may be training."""
    found = [node for kind in _NORMS for node in graph.findAllNodes(kind)]
    return [n for n in found if n.inputsAt(3).type().kind() != "NoneType" and constant(n.inputsAt(5)) is not False]
