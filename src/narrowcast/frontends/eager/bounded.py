"""A call with a boundary around it, carried out in eager code, and told to recordings."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.fx.traceback import annotate
from torch.nn import Module

from narrowcast.core.decide import Argument, Call, decide
from narrowcast.core.policy import DEVICE_TYPES, MODULE_CALL_OP, RESULT, Policy, Site
from narrowcast.frontends.eager.boundary import Boundary, cast_parts, cast_tree, first_floating
from narrowcast.frontends.eager.region import autocast
from narrowcast.frontends.eager.watch import DecidedCall, watchers
from narrowcast.runtime.regions.marks import BOUNDARY as NOTE
from narrowcast.runtime.regions.ruling import region_on, ruled_device_types
from narrowcast.runtime.sites.python_stack import called_modules, find_site, module_path
from narrowcast.runtime.torch_bridge import DTYPES, FORMATS, OpFacts, Slot, device_type_of, tensors_in
from narrowcast.runtime.torch_surface.dynamo import never_begin_at, never_trace
from narrowcast.runtime.torch_surface.jit import tracing_state
from narrowcast.runtime.torch_surface.state import any_autocast, count_function_modes


def run_bounded(
    boundary: Boundary, call: Callable[..., Any], args: Any, kwargs: dict[str, Any], module: Module | None = None
) -> Any:
    """`call(*args, **kwargs)` with a boundary around it; `module` is what is called, if it is one."""
    if boundary.plan.refused is not None:
        boundary.check()
    watching = bool(watchers())
    if watching:
        _tell(boundary, _named(boundary, args, kwargs), module)
    came, new_args, new_kwargs = _cast_arguments(boundary, args, kwargs)
    if watching:
        _told((new_args, new_kwargs))
    if boundary.inside.goes_on:
        result = call(*new_args, **new_kwargs)
    elif boundary.inside.low is not None:
        device_type = device_type_of(args, kwargs) or device_type_of(module) or "cpu"
        result = _run_low(DTYPES[boundary.inside.low], device_type, call, new_args, new_kwargs)
    else:
        result = _run_off(call, new_args, new_kwargs)
    if not boundary.plan.results:
        return result
    if boundary.follows and came is None:
        came = first_floating([*args, *kwargs.values()])
    if watching:
        _tell(boundary, [], module, came)
    with annotate({NOTE: boundary.note(RESULT)}) if torch.compiler.is_exporting() else nullcontext():
        result = cast_parts(result, boundary.plan.results, came)
    if watching:
        _told(result)
    return result


def _cast_arguments(
    boundary: Boundary, args: Any, kwargs: dict[str, Any]
) -> tuple[torch.dtype | None, list[Any], dict[str, Any]]:
    """The dtype of the first floating argument that the boundary casts, as it came, and the arguments, cast."""
    came = None
    entries, known = boundary.positional, len(boundary.positional)
    new_args, new_kwargs = list(args), kwargs
    for position, value in enumerate(args):
        dtype, exactly = entries[position] if position < known else boundary.entry(boundary.names.of(position))
        if dtype is not None:
            came = came or first_floating(value)
            new_args[position] = _cast(value, dtype, exactly, boundary, boundary.names.of(position))
    for name, value in kwargs.items():
        dtype, exactly = boundary.entry(name)
        if dtype is not None:
            came = came or first_floating(value)
            new_kwargs = {**new_kwargs, name: _cast(value, dtype, exactly, boundary, name)}
    return came, new_args, new_kwargs


def _cast(value: Any, dtype: torch.dtype, exactly: bool, boundary: Boundary, name: str) -> Any:
    """The value, cast; with a note where torch.export writes down what it sees."""
    with annotate({NOTE: boundary.note(name)}) if torch.compiler.is_exporting() else nullcontext():
        return cast_tree(value, dtype, exactly)


def _run_off(call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """The call with autocasting off. Where a graph is made, regions that it can see; else a flag, which is cheaper."""
    if not any_autocast():
        return call(*args, **kwargs)
    on = [d for d in _USUAL if torch.is_autocast_enabled(d)]
    if any(map(torch.is_autocast_enabled, _UNUSUAL)):
        on = list(ruled_device_types())
    if count_function_modes() or tracing_state() or torch.compiler.is_exporting():
        with ExitStack() as regions:
            for device_type in on:
                regions.enter_context(_off(device_type))
            return call(*args, **kwargs)
    try:
        for device_type in on:
            torch.set_autocast_enabled(device_type, False)
        return call(*args, **kwargs)
    finally:
        for device_type in on:
            torch.set_autocast_enabled(device_type, True)


_USUAL = ("cpu", "cuda", "xpu", "mps")
_UNUSUAL = tuple(d for d in DEVICE_TYPES if d not in _USUAL)  # they may carry the identity of a policy


@cache
def _off(device_type: str) -> autocast:
    return autocast(device_type, enabled=False)


def _run_low(low: torch.dtype, device_type: str, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """The call in a region of this format, under the policy in force; in none, on a device that has no autocast."""
    if not torch.amp.is_autocast_available(device_type):
        return call(*args, **kwargs)
    with autocast(device_type, low, policy=policy_on(device_type)):
        return call(*args, **kwargs)


def policy_on(device_type: str) -> Policy:
    """The policy in force for a device type, without what was placed for eager code; native where there is none."""
    region = region_on(device_type)
    return region.prepared.for_graphs.policy if region is not None else Policy.native()


# -- for recordings ----------------------------------------------------------------------------------------------------

_FACTS = OpFacts(object(), MODULE_CALL_OP, (), None, True, False, False, False, False)  # type: ignore[arg-type]


def _named(boundary: Boundary, args: Any, kwargs: dict[str, Any]) -> list[tuple[Slot, torch.Tensor]]:
    named = [(boundary.names.of(n), value) for n, value in enumerate(args)] + list(kwargs.items())
    return [(Slot(n, name, False, False), t) for n, (name, value) in enumerate(named) for t in tensors_in(value)]


def _tell(
    boundary: Boundary,
    named: list[tuple[Slot, torch.Tensor]],
    module: Module | None,
    came: torch.dtype | None = None,
) -> None:
    """Recordings hear of the call as of an op's: first of its arguments, and at the end of its results."""
    tensors: list[tuple[Slot, torch.Tensor | None]] = [(slot, tensor) for slot, tensor in named]
    region = boundary.call.region
    arguments = tuple(Argument(s.name, FORMATS.get(t.dtype), region.device_type) for s, t in named)
    plan = decide(Call(MODULE_CALL_OP, arguments, boundary.call.site), boundary.call.policy, region)
    if not named:
        results = boundary.plan.results
        plan = replace(plan, results=tuple(replace(r, format=r.format or FORMATS.get(came)) for r in results))  # type: ignore[arg-type]
    here = find_site()
    path = module_path([module, *called_modules()]) if module is not None else here.module_path
    site = Site(path, boundary.call.site.classes, here.functions, here.file, here.line)
    call = DecidedCall(_FACTS, plan, site, tensors, boundary.call.policy, False)
    for watcher in watchers():
        watcher.begin(call)


def _told(result: Any) -> None:
    for watcher in reversed(watchers()):
        watcher.end(result)


never_begin_at(run_bounded, _run_off)
never_trace(_cast_arguments, _tell, _told)
