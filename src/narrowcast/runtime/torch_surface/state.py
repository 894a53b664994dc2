"""Autocast's own state on this thread: its regions, its keys, the guards that switch it off, the modes around it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch._C import DispatchKey

from narrowcast.runtime.torch_surface.dynamo import constant_for_dynamo, never_begin_at

autocast_off = torch._C._DisableAutocast
"""`with autocast_off():` autocast is off inside, for every device type."""
any_autocast = torch._C._is_any_autocast_enabled
"""Whether autocast is on for some device type."""
is_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether a profiler of torch's runs."""
autocast_device_types = torch._C._autocast_supported_devices
"""Every device type that torch knows autocast for."""

ENTER_AUTOCAST, EXIT_AUTOCAST = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast
"""torch's own regions as calls in a graph."""
GraphRegion: Any = getattr(torch.amp.autocast_mode, "_UnmanagedAutocast", torch.autocast)
"""The region that such a call opens: since torch 2.12 a class of its own."""
cast_for_autocast = torch.amp.autocast_mode._cast
"""torch's cast of nested values, as its Python autocast kernels make it: (value, device type, dtype)."""

has_function_modes = torch._C._is_torch_function_mode_enabled
"""Whether a `TorchFunctionMode` is on."""
count_function_modes = torch._C._len_torch_function_stack
"""How many are."""


def autocast_nesting() -> int:
    """Return how many autocast regions this thread is in, native ones included."""
    depth: int = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth - 1


constant_for_dynamo(autocast_nesting)  # which would undo one call of the two, where the other is one of ours
never_begin_at(autocast_nesting)


def is_enabled(region: Any) -> bool:
    """Return whether a region, torch's or ours, is on while it is entered: torch takes any true value."""
    return bool(region._enabled)


caches: Callable[[Any], bool] = attrgetter("_cache_enabled")
"""Whether a region of torch's keeps casts of weights."""


def tell_export(what: Any, args: tuple[Any, ...]) -> None:
    """Report a region to torch.export, which keeps regions as calls in the graph that it makes before dispatch."""
    tracing: Any = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if tracing is not None:  # what was never imported traces nothing
        for mode in torch.overrides._get_current_function_mode_stack():
            if isinstance(mode, tracing.PreDispatchTorchFunctionMode):
                mode.__torch_function__(what, (), args)
                return


# -- keys --------------------------------------------------------------------------------------------------------------


def autocast_key_name(device_type: str) -> str:
    """Return the name of a device type's key: AutocastCPU for cpu."""
    return f"Autocast{device_type.upper()}"


@cache
def autocast_key(device_type: str) -> DispatchKey:
    """Return the key of that name. Parsed, not looked up: Python's enum lacks some (AutocastMTIA in torch 2.13)."""
    key: DispatchKey = torch._C._dispatch_key_parse(autocast_key_name(device_type))
    return key


below = torch._C._dispatch_keyset_full_after
"""All keys that come after this one."""
excluding = torch._C._ExcludeDispatchKeyGuard
"""`with excluding(keyset):` ops inside skip these keys."""


def autocast_was_on(keys: tuple[DispatchKey, ...]) -> tuple[DispatchKey, ...]:
    """Return, inside `__torch_dispatch__`, the Autocast keys that are off now, and were on when the op was called.

    torch switches autocast off while a dispatch mode runs; an op whose kernel calls other ops would see it on.
    """
    is_off = torch._C._dispatch_tls_is_dispatch_key_excluded
    keys = tuple([key for key in keys if is_off(key)])
    if not keys:
        return ()
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        on = tuple([key for key in keys if not is_off(key)])
        include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    # On its way out that guard takes the present state for the snapshot. Leaving it again in the old state fixes it.
    restore = torch._C._RestorePythonTLSSnapshot  # type: ignore[attr-defined]
    with torch._C._ForceDispatchKeyGuard(include, exclude), restore():
        pass
    return on


@contextmanager
def switched_on(keys: tuple[DispatchKey, ...]) -> Iterator[None]:
    """Switch autocast on for these keys, though torch has excluded them."""
    for key in keys:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        yield
    finally:
        for key in keys:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)
