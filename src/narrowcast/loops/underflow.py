"""Looks at gradients in fp16 that underflow, besides those that are zero in theory and round-off in practice."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from narrowcast.loops.gradients import Found
from narrowcast.runs.by_storage import ByStorage, has_storage
from narrowcast.runs.finiteness import is_finite, is_floating
from narrowcast.runs.noise import Noise
from narrowcast.runs.rerun import can_run_again, changed, planned_arguments, run_wide
from narrowcast.runs.seen_call import SeenCall
from narrowcast.torch_bridge import FORMATS, tensors_in

_TWO_BITS = 4 * FORMATS[torch.float16].smallest
"""Below it fp16 has two bits left or fewer. Larger subnormal numbers are no sign of a fault: the gradients of queries
and keys at the start of training are such, at any usual scale.
"""
_FIVE_BITS = 32 * FORMATS[torch.float16].smallest
"""Below it fp16 has five bits left or fewer. Where even the largest gradient is subnormal, a larger scale would save
all of them.
"""
_SMALLEST_NORMAL = FORMATS[torch.float16].smallest_normal
_UNDERFLOWS = 0.5
"""The share of a gradient, by the sum of its absolute values, from which on what is lost of it is told of."""
_SURE = 4.0
"""How many times the size of its round-off a gradient has to be, so that it is more than that."""
_HALF_A_UNIT = FORMATS[torch.float16].epsilon / 2


class Underflow:
    """What backwards in fp16 lose, of what would be there without rounding.

    Each gradient has a size of its round-off: how far a call's result moves if each number that it reads moves by half
    a unit of fp16, or by its own round-off. A gradient that is as small as that is zero in theory (of a key's bias,
    before a norm whose output's squares are the loss), and nothing is lost with it.
    """

    def __init__(self) -> None:
        self._noise = Noise(seed=0)
        self._sizes: ByStorage[float] = ByStorage()
        self._largest = 0.0  # of a step's gradients in fp16
        self._few_bits: Found | None = None
        self._has_told = False

    def passed_on(self, args: Any, results: Iterable[torch.Tensor]) -> None:
        """Values were copied, or written over by what has them: so is what is known of their round-off."""
        size = max((self._sizes.get(t) or 0.0 for t in tensors_in(args)), default=0.0)
        if size:
            for tensor in results:
                self._sizes.put(tensor, size)

    def find(self, call: SeenCall) -> Found | None:
        """Of a call of a backward: whether what it gives in fp16 lies below what fp16 holds."""
        args, kwargs = planned_arguments(call)
        results = [t for t in call.results if is_floating(t)]
        if not all(t.numel() == 0 or is_finite(t) for t in results):
            return None  # a step that a scaler skips
        exact = None
        if not call.facts.overwrites and can_run_again(call) and all(map(has_storage, tensors_in(args, kwargs))):
            exact = run_wide(call.facts, args, kwargs, torch.float32)
            moved = run_wide(call.facts, *changed(args, kwargs, self._moved), torch.float32)
        if exact is None or moved is None or len(exact) != len(call.results):
            self.passed_on((args, kwargs), results)
            return None
        found = None
        for result, wide, other in zip(call.results, exact, moved, strict=True):
            if not is_floating(result) or not result.numel():
                continue
            size, round_off = _size(wide), _size(other - wide)
            if result.dtype is torch.float16:
                self._largest = max(self._largest, float(wide.abs().max()))
            if result.dtype is torch.float16 and size > _SURE * round_off:
                self._few_bits = self._few_bits or _lost(call, result, wide, _FIVE_BITS)
                if (what := _lost(call, result, wide, _TWO_BITS)) is not None:
                    found, round_off = what, size  # told once: nothing is known of what is computed of it
                    self._has_told = True
            self._sizes.put(result, round_off)
        return found

    def end_of_step(self) -> Found | None:
        """The first of the step's gradients with few bits, if even the largest of all is subnormal."""
        found = self._few_bits if self._largest < _SMALLEST_NORMAL and not self._has_told else None
        self._largest, self._few_bits = 0.0, None
        return found

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.detach().float()
        moved = self._noise.moved(wide, _HALF_A_UNIT)
        size = self._sizes.get(tensor)
        if size:
            own = torch.full_like(wide, math.sqrt(3) * size)  # of uniform noise, whose size it is
            moved += self._noise.moved(own, 1.0) - own
        return moved


def _size(tensor: torch.Tensor) -> float:
    """The root of the mean square."""
    return float(tensor.double().square().mean().sqrt())


def _lost(call: SeenCall, result: torch.Tensor, exact: torch.Tensor, limit: float) -> Found | None:
    there = exact.abs()
    small = there < limit
    if float(there[small].sum()) <= _UNDERFLOWS * float(there.sum()):
        return None
    zeros = int(((result == 0) & (there > 0)).sum()) / int((there > 0).sum())
    if zeros > _UNDERFLOWS:
        what = f"{zeros:.0%} of it {'become zero when it is cast' if call.is_cast else 'are zero'}"
    else:
        share = int((small & (there > 0)).sum()) / int((there > 0).sum())
        bits = "two bits" if limit == _TWO_BITS else "five"
        what = f"{share:.0%} of it lie below {limit:.1e}, where fp16 has {bits}"
    return (
        "gradients underflow",
        f"the gradient of {call.forward} in fp16: {what}",
        "Scale the loss: nc.Scaler, or GradScaler with a larger init_scale; or keep this call in bf16 or fp32 by a "
        "rule.",
        call.site,
    )
