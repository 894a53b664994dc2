"""Attributes and buffers of modules, and what scripts keep, restored after a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn import Module

from narrowcast.frontends.scripts.state import ScriptState, restore_value, value_of
from narrowcast.observation.restore.attributes import Attributes
from narrowcast.runtime.devices.device import random_state_kept
from narrowcast.runtime.torch_surface.dispatch import without_modes
from narrowcast.runtime.torch_surface.fx import FakeTensor
from narrowcast.runtime.torch_surface.modules import compiled_of, is_uninitialized, told_of_module_calls


class _Modules(ExitStack):
    """The modules that are kept have afterwards what they had; scripts are parts of their own."""

    def __init__(self, but: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._kept: set[int] = set()
        self._but = but
        self.callback(self._restore_buffers)

    def called(self, module: Module) -> None:
        """Keep the state of a module that is about to be called, with all inside of a compiled one, where no hook
        runs.
        """
        if id(module) in self._kept:
            return
        compiled = compiled_of(module)
        for one in (module, *(() if compiled is None else compiled.modules())):
            self.keep(one)
        if isinstance(module, torch.jit.ScriptModule):
            self.enter_context(ScriptState(module))

    def keep(self, module: Module) -> None:
        """Keep a module, not those in it."""
        self._kept.add(id(module))
        if id(module) in self._but or is_uninitialized(module):
            return
        self.enter_context(Attributes(vars(module)))
        with without_modes():
            own = [b for b in module.buffers(recurse=False) if b is not None and not isinstance(b, FakeTensor)]
            self._buffers += [(buffer, value_of(buffer)) for buffer in own]

    def _restore_buffers(self) -> None:
        """Restore buffers where their values have changed."""
        with torch.no_grad():
            for buffer, value in self._buffers:
                if buffer.layout is torch.strided and not buffer.is_meta:
                    restore_value(buffer, value)


@contextmanager
def restored_when_called(model: Any = None, copied: Any = None) -> Iterator[None]:
    """Restore attributes (caches that a forward kept) and buffers of all modules that are called; but for those that
    `copied` alone has, a deep copy of `model` that nobody sees afterwards.
    """
    own, copies = [{id(m) for m in one.modules()} if isinstance(one, Module) else set() for one in (model, copied)]
    with _Modules(frozenset(copies - own)) as kept, told_of_module_calls(kept.called):
        yield


@contextmanager
def restored(model: Any) -> Iterator[None]:
    """Restore attributes, buffers (batch norm statistics), what scripts keep, and the random state at the end."""
    with _Modules() as kept:
        if isinstance(model, Module):
            for module in model.modules():
                kept.keep(module)
            kept.enter_context(ScriptState(model))
        kept.enter_context(random_state_kept())
        yield
