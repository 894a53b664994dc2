"""Inspects weights in fp32 for values that went through a low format between two steps."""

from __future__ import annotations

from typing import Any

import torch

from narrowcast.core.ledger.identity import FORWARD
from narrowcast.core.policy import Site
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.statistics.by_storage import has_storage
from narrowcast.runtime.sites.python_stack import loop_line
from narrowcast.runtime.torch_bridge import FORMATS, LOW, tensors_in, values_of
from narrowcast.runtime.torch_surface.dispatch import quietly
from narrowcast.runtime.torch_surface.modules import optimized_by
from narrowcast.training.check.gradients import Found

_SURE = 16
"""Of fewer elements all may be representable in a low format by chance."""


class RoundedWeights:
    """Weights that a step left with values that no low format has, and the next step finds rounded to one."""

    def __init__(self) -> None:
        self.found: Found | None = None
        self._optimizer: Any = None
        self._left: dict[int, torch.Tensor] = {}  # weights, by identity, as a step has left them: in no low format
        self._widened: dict[torch.Size, Site] = {}  # by shape: the line of the last cast from a low format to fp32

    def widens(self, call: SeenCall) -> None:
        """Note a cast, or a copy, from a low format to fp32."""
        read = tensors_in(call.args)
        if (
            call.is_cast
            and call.id.direction == FORWARD
            and call.results
            and call.results[0].dtype is torch.float32
            and read
            and read[-1].dtype in LOW
        ):
            self._widened[call.results[0].shape] = loop_line()

    def steps(self, optimizer: Any) -> None:
        """Note a finding if weights that this optimizer is about to change were rounded since its last step."""
        self._optimizer = optimizer
        weights = [values_of(p) for p in optimized_by(optimizer) if self._left.pop(id(p), None) is not None]
        with quietly():
            rounded = [(value, dtype) for value in weights if (dtype := _low_format_of(value)) is not None]
        if not rounded:
            return
        value, dtype = rounded[0]
        self.found = (
            "weights rounded between steps",
            f"weights in fp32 went through {FORMATS[dtype]} since the last step: what it has added to them below half "
            "a unit of that is lost",
            "Keep the weights that are trained in fp32, and convert a copy: copy.deepcopy(model).to(...), or save them "
            "in fp32.",
            self._widened.get(value.shape) or self._of_whole(value) or loop_line(),
        )

    def _of_whole(self, value: torch.Tensor) -> Site | None:
        """Return the line of the largest cast, of all weights in one vector."""
        shape = max(self._widened, key=lambda shape: shape.numel(), default=torch.Size())
        return self._widened.get(shape) if shape.numel() > value.numel() else None

    def stepped(self) -> None:
        """Note the weights that no low format represents."""
        parameters = [] if self._optimizer is None else list(optimized_by(self._optimizer))
        values = [(p, values_of(p)) for p in parameters]
        with quietly():
            self._left |= {id(p): p for p, value in values if _is_inspected(value) and _low_format_of(value) is None}


def _is_inspected(value: torch.Tensor) -> bool:
    return has_storage(value) and value.dtype is torch.float32 and value.numel() >= _SURE


def _low_format_of(value: torch.Tensor) -> torch.dtype | None:
    """Return the low format that represents all values, not all of them zero; None if none does."""
    if not _is_inspected(value) or not bool(value.any()):
        return None
    by_digits = sorted(LOW, key=lambda low: torch.finfo(low).eps, reverse=True)  # fp16 has most of what bf16 has
    return next((low for low in by_digits if bool(value.to(low).to(torch.float32).equal(value))), None)
