"""`under=`: the region that a function is asked for, as a format, a policy, or a region that was made."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch

from narrowcast.core.policy import BUILTIN, Policy, as_policy
from narrowcast.errors import RegionError
from narrowcast.formats import FORMATS, Format, find_format
from narrowcast.frontends.eager.region import autocast, region_of
from narrowcast.output.words import did_you_mean
from narrowcast.runtime.regions.ruling import active_region, native_region
from narrowcast.runtime.torch_bridge import DTYPES, default_dtype, to_dtype

Under = autocast | Policy | torch.dtype | Format | str | os.PathLike[str] | None
"""A format (`"bf16"`, torch.bfloat16), the name of a built-in policy, the path of a policy file, a Policy, or
`narrowcast.autocast(...)`, read as data. None: the region around the call.
"""


@dataclass(frozen=True, slots=True)
class AskedRegion:
    """What is known of the region before it is known on which device type.

    is_there: whether one is asked for at all; without it those around the call, and those inside the model, hold.
    """

    policy: Policy
    is_there: bool
    device_type: str | None = None
    dtype: torch.dtype | Format | str | None = None
    enabled: bool = True
    cache: bool | str | None = None
    cache_limit_bytes: int | None = None

    def on(self, device_type: str, policy: Policy) -> autocast:
        """Return the region on a device type, under this policy in place of the one that was asked for."""
        return region_of(policy, (device_type, self.dtype, self.enabled, self.cache, self.cache_limit_bytes))

    def fast_dtype_on(self, device_type: str) -> torch.dtype:
        """Return the low dtype: the one that was asked for, or that of the policy, or of the device type."""
        return default_dtype(self.policy, device_type) if self.dtype is None else to_dtype(self.dtype)


def asked_region(verb: str, under: Under) -> AskedRegion:
    """Return what a user wrote; `verb` is the function that they called. Raise RegionError for what is none of it."""
    if under is None:
        return AskedRegion(as_policy(None), False)
    if isinstance(under, autocast):
        return AskedRegion(under.policy, True, *under.asked)
    if isinstance(under, Policy):
        return AskedRegion(under, True)
    if isinstance(under, torch.dtype | Format):
        return AskedRegion(as_policy(None), True, dtype=under)
    if isinstance(under, str | os.PathLike):
        return _named(verb, os.fspath(under))
    raise RegionError(f"{verb}(under={under!r})", f"of type {type(under).__qualname__}", advice=_WHAT)


_WHAT = (
    "Give a format (bf16), a built-in policy (native, safe, ipex) or a policy file (.toml); in Python a Policy or "
    "narrowcast.autocast(...), too."
)


def _named(verb: str, name: str) -> AskedRegion:
    """Return the region of a format's name, a built-in policy's, or a file's path, in this order."""
    low = find_format(name)
    if low is not None:
        return AskedRegion(as_policy(None), True, dtype=low)
    if name.endswith(".toml") or name.partition(":")[0] in BUILTIN:
        return AskedRegion(as_policy(name), True)
    near = did_you_mean(name.lower(), [*FORMATS, *BUILTIN], 0.5)
    if name.lower().startswith(("fp8", "int8", "fp4", "int4")):
        near = ": it needs scales, which no region keeps"
    raise RegionError(f"{verb}(under={name!r})", f"no format, built-in policy or .toml file{near}", advice=_WHAT)


def asked_or_around(verb: str, under: Under, own_device: str, device: str | None = None) -> AskedRegion:
    """Return what a user wrote; or else the region around the call that rules the model's device type.

    own_device: the model's. device: whose lists are to hold, in place of these. RegionError where the region that is
    given is for another.
    """
    asked = asked_region(verb, under)
    if device is None:
        return asked if asked.is_there else _around(own_device) or asked
    if asked.device_type not in (None, device):
        raise RegionError(
            f"{verb}(under={under!r}, device={device!r})", f"the region is for {asked.device_type}",
            advice="Omit device=, or give a region for it.",
        )  # fmt: skip
    return replace(asked, is_there=True, device_type=device)


def _around(device_type: str) -> AskedRegion | None:
    """Return the region on this device type that is open here, one of ours or of torch's."""
    ruling = active_region(device_type)
    if ruling is None and not torch.is_autocast_enabled(device_type):
        return None
    facts = (ruling or native_region(device_type)).prepared.facts
    dtype, owner = DTYPES[facts.low], ruling.owner if ruling is not None else None
    if isinstance(owner, autocast):
        return AskedRegion(owner.policy, True, device_type, dtype, facts.enabled, *owner.asked[3:])
    # torch's own, or one that a checkpoint's recomputation carries
    policy = as_policy(None) if ruling is None else ruling.prepared.policy
    return AskedRegion(policy, True, device_type, dtype, facts.enabled, facts.cache)
