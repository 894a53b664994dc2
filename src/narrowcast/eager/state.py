"""Which regions are open on this thread: the one piece of mutable state, a ContextVar."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from narrowcast.decide import Plan, Region
from narrowcast.eager.identity import Identity
from narrowcast.eager.recomputation import carried_region
from narrowcast.policy import Policy
from narrowcast.torch_bridge import FORMATS, autocast_nesting


@dataclass(frozen=True, slots=True)
class Decided:
    """A plan with its formats as dtypes, ready to be carried out. `is_native`: torch's own kernel does just this."""

    plan: Plan
    dtypes: tuple[torch.dtype | None, ...]
    is_native: bool


@dataclass(slots=True, eq=False)
class OpenRegion:
    """A region between its enter and its exit.

    depth:   torch's nesting count inside it.
    outer:   the next region of ours around it.
    changed: the ids of the ops for which the policy differs from native.
    plans:   what was decided for calls whose plan does not depend on the place.
    owner:   the object that was entered.
    native:  the torch.autocast that it entered, which knows what to restore.
    identity: what tells Dynamo that another policy is in force; None under native.
    casts:   the weight cache of our own kernels, shared with `outer`.
    """

    facts: Region
    policy: Policy
    depth: int
    outer: OpenRegion | None
    changed: frozenset[str]
    plans: dict[object, Decided]
    owner: object
    native: torch.autocast | None
    identity: Identity | None = None
    casts: dict[Any, Any] = field(default_factory=dict)


_innermost: ContextVar[OpenRegion | None] = ContextVar("narrowcast_region", default=None)


def innermost() -> OpenRegion | None:
    """The region entered last on this thread, whatever its device type."""
    return _innermost.get()


def set_innermost(region: OpenRegion | None) -> None:
    """Make `region` the innermost one. Only `autocast` calls this."""
    _innermost.set(region)


def active_region(device_type: str) -> OpenRegion | None:
    """Our region that rules this device type now; None where a native one does, or none.

    The innermost region rules. torch counts nesting, so a `torch.autocast` block entered inside ours shows as a depth
    that no region of ours accounts for, and is left to torch; but where torch.utils.checkpoint recomputes a forward
    that ran in a region of ours, that region rules.
    """
    region = _innermost.get()
    if region is None or region.depth != autocast_nesting():
        return carried_region(device_type)
    while region is not None and region.facts.device_type != device_type:
        outer = region.outer
        if outer is None or outer.depth != region.depth - 1:
            return None
        region = outer
    return region


def native_region(device_type: str) -> OpenRegion:
    """The native region that holds for this device type, as torch keeps it, in the form of one of ours."""
    facts = Region(
        device_type=device_type,
        low=FORMATS[torch.get_autocast_dtype(device_type)],
        enabled=torch.is_autocast_enabled(device_type),
        cache=torch.is_autocast_cache_enabled(),
    )
    policy = Policy.native(device_type)
    return OpenRegion(facts, policy, autocast_nesting(), None, frozenset(), {}, owner=None, native=None)
