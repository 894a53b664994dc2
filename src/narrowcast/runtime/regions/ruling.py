"""Which region rules: ours or one of torch's, by device type, as they are nested and as checkpoints recompute."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from weakref import WeakSet

import torch

from narrowcast.core.decide import Region
from narrowcast.core.ledger import TO_RULE_INSIDE
from narrowcast.core.policy import DEVICE_TYPES, Policy, Site
from narrowcast.runtime.regions.recomputation import carried_region
from narrowcast.runtime.regions.stack import OpenRegion, Prepared, stack
from narrowcast.runtime.sites.warned import warn_at
from narrowcast.runtime.torch_bridge import FORMATS
from narrowcast.runtime.torch_surface.autograd import current_graph_task
from narrowcast.runtime.torch_surface.state import autocast_nesting
from narrowcast.runtime.weights.cache import WeightCache


def active_region(device_type: str) -> OpenRegion | None:
    """Our region that rules this device type now; None where a native one does, or none.

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
    """Our region on this device type that a `torch.autocast` block inside it keeps from ruling now."""
    region = stack.innermost
    while region is not None and region.prepared.facts.device_type != device_type:
        region = region.outer
    return region if region is not None and active_region(device_type) is None else None


def _around_native(region: OpenRegion | None, device_type: str) -> OpenRegion | None:
    """Our innermost region on this device type, seen from a block of torch's inside it; None if the block rules."""
    while region is not None and region.prepared.facts.device_type != device_type:
        region = region.outer
    return region.in_native(_native_facts(device_type)) if region is not None and region.prepared.holds_inside else None


def _native_facts(device_type: str) -> Region:
    """What torch says of this device type now."""
    low, enabled = torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type)
    return Region(device_type, FORMATS[low], enabled, torch.is_autocast_cache_enabled())


def region_on(device_type: str) -> OpenRegion | None:
    """The region that rules this device type, native or ours; None where autocast is off, or unknown to the device."""
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    return active_region(device_type) or native_region(device_type)


def ruled_device_types() -> tuple[str, ...]:
    """The device types for which autocast is really on: not those that carry the identity of a policy."""
    carrying: set[str] = set()
    region = stack.innermost
    while region is not None:
        if region.identity is not None:
            carrying.update(region.identity.carriers)
        region = region.outer
    return tuple(d for d in DEVICE_TYPES if d not in carrying and torch.is_autocast_enabled(d))


_NO_CASTS = WeightCache()  # of native regions: torch's own, and the casts beside it, are kept elsewhere


def native_region(device_type: str) -> OpenRegion:
    """The native region that holds for this device type, as torch keeps it, in the form of one of ours."""
    prepared = _native_prepared(_native_facts(device_type))
    return OpenRegion(prepared, autocast_nesting(), None, None, None, kept=_NO_CASTS)


@lru_cache(maxsize=64)
def _native_prepared(facts: Region) -> Prepared:
    """Shared, so that what was decided for native regions is remembered like the rest."""
    return Prepared(facts, Policy.native(facts.device_type))


_told: WeakSet[object] = WeakSet()
"""Regions of which it was said: a plugin's is entered for each step of a training run."""


def tell_hidden(op: str, device_type: str, find_site: Callable[[], Site]) -> None:
    """RegionWarning, once for each region that was made, if its policy changes this op, and is hidden."""
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
    """The name of the policy that a region of torch's, just entered, keeps from ruling; empty if it keeps none."""
    hidden = shadowed_region(device_type)
    return hidden.prepared.policy.name if hidden is not None and hidden.prepared.differs else ""
