"""A call with a boundary around it, in code that Dynamo traces: what is decided comes from constant functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx.traceback import annotate

from narrowcast.core.policy import RESULT
from narrowcast.frontends.eager.boundary import (
    Boundary,
    cast_part,
    cast_tree,
    find_boundary,
    first_floating,
    ruling_region,
)
from narrowcast.frontends.eager.bounded import policy_on
from narrowcast.frontends.eager.region import autocast
from narrowcast.runtime.regions.marks import BOUNDARY as NOTE
from narrowcast.runtime.regions.ruling import ruled_device_types
from narrowcast.runtime.torch_bridge import DTYPES, device_type_of
from narrowcast.runtime.torch_surface.dynamo import constant_for_dynamo, traced_local

_traced: dict[str, Boundary] = {}


def boundary_key(pin: str, module: int) -> str:
    """The key of the boundary of the call that Dynamo is tracing; empty if there is none. Run while it traces.

    pin, module: not looked at. They make Dynamo guard on which pin it is, and where paths matter on which module.
    """
    del pin, module
    boundary = find_boundary(traced_local("self"), traced=True)
    return "" if boundary is None else key_of(boundary)


def paths_matter() -> bool:
    """Whether the rules about modules that hold name paths."""
    region = ruling_region()
    return region is not None and "module" in region.prepared.policy.asked_of_modules


def key_of(boundary: Boundary) -> str:
    """The key under which constant functions find a boundary."""
    key = f"{id(boundary)}"
    _traced[key] = boundary
    return key


def rules_hold() -> bool:
    """Whether a region with rules about modules is open."""
    return ruling_region() is not None


def traced_check(key: str) -> None:
    """Raise if the call is refused."""
    _traced[key].check()


def traced_argument(key: str, which: int | str) -> tuple[torch.dtype | None, bool, str]:
    """What the argument of this position or name is cast to, whether fp64 is cast, too, and what is noted beside the
    nodes of the cast, for the ledger of the graph.
    """
    boundary = _traced[key]
    name = boundary.names.of(which) if isinstance(which, int) else which
    return *boundary.entry(name), boundary.note(name)


def traced_results(key: str) -> tuple[tuple[str, torch.dtype | None, bool, str], ...]:
    """The casts of what the call returns: of which part, to what (None: as what came), and the same as above."""
    boundary = _traced[key]
    note = boundary.note(RESULT)
    return tuple(
        (r.part, None if r.format is None else DTYPES[r.format], r.exactly, note) for r in boundary.plan.results
    )


def traced_inside(key: str) -> tuple[torch.dtype | None, tuple[str, ...]]:
    """The low dtype of the region inside, None if it is off, or goes on; and the device types for which it is off."""
    inside = _traced[key].inside
    if inside.low is not None:
        return DTYPES[inside.low], ()
    return None, () if inside.goes_on else ruled_device_types()


def traced_policy(device_type: str) -> str:
    """The digest of the policy in force."""
    return policy_on(device_type).digest


for _function in (
    boundary_key,
    paths_matter,
    rules_hold,
    traced_argument,
    traced_results,
    traced_inside,
    traced_policy,
):
    constant_for_dynamo(_function)


def run_traced(key: str, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """`run_bounded` in the words that Dynamo follows: what is decided comes from constant functions."""
    traced_check(key)
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
    for part, dtype, exactly, note in traced_results(key):
        if dtype is None:
            exactly = True
            dtype = first_floating(cast_ones) or first_floating([*args, *kwargs.values()])
        if dtype is not None:
            with annotate({NOTE: note}):
                result = cast_part(result, part, dtype, exactly)
    return result


def _cast_traced(key: str, which: int | str, value: Any, cast_ones: list[Any]) -> Any:
    dtype, exactly, note = traced_argument(key, which)
    if dtype is not None:
        cast_ones.append(value)
        with annotate({NOTE: note}):
            value = cast_tree(value, dtype, exactly)
    return value


def _run_off_traced(device_types: tuple[str, ...], call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    if not device_types:
        return call(*args, **kwargs)
    with autocast(device_types[0], enabled=False):
        return _run_off_traced(device_types[1:], call, args, kwargs)
