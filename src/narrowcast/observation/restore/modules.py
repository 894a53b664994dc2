"""Attributes and buffers of modules, and what scripts keep, restored after a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import Module
from torch.nn.modules.module import register_module_forward_pre_hook

from narrowcast.frontends.scripts.state import ScriptState
from narrowcast.observation.restore.attributes import Attributes
from narrowcast.runtime.devices.device import random_state_kept
from narrowcast.runtime.torch_surface.dispatch import without_modes
from narrowcast.runtime.torch_surface.fx import FakeTensor


class _Modules:
    def __init__(self) -> None:
        self._attributes: dict[int, Attributes] = {}
        self._buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.scripts: list[ScriptState] = []

    def called(self, module: Module, args: Any) -> None:
        """Keep the state of a module that is about to be called."""
        if id(module) not in self._attributes:
            self.keep(module)
            if isinstance(module, torch.jit.ScriptModule):
                self.scripts.append(ScriptState(module))

    def keep(self, module: Module) -> None:
        """Keep a module, not those in it."""
        self._attributes[id(module)] = Attributes(vars(module))
        with without_modes():
            own = [b for b in module.buffers(recurse=False) if b is not None and not isinstance(b, FakeTensor)]
            self._buffers += [(buffer, buffer.detach().clone()) for buffer in own]

    def put_back(self) -> None:
        """Give each what it held; buffers only where their values have changed."""
        for attributes in self._attributes.values():
            attributes.put_back()
        for script in self.scripts:
            script.put_back()
        with torch.no_grad():
            for buffer, value in self._buffers:
                if buffer.layout is torch.strided and not buffer.is_meta and not torch.equal(buffer, value):
                    buffer.copy_(value)


@contextmanager
def restored_when_called() -> Iterator[None]:
    """Restore attributes (caches that a forward kept) and buffers of all modules that are called."""
    kept = _Modules()
    hook = register_module_forward_pre_hook(kept.called)
    try:
        yield
    finally:
        hook.remove()
        kept.put_back()


@contextmanager
def restored(model: Any) -> Iterator[None]:
    """Restore attributes, buffers (batch norm statistics), what scripts keep, and the random state at the end."""
    kept = _Modules()
    if isinstance(model, Module):
        for module in model.modules():
            kept.keep(module)
        kept.scripts.append(ScriptState(model))
    try:
        with random_state_kept():
            yield
    finally:
        kept.put_back()
