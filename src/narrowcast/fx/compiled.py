"""What became of each compiled graph, for those who watch: explanations, tests, benchmarks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from narrowcast.ledger import EditRecord
from narrowcast.policy import NOWHERE, Place
from narrowcast.program import Program


@dataclass(slots=True)
class CompiledGraph:
    """One graph that Dynamo captured.

    before, after: its program as read and as written, None if it was not captured. joint_before, joint_after: the same
    of the joint graph of forward and backward, if autograd made one. edits: what the passes did.
    fallback: why it runs as eager would run it; empty if it does not. place: its first line. broken_by: why the graph
    ends where it ends, and where, if a graph break is the cause.
    """

    number: int
    place: Place = NOWHERE
    before: Program | None = None
    after: Program | None = None
    joint_before: Program | None = None
    joint_after: Program | None = None
    edits: tuple[EditRecord, ...] = ()
    joint_edits: tuple[EditRecord, ...] = ()
    fallback: str = ""
    broken_by: str = ""
    broken_at: str = ""
    seconds: float = 0.0


class _Watching(threading.local):
    def __init__(self) -> None:
        self.lists: list[list[CompiledGraph]] = []


_watching = _Watching()


@contextmanager
def watch_graphs() -> Iterator[list[CompiledGraph]]:
    """The graphs that are compiled inside, in order. Threads are watched one by one."""
    found: list[CompiledGraph] = []
    _watching.lists.append(found)
    try:
        yield found
    finally:
        _watching.lists.remove(found)


def report_graph(place: Place) -> CompiledGraph:
    """A new graph, told to those who watch; the caller fills it in."""
    made = CompiledGraph(len(_watching.lists[-1]) if _watching.lists else 0, place)
    for found in _watching.lists:
        found.append(made)
    return made
