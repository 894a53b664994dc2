"""transformers' Trainer: a mixin that puts our regions where its own autocasting is, and our scaler into its steps."""

from __future__ import annotations

from functools import wraps
from typing import Any

from narrowcast.errors import TrainingError
from narrowcast.integrations.accelerate import attach, run_in_region
from narrowcast.integrations.resuming import load_precision, save_precision
from narrowcast.integrations.training import TrainingPrecision, find_framework
from narrowcast.runtime.sites.python_stack import loop_line

FLAGS = ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval")
OVERRIDDEN = ("create_accelerator_and_postprocess", "_save_scaler", "_load_scaler")
TO_OPEN = (
    "Have the Trainer prepare the model that it trains: a model that is wrapped before (nn.DataParallel), or another "
    "one in compute_loss, runs in the region only in `with trainer.precision.training():`."
)


class PrecisionMixin:
    """`class MyTrainer(PrecisionMixin, Trainer)`, also with Seq2SeqTrainer; then::

        MyTrainer(model=..., args=TrainingArguments(bf16=False, fp16=False),
                  precision=TrainingPrecision(policy=..., dtype="bf16"))

    As with the Trainer's own `bf16=True`, the model's forward runs in the region and gives fp32, in training,
    evaluation and `predict_with_generate`, and a loss computed of its logits is outside of it, bit for bit the same
    under the policy `native`. The backward, clipping and stepping use our scaler. Checkpoints have the policy's digest
    and the scaler's state.

    Raises TrainingError if transformers is missing, has not what the mixin overrides, stands before the mixin among the
    bases, or would autocast or convert the model itself (`bf16`, `fp16`, `bf16_full_eval`, `fp16_full_eval`,
    `accelerate launch --mixed_precision`).
    """

    precision: TrainingPrecision

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        first = next(base for base in cls.__mro__ if OVERRIDDEN[0] in vars(base))
        if not issubclass(first, PrecisionMixin):
            asked = f"class {cls.__name__}({', '.join(base.__name__ for base in cls.__bases__)})"
            found = f"{first.__name__} comes before PrecisionMixin, which would never be asked: it would train in fp32"
            where = loop_line().origins
            raise TrainingError(asked, found, where, f"Write class {cls.__name__}(PrecisionMixin, {first.__name__}).")

    def __init__(self, *args: Any, precision: TrainingPrecision | None = None, **kwargs: Any) -> None:
        transformers = find_framework("transformers", "transformers accelerate", type(self).__name__)
        below = super()
        missing = [name for name in OVERRIDDEN if not hasattr(below, name)]
        if missing:
            asked = f"{type(self).__name__} with transformers {transformers.__version__}"
            advice = "Write class MyTrainer(PrecisionMixin, Trainer), with a transformers that the page names."
            raise TrainingError(asked, f"the class after PrecisionMixin has no {missing[0]}", advice=advice)
        self.precision = TrainingPrecision() if precision is None else precision
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the trainer's Accelerator, with our scaler, and our region for its own; nothing else may autocast."""
        trainer: Any = self
        flags = [name for name in FLAGS if getattr(trainer.args, name, False)]
        if flags:
            found = f"TrainingArguments({flags[0]}=True) has the Trainer choose formats, too, and its choice would rule"
            off = ", ".join(f"{name}=False" for name in flags)
            advice = f"Write TrainingArguments({off}) and precision=TrainingPrecision(policy=..., dtype=...)."
            raise TrainingError(f"{type(self).__name__}, policy {self.precision.policy.name}", found, advice=advice)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.precision.follow(trainer.model)
        self.precision.on_device(trainer.accelerator.device.type)
        accelerator = trainer.accelerator
        attach(accelerator, self.precision, type(self).__name__, TO_OPEN)
        prepare = accelerator.prepare_model
        to_fp32 = find_framework("accelerate.utils", "accelerate", type(self).__name__).convert_to_fp32

        @wraps(prepare)
        def in_regions(*args: Any, **kwargs: Any) -> Any:
            prepared = prepare(*args, **kwargs)
            run_in_region(accelerator.unwrap_model(prepared), self.precision, to_fp32)
            return prepared

        accelerator.prepare_model = in_regions

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as usual; what observes is closed, also after an error."""
        with self.precision:
            return super().train(*args, **kwargs)  # type: ignore[misc]

    def _save_scaler(self, output_dir: str) -> None:
        super()._save_scaler(output_dir)  # type: ignore[misc]
        trainer: Any = self
        if trainer.args.should_save:
            save_precision(self.precision, output_dir)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Load the rest after the scaler, which has a file of its own; each difference is reported."""
        if checkpoint is None:
            return
        if self.precision.scaler is not None:
            super()._load_scaler(checkpoint)  # type: ignore[misc]
        load_precision(self.precision, checkpoint)
