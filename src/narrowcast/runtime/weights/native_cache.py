"""torch's weight cache, for native regions whose ops pass through kernels of ours.

torch's own cannot be reached from Python without risking a deadlock (see kernels.py), so its rules are repeated here:
one cast per weight, whatever its version and whatever the format, until an outermost region closes and torch clears its
cache. That is one function, which is wrapped once so that ours is cleared with it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from narrowcast.runtime.torch_bridge import cast
from narrowcast.runtime.torch_surface.jit import tracing_state
from narrowcast.runtime.torch_surface.patches import stay
from narrowcast.runtime.weights.cache import mutations


class _Casts(threading.local):
    """Per thread: a weight's id and the trace, the weight (so that the id stays its own), and its cast."""

    def __init__(self) -> None:
        self.mutations = mutations.count
        self.by_id: dict[tuple[int, Any], tuple[torch.Tensor, torch.Tensor]] = {}


_casts = _Casts()


def native_cast(weight: torch.Tensor, dtype: torch.dtype, low: torch.dtype) -> torch.Tensor:
    """The cast of a cacheable weight in a native region: casts to the low format are kept, others are made again."""
    if dtype is not low:
        return cast(weight, dtype)
    if _casts.mutations != mutations.count:  # of another thread, whose step cannot reach this one's casts
        _casts.by_id.clear()
        _casts.mutations = mutations.count
    key = (id(weight), tracing_state())
    entry = _casts.by_id.get(key)
    if entry is not None:
        return entry[1]
    stay(torch, "clear_autocast_cache", _clearing_ours, "casts in native regions go with torch's own")
    with torch.enable_grad():  # as torch does: a cast made under no_grad carries the gradient of a later use
        made = cast(weight, dtype)
    _casts.by_id[key] = (weight, made)
    return made


def native_cache_size() -> tuple[int, int]:
    """How many casts of native regions our kernels keep on this thread, and their bytes."""
    made = [cast for _, cast in _casts.by_id.values()]
    return len(made), sum(cast.nbytes for cast in made)


def _clearing_ours(original: Callable[[], None]) -> Callable[[], None]:
    def clear_autocast_cache() -> None:
        _casts.by_id.clear()
        original()

    return clear_autocast_cache
