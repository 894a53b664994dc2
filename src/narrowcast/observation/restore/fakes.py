"""Fake tensors that a program kept outside of its model, removed: in functions' caches, in classes, files, closures."""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.nn import Module, Parameter

from narrowcast.runtime.torch_surface.fx import FakeTensor

_LRU_CACHE: type[Any] = type(lru_cache(lambda: None))
_CONTAINERS = (dict, list, set, OrderedDict, defaultdict)
"""By type alone: the methods of others, and what lazy objects say of themselves, are code of others."""
_DEPTH = 5
"""Containers and functions this deep in one another are searched."""
_NOT_USERS = {"torch", "torchgen", "functorch", "numpy", "scipy", "sympy", "narrowcast", *sys.stdlib_module_names}


@contextmanager
def without_kept_fakes(model: Callable[..., Any]) -> Iterator[None]:
    """Remove fake tensors that the program kept: a table that it computes once would be fake from then on.

    What held one holds again what it held before, or loses that entry; caches of `functools` are cleared. What holds
    none is left alone: another thread may be using it.
    """
    before = {id(owner): (owner, _entries(owner)) for owner in _owners(model)}
    try:
        yield
    finally:
        living = [one for one in gc.get_objects() if type(one) in (_LRU_CACHE, Parameter)]  # but what gc.freeze hides
        cached = {id(one): one for one in living if type(one) is _LRU_CACHE}
        for owner in (*_owners(model), *(vars(one) for one in living if type(one) is Parameter)):
            kept = before.get(id(owner), (owner, {}))[1]
            for key, value in _entries(owner).items():
                is_new = kept.get(key) is not value and (type(value) not in _CONTAINERS or id(value) not in before)
                if is_new and _holds_fake(value, _DEPTH):
                    _put(owner, key, value, kept)
                function = value.__func__ if type(value) in (staticmethod, classmethod) else value
                if type(function) is _LRU_CACHE:
                    cached[id(function)] = function
        for function in cached.values():
            if any(_holds_fake(result, _DEPTH) for result in gc.get_referents(function)):
                function.cache_clear()


def _owners(model: Callable[..., Any]) -> list[Any]:
    """Return what a model's own code can keep tensors in: files, with their classes, objects and containers."""
    found: dict[int, Any] = {}
    parts = [type(part) for part in model.modules()] if isinstance(model, Module) else [model]
    kinds = {kind for part in parts for kind in (part.__mro__ if isinstance(part, type) else (part,))}
    files = {getattr(kind, "__module__", "") for kind in kinds}
    files = set(filter(_is_users, files | {of for file in files for of in _named_in(file)}))
    for kind in kinds:
        _add(getattr(kind, "__func__", kind), found, files)
        _add(getattr(kind, "__self__", None), found, files)  # of a bound method
    for name in files:
        if type(sys.modules.get(name)) is ModuleType:
            names = found[id(vars(sys.modules[name]))] = vars(sys.modules[name])
            for value in list(names.values()):
                _add(value, found, files)
    return list(found.values())


def _named_in(name: str) -> set[str]:
    """Return the files whose functions, classes and names a file uses, if it is no installed package's."""
    file = sys.modules.get(name)
    is_installed = "site-packages" in (getattr(file, "__file__", None) or "")
    values = list(vars(file).values()) if type(file) is ModuleType and _is_users(name) and not is_installed else []
    return {value.__name__ if type(value) is ModuleType else value.__module__ or ""
            for value in values if type(value) in (ModuleType, FunctionType, type)}  # fmt: skip


def _add(value: Any, found: dict[int, Any], files: set[str], depth: int = _DEPTH) -> None:
    """Add a container, a class, what an object of these files holds, or what a function keeps: defaults, attributes,
    and what it closes over.
    """
    if depth == 0 or id(value) in found:
        return
    kind = type(value)
    if kind is FunctionType:
        inner = [*closed_over(value), *(value.__defaults__ or ()), value.__kwdefaults__, vars(value)]
    elif issubclass(kind, type):
        if not _is_users(value.__module__):
            return
        found[id(value)] = value
        inner = list(vars(value).values())
    elif kind in _CONTAINERS:
        found[id(value)] = value
        inner = list(value.values() if isinstance(value, dict) else value)
    elif kind.__module__ in files and not issubclass(kind, (Module, torch.Tensor)):
        inner = [getattr(value, "__dict__", None)]
        depth += 1
    else:
        return
    for one in inner:
        if type(one) in (*_CONTAINERS, FunctionType) or type(one).__module__ in files:
            _add(one, found, files, depth - 1)


def closed_over(function: FunctionType) -> Iterator[Any]:
    """Return what is in the cells of a function."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # nothing is in it yet
            yield cell.cell_contents


def _is_users(name: str | None) -> bool:
    return name == "__main__" or (name or "torch").partition(".")[0] not in _NOT_USERS


def _entries(owner: Any) -> dict[Any, Any]:
    """Return what a container holds, by key or position; of a class its attributes."""
    if issubclass(type(owner), type):
        return dict(vars(owner))
    return dict(owner) if isinstance(owner, dict) else dict(enumerate(list(owner)))


def _holds_fake(value: Any, depth: int) -> bool:
    if type(value) not in (*_CONTAINERS, tuple):
        return issubclass(type(value), FakeTensor)
    parts = value if type(value) in (list, set, tuple) else value.values()
    return depth > 0 and any(_holds_fake(part, depth - 1) for part in list(parts))


def _put(owner: Any, key: Any, value: Any, before: dict[Any, Any]) -> None:
    """Give an entry its former value, or remove it."""
    if isinstance(owner, type):
        setattr(owner, key, before[key]) if key in before else delattr(owner, key)
    elif isinstance(owner, dict):
        owner.update({key: before[key]}) if key in before else owner.pop(key)
    elif isinstance(owner, set):
        owner.discard(value)
    else:
        owner[:] = [one for one in owner if one is not value]
