"""What `compile` returns: a compiled module or function that runs in its region, whatever of it is called.

Dynamo inlines `CompiledModule.forward` where it is called in other compiled code; there the region is one that it makes
as it traces. Copies and pickles hold the original module and what `compile` was asked, and are compiled at their first
call.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import GeneratorType, MethodType
from typing import Any

import torch

from narrowcast.core.goals import Goal
from narrowcast.core.policy import Policy
from narrowcast.errors import NarrowcastError, RegionError
from narrowcast.frontends.eager import autocast
from narrowcast.frontends.eager.asked import AskedRegion, Under, asked_region
from narrowcast.frontends.eager.steps import run_in_steps, run_inside
from narrowcast.frontends.eager.watch import Arguments, Keywords, stepping
from narrowcast.frontends.race.eager_ops import is_raced, run_watched
from narrowcast.runtime.sites.python_stack import is_user_file
from narrowcast.runtime.torch_bridge import device_type_of, to_dtype
from narrowcast.runtime.torch_surface import dynamo
from narrowcast.runtime.torch_surface.dispatch import count_dispatch_modes
from narrowcast.runtime.torch_surface.modules import COMPILED, call_of_module, compiled_of, has_global_hooks, is_sharded


class Compiled:
    """What runs a compiled call."""

    def run(self, compiled: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
        """Return the call's result."""
        return compiled(*args, **kwargs)

    def region(self, args: Any = (), kwargs: Any = None) -> AbstractContextManager[Any]:
        """Return the region of a call with these arguments, for what is run in it and is not compiled by us."""
        return nullcontext()


class InRegion(Compiled):
    """Runs a compiled call in a region, which is made when it is first known for which device type.

    make: gives the region on a device type. Under a goal the first call shows what runs as eager code in it; the region
    of those that follow is made for that.
    """

    def __init__(self, make: Callable[[str], autocast], device_type: str | None, goal: Goal) -> None:
        self._make, self._device_type, self._goal = make, device_type, goal
        self._regions: dict[str, autocast] = {}
        self._lock = threading.Lock()
        self._as_asked = make(device_type) if device_type is not None else None  # what is wrong is said at once

    def region(self, args: Any = (), kwargs: Any = None) -> AbstractContextManager[Any]:
        """Return the region, as it was asked for; where Dynamo traces, one that it makes there."""
        if self._as_asked is not None:
            return self._as_asked.again()
        return self._make(device_type_of(args, kwargs or {}) or "cpu")

    def run(self, compiled: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
        """Return the call's result."""
        device_type = self._device_type or device_type_of(args, kwargs) or "cpu"
        region = self._regions.get(device_type)
        if region is None:
            return self._first_call(device_type, compiled, args, kwargs)
        with region:
            return compiled(*args, **kwargs)

    def _first_call(self, device_type: str, compiled: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        region = self._make(device_type)
        if not is_raced(region, self._goal):
            self._regions[device_type] = region
        # while it is recorded, or on fake tensors, no time says much; another thread may be here already
        if device_type in self._regions or count_dispatch_modes() or not self._lock.acquire(False):
            with region:
                return compiled(*args, **kwargs)
        try:
            results, policy = run_watched(lambda: compiled(*args, **kwargs), region)
            self._regions[device_type] = region if policy is region.policy else region.with_eager_policy(policy)
            return results
        finally:
            self._lock.release()


dynamo.never_trace(InRegion._first_call)


def _called(around: Compiled, compiled: Callable[..., Any], args: Arguments, kwargs: Keywords) -> Any:
    """Return the call's result; while a run is observed, it is that of our graphs, which report their calls. Of a
    generator the steps run in the region.

    An error of ours that Dynamo has wrapped comes out as it was raised.
    """
    try:
        if not stepping():
            result = around.run(compiled, args, kwargs)
        else:
            with dynamo.CompiledCode(on=True):
                result = around.run(compiled, args, kwargs)
        is_in_steps = isinstance(result, GeneratorType)
        return run_in_steps(result, lambda: around.region(args, kwargs)) if is_in_steps else result
    except Exception as error:
        inner = dynamo.wrapped_in(error)
        if inner is not error and isinstance(inner, NarrowcastError):
            raise inner from None
        raise


class CompiledModule(dynamo.OptimizedModule):  # type: ignore[misc]
    """A compiled module that runs in its region. Parameters, state_dict and attributes are the original's.

    Its methods run in the region, too: what they call of the original module is not compiled.
    """

    _around: Compiled
    _compiled: Callable[..., Any]
    _again: functools.partial[Any]
    _is_new = True

    @staticmethod
    def of(compiled: Any, around: Compiled, again: functools.partial[Any]) -> CompiledModule:
        """Change the module that torch.compile returned, in place. again: compiles a copy, with the same arguments."""
        compiled.__class__ = CompiledModule
        object.__setattr__(compiled, "_around", around)
        object.__setattr__(compiled, "_again", again)
        object.__setattr__(compiled, "_compiled", compiled.__dict__.pop("forward"))
        dynamo.forget_original(compiled)  # torch.compile would compile that again, without the region
        return compiled  # type: ignore[no-any-return]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result, computed in the region."""
        if torch.compiler.is_dynamo_compiling():  # Dynamo refuses to look into torch's own
            return self.forward(*args, **kwargs)
        if has_global_hooks():  # of which torch warns
            return super().__call__(*args, **kwargs)
        return call_of_module(self, *args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's result, computed in the region."""
        if torch.compiler.is_dynamo_compiling():
            with self._around.region(args, kwargs):
                return self._modules[COMPILED](*args, **kwargs)
        if self._is_new:  # and sharded since it was compiled, perhaps
            refuse_sharded(self._modules[COMPILED])
            object.__setattr__(self, "_is_new", False)
        return _called(self._around, self._compiled, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        module = self._modules[COMPILED]
        if name == COMPILED:
            return module
        attribute = getattr(module, name)
        if isinstance(attribute, MethodType) and attribute.__self__ is module and not _is_torchs(attribute):
            return _method_in_region(attribute, self._around)
        return attribute

    def __bool__(self) -> bool:  # torch 2.11 asks for a length, which most models have not
        return bool(self._orig_mod)

    def __reduce__(self) -> Any:
        return self._again, (self._orig_mod,)


def refuse_sharded(model: torch.nn.Module) -> None:
    """Raise RegionError where FSDP2 shards a block of one of torch's own classes. Dynamo stops at the hooks around a
    block, and begins again in the block's forward, but not in torch's: that would run as eager code without notice.
    """
    for name, module in model.named_modules():
        inside = (other for other in module.modules() if other is not module)
        if not is_sharded(module) or any(map(is_sharded, inside)):
            continue
        code = getattr(type(module).forward, "__code__", None)
        if code is not None and not is_user_file(code.co_filename):
            kind = next(k for k in type(module).__mro__ if "forward" in vars(k)).__name__
            raise RegionError(
                asked=f"compile({type(model).__name__})",
                found=f"{name or 'the model'}, a {kind}, is sharded by fully_shard, and Dynamo compiles no forward of "
                "torch's own classes behind its hooks: it would run as eager code",
                advice="Shard a module of your own class around it, whose forward calls it, or leave it to the module "
                "that holds it: fully_shard(block).",
            )


def _is_torchs(method: MethodType) -> bool:
    """Return whether a method is one that every module has, or that a module keeps for itself."""
    return method.__name__.startswith("_") or hasattr(torch.nn.Module, method.__name__)


def _method_in_region(method: MethodType, around: Compiled) -> Callable[..., Any]:
    @functools.wraps(method)
    def first(*args: Any, **kwargs: Any) -> Any:
        if isinstance(around, InRegion) and not torch.compiler.is_dynamo_compiling():
            _tell_uncompiled(method)
        return run_inside(method, lambda: around.region(args, kwargs))(*args, **kwargs)

    return first


def _tell_uncompiled(method: MethodType) -> None:
    kind = type(method.__self__).__qualname__
    warnings.warn(
        f"narrowcast: {kind}.{method.__name__} runs in the region of the compiled module, and what it calls of the "
        f"module runs as eager code: narrowcast.compile compiles the module's own call. Compile the method by itself, "
        f"narrowcast.compile(model.{method.__name__}, ...), or what it calls, model.forward = "
        "narrowcast.compile(model.forward, ...)",
        stacklevel=3,
    )


def compiled_function(
    function: Callable[..., Any], compiled: Callable[..., Any], around: Compiled, asked: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return a function that runs what was compiled of it in its region."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            with around.region(args, kwargs):
                return function(*args, **kwargs)
        return _called(around, compiled, args, kwargs)

    run.__narrowcast_compiled__ = asked  # type: ignore[attr-defined]
    return run


def original(model: Any) -> Any:
    """Return what a compiled module or function was compiled of."""
    return compiled_of(model) if isinstance(model, CompiledModule) else model.__wrapped__


def asked_before(model: Any) -> Mapping[str, Any] | None:
    """Return the arguments of the `compile` that made this; None if it did not."""
    asked = getattr(model, "__narrowcast_compiled__", None)
    return model._again.keywords if isinstance(model, CompiledModule) else asked if isinstance(asked, dict) else None


def asked_again(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments to compile a compiled model again: its region stays. RegionError if another is asked for."""
    if now["under"] is not None and _facts(before["under"]) != _facts(now["under"]):
        raise RegionError(
            asked=f"compile(model, {_shown(now['under'])})",
            found=f"the model is compiled already, with {_shown(before['under'])}",
            advice=f"Compile the original, model.{COMPILED}, or omit under to keep the region.",
        )
    return {**now, "under": before["under"]}


def _facts(under: Under) -> AskedRegion:
    """Return what is asked for in a form in which equal regions are equal."""
    asked = asked_region("compile", under)
    return replace(asked, dtype=None if asked.dtype is None else to_dtype(asked.dtype))


def _shown(under: Under) -> str:
    return "no region" if under is None else f"under={under.name if isinstance(under, Policy) else under}"
