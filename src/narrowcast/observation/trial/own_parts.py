"""Whether a copy of a model would call the original: by functions that it holds, which a deep copy shares."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ref

import torch
from torch.nn import Module

from narrowcast.observation.restore.fakes import closed_over
from narrowcast.runtime.torch_surface.modules import compiled_of

_CONTAINERS = (dict, OrderedDict, defaultdict, list, tuple, set, deque)
_CALLED = (FunctionType, MethodType, partial, ref)
_NOT_COPIED = (str, bytes, bool, int, float, complex, type(None), type, *_CALLED, ModuleType, Module, torch.Tensor)


def closes_over_itself(model: Module) -> bool:
    """Return whether a hook, a `forward` set on a module, or another function among the attributes of the modules,
    closes over a part of the model, or what one of them holds; or an attribute is a weak reference to one.
    """
    modules = [module for module in model.modules() if compiled_of(module) is None]  # which is made again for a copy
    containers = [held for module in modules for held in vars(module).values() if type(held) in _CONTAINERS]
    called = [one for held in containers for one in _items(held) if isinstance(one, _CALLED)]
    called += [held for module in modules for held in vars(module).values() if isinstance(held, _CALLED)]
    if not called:
        return False
    tensors = (*model.parameters(), *model.buffers())
    own = {id(one) for one in (*modules, *tensors, *_held_by(modules))}
    return any(_closes_over(one, own, set()) for one in called)


def _held_by(modules: Iterable[Module]) -> Iterator[Any]:
    """Yield the containers and objects that modules hold, and those in them: a deep copy has others."""
    waiting, seen = [held for module in modules for held in vars(module).values()], set[int]()
    while waiting:
        held = waiting.pop()
        if isinstance(held, _NOT_COPIED) or id(held) in seen:
            continue
        seen.add(id(held))
        if type(held) in _CONTAINERS:
            yield held
            waiting += _items(held)
        elif isinstance(known := getattr(held, "__dict__", None), dict):
            yield held
            waiting += known.values()


def _items(held: Any) -> list[Any]:
    return list(held.values() if isinstance(held, dict) else held)


def _closes_over(value: Any, own: set[int], seen: set[int]) -> bool:
    """Return whether what a deep copy shares of a function leads to one of these objects."""
    if id(value) in seen:
        return False
    seen.add(id(value))
    if isinstance(value, ref):
        return isinstance(value(), Module) and id(value()) in own  # those to weights are made again: recurrent layers
    if isinstance(value, partial):
        return any(_closes_over(one, own, seen) for one in (value.func, *value.args, *value.keywords.values()))
    function = value.__func__ if isinstance(value, MethodType) else value
    return isinstance(function, FunctionType) and any(
        id(one) in own or id(getattr(one, "__self__", None)) in own or _closes_over(one, own, seen)
        for one in _inside(function)
    )


def _inside(function: FunctionType) -> Iterator[Any]:
    """Return what a function closes over, and its defaults, with the items of containers."""
    defaults = function.__defaults__ or ()
    for one in (*closed_over(function), *defaults, *(function.__kwdefaults__ or {}).values()):
        yield one
        if type(one) in _CONTAINERS:
            yield from _items(one)
