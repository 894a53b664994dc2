"""Regions as objects of Python: which objects are some, and the arguments that make them in a script."""

from __future__ import annotations

from typing import Any

import torch

from narrowcast.errors import RegionError
from narrowcast.frontends.eager import autocast
from narrowcast.frontends.scripts.region_facts import number_of
from narrowcast.runtime.torch_surface.state import caches, is_enabled

Signature = tuple[tuple[str, ...], dict[str, str]]
"""Of a region class: names of its arguments, and what ours is given, as source, where a call does not say it."""


def is_region(value: Any) -> bool:
    """Whether something is a region, or a class of them, or a part without gradients, which scripts have, too."""
    kind = value if isinstance(value, type) else type(value)
    return issubclass(kind, (torch.autocast, autocast)) or type(value) is torch.no_grad


def described(value: Any) -> dict[str, Any]:
    """The arguments that make a region in a script. RegionError for one that does what a user's class says."""
    if type(value) is autocast:
        facts: dict[str, Any] = {"cache_enabled": value.prepared.facts.cache, "policy": value.policy.digest}
    elif type(value) in (torch.autocast, torch.cpu.amp.autocast, torch.cuda.amp.autocast):  # type: ignore[attr-defined]
        facts = {"cache_enabled": caches(value), "policy": ""}
    else:
        found = f"scripts do not know what {type(value).__qualname__} does"
        raise RegionError("a region in a script", found, advice="Open torch.autocast or narrowcast.autocast itself.")
    return {"device_type": value.device, "dtype": number_of(value.fast_dtype), "enabled": is_enabled(value), **facts}


def signature_of(value: Any) -> Signature | None:
    """The arguments of region classes in their order, and what ours takes where these do not say it."""
    return _SIGNATURES.get(value) if isinstance(value, type) else None


_ALL, _OLD = ("device_type", "dtype", "enabled", "cache_enabled"), ("enabled", "dtype", "cache_enabled")
_TOLD = {"cache_enabled": "True", "policy": "''"}
_SIGNATURES: dict[type, Signature] = {
    autocast: (_ALL, {}),
    torch.autocast: (_ALL, {"policy": "''"}),
    torch.cpu.amp.autocast: (_OLD, {"device_type": "'cpu'", "dtype": str(number_of(torch.bfloat16)), **_TOLD}),  # type: ignore[attr-defined]
    torch.cuda.amp.autocast: (_OLD, {"device_type": "'cuda'", "dtype": str(number_of(torch.float16)), **_TOLD}),
}
