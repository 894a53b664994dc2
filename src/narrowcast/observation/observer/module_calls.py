"""Who a call of a run is: the modules that are being called, and the numbers of calls in them. Modules tell when they
are called (`Observer.called`); where that is, is read off the Python stack if someone asks: that takes longer than
small ops do.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from narrowcast.core.ledger.identity import BACKWARD, FORWARD, CallId
from narrowcast.core.policy import Site
from narrowcast.observation.statistics.by_storage import has_storage
from narrowcast.runtime.sites.graph_nodes import GraphCall, current_graph_call
from narrowcast.runtime.sites.python_stack import find_site
from narrowcast.runtime.torch_surface.dispatch import storage_key
from narrowcast.runtime.torch_surface.modules import without_wrapper

Key = tuple[str, str, str]
"""Module path, op, direction. The path is empty for what the module that is called computes itself."""


@dataclass(slots=True)
class _ModuleCall:
    """One call of a module, on its way: which one of this module, and how many calls of each op it has made."""

    module: Any
    number: int
    counts: dict[Key, int] = field(default_factory=dict)

    def count(self, path: str, op: str, direction: str) -> int:
        """Return the number of the next call, and count it."""
        key = (path, op, direction)
        number = self.counts[key] = self.counts.get(key, 0) + 1
        return number


class Who:
    """The identity and the place of a call; those of the forward are put together when they are first asked for.

    So they have to be asked for while the call runs, or while it is inspected.
    """

    __slots__ = ("_asked", "_id", "_site")

    def __init__(self, identity: CallId | None, site: Site | None, asked: _Asked | None = None) -> None:
        self._id, self._site, self._asked = identity, site, asked

    @property
    def id(self) -> CallId:
        """The identity."""
        return self._id or self._found()[0]

    @property
    def site(self) -> Site:
        """The place."""
        return self._site or self._found()[1]

    @property
    def direction(self) -> str:
        """Forward, backward or recomputation: known at once."""
        return FORWARD if self._id is None else self._id.direction

    @property
    def is_in_module(self) -> bool:
        """Whether it is made, or is a backward of what is made, in a module; asked while the call is inspected."""
        return self._asked is not None or self.direction != FORWARD or bool(self.id.module_path)

    def module(self) -> str | weakref.ref[Any]:
        """Return the path of its module, or, where that would have to be put together, the module."""
        if self._id is None and self._asked is not None:
            return weakref.ref(self._asked[0].module)
        return self.id.module_path

    def known(self) -> Who:
        """Return this with its identity found now, for a caller that keeps it."""
        if self._id is None:
            self._found()
        return self

    def end(self) -> None:
        """Forget what was not asked for: the call is over."""
        self._asked = None

    def _found(self) -> tuple[CallId, Site]:
        if self._asked is None:
            raise RuntimeError("who the call was is asked for after it has ended: keep `call.who.known()`")
        module_call, op, number, with_names = self._asked
        self._site = find_site(with_names)
        self._id = CallId(self._site.module_path, op, number, module_call.number, FORWARD)
        return self._id, self._site


_Asked = tuple[_ModuleCall, str, int, bool]
"""What a call is found by: the module being called, its op and number, whether names are wanted."""


class _Called(threading.local):
    def __init__(self) -> None:
        self.calls: list[_ModuleCall] = []


class ModuleCalls:
    """The calls of modules in one run, and who stands where in them."""

    def __init__(self) -> None:
        self._called = _Called()
        self._of_module: dict[int, tuple[list[int], weakref.ref[Any]]] = {}  # by id: half the time of weak keys
        self._outside = _ModuleCall(None, 1)
        self._of_path: dict[str, int] = {}
        self._in_graphs: dict[tuple[str, GraphCall], _ModuleCall] = {}
        self.roots: weakref.WeakKeyDictionary[torch.nn.Module, None] = weakref.WeakKeyDictionary()
        """The outermost modules that were called, in that order."""

    def begin(self, module: Any) -> bool:
        """Note that the module is called."""
        calls = self._called.calls
        if not calls:
            self.roots.setdefault(module)
        numbered = self._of_module.get(id(module))
        if numbered is None:
            key, of_module = id(module), self._of_module
            numbered = of_module[key] = ([0], weakref.ref(module, lambda _: of_module.pop(key, None)))
        number = numbered[0]
        number[0] += 1
        # what is called outside of modules has the path and the module call of the outermost: they are counted together
        counts = self._outside.counts if not calls and number[0] == 1 else {}
        calls.append(_ModuleCall(module, number[0], counts))
        return True

    def end(self) -> None:
        """Note that the call that began last on this thread has ended."""
        self._called.calls.pop()

    def who(self, op: str, direction: str, is_cast: bool, noted: Site | None, with_names: bool) -> Who:
        """Return the identity of the next call of an op, forward or recomputed. Casts are counted apart.

        noted: its place, if a graph or a script says it. with_names: else with the names of classes and functions.
        """
        calls = self._called.calls
        counted = "cast" if is_cast else direction
        if noted is None and calls and direction == FORWARD:
            return Who(None, None, (calls[-1], op, calls[-1].count("", op, counted), with_names))
        site = noted or find_site(with_names)
        graph_call = current_graph_call()
        module_call = calls[-1] if calls else self._outside
        path = site.module_path
        if graph_call is not None:
            module_call = self._in_graph(path, graph_call)
        elif calls and (noted is None or path == find_site(with_names=False).module_path):
            path = ""
        number = module_call.count(path, op, counted)
        return Who(CallId(site.module_path, op, number, module_call.number, direction), site)

    def of_backward(self, path: str, op: str, module_call: int) -> CallId:
        """Return the next call of an op in the backward of one call of a module."""
        return CallId(path, op, self._outside.count(path, op, f"{BACKWARD} {module_call}"), module_call, BACKWARD)

    def _in_graph(self, path: str, call: GraphCall) -> _ModuleCall:
        module_call = self._in_graphs.get((path, call))
        if module_call is None:
            number = self._of_path[path] = self._of_path.get(path, 0) + 1
            module_call = self._in_graphs[path, call] = _ModuleCall(None, number)
        return module_call


def path_of(module: str | weakref.ref[Any], roots: Iterable[torch.nn.Module]) -> str:
    """Return the path of a module in the form of `Who.module`."""
    if isinstance(module, str):
        return module
    called = module()
    return next((name for root in roots for name, each in root.named_modules() if each is called), "")


def names_of_parameters(roots: Iterable[torch.nn.Module]) -> dict[int, str]:
    """Return the parameters of the models that ran, by their ids: full names, and with the model's class where two
    models have the same; numbered where the classes are the same, too.
    """
    named: dict[int, tuple[str, str]] = {}
    models: Counter[str] = Counter()
    for root in roots:
        kind = type(root).__name__
        models[kind] += 1
        model = kind if models[kind] == 1 else f"{kind} {models[kind]}"
        for name, parameter in root.named_parameters():
            full = without_wrapper(name)
            if len(full) > len(named.get(id(parameter), ("", ""))[0]):  # of a part that was called by itself, too
                named[id(parameter)] = full, model
    often = Counter(name for name, _ in named.values())
    return {key: name if often[name] == 1 else f"{model}.{name}" for key, (name, model) in named.items()}


def parameter_at(tensor: torch.Tensor, roots: Iterable[torch.nn.Module]) -> str:
    """Return `the parameter encoder.weight`, if the tensor is one of the models that ran, or a view of one."""
    models = tuple(roots)
    for parameter in (parameter for model in models for parameter in model.parameters()):
        if has_storage(parameter) and storage_key(parameter) == storage_key(tensor):
            return f"the parameter {names_of_parameters(models)[id(parameter)]}"
    return ""
