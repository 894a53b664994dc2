"""transformers' Trainer: a mixin that puts our regions where it asks for autocasting, and our scaler into its steps."""

from __future__ import annotations

from typing import Any

from narrowcast.errors import TrainingError
from narrowcast.integrations.accelerate import attach
from narrowcast.integrations.resuming import load_precision, save_precision
from narrowcast.integrations.training import TrainingPrecision, find_framework

FLAGS = ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval")
OVERRIDDEN = ("autocast_smart_context_manager", "create_accelerator_and_postprocess", "_save_scaler", "_load_scaler")


class PrecisionMixin:
    """`class MyTrainer(PrecisionMixin, Trainer)`, also with Seq2SeqTrainer; then::

        MyTrainer(model=..., args=TrainingArguments(bf16=False, fp16=False),
                  precision=TrainingPrecision(policy=..., dtype="bf16"))

    Training, evaluation and `predict_with_generate` run in the region; the backward, clipping and stepping use our
    scaler. Checkpoints have the policy's digest and the scaler's state. What evaluation gives is fp32.

    Raises TrainingError if transformers is missing, has not what the mixin overrides, or would autocast or convert the
    model itself (`bf16`, `fp16`, `bf16_full_eval`, `fp16_full_eval`, `accelerate launch --mixed_precision`).
    """

    precision: TrainingPrecision

    def __init__(self, *args: Any, precision: TrainingPrecision | None = None, **kwargs: Any) -> None:
        transformers = find_framework("transformers", "transformers accelerate", type(self).__name__)
        below = super()
        missing = [name for name in OVERRIDDEN if not hasattr(below, name)]
        if missing:
            raise TrainingError(
                f"{type(self).__name__} with transformers {transformers.__version__}",
                f"the class after PrecisionMixin has no {missing[0]}",
                advice="Write class MyTrainer(PrecisionMixin, Trainer), with a transformers that the page names.",
            )
        self.precision = TrainingPrecision() if precision is None else precision
        super().__init__(*args, **kwargs)
        told: Any = self
        told.add_callback(_callback(transformers, self.precision))

    def create_accelerator_and_postprocess(self) -> None:
        """The trainer's Accelerator, with our scaler; nothing else may autocast."""
        trainer: Any = self
        flags = [name for name in FLAGS if getattr(trainer.args, name, False)]
        if flags:
            raise TrainingError(
                f"{type(self).__name__}, policy {self.precision.policy.name}",
                f"TrainingArguments({flags[0]}=True) has the Trainer choose formats, too, and its choice would rule",
                advice=f"Write TrainingArguments({', '.join(f'{name}=False' for name in flags)}) and "
                "precision=TrainingPrecision(policy=..., dtype=...).",
            )
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.precision.follow(trainer.model)
        self.precision.on_device(trainer.accelerator.device.type)
        attach(trainer.accelerator, self.precision, type(self).__name__)

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        """The region; in training, the begin of a step."""
        return self.precision.around_forward()

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Also what generates runs in the region."""
        with self.precision.region:
            found = super().prediction_step(*args, **kwargs)  # type: ignore[misc]
        return find_framework("accelerate.utils", "accelerate", type(self).__name__).convert_to_fp32(found)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As ever; what looks at it is closed, also after an error."""
        with self.precision:
            return super().train(*args, **kwargs)  # type: ignore[misc]

    def _save_scaler(self, output_dir: str) -> None:
        super()._save_scaler(output_dir)  # type: ignore[misc]
        trainer: Any = self
        if trainer.args.should_save:
            save_precision(self.precision, output_dir)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """After the scaler, which has a file of its own, the rest; each is said if it is not as it was."""
        if checkpoint is None:
            return
        if self.precision.scaler is not None:
            super()._load_scaler(checkpoint)  # type: ignore[misc]
        load_precision(self.precision, checkpoint)


def _callback(transformers: Any, precision: TrainingPrecision) -> Any:
    """What the Trainer tells of its steps."""

    class EndOfSteps(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            precision.end_step()

    return EndOfSteps()
