"""Which call of a run something is: the modules that are being called, their paths, and the numbers of calls in them.

Modules tell when they are called (`Observer.called`), so a path is put together once for each call of a module:
reading it off the Python stack, op by op, takes longer than small ops do.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from narrowcast.ledger.identity import BACKWARD, CallId
from narrowcast.sites.graph_nodes import GraphCall, current_graph_call
from narrowcast.sites.python_stack import is_wrapper, module_path, modules_on_stack, name_in

Key = tuple[str, str, str]
"""Module path, op, direction; of a cast the word cast."""


@dataclass(slots=True)
class _Turn:
    """One call of a module, on its way: which one of this module, and how many calls of each op it has made.

    path: None where the Python stack has to be asked; `is_found`: whether that is known yet.
    """

    module: Any
    number: int
    counts: Counter[Key] = field(default_factory=Counter)
    path: str | None = None
    is_found: bool = False


class _Called(threading.local):
    def __init__(self) -> None:
        self.turns: list[_Turn] = []


class Turns:
    """The calls of modules in one run, and who stands where in them."""

    def __init__(self) -> None:
        self._called = _Called()
        self._of_module: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._outside: Counter[Key] = Counter()
        self._of_path: Counter[str] = Counter()
        self._in_graphs: dict[tuple[str, GraphCall], _Turn] = {}
        self.roots: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        """The outermost modules that were called."""

    def begin(self, module: Any) -> None:
        """The module is called."""
        turns = self._called.turns
        if not turns:
            self.roots.add(module)
        number = self._of_module[module] = self._of_module.get(module, 0) + 1
        turns.append(_Turn(module, number))

    def end(self) -> None:
        """The call that began last on this thread has ended."""
        self._called.turns.pop()

    def path(self) -> str | None:
        """The path of the module whose call is on its way; None where the Python stack has to be asked."""
        turns = self._called.turns
        if not turns:
            return None
        if not turns[-1].is_found:
            _find_paths(turns)
        return turns[-1].path

    def identity(self, path: str, op: str, direction: str, is_cast: bool) -> CallId:
        """The next call of an op there, forward or recomputed."""
        graph_call = current_graph_call()
        turns = self._called.turns
        if graph_call is not None:
            turn = self._in_graph(path, graph_call)
            counts, number = turn.counts, turn.number
        else:
            counts, number = (turns[-1].counts, turns[-1].number) if turns else (self._outside, 1)
        key = (path, op, "cast" if is_cast else direction)
        counts[key] += 1
        return CallId(path, op, counts[key], number, direction)

    def backward_identity(self, path: str, op: str, turn: int) -> CallId:
        """The next call of an op in the backward of one call of a module."""
        key = (path, op, f"{BACKWARD} {turn}")
        self._outside[key] += 1
        return CallId(path, op, self._outside[key], turn, BACKWARD)

    def _in_graph(self, path: str, call: GraphCall) -> _Turn:
        """The call of a module inside a graph that a node stands in."""
        found = self._in_graphs.get((path, call))
        if found is None:
            self._of_path[path] += 1
            found = self._in_graphs[path, call] = _Turn(None, self._of_path[path])
        return found


def _find_paths(turns: list[_Turn]) -> None:
    """Put the paths of calls together that have none yet, from the outermost inwards.

    Modules that were called before the run began are on the stack alone. Wrappers around the model are no part of a
    path: what they call has its path read off the stack.
    """
    first = turns[0]
    if not first.is_found:
        modules = modules_on_stack()
        around = modules[len(turns) - 1 :]
        if around and around[0] is first.module and not is_wrapper(around[-1]):
            first.path = module_path(around)
        first.is_found = True
    for outer, inner in pairwise(turns):
        if inner.is_found:
            continue
        if outer.path is not None:
            name = name_in(outer.module, inner.module)
            inner.path = f"{outer.path}.{name}" if outer.path and name else outer.path or name
        inner.is_found = True
