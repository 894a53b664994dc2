"""Steps with a closure: gradients are unscaled and checked after each call of it, and a step is made whole or not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from narrowcast.runtime.torch_surface.modules import optimized_by


class _StepNotFinite(Exception):
    """Leaves the optimizer's step."""


def closure_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """The closure among the arguments of an optimizer's step."""
    first = kwargs.get("closure", args[0] if args else None)
    return first if callable(first) else None


def step_with_closure(
    optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], is_finite: Callable[[Any], bool]
) -> tuple[Any, bool]:
    """The optimizer's step, and whether it was made. Before the optimizer sees what a call of the closure gave,
    `is_finite` is asked; if it says no, parameters and state are what they were before the step. For that they are kept
    until it ends.
    """
    closure = closure_in(args, kwargs)
    weights = [(p, p.detach().clone()) for p in optimized_by(optimizer)]
    state = {p: copy.deepcopy(held) for p, held in optimizer.state.items()}

    def checked() -> Any:
        loss = closure() if closure is not None else None
        if not is_finite(loss):
            raise _StepNotFinite
        return loss

    if "closure" in kwargs:
        kwargs = {**kwargs, "closure": checked}
    else:
        args = (checked, *args[1:])
    try:
        return optimizer.step(*args, **kwargs), True
    except _StepNotFinite:
        with torch.no_grad():
            for parameter, before in weights:
                parameter.copy_(before)
        optimizer.state.clear()
        optimizer.state.update(state)
        return None, False
