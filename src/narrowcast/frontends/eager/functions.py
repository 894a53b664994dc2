"""`custom_fwd` and `custom_bwd`: autocasting for autograd functions, on whatever device their tensors are. `carry`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch

from narrowcast.errors import RegionError
from narrowcast.formats import Format
from narrowcast.frontends.eager.bounded import policy_on, traced_policy
from narrowcast.frontends.eager.region import autocast, region_of
from narrowcast.frontends.eager.steps import run_inside
from narrowcast.runtime.regions.ruling import ruled_device_types, ruling_regions
from narrowcast.runtime.regions.stack import CHECKED
from narrowcast.runtime.torch_bridge import DTYPES, device_type_of, to_dtype
from narrowcast.runtime.torch_bridge.calls import cast_tree
from narrowcast.runtime.torch_surface.autograd import note_forward, noted_forward
from narrowcast.runtime.torch_surface.dispatch import tree_map_only


def custom_fwd(
    fwd: Callable[..., Any] | None = None,
    *,
    device_type: str | None = None,
    cast_inputs: torch.dtype | str | Format | None = None,
) -> Any:
    """Decorate the `forward` of a torch.autograd.Function; what torch.amp.custom_fwd does, for any device.

    device_type: left out, that of the first tensor that `forward` is called with (cpu if there is none).
    cast_inputs: in a region, cast floating inputs on that device, except fp64, to this format, and run `forward` with
        autocasting off. None: `forward` runs in the region as it is. Outside of regions nothing happens.

    The region's format and policy are kept for `custom_bwd`.
    """
    if fwd is None:
        return functools.partial(custom_fwd, device_type=device_type, cast_inputs=cast_inputs)
    dtype = None if cast_inputs is None else to_dtype(cast_inputs)
    function = fwd

    @functools.wraps(fwd)
    def forward(*args: Any, **kwargs: Any) -> Any:
        without = len(args) == 0 or isinstance(args[0], torch.Tensor)  # a setup_context beside it has the context then
        ctx: Any = _NoContext() if without else args[0]
        device = device_type if device_type is not None else device_type_of(args, kwargs) or "cpu"
        enabled = torch.is_autocast_enabled(device)
        note_forward(ctx, torch.get_autocast_dtype(device), enabled and dtype is None)
        policy = traced_policy(device) if torch.compiler.is_dynamo_compiling() else policy_on(device)
        ctx._narrowcast_region = (device, policy)
        if dtype is None or not enabled:
            return function(*args, **kwargs)
        new_args, new_kwargs = tree_map_only(
            torch.Tensor, lambda t: cast_tree(t, dtype, False) if t.device.type == device else t, (args, kwargs)
        )
        with autocast(device, enabled=False):
            return function(*new_args, **new_kwargs)

    return forward


def custom_bwd(bwd: Callable[..., Any] | None = None, *, device_type: str | None = None) -> Any:
    """Decorate the `backward` of a torch.autograd.Function: it runs as `forward` did, in the same format and policy.

    device_type: left out, that of the forward. Raises RegionError if `forward` is not decorated with `custom_fwd`.
    """
    if bwd is None:
        return functools.partial(custom_bwd, device_type=device_type)
    function = bwd

    @functools.wraps(bwd)
    def backward(ctx: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(ctx, "_narrowcast_region"):
            raise RegionError(
                asked="custom_bwd", found="the forward did not say in which region it ran",
                advice="Decorate forward with narrowcast.custom_fwd, too.",
            )  # fmt: skip
        device, policy = ctx._narrowcast_region
        chosen = device if device_type is None else device_type
        with autocast(chosen, *noted_forward(ctx), policy=policy if chosen == device else None):
            return function(ctx, *args, **kwargs)

    return backward


class _NoContext:
    """What a forward with a `setup_context` beside it writes to."""


# -- threads, which do not inherit regions -----------------------------------------------------------------------------


F = TypeVar("F", bound=Callable[..., Any])


_elsewhere = [0]


def carried_elsewhere() -> int:
    """Return how often functions were carried to another thread, whose calls nobody on this one sees."""
    return _elsewhere[0]


def carry(function: F) -> F:
    """Return the function, running in the regions that hold where `carry` is called, on any thread and for any caller.

    `executor.submit(nc.carry(work), x)`, `Thread(target=nc.carry(work))`. Regions of its caller do not hold in it;
    regions that are native here are native there. Generators and async functions are carried step by step. The weight
    cache is that of the call. Raises RegionError for what cannot be called.
    """
    if not callable(function):
        raise RegionError(
            asked=f"carry({type(function).__name__})", found="not callable",
            advice="Give the function that the thread is to run.",
        )  # fmt: skip
    carried_regions, made_by = [], threading.get_ident()
    for device_type, region in ruling_regions().items():
        prepared = region.prepared
        cache = prepared.grade if prepared.grade in CHECKED else prepared.facts.cache
        asked = (device_type, DTYPES[prepared.facts.low], True, cache, prepared.cache_limit_bytes)
        carried_regions.append(region_of(prepared.for_graphs.policy, asked))

    @contextmanager
    def regions() -> Iterator[None]:
        if threading.get_ident() != made_by:
            _elsewhere[0] += 1
        carried = {region.device for region in carried_regions}
        with ExitStack() as stack:
            for device_type in ruled_device_types():
                if device_type not in carried:
                    stack.enter_context(autocast(device_type, enabled=False))
            for region in carried_regions:
                stack.enter_context(region)
            yield

    return run_inside(function, regions)  # type: ignore[return-value]
