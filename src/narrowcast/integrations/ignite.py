"""PyTorch-Ignite: a trainer and an evaluator whose model and loss run in our region, with our scaler."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from narrowcast.errors import TrainingError
from narrowcast.integrations.training import TrainingPrecision, find_framework


def _same(output: Any) -> Any:
    return output


def _loss_item(x: Any, y: Any, y_pred: Any, loss: torch.Tensor) -> Any:
    return loss.item()


class IgnitePrecision(TrainingPrecision):
    """Ignite's engines under a policy::

        precision = IgnitePrecision(policy=..., dtype="bf16")
        trainer = precision.trainer(model, optimizer, loss_fn, gradient_accumulation_steps=4)
        evaluator = precision.evaluator(model, metrics=...)
        Checkpoint({"model": model, "optimizer": optimizer, "trainer": trainer, "precision": precision}, ...)

    The settings are those of `TrainingPrecision`. An update function of your own may use `precision.model_fn`,
    `backward` and `step`.
    """

    def model_fn(self, model: Any, x: Any) -> Any:
        """Return the model's output in the region, as Ignite's `model_fn`: for evaluators and engines of your own."""
        with self.around_forward():
            return model(x)

    def trainer(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        device: str | torch.device | None = None,
        non_blocking: bool = False,
        prepare_batch: Callable[..., Any] | None = None,
        model_transform: Callable[[Any], Any] = _same,
        output_transform: Callable[[Any, Any, Any, torch.Tensor], Any] = _loss_item,
        deterministic: bool = False,
        amp_mode: str | None = None,
        scaler: Any = False,
        gradient_accumulation_steps: int = 1,
        model_fn: Callable[[Any, Any], Any] = operator.call,
        clip: Callable[[], object] | None = None,
    ) -> Any:
        """Return a trainer like `create_supervised_trainer`, with its arguments; forward and loss run in the region.

        clip: called before each step, when gradients are unscaled. `amp_mode` and `scaler` belong to Ignite's own
        autocasting: TrainingError.
        """
        engine = find_framework("ignite.engine", "pytorch-ignite", "IgnitePrecision.trainer")
        _refuse(amp_mode, scaler)
        if gradient_accumulation_steps < 1:
            asked = f"gradient_accumulation_steps={gradient_accumulation_steps}"
            raise TrainingError(asked, "batches are counted from 1", advice="Give 1 or more.")
        self.follow(model)
        prepare, every = prepare_batch or engine._prepare_batch, gradient_accumulation_steps

        def update(trainer: Any, batch: Any) -> Any:
            if (trainer.state.iteration - 1) % every == 0:
                optimizer.zero_grad()
            model.train()
            x, y = prepare(batch, device=device, non_blocking=non_blocking)
            with self.training():
                y_pred = model_transform(model_fn(model, x))
                loss = loss_fn(y_pred, y)
                if every > 1:
                    loss = loss / every
            self.backward(loss)
            if trainer.state.iteration % every == 0:
                self.step(optimizer, clip=clip)
            return output_transform(x, y, y_pred, loss * every)

        trainer_engine = (engine.DeterministicEngine if deterministic else engine.Engine)(update)
        for event in (engine.Events.COMPLETED, engine.Events.TERMINATE):
            trainer_engine.add_event_handler(event, self.close)
        return trainer_engine

    def evaluator(
        self,
        model: torch.nn.Module,
        metrics: dict[str, Any] | None = None,
        *,
        model_fn: Callable[[Any, Any], Any] = operator.call,
        amp_mode: str | None = None,
        **options: Any,
    ) -> Any:
        """Return an evaluator like `create_supervised_evaluator`; `model_fn`, which may generate, is in the region."""
        engine = find_framework("ignite.engine", "pytorch-ignite", "IgnitePrecision.evaluator")
        _refuse(amp_mode, False)
        if self._model is None:
            self.follow(model)

        def inside(model: Any, x: Any) -> Any:
            with self.region:
                return model_fn(model, x)

        return engine.create_supervised_evaluator(model, metrics, model_fn=inside, **options)


def _refuse(amp_mode: str | None, scaler: Any) -> None:
    if amp_mode is not None or scaler:
        given = f'amp_mode="{amp_mode}"' if amp_mode is not None else f"scaler={scaler}"
        found = "Ignite's own torch.autocast would rule inside our region, and its scaler scale once more"
        advice = "Leave it out, and write IgnitePrecision(policy=..., dtype=..., scaler=...)."
        raise TrainingError(f"an Ignite engine with {given}, under a policy", found, advice=advice)
