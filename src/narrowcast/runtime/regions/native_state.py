"""torch's own autocast state: written when a region is entered, and written back when it is left.

The calls of torch.autocast's own `__enter__` and `__exit__`, without an object and its checks at each entry: around a
model that takes a fraction of a millisecond, a region's own cost counts.
"""

from __future__ import annotations

import torch

from narrowcast.runtime.torch_surface.dynamo import never_trace
from narrowcast.runtime.torch_surface.state import ENTER_AUTOCAST, EXIT_AUTOCAST, has_function_modes, tell_export

_is_enabled, _set_enabled = torch.is_autocast_enabled, torch.set_autocast_enabled
_dtype, _set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype
_is_cached, _set_cached = torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
_deeper = torch.autocast_increment_nesting


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
    if torch.autocast_decrement_nesting() == 0:  # looked up, as the next: who looks at a program wraps it
        torch.clear_autocast_cache()  # as weights/cache.py does
    _set_enabled(device_type, enabled)
    _set_dtype(device_type, dtype)
    _set_cached(cache)
    if has_function_modes():
        tell_export(EXIT_AUTOCAST, ())


# -- the identity of the policy in force, where Dynamo looks -----------------------------------------------------------
#
# Dynamo guards compiled code, and keys its caches on disk, on the autocast state of every device type that torch knows,
# and on nothing that names a policy. So a region writes a number made from its policy's digest into the state of device
# types that are not here: code compiled under one policy is compiled again under another. While a backend traces, our
# kernels run, and what they cast is compiled.


_DTYPES = sorted({d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=str)
CARRIERS = ("ipu", "maia", "mtia")  # no longer made, and not to be had outside their makers
_AT_REST = {name: (name, False, _dtype(name)) for name in CARRIERS}


Carried = tuple[tuple[str, torch.dtype], ...]
"""What is written where: by device type, the dtype."""


def carried_by(digest: str, device_type: str) -> Carried:
    """Return the state that a region on this device type writes for a policy digest, for the other device types."""
    accelerator = torch.accelerator.current_accelerator()
    taken = (device_type, accelerator.type if accelerator is not None else "")
    number, written = int(digest[:12], 16), []
    for name in (name for name in CARRIERS if name not in taken):
        number, position = divmod(number, len(_DTYPES))
        written.append((name, _DTYPES[position]))
    return tuple(written)


class Identity:
    """The carriers' state before a region of ours wrote its policy there."""

    __slots__ = ("_before",)

    def __init__(self, carried: Carried, is_first: bool = False) -> None:
        """is_first: whether autocast was off on every device type; the carriers are then as torch starts them."""
        before = []
        for name, dtype in carried:
            before.append(_AT_REST[name] if is_first else (name, _is_enabled(name), _dtype(name)))
            _set_enabled(name, True)
            _set_dtype(name, dtype)
        self._before = before

    @property
    def carriers(self) -> tuple[str, ...]:
        """The device types whose state is not their own."""
        return tuple(name for name, _, _ in self._before)

    def hand_over(self, inner: Identity) -> None:
        """Leave it to a region inside, which is left later, to write back what was there."""
        states = {state[0]: state for state in (*inner._before, *self._before)}
        inner._before = list(states.values())

    def restore(self) -> None:
        """Write back what was there."""
        for name, enabled, dtype in self._before:
            _set_enabled(name, enabled)
            _set_dtype(name, dtype)


never_trace(Identity.__init__, Identity.restore)
