"""Which gradients underflow in fp16, besides those that are zero in theory and round-off in practice."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.statistics.by_storage import ByStorage, has_storage
from narrowcast.observation.trial.finiteness import is_finite, is_floating
from narrowcast.observation.trial.noise import Noise
from narrowcast.observation.trial.rerun import can_run_again, changed, planned_arguments, run_wide
from narrowcast.runtime.torch_bridge import FORMATS, tensors_in
from narrowcast.training.check.gradients import Found

_SMALLEST_NORMAL = FORMATS[torch.float16].smallest_normal
_HALF, _FIVE_BITS = 0.5, 2.0**-6
"""The share of a gradient's norm that has to be lost so that it is reported; and the share where even the largest
gradient of the step is subnormal, so that a larger scale would save all of them.
"""
_SMALL = 1.0
"""A step whose largest gradient in fp16 reaches this is not reported: what underflows (below 3e-8) is less than half a
unit of that in fp32, and a scaler that doubles its scale now and then has few steps left to do so.
"""
_SURE = 4.0
"""How many times as large as its round-off a gradient has to be, so that it is not taken for that."""
_HALF_A_UNIT = FORMATS[torch.float16].epsilon / 2


class Underflow:
    """Measures what gradients in fp16 lose to underflow, compared with fp32.

    The round-off of each gradient is estimated: how far a call's result changes if each of its inputs changes by half a
    unit of fp16, or by its own round-off. A gradient that is as small as that is zero in theory (of a key's bias,
    before a norm whose output's squares are the loss), and nothing is lost with it.
    """

    def __init__(self) -> None:
        self._noise = Noise(seed=0)
        self._sizes: ByStorage[float] = ByStorage()
        self._saved: ByStorage[bool] = ByStorage()
        self._largest = 0.0  # of a step's gradients in fp16; the gradient of a loss is a scale, and none of them
        self._lost: list[tuple[float, Found]] = []  # in the step
        self._has_reported = False

    def passed_on(self, args: Any, results: Iterable[torch.Tensor]) -> None:
        """Record the round-off of the arguments for results that have their values."""
        size = max((self._sizes.get(t) or 0.0 for t in tensors_in(args)), default=0.0)
        if size:
            for tensor in results:
                self._sizes.put(tensor, size)

    def look(self, call: SeenCall) -> None:
        """Measure how much of the results of a call of a backward is lost below the normal range of fp16."""
        args, kwargs = planned_arguments(call)
        results = [t for t in call.results if is_floating(t)]
        read = tensors_in(args, kwargs)
        is_factor = bool(read) and not torch.is_grad_enabled() and all(map(self._is_saved, read))
        for tensor in results if is_factor or call.facts.overwrites else ():
            self._saved.put(tensor, is_factor)
        if is_factor:  # of gradients, as large as it may be: 2x in that of a square
            return
        if not all(t.numel() == 0 or is_finite(t) for t in results):
            self._largest = math.inf  # a step that a scaler skips
            return
        exact = None
        if not call.facts.overwrites and can_run_again(call) and all(map(has_storage, read)):
            exact = run_wide(call.facts, args, kwargs, torch.float32)
            moved = run_wide(call.facts, *changed(args, kwargs, self._moved), torch.float32)
        if exact is None or moved is None or len(exact) != len(call.results):
            self.passed_on((args, kwargs), results)
            return
        for result, wide, other in zip(call.results, exact, moved, strict=True):
            if not is_floating(result) or not result.numel():
                continue
            size, round_off = _size(wide), _size(other - wide)
            if result.dtype is torch.float16 and result.numel() > 1:
                self._largest = max(self._largest, float(wide.abs().max()))
            if result.dtype is torch.float16 and size > _SURE * round_off:
                lost = _size(torch.where(wide.abs() < _SMALLEST_NORMAL, result.float() - wide, 0.0)) / size
                if lost > _FIVE_BITS:
                    self._lost.append((lost, _underflows(call, result, wide, lost)))
                if lost > _HALF:
                    round_off = size  # nothing is known of what is computed of it
            self._sizes.put(result, round_off)

    def end_of_step(self) -> Found | None:
        """Return a finding about the first of the step's gradients of which too much is lost; only once in a loop."""
        limit = _FIVE_BITS if self._largest < _SMALLEST_NORMAL else _HALF if self._largest < _SMALL else math.inf
        findings = [finding for lost, finding in self._lost if lost > limit and not self._has_reported]
        self._largest, self._lost, self._has_reported = 0.0, [], self._has_reported or bool(findings)
        return findings[0] if findings else None

    def _is_saved(self, tensor: torch.Tensor) -> bool:
        """Return whether the forward has saved a tensor, or it is computed of such alone: the others of a backward
        that records no graph require no gradient.
        """
        return tensor.requires_grad or bool(self._saved.get(tensor))

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        wide = tensor.detach().float()
        moved = self._noise.moved(wide, _HALF_A_UNIT)
        size = self._sizes.get(tensor)
        if size:
            own = torch.full_like(wide, math.sqrt(3) * size)  # of uniform noise, whose size it is
            moved += self._noise.moved(own, 1.0) - own
        return moved


def _size(tensor: torch.Tensor) -> float:
    """Return the root mean square."""
    return float(tensor.double().square().mean().sqrt())


def _underflows(call: SeenCall, result: torch.Tensor, exact: torch.Tensor, lost: float) -> Found:
    zeros = int(((result == 0) & (exact != 0)).sum()) / int((exact != 0).sum())
    name = "a gradient" if call.is_cast or call.forward is None else f"the gradient of {call.forward}"
    what = f"{zeros:.0%} of it {'become zero when it is cast' if call.is_cast else 'are zero'}"
    if zeros <= _HALF:
        what = f"{lost:.0%} of it, by its norm, is lost below {_SMALLEST_NORMAL:.1e}"
    return (
        "gradients underflow",
        f"{name} in fp16: {what}",
        "Scale the loss: nc.Scaler, or GradScaler with a larger init_scale; or keep "
        + ("what it converts in bf16 or fp32." if call.is_cast else "this call in bf16 or fp32 by a rule."),
        call.site,
    )
