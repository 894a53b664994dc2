"""Variables that a function may bind again: counters, running states and buffers that are in no module."""

from __future__ import annotations

import dis
from collections import deque
from collections.abc import Callable
from functools import partial
from types import BuiltinMethodType, CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from narrowcast.observation.restore.attributes import Attributes

_OTHERS = (Module, Optimizer, LRScheduler, Tensor, DataLoader, type, BuiltinMethodType)
"""Objects that are restored otherwise, or have nothing to restore."""


class Variables:
    """The variables of the functions around a function (`nonlocal`), those of its file that it assigns (`global`), and
    the attributes of the object whose method it is; of these, and of functions and objects of its file that it uses,
    too. Of lists, dicts, deques and sets in them what they hold. An iterator goes on where it was left.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._cells: dict[int, tuple[CellType, Any]] = {}
        self._kept: list[Attributes] = []
        self._globals: list[tuple[dict[str, Any], str, Any]] = []
        self._seen: set[int] = set()
        inner = function
        while isinstance(inner, partial):
            inner = inner.func
        self._file = getattr(inner, "__module__", None)
        self._look(function)

    def restore(self) -> None:
        """Bind them to what they were bound to."""
        for cell, content in self._cells.values():
            cell.cell_contents = content
        for names, name, value in self._globals:
            names[name] = value
        for attributes in self._kept:
            attributes.restore()

    def _look(self, value: Any) -> None:
        if id(value) in self._seen or isinstance(value, _OTHERS):
            return
        self._seen.add(id(value))
        if isinstance(value, MethodType):
            self._look(value.__func__)
            self._object(value.__self__)
        elif isinstance(value, partial):
            for one in (value.func, *value.args, *value.keywords.values()):
                self._look(one)
        elif isinstance(value, FunctionType):
            self._function(value)
        elif type(value).__module__ == self._file:
            self._object(value)
        elif isinstance(value, list | dict | set | deque):
            self._kept.append(Attributes({"": value}))
            self._inside(value)

    def _inside(self, owner: list[Any] | dict[Any, Any] | set[Any] | deque[Any]) -> None:
        """Look at the objects of the file in a list, which may be long."""
        for value in owner.values() if isinstance(owner, dict) else owner:
            if type(value).__module__ == self._file or isinstance(value, FunctionType | MethodType):
                self._look(value)

    def _function(self, function: FunctionType) -> None:
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # it is empty
                continue
            self._cells[id(cell)] = cell, content
            self._look(content)
        if function.__module__ != self._file:
            return
        names = function.__globals__
        for step in dis.get_instructions(function):
            if step.opname in ("STORE_GLOBAL", "LOAD_GLOBAL") and step.argval in names:
                value = names[step.argval]
                if step.opname == "STORE_GLOBAL":
                    self._globals.append((names, step.argval, value))
                self._look(value)

    def _object(self, owner: Any) -> None:
        held = getattr(owner, "__dict__", None)
        if isinstance(held, dict) and not isinstance(owner, _OTHERS):
            self._kept.append(Attributes(held))
            for value in (*held.values(), *vars(type(owner)).values()):
                self._look(value)
