"""Which region rules: ours or one of torch's, by device type, as they are nested and as checkpoints recompute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import count
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch
import torch.utils.checkpoint

from narrowcast.core.decide import Region
from narrowcast.core.ledger import TO_RULE_INSIDE
from narrowcast.core.policy import DEVICE_TYPES, Policy, Site
from narrowcast.runtime.regions.stack import OpenRegion, Prepared, stack
from narrowcast.runtime.sites.numbering import PerRecomputation, counted_here
from narrowcast.runtime.sites.python_stack import NO_AROUND, Around, warn_at
from narrowcast.runtime.torch_bridge import DTYPES, FORMATS
from narrowcast.runtime.torch_surface.autograd import current_graph_task
from narrowcast.runtime.torch_surface.dispatch import count_dispatch_modes
from narrowcast.runtime.torch_surface.modules import CHECKPOINT_STATE, carried_state, find_recomputation
from narrowcast.runtime.torch_surface.patches import stay
from narrowcast.runtime.torch_surface.probes import require
from narrowcast.runtime.torch_surface.state import autocast_nesting
from narrowcast.runtime.weights.cache import WeightCache


def active_region(device_type: str) -> OpenRegion | None:
    """Return our region that rules this device type now; None where a native one does, or none.

    The innermost region rules. torch counts nesting, so a `torch.autocast` block entered inside ours shows as a depth
    that no region of ours accounts for, and is left to torch unless our policy is to hold there; but where
    torch.utils.checkpoint recomputes a forward that ran in a region of ours, that region rules.
    """
    region = stack.innermost
    if region is None or not region.is_innermost:
        return carried_region(device_type) or _around_native(region, device_type)
    while region is not None and region.prepared.facts.device_type != device_type:
        outer = region.outer
        if outer is None or outer.depth != region.depth - 1:
            return _around_native(outer, device_type)
        region = outer
    return region


def shadowed_region(device_type: str) -> OpenRegion | None:
    """Return our region on this device type that a `torch.autocast` block inside it keeps from ruling now."""
    region = _on_device(stack.innermost, device_type)
    return region if region is not None and active_region(device_type) is None else None


def _on_device(region: OpenRegion | None, device_type: str) -> OpenRegion | None:
    while region is not None and region.prepared.facts.device_type != device_type:
        region = region.outer
    return region


def _around_native(region: OpenRegion | None, device_type: str) -> OpenRegion | None:
    """Return our innermost region on this device type around a block of torch's; None if the block rules."""
    region = _on_device(region, device_type)
    return region.in_native(_native_facts(device_type)) if region is not None and region.prepared.holds_inside else None


def _native_facts(device_type: str) -> Region:
    """Return the state that torch has of this device type now."""
    low, enabled = torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type)
    return Region(device_type, FORMATS[low], enabled, torch.is_autocast_cache_enabled())


def region_on(device_type: str) -> OpenRegion | None:
    """Return the region that rules this device type, native or ours; None where autocast is off, or unsupported."""
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    return active_region(device_type) or native_region(device_type)


def ruled_device_types() -> tuple[str, ...]:
    """Return the device types for which autocast is really on: not those that carry the identity of a policy."""
    carrying: set[str] = set()
    region = stack.innermost
    while region is not None:
        if region.identity is not None:
            carrying.update(region.identity.carriers)
        region = region.outer
    return tuple(d for d in DEVICE_TYPES if d not in carrying and torch.is_autocast_enabled(d))


def ruling_regions() -> dict[str, OpenRegion]:
    """Return the regions that rule, native or ours, by device type."""
    return {d: region for d in ruled_device_types() if (region := region_on(d)) is not None}


_NO_CASTS = WeightCache()  # of native regions: torch's own, and the casts beside it, are kept elsewhere


def native_region(device_type: str) -> OpenRegion:
    """Return the native region that holds for this device type, as torch keeps it, in the form of one of ours."""
    prepared = _native_prepared(_native_facts(device_type))
    return OpenRegion(prepared, autocast_nesting(), None, None, None, kept=_NO_CASTS)


@lru_cache(maxsize=64)
def _native_prepared(facts: Region) -> Prepared:
    """Return the shared form of a native region, so that what was decided for it is remembered like the rest."""
    return Prepared(facts, Policy.native(facts.device_type))


_told: WeakSet[object] = WeakSet()
"""Regions of which it was said, or is not to be: a plugin's is entered for each step of a training run."""
never_tell_hidden = _told.add
"""Say nothing of a region: nobody wrote it."""


def tell_hidden(op: str, device_type: str, find_site: Callable[[], Site]) -> None:
    """Warn, once for each region that was made, if its policy changes this op, and is hidden."""
    region = shadowed_region(device_type)
    if region is None or op not in region.prepared.changed or current_graph_task() != -1 or region.owner in _told:
        return
    _told.add(region.owner)
    warn_at(
        f"narrowcast: a torch.autocast block inside your region hides policy {region.prepared.policy.name}: {op} runs "
        f"as torch decides. {TO_RULE_INSIDE}; narrowcast.record says where the block is opened",
        find_site(),
    )


def hidden_policy(device_type: str) -> str:
    """Return the name of the policy that a region of torch's, just entered, keeps from ruling; empty if none."""
    hidden = shadowed_region(device_type)
    return hidden.prepared.policy.name if hidden is not None and hidden.prepared.differs else ""


# -- our region in the recomputation of torch.utils.checkpoint, which knows only torch's own autocast state ------------
#
# At the forward, checkpoint asks one function for the state to restore, and keeps what it got until it recomputes. That
# function is wrapped once: what it returns inside a region of ours carries the region. At the recomputation it is found
# on the Python stack, whether the backward was called inside the region or after it.


class _CarriedArguments(dict[str, Any]):
    """torch's keyword arguments for the cpu region, with ours beside them, and where the checkpoint was called."""

    region: OpenRegion | None
    around: Around
    counted: PerRecomputation[dict[str, int]]
    casts: PerRecomputation[WeightCache]


_carried: WeakValueDictionary[int, _CarriedArguments] = WeakValueDictionary()
"""What carries regions of policies, by number, as long as a recomputation may come."""
_numbers = count()


def next_carried() -> int:
    """Return a number below those of what will carry a region."""
    return next(_numbers)


def is_carried_since(number: int) -> bool:
    """Return whether a region of a policy waits for a recomputation, whose forward ran after that number was given."""
    return any(key > number for key in list(_carried.keys()))


def carry_into_recomputation() -> None:
    """Wrap checkpoint's function, once."""
    require("checkpoints ask for autocast's state")
    why = "the forward that a checkpoint recomputes runs in the region that it ran in"
    stay(torch.utils.checkpoint, CHECKPOINT_STATE, _with_region, why)


def _with_region(original: Any) -> Any:
    def with_region(*args: Any, **kwargs: Any) -> Any:
        device, cpu = original(*args, **kwargs)
        region, is_observed = stack.innermost, count_dispatch_modes() > 0
        region = region if region is not None and region.is_innermost else None
        if region is not None or is_observed:
            cpu = _CarriedArguments(cpu)
            cpu.region = region
            has_rules = region is not None and region.prepared.differs
            if has_rules:
                _carried[next(_numbers)] = cpu
            cpu.around = Around.now() if has_rules or is_observed else NO_AROUND
            cpu.counted, cpu.casts = counted_here(), PerRecomputation(WeightCache)
        return device, cpu

    return with_region


def carried_region(device_type: str) -> OpenRegion | None:
    """Return the region of the forward that this stack recomputes, if it was ours and its state is in force.

    Its weight cache is not taken along: the casts in it belong to a graph that may be gone.
    """
    if current_graph_task() == -1:  # no backward is running
        return None
    frame = find_recomputation()
    carrier = carried_state(frame) if frame is not None else None
    if frame is None or not isinstance(carrier, _CarriedArguments):
        return None
    return _of_device(carrier.region, device_type, carrier.casts.found_in(frame))


def _of_device(region: OpenRegion | None, device_type: str, casts: WeightCache) -> OpenRegion | None:
    region = _on_device(region, device_type)
    if region is None or region.before is None:
        return None
    in_force = torch.is_autocast_enabled(device_type) == region.prepared.facts.enabled
    same_format = torch.get_autocast_dtype(device_type) is DTYPES[region.prepared.facts.low]
    return replace(region, kept=casts) if in_force and same_format else None
