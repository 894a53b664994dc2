"""Several losses, each with a scale of its own: each backward is unscaled by itself before its gradients are added."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from narrowcast.runtime.torch_surface.grad_scaling import update_scale
from narrowcast.runtime.torch_surface.modules import optimized_by
from narrowcast.training.scaler.gradients import Flags, check, in_one, inverse_of


class LossScale:
    """The scale of one loss: on the device of the first loss, grown and backed off as torch's scaler does it. least:
    the scale is not backed off below it, or below the first scale if that is less.
    """

    restored_with_owner = True

    def __init__(self, first: float, least: float, tracker: int = 0) -> None:
        self.first, self.floor, self.first_tracker = first, min(least, first), tracker
        self.scale: torch.Tensor | None = None
        self.tracker: torch.Tensor | None = None
        self.found: torch.Tensor | None = None

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the scale, put on the device of the first loss."""
        if self.scale is None or self.tracker is None:
            self.scale = torch.full((), self.first, dtype=torch.float32, device=device)
            self.tracker = torch.full((), self.first_tracker, dtype=torch.int32, device=device)
        return self.scale

    def update(self, growth_factor: float, backoff_factor: float, growth_interval: int) -> None:
        """Grow or back off by what the backwards since the last update have found; not at all if there were none."""
        if self.scale is None or self.tracker is None or self.found is None:
            return
        update_scale(self.scale, self.tracker, self.found, growth_factor, backoff_factor, growth_interval)
        self.scale.clamp_(min=self.floor)
        self.found = None

    def data(self) -> dict[str, Any]:
        """Return its state as it is saved; reads the device."""
        if self.scale is None or self.tracker is None:
            return {"scale": self.first, "_growth_tracker": self.first_tracker}
        return {"scale": float(self.scale.item()), "_growth_tracker": int(self.tracker.item())}


def backward_of(
    loss: torch.Tensor, scale: LossScale, optimizers: Iterable[Any], group: Any, kwargs: dict[str, Any]
) -> list[Flags]:
    """Run the backward of the scaled loss, unscale its gradients and add them to those that were there; return the
    flags of each optimizer. Gradients that were there are held meanwhile.
    """
    optimizers = list(optimizers)
    factor = scale.on(loss.device)
    kept = {p: p.grad for optimizer in optimizers for p in optimized_by(optimizer)}
    for parameter in kept:
        parameter.grad = None
    try:
        (loss * factor.to(loss.device, non_blocking=True)).backward(**kwargs)
        inverse = inverse_of(factor)
        zero = torch.zeros((), device=factor.device)
        flags = [check(optimizer, inverse, zero, group) for optimizer in optimizers]
        for by_device in flags:
            flag = in_one(by_device.values(), factor.device) if by_device else zero
            scale.found = flag.clone() if scale.found is None else torch.maximum(scale.found, flag)
    finally:
        for parameter, before in kept.items():
            _add(parameter, before)
    return flags


@torch.no_grad()
def _add(parameter: torch.Tensor, before: torch.Tensor | None) -> None:
    """Add what was there before to the parameter's gradient, in the tensor that was there."""
    if before is None:
        return
    new = parameter.grad
    if new is None:
        parameter.grad = before
    elif before.is_sparse or new.is_sparse:
        parameter.grad = before + new
    else:
        parameter.grad = before.add_(new)
