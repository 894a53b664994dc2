"""The region that a front end is asked for: by policy, dtype and device type, or as a region that was made."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowcast.core.policy import Policy, as_policy
from narrowcast.errors import RegionError
from narrowcast.formats import Format
from narrowcast.frontends.eager.region import autocast
from narrowcast.runtime.regions.ruling import active_region, native_region
from narrowcast.runtime.torch_bridge import DTYPES

AnyPolicy = Policy | str | None
AnyDtype = torch.dtype | str | Format | None


@dataclass(frozen=True, slots=True)
class AskedRegion:
    """What is known of the region before it is known on which device type.

    is_there: whether one is asked for at all; without it those around the call, and those inside the model, hold.
    """

    policy: Policy
    is_there: bool
    dtype: AnyDtype = None
    device_type: str | None = None
    enabled: bool = True
    cache: bool | str | None = None
    cache_limit_bytes: int | None = None

    def on(self, device_type: str, policy: Policy) -> autocast:
        """The region on a device type, under this policy in place of the one that was asked for."""
        return autocast(
            device_type, self.dtype, self.enabled, self.cache, policy=policy, cache_limit_bytes=self.cache_limit_bytes
        )


def asked_region(
    verb: str, policy: AnyPolicy, dtype: AnyDtype, device_type: str | None, region: autocast | None
) -> AskedRegion:
    """What a user wrote; `verb` is the function that they called. RegionError for what does not go together."""
    if region is None:
        is_there = policy is not None or dtype is not None or device_type is not None
        return AskedRegion(as_policy(policy), is_there, dtype, device_type)
    if not isinstance(region, autocast):
        raise RegionError(
            asked=f"{verb}(region={region!r})", found=f"a {type(region).__name__}",
            advice=f"Write {verb}(..., region=narrowcast.autocast(...)).",
        )  # fmt: skip
    given = {"policy": policy, "dtype": dtype, "device_type": device_type}
    twice = [name for name, value in given.items() if value is not None]
    if twice:
        raise RegionError(
            asked=f"{verb} with region={region!r} and {' and '.join(twice)}", found="the region says that already",
            advice=f"Give the region alone, or {', '.join(given)}.",
        )  # fmt: skip
    return AskedRegion(
        region.policy, True, region.fast_dtype, region.device, region.asked_enabled, region.cache,
        region.cache_limit_bytes,
    )  # fmt: skip


def asked_or_around(
    verb: str, policy: AnyPolicy, dtype: AnyDtype, device_type: str | None, region: autocast | None, own_device: str
) -> AskedRegion:
    """What a user wrote; where they wrote nothing, the region around the call that rules the model's device type."""
    asked = asked_region(verb, policy, dtype, device_type, region)
    return asked if asked.is_there else _around(own_device) or asked


def _around(device_type: str) -> AskedRegion | None:
    """The region on this device type that is open here, one of ours or of torch's."""
    found = active_region(device_type)
    if found is None and not torch.is_autocast_enabled(device_type):
        return None
    facts = (found or native_region(device_type)).prepared.facts
    dtype, owner = DTYPES[facts.low], found.owner if found is not None else None
    if not isinstance(owner, autocast):  # torch's own, or one that a checkpoint's recomputation carries
        policy = as_policy(None) if found is None else found.prepared.policy
        return AskedRegion(policy, True, dtype, device_type, facts.enabled, facts.cache)
    return AskedRegion(
        owner.policy, True, dtype, device_type, facts.enabled, owner.cache, owner.cache_limit_bytes
    )  # fmt: skip
