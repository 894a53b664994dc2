"""torch's own autocast state: written when a region is entered, and written back when it is left.

The calls of torch.autocast's own `__enter__` and `__exit__`, without an object and its checks at each entry: around a
model that takes a fraction of a millisecond, a region's own cost counts.
"""

from __future__ import annotations

import torch

from narrowcast.runtime.torch_surface.state import ENTER_AUTOCAST, EXIT_AUTOCAST, has_function_modes, tell_export

_is_enabled, _set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled
_dtype, _set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype
_is_cached, _set_cached = torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
_deeper, _shallower = torch.autocast_increment_nesting, torch.autocast_decrement_nesting


NativeState = tuple[str, bool, torch.dtype, bool]
"""What torch keeps of a region: device type, whether it is enabled, dtype, whether casts of weights are kept."""


def enter_native(state: NativeState) -> tuple[NativeState, int]:
    """Put a state in force, one level deeper: what was in force before, and the new depth."""
    device_type, enabled, dtype, cache = state
    before = device_type, _is_enabled(device_type), _dtype(device_type), _is_cached()
    _set_enabled(device_type, enabled)
    _set_dtype(device_type, dtype)
    depth = _deeper()
    _set_cached(cache)
    if has_function_modes():
        tell_export(ENTER_AUTOCAST, (device_type, dtype, enabled, cache))
    return before, depth


def leave_native(before: NativeState) -> None:
    """Write back what was in force before; the outermost region's casts are forgotten."""
    device_type, enabled, dtype, cache = before
    if _shallower() == 0:
        torch.clear_autocast_cache()  # looked up: native_cache.py wraps it
    _set_enabled(device_type, enabled)
    _set_dtype(device_type, dtype)
    _set_cached(cache)
    if has_function_modes():
        tell_export(EXIT_AUTOCAST, ())
