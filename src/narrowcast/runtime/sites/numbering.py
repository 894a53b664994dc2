"""Which call of an op it is, inside one call of a module: counted while somebody asks.

Somebody is a recording, or a policy with a rule about the n-th call, from the first region of such a policy on. Outside
of modules' calls they are counted from where the outermost such region, or the recording, began.

Nodes of graphs are known by what Dynamo and torch.export noted beside them; scripts count in
frontends/scripts/convert. A law holds them equal (test_calls_by_number).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from narrowcast.runtime.sites.graph_nodes import begins_here, number_in_graph
from narrowcast.runtime.sites.python_stack import called_modules
from narrowcast.runtime.torch_surface.autograd import current_graph_task
from narrowcast.runtime.torch_surface.dynamo import dynamo_trace, never_begin_at, tracing_compiled_code
from narrowcast.runtime.torch_surface.modules import STACK, carried_state, find_recomputation
from narrowcast.runtime.torch_surface.patches import once

PLAIN_BODIES = frozenset(
    ["tag_activation_checkpoint", "wrap_activation_checkpoint", "wrap", "invoke_subgraph", "autograd_function_apply",
     "wrap_with_set_grad_enabled"]
)  # fmt: skip
"""Higher-order ops whose bodies eager code runs as they stand, once; others run theirs without the weight cache."""
_ONCE = PLAIN_BODIES | {"wrap_with_autocast"}

Key = tuple[str | None, str]  # of a module's call, and an op


@dataclass(slots=True)
class Numbering:
    """begins: whether the graph begins where the call of the module around it does, or no module is around it."""

    begins: bool = True
    _counts: Counter[Key] = field(default_factory=Counter)
    _lost: set[Key] = field(default_factory=set)
    _unsure: list[str | None] = field(default_factory=list)

    def number(self, meta: Mapping[str, Any], op: str) -> int:
        """Return the number of a node that calls this op, from 1; 0 where that is not known before it runs."""
        called = _call_of(meta)
        key = (called, op)
        if called in self._unsure or (called is None and not self.begins):
            self._lost.add(key)
        if key in self._lost:
            return 0
        self._counts[key] += 1
        return self._counts[key]

    @contextmanager
    def in_bodies(self, meta: Mapping[str, Any], name: str) -> Iterator[None]:
        """Drop counts of the module around a node with bodies, a higher-order op, unless they run exactly once."""
        if name in _ONCE:
            yield
            return
        before = len(self._unsure)
        self._unsure += [_call_of(meta), None]
        try:
            yield
        finally:
            del self._unsure[before:]


def _call_of(meta: Mapping[str, Any]) -> str | None:
    """Return the key of the call of a module around a node; None where the graph does not hold all of it."""
    return next(reversed(meta.get(STACK) or {}), None)


_traces: WeakKeyDictionary[Any, Numbering] = WeakKeyDictionary()  # by what Dynamo keeps of each


def number_in_trace(op: str) -> int:
    """Return the number of a call that Dynamo is tracing on this thread; 0 where that is unknown."""
    trace = dynamo_trace()
    if trace is None:
        return 0
    numbering = _traces.get(trace)
    if numbering is None:
        numbering = _traces[trace] = Numbering(begins_here(tuple(called_modules())))
    return numbering.number({STACK: trace.output.current_tx.nn_module_stack}, op)


# -- in eager code -----------------------------------------------------------------------------------------------------


T = TypeVar("T")
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


class PerRecomputation(Generic[T]):
    """What each recomputation of a checkpoint, in each backward, has of its own: the last one's is kept."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make, self._made = make, make()
        self._recomputation = (-1, 0)

    def found_in(self, frame: object) -> T:
        """Return the value of the recomputation in this frame, in the backward that runs."""
        key = (current_graph_task(), id(frame))
        if self._recomputation != key:
            self._recomputation, self._made = key, self._make()
        return self._made


def counted_here() -> PerRecomputation[Counts]:
    """Return the counts of the module's call that calls a checkpoint, from which its recomputation goes on."""
    return PerRecomputation(dict(_now.counts or {}).copy)


def is_wanted() -> bool:
    """Return whether anything asks for numbers."""
    return bool(_wanted)


def begin_counting() -> None:
    """Count calls from now on; those of this thread outside of modules' calls from here."""
    _stay()
    _begin()


_stay = once(lambda: _wanted.append(None))


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
    """Return the number of a call of this op that is about to run, from 1; 0 where it is not asked for, or unknown."""
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
    """Return the counts of the module's call that we are in; in a recomputation, of the checkpoint's caller."""
    task = current_graph_task()
    if task not in (-1, _now.task):
        frame = find_recomputation()
        counted: Any = getattr(carried_state(frame), "counted", None) if frame is not None else None
        if counted is not None:
            return counted.found_in(frame)  # type: ignore[no-any-return]
    return _now.counts


def numbered_apart(call: Callable[..., Any], /, *args: Any) -> Any:
    """Return `call(*args)`, a module's call: what it calls is counted from 1."""
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
    """Count one call while a dispatch mode executes this op with autocast on: its kernel may be asked once more."""
    before, _now.again = _now.again, op
    try:
        yield
    finally:
        _now.again = before
