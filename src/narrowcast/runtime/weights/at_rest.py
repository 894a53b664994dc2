"""Cached low-precision weights: casts that are made once and kept from call to call, for all graphs of a process.

A copy holds as long as its weight is the same object with the same memory, shape, strides and version counter, and as
long as a sample of its elements has the bits that it had (host memory only). So writes that torch counts are seen, and
so are writes to `weight.data` that change the whole of it: an optimizer's, a moving average's. One behind the counter
that leaves the sampled elements as they are (a mask, a clamp, a single element) is not:
`frontends.eager.invalidate(weight)` says so.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from narrowcast.runtime.devices.device import is_capturing
from narrowcast.runtime.torch_bridge import PLAIN, cast
from narrowcast.runtime.torch_surface.dispatch import version_of
from narrowcast.runtime.torch_surface.state import autocast_off

PROBES, FEW, SMALL = 16, 4, 2**14
"""Elements that are compared: of weights, of small ones, and how many elements these have at most."""


class Copy:
    """A weight's cast, and how it is known that the weight is as it was. Given up, it has no low."""

    __slots__ = ("address", "low", "probes", "shape", "stride", "version", "weight")

    def __init__(self, weight: torch.Tensor, low: torch.Tensor, forget: Any) -> None:
        self.weight: Callable[[], torch.Tensor | None] = weakref.ref(weight, forget)
        self.version = version_of(weight)
        self.address = weight.data_ptr()
        self.shape, self.stride = weight.shape, weight.stride()
        self.low: torch.Tensor | None = low
        self.probes = [(probe, probe.value) for probe in _probes(weight)]


def lows_of(copies: Sequence[Copy], weights: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
    """Return the casts of these weights, if all of them hold. Runs at each call of a compiled graph: calls are few."""
    lows = []
    for copy, weight in zip(copies, weights, strict=True):
        low = copy.low
        if low is None or copy.weight() is not weight or copy.version != version_of(weight):
            return None
        if copy.address != weight.data_ptr() or copy.shape != weight.shape or copy.stride != weight.stride():
            return None
        for probe, bits in copy.probes:
            if probe.value != bits:
                return None
        lows.append(low)
    return lows


def _probes(weight: torch.Tensor) -> list[Any]:
    """Return elements at even distances, read in place."""
    if weight.device.type != "cpu" or weight.dtype is not torch.float32 or not weight.numel():
        return []
    flat_last = sum((n - 1) * s for n, s in zip(weight.shape, weight.stride(), strict=True))
    if flat_last + 1 != weight.numel():
        return []
    count = FEW if weight.numel() <= SMALL else PROBES
    sites = {flat_last * k // (count - 1) for k in range(count)}
    return [ctypes.c_uint32.from_address(weight.data_ptr() + 4 * site) for site in sorted(sites)]


class WeightsAtRest:
    """The kept casts of a process."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, torch.dtype], Copy] = {}
        self._lock = threading.Lock()
        self.made = 0

    def find(self, weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, Copy | None]:
        """Return the cached cast of a weight, without a gradient, and its copy; None if nothing can be kept.

        It is cast only if it is not kept, or not as it was.
        """
        key = (id(weight), dtype)
        kept = self._copies.get(key)
        lows = lows_of([kept], [weight]) if kept is not None else None
        if lows is not None:
            return lows[0], kept
        with torch.inference_mode(False), torch.no_grad(), autocast_off():
            low = cast(weight.detach(), dtype)
        if type(weight) not in PLAIN or weight.is_inference() or is_capturing():
            return low, None  # what is cast while a CUDA graph is captured is there only when it is replayed
        copy = Copy(weight, low, lambda _: self._give_up(key))
        if not copy.probes and weight.device.type == "cpu":  # what cannot be looked at is not kept
            return low, None
        with self._lock:
            self._give_up(key)
            self._copies[key] = copy
            self.made += 1
        return low, copy

    def _give_up(self, key: tuple[int, torch.dtype]) -> None:
        """Free a copy and its memory, also for graphs that hold it. No reference prevents a swap."""
        copy = self._copies.pop(key, None)
        if copy is not None:
            copy.low, copy.weight = None, lambda: None

    def forget(self, *weights: torch.Tensor) -> None:
        """Drop the casts of these weights, or all of them."""
        ids = {id(weight) for weight in weights}
        for key in list(self._copies):
            if not ids or key[0] in ids:
                self._give_up(key)

    def __len__(self) -> int:
        return len(self._copies)


at_rest = WeightsAtRest()


class _Working(torch.autograd.Function):
    """A weight's low copy in the place of its cast: what the copy's readers add up flows back as one gradient."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        ctx.dtype = weight.dtype
        ctx.set_materialize_grads(False)  # a weight without a gradient gets none
        return low.view_as(low)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return (gradient.to(ctx.dtype) if gradient is not None else None), None


def connected(weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return a kept cast connected with its weight: gradients flow as through a cast."""
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return low
    joined: torch.Tensor = _Working.apply(weight, low)
    return joined
