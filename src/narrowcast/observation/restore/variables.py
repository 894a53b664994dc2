"""Variables that a function may bind again: counters, running states and buffers that are in no module."""

from __future__ import annotations

import dis
import random
from argparse import Namespace
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from operator import is_
from types import CellType, FunctionType, GeneratorType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from narrowcast.runtime.sites.python_stack import is_own_module
from narrowcast.runtime.torch_bridge import tensors_in
from narrowcast.runtime.torch_surface.autograd import is_trained

_OTHERS = (Module, Optimizer, LRScheduler, Tensor, type)
"""Objects that are restored otherwise, or have nothing to restore."""
_MET = (Module, Parameter, Optimizer)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_NAMESPACES = (SimpleNamespace, Namespace)
_NUMBERS = (set, bytearray, array)
_OF_MODULES = frozenset(vars(Module()))
_CACHE = type(lru_cache(int))
_HOLDING = (list, tuple, deque, dict, FunctionType, GeneratorType, MethodType, np.ndarray, _CACHE)
_LOOKED_INTO = (*_HOLDING, *_NAMESPACES, *_NUMBERS, *_GENERATORS)
"""What is restored in containers, beside objects of the user's files."""
_PLAIN = (bool, int, float, complex, str, bytes, tuple, frozenset, type(None))
"""Values of attributes of a class that a program replaces, as it counts."""
_LARGEST = 1 << 26
"""Of an array of numpy, in bytes: larger ones are data, of which no copy is made."""


class Variables:
    """The variables of the functions around a function (`nonlocal`), those of its file that it assigns (`global`), and
    the attributes of the object whose method it is, and of its class; of functions and objects of the user's files that
    it uses, and of namespaces, too. What objects hold is as before. Items of other lists and dicts are as before; what
    was added stays there, for code that collects results, but for tensors in a dict, which are a state. A deque, which
    steps replay, and a set hold what they held, and so do arrays; generators of random numbers go back. A function's
    cache (functools.lru_cache) that was added to is empty. An iterator goes on where it was left. function: a model,
    too: what its classes and their files hold.

    met: modules, parameters, other tensors that are trained, and optimizers that they name, which are not looked into;
    each with its variable's or attribute's name. is_suspended: a generator is among them, whose frame keeps what it
    computes, and goes on where it was left.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.met: list[tuple[str, Any]] = []
        self.is_suspended = False
        self._cells: list[tuple[CellType, Any]] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._named: list[tuple[dict[Any, Any], dict[Any, Any], bool]] = []
        self._listed: list[tuple[list[Any] | deque[Any], list[Any], bool]] = []
        self._attributes: list[tuple[Any, dict[str, Any]]] = []
        self._arrays: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]] = []
        self._numbers: list[tuple[Any, Any]] = []
        self._generators: list[tuple[Callable[[Any], object], Any]] = []
        self._caches: list[tuple[Any, int]] = []
        self._seen: set[int] = set()
        self._are_own: dict[str | None, bool] = {}
        self._classes: set[int] = set()
        inner = function
        while isinstance(inner, partial):
            inner = inner.func
        self._file = None if isinstance(inner, Module) else getattr(inner, "__module__", None)
        self._look(function)

    def restore(self) -> None:
        """Bind them to what they were bound to."""
        for cell, content in self._cells:
            cell.cell_contents = content
        for names, name, value in self._globals:
            names[name] = value
        for names, before, is_state in self._named:
            for name in [name for name in names if name not in before]:
                if is_state or tensors_in(names[name]):
                    del names[name]
            for name, value in before.items():
                if dict.get(names, name, names) is not value:  # a class of others may have its own
                    names[name] = value
        for items, held, is_state in self._listed:
            if len(items) == len(held) and all(map(is_, items, held)):
                continue
            while is_state and len(items) > len(held):
                items.pop()
            for at, value in enumerate(held):
                if at == len(items):
                    items.append(value)
                elif items[at] is not value:
                    items[at] = value
        for owner, values in self._attributes:
            for name, value in values.items():
                if getattr(owner, name, owner) is not value:
                    setattr(owner, name, value)
        for numbered, copy in self._arrays:
            numbered[...] = copy
        for numbers, copy in self._numbers:
            if isinstance(numbers, set):
                numbers.intersection_update(copy)
                numbers.update(copy)
            else:
                numbers[:] = copy
        for restore, state in self._generators:
            restore(state)
        for cache, misses in self._caches:
            if cache.cache_info().misses > misses:
                cache.cache_clear()
        self._caches = [(cache, cache.cache_info().misses) for cache, _ in self._caches]

    def _look(self, value: Any, is_state: bool = False, name: str = "") -> None:
        """Note what a value holds. is_state: an object holds it, or something in one. name: of what names it."""
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, _OTHERS):
            if isinstance(value, _MET) or is_trained(value):
                self.met.append((name, value))
                self._look_at_hooks(value)
                self._look_at_attributes(value)
                self._look_at_classes(value)
            return
        if isinstance(value, MethodType):
            self._look(value.__func__)
            if isinstance(value.__self__, _MET):
                self._look(value.__self__)
            self._look_inside(value.__self__)
        elif isinstance(value, partial):
            self._look(value.func)
            for key, one in (*enumerate(value.args), *value.keywords.items()):
                self._look(one, name=key if isinstance(key, str) else f"args.{key}")
        elif isinstance(value, FunctionType):
            self._look_around(value)
        elif isinstance(value, GeneratorType):
            self.is_suspended = True
            frame = value.gi_frame
            for variable, one in dict(frame.f_locals if frame is not None else {}).items():
                self._look(one, name=variable)
        elif isinstance(value, staticmethod | classmethod):
            self._look(value.__func__)
        elif isinstance(value, _CACHE):
            self._caches.append((value, value.cache_info().misses))
            self._look(value.__wrapped__)
        elif isinstance(value, np.ndarray):
            if value.flags.writeable and value.nbytes <= _LARGEST and value.dtype != object:
                self._arrays.append((value, value.copy()))
        elif isinstance(value, _NUMBERS):
            if len(value) <= _LARGEST // 8:
                self._numbers.append((value, value[:] if isinstance(value, array) else type(value)(value)))
        elif isinstance(value, random.Random):
            self._generators.append((value.setstate, value.getstate()))
        elif isinstance(value, np.random.Generator):
            self._generators.append((partial(setattr, value.bit_generator, "state"), value.bit_generator.state))
        elif isinstance(value, np.random.RandomState):
            self._generators.append((value.set_state, value.get_state()))
        elif isinstance(value, list | deque):
            self._listed.append((value, list(value), is_state or isinstance(value, deque)))
            self._look_at_items(enumerate(value), is_state, name)
        elif isinstance(value, dict):
            self._named.append((value, dict(value), is_state))
            self._look_at_items(value.items(), is_state, name)
        elif isinstance(value, tuple):
            self._look_at_items(enumerate(value), is_state, name)
        elif self._is_own(type(value).__module__) or isinstance(value, _NAMESPACES):
            self._look_inside(value)

    def _is_own(self, name: str | None) -> bool:
        """Return whether a module is the function's, or another of the user's."""
        if name not in self._are_own:
            self._are_own[name] = name == self._file or is_own_module(name)
        return self._are_own[name]

    def _look_at_hooks(self, owner: Any) -> None:
        """Look at the functions that a model or an optimizer calls besides."""
        for one in owner.modules() if isinstance(owner, Module) else (owner,):
            for name, hooks in vars(one).items():
                if name.endswith("_hooks") and isinstance(hooks, dict):
                    for hook in list(hooks.values()):
                        if (getattr(hook, "__module__", None) or "").partition(".")[0] not in ("torch", "narrowcast"):
                            self._look(hook)

    def _look_at_attributes(self, owner: Any) -> None:
        """Look at what modules hold beside their parts: generators, arrays, optimizers, objects of the user's files.
        And at what parameters hold: moments, perhaps.
        """
        for one in owner.parameters() if isinstance(owner, Module) else (owner,):
            if type(one) is Parameter:
                self._named.append((vars(one), dict(vars(one)), False))
        for one in owner.modules() if isinstance(owner, Module) else ():
            held = ((name, value) for name, value in vars(one).items() if name not in _OF_MODULES)
            self._look_at_items(held, is_state=True)

    def _look_at_classes(self, owner: Any) -> None:
        """Look at the user's classes of a model's modules: what they hold, and the files of their methods."""
        kinds = {type(one) for one in owner.modules()} if isinstance(owner, Module) else set()
        for kind in dict.fromkeys(base for one in sorted(kinds, key=str) for base in one.__mro__):
            if self._is_own(kind.__module__):
                self._look_at_class(None, kind)

    def _look_at_items(self, items: Iterable[tuple[Any, Any]], is_state: bool, name: str = "") -> None:
        """Look at the objects of the user's files in a container, and at containers; it may be long."""
        for key, one in items:
            if isinstance(one, (*_LOOKED_INTO, *_MET)) or is_trained(one) or self._is_own(type(one).__module__):
                self._look(one, is_state, f"{name}.{key}" if name else str(key))

    def _look_around(self, function: FunctionType) -> None:
        modules = list[ModuleType]()
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # it is empty
                continue
            self._cells.append((cell, content))
            modules += [content] if isinstance(content, ModuleType) else []
            self._look(content, name=name)
        if not self._is_own(function.__module__):
            return
        names = function.__globals__
        for step in dis.get_instructions(function):
            if step.opname in ("STORE_GLOBAL", "LOAD_GLOBAL") and step.argval in names:
                value = names[step.argval]
                if step.opname == "STORE_GLOBAL":
                    self._globals.append((names, step.argval, value))
                modules += [value] if isinstance(value, ModuleType) else []
                self._look(value, name=step.argval)
        for module in modules:
            if self._is_own(module.__name__):
                for name in function.__code__.co_names:
                    self._look(vars(module).get(name), name=name)

    def _look_inside(self, owner: Any) -> None:
        if isinstance(owner, _OTHERS):
            return
        held = getattr(owner, "__dict__", None)
        if isinstance(held, dict):
            self._named.append((held, dict(held), True))
            for name, value in held.items():
                self._look(value, is_state=True, name=name)
        for kind in type(owner).__mro__:
            if self._is_own(kind.__module__):
                self._look_at_class(owner, kind)

    def _look_at_class(self, owner: Any, kind: type) -> None:
        """Look at what a class of the user's holds: methods, attributes of its own, and slots of an object."""
        own = {name: value for name, value in vars(kind).items() if not name.startswith("__")}
        slots = [name for name, value in own.items() if isinstance(value, MemberDescriptorType)]
        held = {name: getattr(owner, name) for name in slots if hasattr(owner, name)}
        if held:
            self._attributes.append((owner, held))
        if id(kind) not in self._classes:  # the same of all its objects
            self._classes.add(id(kind))
            self._attributes.append((kind, {name: value for name, value in own.items() if isinstance(value, _PLAIN)}))
        for name, value in (*held.items(), *own.items()):
            self._look(value, is_state=True, name=name)
