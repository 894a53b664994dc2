"""Which call of its op a node of a graph is, inside one call of a module: counted in the order in which nodes run.

Nodes are known by what Dynamo and torch.export noted beside them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from narrowcast.runtime.sites.graph_nodes import begins_here
from narrowcast.runtime.sites.python_stack import called_modules
from narrowcast.runtime.torch_surface.dynamo import dynamo_trace
from narrowcast.runtime.torch_surface.modules import STACK

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
        """The number of a node that calls this op, from 1; 0 where that is not known before it runs."""
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
        """The bodies of this node, a higher-order op, unless they run exactly once: what its module calls is lost."""
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
    """Which call of a module a node stands in, of those that the graph makes from beginning to end; None for none."""
    return next(reversed(meta.get(STACK) or {}), None)


_traces: WeakKeyDictionary[Any, Numbering] = WeakKeyDictionary()  # by what Dynamo keeps of each


def number_in_trace(op: str) -> int:
    """The number of a call that Dynamo is tracing on this thread; 0 where that is not known, or it traces nothing."""
    trace = dynamo_trace()
    if trace is None:
        return 0
    found = _traces.get(trace)
    if found is None:
        found = _traces[trace] = Numbering(begins_here(tuple(called_modules())))
    return found.number({STACK: trace.output.current_tx.nn_module_stack}, op)
