"""Weights at rest: casts of weights that are made once and kept from call to call, for all graphs of a process.

A copy holds as long as its weight is the same object with the same memory, shape, strides and version counter, and as
long as a sample of its elements has the bits that it had (host memory only). So writes that torch counts are seen, and
so are writes to `weight.data` that change the whole of it: an optimizer's, a moving average's. One behind the counter
that leaves the sampled elements as they are (a mask, a clamp, a single element) is not: `narrowcast.invalidate(weight)`
says so.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from typing import Any

import torch

from narrowcast.torch_bridge import cast

PROBES = 16
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class _Copy:
    """A weight's cast, and how it is known that the weight is as it was."""

    __slots__ = ("address", "bits", "count", "layout", "low", "probes", "version", "weight")

    def __init__(self, weight: torch.Tensor, low: torch.Tensor, count: int, forget: Any) -> None:
        self.weight = weakref.ref(weight, forget)
        self.version = weight._version
        self.address = weight.data_ptr()
        self.layout = (weight.shape, weight.stride())
        self.count = count
        self.low = low
        self.probes = _probes(weight)
        self.bits = [probe.value for probe in self.probes]

    def holds(self, weight: torch.Tensor, count: int) -> bool:
        if self.weight() is not weight or self.version != weight._version or self.address != weight.data_ptr():
            return False
        if self.count != count or self.layout != (weight.shape, weight.stride()):
            return False
        return [probe.value for probe in self.probes] == self.bits


def _probes(weight: torch.Tensor) -> list[Any]:
    """Elements at even distances, read where they lie."""
    if weight.device.type != "cpu" or weight.dtype is not torch.float32 or not weight.numel():
        return []
    flat_last = sum((n - 1) * s for n, s in zip(weight.shape, weight.stride(), strict=True))
    if flat_last + 1 != weight.numel():
        return []
    places = {flat_last * k // max(PROBES - 1, 1) for k in range(PROBES)}
    return [ctypes.c_uint32.from_address(weight.data_ptr() + 4 * place) for place in sorted(places)]


class WeightsAtRest:
    """The kept casts of a process."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, torch.dtype], _Copy] = {}
        self._count = 0
        self._lock = threading.Lock()
        self.made = 0

    def low(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The weight in another format, without a gradient; cast only if it is not kept, or not as it was."""
        key = (id(weight), dtype)
        kept = self._copies.get(key)
        if kept is not None and kept.holds(weight, self._count):
            return kept.low
        with torch.inference_mode(False), torch.no_grad(), torch._C._DisableAutocast():
            made = cast(weight.detach(), dtype)
        if type(weight) in _PLAIN and not weight.is_inference():
            copy = _Copy(weight, made, self._count, lambda _: self._copies.pop(key, None))
            if copy.probes or weight.device.type != "cpu":  # what cannot be looked at is not kept
                with self._lock:
                    self._copies[key] = copy
                    self.made += 1
        return made

    def forget(self, *weights: torch.Tensor) -> None:
        """Drop the casts of these weights, or all of them."""
        if not weights:
            self._count += 1
            self._copies.clear()
        for weight in weights:
            for key in [k for k in list(self._copies) if k[0] == id(weight)]:
                self._copies.pop(key, None)

    @property
    def bytes(self) -> int:
        """Memory that the kept casts take."""
        return sum(kept.low.nbytes for kept in list(self._copies.values()))

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


def working_copy(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The kept cast, connected with the weight: gradients flow as through a cast."""
    low = at_rest.low(weight, dtype)
    if not (torch.is_grad_enabled() and weight.requires_grad):
        return low
    made: torch.Tensor = _Working.apply(weight, low)
    return made
