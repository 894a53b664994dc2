"""A call with a boundary around it, carried out in eager code, and reported to recordings."""

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
from narrowcast.core.module_calls import policy_inside
from narrowcast.core.policy import DEVICE_TYPES, MODULE_CALL_OP, RESULT, Policy, Site
from narrowcast.frontends.eager.boundary import Boundary, find_boundary, ruling_region
from narrowcast.frontends.eager.region import autocast
from narrowcast.frontends.eager.watch import DecidedCall, Keywords, watchers
from narrowcast.runtime.regions.marks import BOUNDARY as NOTE
from narrowcast.runtime.regions.ruling import region_on, ruled_device_types
from narrowcast.runtime.sites.python_stack import called_modules, find_site, module_path
from narrowcast.runtime.torch_bridge import DTYPES, FORMATS, OpFacts, Slot, device_type_of, tensors_in
from narrowcast.runtime.torch_bridge.calls import cast_part, cast_parts, cast_tree, first_floating
from narrowcast.runtime.torch_surface.dynamo import constant_for_dynamo, never_begin_at, never_trace, traced_local
from narrowcast.runtime.torch_surface.jit import tracing_state
from narrowcast.runtime.torch_surface.state import any_autocast, count_function_modes


def run_bounded(
    boundary: Boundary, call: Callable[..., Any], args: Any, kwargs: Keywords, module: Module | None = None
) -> Any:
    """Return `call(*args, **kwargs)`, run with a boundary around it; `module` is what is called, if it is one."""
    if boundary.plan.refused is not None:
        boundary.check()
    watching = bool(watchers())
    if watching:
        _tell(boundary, _named(boundary, args, kwargs), module)
    input_dtype, new_args, new_kwargs = _cast_arguments(boundary, args, kwargs)
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
    if boundary.follows and input_dtype is None:
        input_dtype = first_floating([*args, *kwargs.values()])
    if watching:
        _tell(boundary, [], module, input_dtype)
    with annotate({NOTE: boundary.note(RESULT)}) if torch.compiler.is_exporting() else nullcontext():
        result = cast_parts(result, boundary.plan.results, input_dtype)
    if watching:
        _told(result)
    return result


def _cast_arguments(
    boundary: Boundary, args: Any, kwargs: Keywords
) -> tuple[torch.dtype | None, list[Any], dict[str, Any]]:
    """Return the input dtype of the first floating argument that the boundary casts, and the arguments, cast."""
    input_dtype = None
    entries, known = boundary.positional, len(boundary.positional)
    new_args, new_kwargs = list(args), kwargs
    for position, value in enumerate(args):
        dtype, exactly = entries[position] if position < known else boundary.entry(boundary.names.of(position))
        if dtype is not None:
            input_dtype = input_dtype or first_floating(value)
            new_args[position] = _cast(value, dtype, exactly, boundary, boundary.names.of(position))
    for name, value in kwargs.items():
        dtype, exactly = boundary.entry(name)
        if dtype is not None:
            input_dtype = input_dtype or first_floating(value)
            new_kwargs = {**new_kwargs, name: _cast(value, dtype, exactly, boundary, name)}
    return input_dtype, new_args, new_kwargs


def _cast(value: Any, dtype: torch.dtype, exactly: bool, boundary: Boundary, name: str) -> Any:
    """Return the value, cast; with a note where torch.export records it."""
    with annotate({NOTE: boundary.note(name)}) if torch.compiler.is_exporting() else nullcontext():
        return cast_tree(value, dtype, exactly)


def _run_off(call: Callable[..., Any], args: Any, kwargs: Keywords) -> Any:
    """Run the call with autocasting off. Where a graph is made, in regions that it can see; else by a cheaper flag."""
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


def _run_low(low: torch.dtype, device_type: str, call: Callable[..., Any], args: Any, kwargs: Keywords) -> Any:
    """Run the call in a region of this format, under the policy in force; in none, on a device without autocast."""
    if not torch.amp.is_autocast_available(device_type):
        return call(*args, **kwargs)
    with autocast(device_type, low, policy=policy_on(device_type)):
        return call(*args, **kwargs)


def policy_on(device_type: str) -> Policy:
    """Return the policy for a region inside: of the one in force, without what was placed for eager code; or native."""
    region = region_on(device_type)
    return Policy.native() if region is None else policy_inside(region.prepared.for_graphs.policy)


# -- for recordings ----------------------------------------------------------------------------------------------------

_FACTS = OpFacts(object(), MODULE_CALL_OP, (), None, True, False, False, False, False)  # type: ignore[arg-type]


def _named(boundary: Boundary, args: Any, kwargs: Keywords) -> list[tuple[Slot, torch.Tensor]]:
    named = [(boundary.names.of(n), value) for n, value in enumerate(args)] + list(kwargs.items())
    return [(Slot(n, name, False, False), t) for n, (name, value) in enumerate(named) for t in tensors_in(value)]


def _tell(
    boundary: Boundary, named: list[tuple[Slot, torch.Tensor]], module: Module | None, src: torch.dtype | None = None
) -> None:
    """Report the call to recordings as an op's: first its arguments, and at the end its results."""
    tensors: list[tuple[Slot, torch.Tensor | None]] = [(slot, tensor) for slot, tensor in named]
    region = boundary.call.region
    arguments = tuple(Argument(s.name, FORMATS.get(t.dtype), region.device_type) for s, t in named)
    plan = decide(Call(MODULE_CALL_OP, arguments, boundary.call.site), boundary.call.policy, region)
    if not named:
        results = boundary.plan.results
        plan = replace(plan, results=tuple(replace(r, format=r.format or FORMATS.get(src)) for r in results))  # type: ignore[arg-type]
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
never_trace(_cast_arguments, _tell, _told, policy_on)


# -- where Dynamo traces: what is decided comes from constant functions ------------------------------------------------


_traced: dict[str, Boundary] = {}


def boundary_key(pin: str, module: int) -> str:
    """Return the key of the boundary of the call that Dynamo is tracing; empty if there is none. Run while it traces.

    pin, module: not used. They make Dynamo guard on which pin it is, and where paths matter on which module.
    """
    del pin, module
    boundary = find_boundary(traced_local("self"), traced=True)
    return "" if boundary is None else key_of(boundary)


def paths_matter() -> bool:
    """Return whether the rules about modules that hold name paths."""
    region = ruling_region()
    return region is not None and "module" in region.prepared.policy.asked_of_modules


def key_of(boundary: Boundary) -> str:
    """Return the key under which constant functions find a boundary."""
    key = f"{id(boundary)}"
    _traced[key] = boundary
    return key


def rules_hold() -> bool:
    """Return whether a region with rules about modules is open."""
    return ruling_region() is not None


def is_refused(key: str) -> bool:
    """Return whether the call must not run."""
    return _traced[key].plan.refused is not None


def traced_argument(key: str, which: int | str) -> tuple[torch.dtype | None, bool, str]:
    """Return what the argument of this position or name is cast to, whether fp64 is cast, too, and what is noted beside
    the nodes of the cast, for the ledger of the graph.
    """
    boundary = _traced[key]
    name = boundary.names.of(which) if isinstance(which, int) else which
    return *boundary.entry(name), boundary.note(name)


def traced_results(key: str) -> tuple[tuple[str, torch.dtype | None, bool, str], ...]:
    """Return the casts of the call's results: part, dtype (None: the input's), whether fp64 is cast, and the note."""
    boundary = _traced[key]
    note = boundary.note(RESULT)
    return tuple(
        (r.part, None if r.format is None else DTYPES[r.format], r.exactly, note) for r in boundary.plan.results
    )


def traced_inside(key: str) -> tuple[torch.dtype | None, tuple[str, ...]]:
    """Return the low dtype of the region inside, None if it is off or goes on; and the device types where it is off."""
    inside = _traced[key].inside
    if inside.low is not None:
        return DTYPES[inside.low], ()
    return None, () if inside.goes_on else ruled_device_types()


def traced_policy(device_type: str) -> str:
    """Return the digest of the policy in force."""
    return policy_on(device_type).digest


for _function in (
    boundary_key,
    paths_matter,
    rules_hold,
    is_refused,
    traced_argument,
    traced_results,
    traced_inside,
    traced_policy,
):
    constant_for_dynamo(_function)


def run_traced(key: str, call: Callable[..., Any], args: Any, kwargs: Keywords) -> Any:
    """Run a bounded call in a form that Dynamo follows: what is decided comes from constant functions."""
    if is_refused(key):  # Dynamo knows no key that has come since it first looked
        _traced[key].check()
    new_args: list[Any] = []
    new_kwargs: dict[str, Any] = {}
    cast_ones: list[Any] = []  # as they came
    for position, value in enumerate(args):
        new_args.append(_cast_traced(key, position, value, cast_ones))
    for name, value in kwargs.items():
        new_kwargs[name] = _cast_traced(key, name, value, cast_ones)
    low, off = traced_inside(key)
    if low is not None:
        device_type = device_type_of(args, kwargs) or "cpu"
        with autocast(device_type, low, policy=traced_policy(device_type)):
            result = call(*new_args, **new_kwargs)
    elif off:
        result = _run_off_traced(off, call, new_args, new_kwargs)
    else:
        result = call(*new_args, **new_kwargs)
    given = result
    for part, dtype, exactly, note in traced_results(key):
        if dtype is None:
            exactly = True
            dtype = first_floating(cast_ones) or first_floating([*args, *kwargs.values()])
        if dtype is not None:
            with annotate({NOTE: note}):
                result = cast_part(result, given, part, dtype, exactly)
    return result


def _cast_traced(key: str, which: int | str, value: Any, cast_ones: list[Any]) -> Any:
    dtype, exactly, note = traced_argument(key, which)
    if dtype is not None:
        cast_ones.append(value)
        with annotate({NOTE: note}):
            value = cast_tree(value, dtype, exactly)
    return value


def _run_off_traced(device_types: tuple[str, ...], call: Callable[..., Any], args: Any, kwargs: Keywords) -> Any:
    if not device_types:
        return call(*args, **kwargs)
    with autocast(device_types[0], enabled=False):
        return _run_off_traced(device_types[1:], call, args, kwargs)
