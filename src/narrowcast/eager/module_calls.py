"""Modules' calls under pins and under rules about `module.call`.

torch's `Module._call_impl` is replaced once, when the first pin is set or the first region opened whose policy has such
rules. It asks for the pin of the module and for the region that rules, and calls torch's own; no hook is put on a
module, and nothing of a module changes but one attribute of a pinned one.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch.fx.traceback import annotate
from torch.nn import Module

from narrowcast.decide import Argument, Call, Region, decide
from narrowcast.dynamo_bridge import never_begin_at, never_trace, traced_local
from narrowcast.eager.boundary import (
    Boundary,
    Entry,
    Names,
    boundary_of,
    cast_part,
    cast_parts,
    cast_tree,
    first_floating,
    names_of,
)
from narrowcast.eager.region import autocast
from narrowcast.eager.watch import DecidedCall, watchers
from narrowcast.formats import bf16
from narrowcast.policy import DEVICE_TYPES, MODULE_CALL_OP, NOWHERE, RESULT, Place, Policy
from narrowcast.regions.graph_place import traced_place
from narrowcast.regions.marks import BOUNDARY as NOTE
from narrowcast.regions.place import called_modules, find_place, module_path
from narrowcast.regions.state import OpenRegion, innermost, region_on, ruled_device_types
from narrowcast.torch_bridge import DTYPES, FORMATS, OpFacts, Slot, autocast_nesting, tensors_in

ATTRIBUTE = "_narrowcast_pin"
_ANYWHERE = Region("cpu", bf16)  # pins name their formats: they hold in any region, and in none


class Pinned(Protocol):
    """What `ATTRIBUTE` holds: narrowcast.eager.pins.Pin."""

    policy: Policy
    region: autocast | None
    boundaries: dict[Any, Boundary | None]

    @property
    def number(self) -> int:
        """Unlike any other pin's."""


# -- which boundary a call has -----------------------------------------------------------------------------------------


def _ruling() -> OpenRegion | None:
    """The innermost region of ours that is in force, if its policy has rules about modules."""
    region = innermost()
    if region is None or region.depth != autocast_nesting():
        return None
    while region is not None and not region.prepared.policy.has_module_rules:
        outer = region.outer
        region = outer if outer is not None and outer.depth == region.depth - 1 else None
    return region if region is not None and region.prepared.facts.enabled else None


def find_boundary(module: Module, traced: bool = False) -> Boundary | None:
    """The boundary of a module's call, here and now; None if nothing is said about it."""
    pin: Pinned | None = module._narrowcast_pin  # type: ignore[assignment]
    ruling = _ruling() if innermost() is not None else None
    if ruling is None:
        if pin is None or not pin.policy.has_module_rules:
            return None
        known, base = pin.boundaries, pin.policy
        if type(module) in known:
            return known[type(module)]
        boundary = boundary_of(_names(module), base, _ANYWHERE, _of_module(NOWHERE, module))
        return known.setdefault(type(module), boundary)
    known, base = ruling.prepared.boundaries, ruling.prepared.policy
    key: list[Any] = [type(module), pin.number if pin is not None else None]
    asked = base.asked_of_modules
    if traced:
        place = traced_place() or NOWHERE
    else:
        path = module_path([module, *called_modules()]) if "module" in asked else ""
        place = Place(path, functions=find_place().functions if "function" in asked else ())
    if "module" in asked:
        key.append(place.module_path)
    if "function" in asked:
        key.append(place.functions)
    at = tuple(key)
    if at not in known:
        policy = base if pin is None else base.with_rules(pin.policy.rules)
        known[at] = boundary_of(_names(module), policy, ruling.prepared.facts, _of_module(place, module))
    return known[at]


def _names(module: Module) -> Names:
    forward = module.forward
    function = getattr(forward, "__func__", forward)
    return names_of(function, function is not forward)


def _of_module(place: Place, module: Module) -> Place:
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    return Place(place.module_path, (name,), place.functions, place.file, place.line)


# -- carrying it out ---------------------------------------------------------------------------------------------------


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
    if boundary.goes_on:
        result = call(*new_args, **new_kwargs)
    elif boundary.inside is not None:
        device_type = device_of((args, kwargs))
        with autocast(device_type, DTYPES[boundary.inside], policy=policy_on(device_type)):
            result = call(*new_args, **new_kwargs)
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
    cast = _cast_noted if torch.compiler.is_exporting() else _cast_plain
    entries, known = boundary.positional, len(boundary.positional)
    new_args, new_kwargs = list(args), kwargs
    for position, value in enumerate(args):
        entry = entries[position] if position < known else boundary.entry_at(position)
        if entry.dtype is not None:
            came = came or first_floating(value)
            new_args[position] = cast(value, entry, boundary, boundary.names.of(position))
    for name, value in kwargs.items():
        entry = boundary.entry(name)
        if entry.dtype is not None:
            came = came or first_floating(value)
            new_kwargs = {**new_kwargs, name: cast(value, entry, boundary, name)}
    return came, new_args, new_kwargs


def _cast_plain(value: Any, entry: Entry, boundary: Boundary, name: str) -> Any:
    del boundary, name
    return value if entry.dtype is None else cast_tree(value, entry.dtype, entry.exactly)


def _cast_noted(value: Any, entry: Entry, boundary: Boundary, name: str) -> Any:
    """The same, where torch.export writes down what it sees."""
    with annotate({NOTE: boundary.note(name)}):
        return _cast_plain(value, entry, boundary, name)


def _run_off(call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """The call with autocasting off. Where a graph is made, regions that it can see; else a flag, which is cheaper."""
    if not torch._C._is_any_autocast_enabled():
        return call(*args, **kwargs)
    on = [d for d in _USUAL if torch.is_autocast_enabled(d)]
    if any(map(torch.is_autocast_enabled, _UNUSUAL)):
        on = list(ruled_device_types())
    if torch._C._len_torch_function_stack() or torch._C._get_tracing_state() or torch.compiler.is_exporting():
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


def device_of(values: Any) -> str:
    """The device type of the first floating tensor; cpu if there is none."""
    return next((t.device.type for t in tensors_in(values) if t.is_floating_point()), "cpu")


def policy_on(device_type: str) -> Policy:
    """The policy in force for a device type; native where there is none."""
    region = region_on(device_type)
    return region.prepared.policy if region is not None else Policy.native()


# -- for recordings ----------------------------------------------------------------------------------------------------

_FACTS = OpFacts(object(), MODULE_CALL_OP, (), None, True, False, False, False)  # type: ignore[arg-type]


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
    arguments = tuple(Argument(s.name, FORMATS.get(t.dtype), boundary.region.device_type) for s, t in named)
    plan = decide(Call(MODULE_CALL_OP, arguments, boundary.place), boundary.policy, boundary.region)
    if not named:
        results = boundary.plan.results
        plan = replace(plan, results=tuple(replace(r, format=r.format or FORMATS.get(came)) for r in results))  # type: ignore[arg-type]
    here = find_place()
    path = module_path([module, *called_modules()]) if module is not None else here.module_path
    place = Place(path, boundary.place.classes, here.functions, here.file, here.line)
    call = DecidedCall(_FACTS, plan, place, tensors, boundary.policy, False)
    for watcher in watchers():
        watcher.begin(call)


def _told(result: Any) -> None:
    for watcher in reversed(watchers()):
        watcher.end(result)


# -- in code that Dynamo traces ----------------------------------------------------------------------------------------

_traced: dict[str, Boundary] = {}


def boundary_key() -> str:
    """The key of the boundary of the call that Dynamo is tracing; empty if there is none. Run while it traces."""
    boundary = find_boundary(traced_local("self"), traced=True)
    return "" if boundary is None else _key_of(boundary)


def _key_of(boundary: Boundary) -> str:
    key = f"{id(boundary)}"
    _traced[key] = boundary
    return key


def rules_hold() -> bool:
    """Whether a region with rules about modules is open."""
    return _ruling() is not None


def traced_entry(key: str, position: int, name: str) -> torch.dtype | None:
    """What an argument is cast to, by position, or by name if the position is negative."""
    boundary = _traced[key]
    boundary.check()
    return boundary.entry(boundary.names.of(position) if position >= 0 else name).dtype


def traced_exactly(key: str, position: int, name: str) -> bool:
    """Whether fp64 is cast, too."""
    boundary = _traced[key]
    return boundary.entry(boundary.names.of(position) if position >= 0 else name).exactly


def traced_note(key: str, position: int, name: str) -> str:
    """What is noted beside the nodes of a cast, for the ledger of the graph."""
    boundary = _traced[key]
    return boundary.note(boundary.names.of(position) if position >= 0 else name)


def traced_results(key: str) -> int:
    """How many casts of results there are."""
    return len(_traced[key].plan.results)


def traced_part(key: str, number: int) -> str:
    """What one of them is about."""
    return _traced[key].plan.results[number].part


def traced_dtype(key: str, number: int) -> torch.dtype | None:
    """What it is cast to; None: as what came."""
    wanted = _traced[key].plan.results[number].format
    return None if wanted is None else DTYPES[wanted]


def traced_exact_result(key: str, number: int) -> bool:
    """Whether fp64 is cast, too."""
    return _traced[key].plan.results[number].exactly


def traced_inside(key: str) -> torch.dtype | None:
    """The low dtype of the region inside; None if it is off, or goes on."""
    found = _traced[key].inside
    return None if found is None else DTYPES[found]


def traced_off(key: str) -> str:
    """The device types for which autocasting is switched off inside, with commas between."""
    boundary = _traced[key]
    return "" if boundary.goes_on or boundary.inside is not None else ",".join(ruled_device_types())


def traced_policy(device_type: str) -> str:
    """The digest of the policy in force."""
    return policy_on(device_type).digest


for _function in (
    boundary_key, rules_hold, traced_entry, traced_exactly, traced_note, traced_results, traced_part, traced_dtype,
    traced_exact_result, traced_inside, traced_off, traced_policy,
):  # fmt: skip
    _function.__dict__["_dynamo_marked_constant"] = True  # torch._dynamo.assume_constant_result


def _run_traced(key: str, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """`run_bounded` in the words that Dynamo follows: what is decided comes from constant functions."""
    new_args, new_kwargs, cast_ones = [], {}, []
    for position, value in enumerate(args):
        dtype = traced_entry(key, position, "")
        if dtype is not None:
            cast_ones.append(value)
            with annotate({NOTE: traced_note(key, position, "")}):
                value = cast_tree(value, dtype, traced_exactly(key, position, ""))
        new_args.append(value)
    for name, value in kwargs.items():
        dtype = traced_entry(key, -1, name)
        if dtype is not None:
            cast_ones.append(value)
            with annotate({NOTE: traced_note(key, -1, name)}):
                value = cast_tree(value, dtype, traced_exactly(key, -1, name))
        new_kwargs[name] = value
    low, off = traced_inside(key), traced_off(key)
    if low is not None:
        device_type = device_of((args, kwargs))
        with autocast(device_type, low, policy=traced_policy(device_type)):
            result = call(*new_args, **new_kwargs)
    elif off:
        result = _run_off_traced(off.split(","), call, new_args, new_kwargs)
    else:
        result = call(*new_args, **new_kwargs)
    for number in range(traced_results(key)):
        dtype = traced_dtype(key, number)
        exactly = dtype is None or traced_exact_result(key, number)
        if dtype is None:
            dtype = first_floating(cast_ones) or first_floating([*args, *kwargs.values()])
        if dtype is not None:
            with annotate({NOTE: traced_note(key, -1, RESULT)}):
                result = cast_part(result, traced_part(key, number), dtype, exactly)
    return result


def _run_off_traced(device_types: list[str], call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    if not device_types:
        return call(*args, **kwargs)
    with autocast(device_types[0], enabled=False):
        return _run_off_traced(device_types[1:], call, args, kwargs)


# -- torch's call of modules -------------------------------------------------------------------------------------------

_lock = threading.Lock()


def watch_module_calls() -> None:
    """Put our question before torch's call of modules, once."""
    if hasattr(Module, ATTRIBUTE):
        return
    importlib.import_module("torch._dynamo.variables.nn_module")  # it takes what it finds then for torch's own
    with _lock:
        if not hasattr(Module, ATTRIBUTE):
            setattr(Module, ATTRIBUTE, None)
            Module._call_impl = _watching(Module._call_impl)  # type: ignore[method-assign]


def _watching(original: Callable[..., Any]) -> Callable[..., Any]:
    def _call_impl(self: Module, *args: Any, **kwargs: Any) -> Any:
        pin: Any = self._narrowcast_pin
        if torch.compiler.is_dynamo_compiling():
            if pin is None and not rules_hold():
                return original(self, *args, **kwargs)
            call, key = partial(original, self), boundary_key()
            if pin is not None and pin.region is not None:
                with pin.region.again():
                    return _run_traced(key, call, args, kwargs) if key else call(*args, **kwargs)
            return _run_traced(key, call, args, kwargs) if key else call(*args, **kwargs)
        if pin is None and innermost() is None:
            return original(self, *args, **kwargs)
        if pin is not None and pin.region is not None:
            with pin.region:
                return _called(original, self, args, kwargs)
        return _called(original, self, args, kwargs)

    never_begin_at(_call_impl)
    return _call_impl


def _called(original: Callable[..., Any], module: Module, args: Any, kwargs: dict[str, Any]) -> Any:
    boundary = find_boundary(module)
    if boundary is None:
        return original(module, *args, **kwargs)
    return run_bounded(boundary, partial(original, module), args, kwargs, module)


never_begin_at(run_bounded, _run_off, _called)
never_trace(find_boundary, _cast_arguments, _tell, _told)
