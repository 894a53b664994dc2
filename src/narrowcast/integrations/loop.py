"""Plain loops, in timm's style: a factory of contexts, and a callable that scales, clips and steps."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from narrowcast.errors import TrainingError
from narrowcast.integrations.training import TrainingPrecision, find_framework

CLIP_MODES = ("norm", "value", "agc")


class LoopPrecision(TrainingPrecision):
    """`amp_autocast` and `loss_scaler` for a loop like timm's `train.py`::

        precision = LoopPrecision(policy=..., dtype="bf16", device_type="cuda")
        amp_autocast, loss_scaler = precision.amp_autocast, precision

        with amp_autocast():
            loss = loss_fn(model(x), target)
        loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters(), need_update=is_last_micro_batch)

    A checkpoint has it under `loss_scaler.state_dict_key`, as timm's has; the state of timm's own scaler is read, too.
    The settings are those of `TrainingPrecision`, and `backward` and `step` are there, too.
    """

    state_dict_key = "amp_scaler"
    to_open = "Run the forward and its loss in `with precision.amp_autocast():`."

    def amp_autocast(self) -> Any:
        """Return a context of the region that, with gradients, begins a step. For evaluation and generation as well."""
        return self.around_forward()

    def __call__(
        self,
        loss: torch.Tensor,
        optimizer: torch.optim.Optimizer,
        clip_grad: float | None = None,
        clip_mode: str = "norm",
        parameters: Iterable[torch.Tensor] | None = None,
        create_graph: bool = False,
        need_update: bool = True,
    ) -> None:
        """Backward; and unless more micro-batches follow, unscale, clip and step.

        clip_mode: `norm`, `value`, or timm's `agc`. TrainingError for another one, or without the parameters to clip.
        """
        if clip_grad is not None and (parameters is None or clip_mode not in CLIP_MODES):
            what = "there are no parameters to clip" if parameters is None else f"no clip_mode {clip_mode!r}"
            advice = f"Give parameters=model.parameters(), and one of {', '.join(CLIP_MODES)}."
            raise TrainingError(f"loss_scaler(clip_grad={clip_grad}, clip_mode={clip_mode!r})", what, advice=advice)
        self.backward(loss, create_graph=create_graph)
        if need_update:
            self.step(optimizer, clip=None if clip_grad is None else partial(_clip, parameters, clip_grad, clip_mode))


def _clip(parameters: Any, value: float, mode: str) -> None:
    if mode == "norm":
        torch.nn.utils.clip_grad_norm_(parameters, value)
    elif mode == "value":
        torch.nn.utils.clip_grad_value_(parameters, value)
    else:
        find_framework("timm.utils.agc", "timm", 'clip_mode="agc"').adaptive_clip_grad(parameters, value)
