"""`carry`: regions for threads, which do not inherit them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from narrowcast.errors import RegionError
from narrowcast.frontends.eager.region import autocast
from narrowcast.frontends.eager.steps import run_inside
from narrowcast.runtime.regions.ruling import region_on, ruled_device_types
from narrowcast.runtime.regions.stack import CHECKED
from narrowcast.runtime.torch_bridge import DTYPES

F = TypeVar("F", bound=Callable[..., Any])


def carry(function: F) -> F:
    """The function, running in the regions that hold where `carry` is called, whatever calls it, and on which thread.

    `executor.submit(nc.carry(work), x)`, `Thread(target=nc.carry(work))`. Regions of its caller do not hold in it;
    regions that are native here are native there. Generators and async functions are carried step by step. The weight
    cache is that of the call. Raises RegionError for what cannot be called.
    """
    if not callable(function):
        raise RegionError(
            asked=f"carry({type(function).__name__})", found="not callable",
            advice="Give the function that the thread is to run.",
        )  # fmt: skip
    found = []
    for device_type in ruled_device_types():
        region = region_on(device_type)
        if region is not None:
            prepared = region.prepared
            cache = prepared.grade if prepared.grade in CHECKED else prepared.facts.cache
            found.append(
                autocast(
                    device_type, DTYPES[prepared.facts.low], True, cache, policy=prepared.for_graphs.policy,
                    cache_limit_bytes=prepared.cache_limit_bytes,
                )
            )  # fmt: skip

    @contextmanager
    def regions() -> Iterator[None]:
        carried = {region.device for region in found}
        with ExitStack() as stack:
            for device_type in ruled_device_types():
                if device_type not in carried:
                    stack.enter_context(autocast(device_type, enabled=False))
            for region in found:
                stack.enter_context(region)
            yield

    return run_inside(function, regions)  # type: ignore[return-value]
