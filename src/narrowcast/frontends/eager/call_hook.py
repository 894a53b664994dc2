"""The hook at modules' calls: pins, and rules about `module.call`, are asked for there; observers number calls there.

torch's `Module._call_impl` is replaced once, when the first pin is set or the first region opened whose policy has such
rules, or the first run observed. It asks for the pin of the module and for the region that rules, and calls torch's
own; no hook is put on a module, and nothing of a module changes but one attribute of a pinned one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import Module

from narrowcast.frontends.eager.boundary import find_boundary
from narrowcast.frontends.eager.bounded import boundary_key, paths_matter, rules_hold, run_bounded, run_traced
from narrowcast.frontends.eager.watch import Arguments, Keywords, stepping, watchers
from narrowcast.runtime.regions import pinned
from narrowcast.runtime.regions.failures import note_weights
from narrowcast.runtime.regions.pinned import ATTRIBUTE
from narrowcast.runtime.regions.stack import stack
from narrowcast.runtime.sites.numbering import is_wanted, numbered_apart
from narrowcast.runtime.torch_surface.autograd import current_graph_task
from narrowcast.runtime.torch_surface.dynamo import know_torchs_call, never_begin_at, never_trace
from narrowcast.runtime.torch_surface.modules import CALL
from narrowcast.runtime.torch_surface.patches import note_staying, once, stay
from narrowcast.runtime.torch_surface.probes import require


@once
def ask_at_calls() -> None:
    """Put our question before torch's call of modules, once, also in compiled code."""
    know_torchs_call(_torchs_own[0] if _torchs_own else getattr(Module, CALL))
    stand_at_calls()


@once
def stand_at_calls() -> None:
    """Watch calls of modules in eager code alone: Dynamo, which takes a second to import, need not know."""
    require("calls of modules go through _call_impl")
    setattr(Module, ATTRIBUTE, None)
    note_staying(f"torch.nn.modules.module.Module.{ATTRIBUTE}", _WHY)
    stay(Module, CALL, _watching, _WHY)


_WHY = "pins, rules about the calls of modules, observed runs"


_torchs_own: list[Callable[..., Any]] = []  # what is replaced, once it is


def _watching(original: Callable[..., Any]) -> Callable[..., Any]:
    _torchs_own.append(original)

    def _call_impl(self: Module, *args: Any, **kwargs: Any) -> Any:
        pin: Any = self._narrowcast_pin
        if torch.compiler.is_dynamo_compiling():
            if pinned.class_pins and pin is None and not rules_hold():
                return original(self, *args, **kwargs)
            if pin is not None and pin.region is not None:
                with pin.region.again():
                    return _called_traced(original, self, pin, args, kwargs)
            return _called_traced(original, self, pin, args, kwargs)
        called = partial(numbered_apart, _called_pinned) if is_wanted() else _called_pinned
        if watchers():
            call = partial(called, original, self, pin)
            for watcher in stepping():
                call = partial(watcher.called, call, self)
            return call(args, kwargs)
        return called(original, self, pin, args, kwargs)

    never_begin_at(_call_impl)
    return _call_impl


def _called_pinned(original: Callable[..., Any], module: Module, pin: Any, args: Arguments, kwargs: Keywords) -> Any:
    if pin is None and stack.innermost is None and current_graph_task() == -1:
        return original(module, *args, **kwargs)
    if pin is not None and pin.region is not None:
        with pin.region:
            return _called(original, module, args, kwargs)
    return _called(original, module, args, kwargs)


def _called(original: Callable[..., Any], module: Module, args: Any, kwargs: Keywords) -> Any:
    boundary = find_boundary(module)
    if boundary is None:
        return original(module, *args, **kwargs)
    try:
        return run_bounded(boundary, partial(original, module), args, kwargs, module)
    except RuntimeError as error:
        note_weights(error, module)
        raise


def _called_traced(original: Callable[..., Any], self: Module, pin: Any, args: Any, kwargs: Keywords) -> Any:
    key = boundary_key("" if pin is None else pin.tag, id(self) if paths_matter() else 0)
    call = partial(original, self)
    return run_traced(key, call, args, kwargs) if key else call(*args, **kwargs)


never_begin_at(_called, _called_pinned)
never_trace(find_boundary)
