"""Which call of an op it is, inside one call of a module: counted while somebody asks.

Somebody is a recording, or a policy with a rule about the n-th call, from the first region of such a policy on. Outside
of modules' calls they are counted from where the outermost such region, or the recording, began.

Graphs count in graph_numbering, scripts in frontends/scripts/numbering. A law holds them equal (test_calls_by_number).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from narrowcast.runtime.sites.graph_nodes import number_in_graph
from narrowcast.runtime.sites.graph_numbering import number_in_trace
from narrowcast.runtime.torch_surface.autograd import current_graph_task
from narrowcast.runtime.torch_surface.dynamo import never_begin_at, tracing_compiled_code
from narrowcast.runtime.torch_surface.modules import carried_state, find_recomputation

Counts = dict[str, int]  # of calls, by op


class _CountsNow(threading.local):
    """Of the innermost module's call on this thread: how many calls of each op it has made. None: nobody asked.

    modules: how many calls of modules there are around. task: the backward that this call is part of. again: the op
    that a dispatch mode executes, and that may come round to its kernel once more.
    """

    counts: Counts | None = None
    modules: int = 0
    task: int = -1
    again: str = ""


_now = _CountsNow()
_wanted: list[None] = []  # one for each recording, and one from the first such region on
_staying: list[None] = []


@dataclass(slots=True)
class Counted:
    """What a module's call had counted when it called a checkpoint, which goes on from there when it recomputes."""

    before: Counts
    again: Counts = field(default_factory=dict)
    recomputation: tuple[int, int] = (0, 0)

    @staticmethod
    def now() -> Counted:
        """What is counted up to here."""
        return Counted(dict(_now.counts or {}))

    def in_recomputation(self, task: int, frame: object) -> Counts:
        """The counts of the recomputation in this frame, in this backward."""
        if self.recomputation != (task, id(frame)):
            self.recomputation, self.again = (task, id(frame)), dict(self.before)
        return self.again


def is_wanted() -> bool:
    """Whether somebody asks."""
    return bool(_wanted)


def begin_counting() -> None:
    """Count calls from now on; those of this thread outside of modules' calls from here."""
    if not _staying:
        _staying.append(None)
        _wanted.append(None)
    _begin()


@contextmanager
def counting() -> Iterator[None]:
    """Count calls for a while; those of this thread outside of modules' calls from here."""
    _wanted.append(None)
    _begin()
    try:
        yield
    finally:
        _wanted.pop()


def _begin() -> None:
    if not _now.modules:
        _now.counts = {}


def number_call(op: str) -> int:
    """The number of a call of this op that is about to run, from 1; 0 where nobody asked, or knows."""
    if not _wanted:
        return 0
    in_graph = number_in_graph(op)
    if in_graph is not None:
        return in_graph
    if tracing_compiled_code():
        return number_in_trace(op)
    counts = _counts()
    if counts is None:
        return 0
    if _now.again == op:
        _now.again = ""
    else:
        counts[op] = counts.get(op, 0) + 1
    return counts.get(op, 0)


def _counts() -> Counts | None:
    """Of the module's call that we are in; in what a checkpoint recomputes, of the one that called it."""
    task = current_graph_task()
    if task not in (-1, _now.task):
        frame = find_recomputation()
        counted: Counted | None = getattr(carried_state(frame), "counted", None) if frame is not None else None
        if counted is not None:
            return counted.in_recomputation(task, frame)
    return _now.counts


def numbered_apart(call: Callable[..., Any], /, *args: Any) -> Any:
    """`call(*args)`, a module's call: what it calls is counted from 1."""
    before = _now.counts, _now.again, _now.task
    _now.counts, _now.again, _now.task = {}, "", current_graph_task()
    _now.modules += 1
    try:
        return call(*args)
    finally:
        _now.modules -= 1
        _now.counts, _now.again, _now.task = before


never_begin_at(numbered_apart)


@contextmanager
def coming_round(op: str) -> Iterator[None]:
    """A dispatch mode executes this op, with autocast on: if its kernel is asked once more, it is the same call."""
    before, _now.again = _now.again, op
    try:
        yield
    finally:
        _now.again = before
