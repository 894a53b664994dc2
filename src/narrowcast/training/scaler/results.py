"""What `step` gives: whether the optimizer stepped and why not, read from the device when it is asked for; by names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed

from narrowcast.runtime.torch_surface.modules import without_wrapper
from narrowcast.training.scaler.gradients import Culprits
from narrowcast.training.scaler.readings import HostNumbers
from narrowcast.training.scaler.stuck import why_skipped

Names = Callable[[int, Any], str]
"""(number in the optimizer, parameter) -> the name to show."""

TOO_LATE = "a fused optimizer decides on the device, and its gradients were freed before the result was known"
ELSEWHERE = "on another rank"


class StepResult:
    """The result of one `scaler.step(optimizer)`.

    value: what the optimizer's step returned (torch's scaler returns this alone); None where it was skipped by the
    host. Everything else is read when it is asked for, and waits for the device only where the host does not know yet:
    with fused optimizers, which decide there. `float(result)` is the value's, and `if result:` asks whether it stepped.
    """

    __slots__ = ("_culprits", "_look", "_names", "_reading", "_rows", "op", "value")

    def __init__(self, value: Any, skipped: HostNumbers, names: Names, look: Callable[[], Culprits | None]) -> None:
        self.value, self._reading, self._names = value, skipped, names
        self._look: Callable[[], Culprits | None] | None = look
        self._culprits: Culprits | None = None
        self._rows: tuple[tuple[str, str], ...] | None = None
        self.op = ""

    @property
    def skipped(self) -> bool:
        """Whether the optimizer did not step."""
        skipped = any(self._reading.values())
        self.look_if_skipped()
        return skipped

    @property
    def is_here(self) -> bool:
        """Whether all of it is known without waiting for the device."""
        return self._reading.is_here and (self._culprits is None or self._culprits.is_here)

    def look_if_skipped(self, always: bool = False) -> None:
        """Start looking at the gradients, which may be gone soon, if the host knows that the step was skipped."""
        if self._look is None or self._culprits is not None:
            return
        if always or (self._reading.is_here and any(self._reading.values())):
            self._culprits, self._look = self._look(), None

    @property
    def found(self) -> tuple[tuple[str, str], ...]:
        """Parameters whose gradients were not finite, each with `NaN` or `infinite`, as far as they could be seen."""
        if self._rows is None:
            rows = self._culprits.read() if self.skipped and self._culprits is not None else []
            self._rows = tuple((self._names(number, parameter), what) for number, parameter, what in rows)
        return self._rows

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of the parameters whose gradients were not finite."""
        return tuple(name for name, _ in self.found)

    @property
    def why(self) -> str:
        """Why the step was skipped, in words; empty where it was not."""
        if not self.skipped:
            return ""
        elsewhere = torch.distributed.is_available() and torch.distributed.is_initialized()
        was_seen = self._culprits is not None and self._culprits.has_gradients
        return why_skipped(self.found, self.op, ELSEWHERE if elsewhere and was_seen else TOO_LATE)

    def let_go(self) -> None:
        """Drop references to the gradients of this step, which are about to be replaced."""
        self._look = None

    def __bool__(self) -> bool:
        return not self.skipped

    def __float__(self) -> float:
        value = self.value
        return float(value.detach() if isinstance(value, torch.Tensor) else value)

    def __repr__(self) -> str:
        if not self._reading.is_here:
            return "<StepResult: not known yet, the device has not reported>"
        return f"<StepResult: {'skipped: ' + self.why if self.skipped else 'stepped'}>"


def name_of(optimizer: Any, models: Iterable[torch.nn.Module], number: int, parameter: torch.Tensor) -> str:
    """Return the name under which the user knows a parameter, by identity. number: in the optimizer, from 0."""
    for model in models:
        for name, other in model.named_parameters():
            if other is parameter:
                return without_wrapper(name)
    for index, group in enumerate(optimizer.param_groups):
        if number < len(group["params"]):
            names = group.get("param_names")
            return (
                f"parameter {number} of group {index} {tuple(parameter.shape)}" if names is None else str(names[number])
            )
        number -= len(group["params"])
    return f"a parameter {tuple(parameter.shape)}"
