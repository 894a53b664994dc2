"""Accelerate: `Accelerator(mixed_precision="no")`, and ours in the place of its autocast and scaler."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import MethodType
from typing import Any, Unpack

import torch

from narrowcast.errors import Origin, TrainingError
from narrowcast.frontends.eager.region import autocast
from narrowcast.integrations.resuming import load_precision, save_precision
from narrowcast.integrations.training import Settings, TrainingPrecision, find_framework

SCALER_FILE = "scaler.pt"
"""Where `save_state` puts the scaler's state."""
ENGINES = ("DEEPSPEED", "MEGATRON_LM")
"""They scale and step by themselves."""
FSDP_FORMATS = ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype")
"""What FSDP casts, by the names of its two versions' settings."""
TO_OPEN = (
    "Make AcceleratePrecision before anything is prepared, and write precision.prepare(model, optimizer, ...) for "
    "accelerator.prepare(...); or run the forward in `with accelerator.autocast():`."
)


class AcceleratePrecision(TrainingPrecision):
    """Precision for an Accelerator, and `prepare` for what it prepares::

        accelerator = Accelerator(mixed_precision="no", gradient_accumulation_steps=4)
        precision = AcceleratePrecision(accelerator, policy=..., dtype="bf16")
        model, optimizer, loader = precision.prepare(model, optimizer, loader)

    The loop stays as it is. The model's forward runs in the region, also where `unwrap_model(model).generate(...)` or a
    wrapper calls it, and `with accelerator.autocast()` is our region, for the loss. `accelerator.backward`,
    `clip_grad_norm_`, `clip_grad_value_` and the optimizer's `step` use our scaler. `save_state` and `load_state` have
    the policy's digest and the scaler's state.

    fp32_outputs: floating results of the model come out in fp32, as Accelerate has it, so that a loss outside of the
        region is computed in fp32.

    The other settings are those of `TrainingPrecision`; `close()` at the end where it watches. Raises TrainingError if
    Accelerate is missing or would autocast itself, with DeepSpeed and Megatron, and at the first backward or step if no
    forward ran in the region, as after `accelerator.prepare` in the place of ours.
    """

    to_open = TO_OPEN

    def __init__(self, accelerator: Any, *, fp32_outputs: bool = True, **settings: Unpack[Settings]) -> None:
        asked = "AcceleratePrecision(accelerator)"
        self._accelerate = find_framework("accelerate", "accelerate", asked)
        settings.setdefault("device_type", accelerator.device.type)
        super().__init__(**settings)
        self._fp32_outputs = fp32_outputs
        self.accelerator = accelerator
        attach(accelerator, self, asked)
        accelerator.autocast = self._autocast
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._load)

    def prepare(self, *objects: Any, **options: Any) -> Any:
        """Return what `accelerator.prepare` returns, with models that run in the region."""
        for one in objects:
            if isinstance(one, torch.nn.Module):
                self.follow(one)
        prepared = self.accelerator.prepare(*objects, **options)
        for one_prepared in prepared if isinstance(prepared, (tuple, list)) else (prepared,):
            if isinstance(one_prepared, torch.nn.Module):
                run_in_region(self.accelerator.unwrap_model(one_prepared), self, self._convert)
        return prepared

    def loss(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a loss function that runs in the region."""

        @wraps(function, updated=())
        def inside(*args: Any, **kwargs: Any) -> Any:
            with self.region:
                return function(*args, **kwargs)

        return inside

    def _autocast(self, autocast_handler: Any = None) -> Any:
        """Return our region where Accelerate's would be; a handler that is switched off stays off."""
        if autocast_handler is not None and not autocast_handler.enabled:
            return autocast(self.device, enabled=False)
        return self.around_forward()

    def _convert(self, result: Any) -> Any:
        return self._accelerate.utils.convert_to_fp32(result) if self._fp32_outputs else result

    def _save(self, models: Any, weights: Any, folder: Any) -> None:
        """Save, beside the scaler's file of Accelerate, what it leaves out, in a file that it does not ask for."""
        if self.accelerator.is_main_process:
            save_precision(self, folder)

    def _load(self, models: Any, folder: Any) -> None:
        file = Path(folder) / SCALER_FILE
        if self.scaler is not None and not file.exists():
            asked, where = f"resuming from {folder} with a scaler", (Origin(str(file)),)
            advice = "Train in the low format that it was saved under, or give scaler=False."
            raise TrainingError(asked, "it was saved without one", where, advice)
        load_precision(self, folder)


def run_in_region(model: Any, precision: TrainingPrecision, convert: Callable[[Any], Any]) -> None:
    """Have the model's forward run in the region, as a method of this model, and of copies that are made of it; what
    it gives is converted. The region of another precision, which ran it before, is gone.
    """
    before, is_method = getattr(model.forward, "__narrowcast_before__", (None, False))
    if before is None:
        is_method = getattr(model.forward, "__self__", None) is model
        before = model.forward.__func__ if is_method else model.forward

    @wraps(before)  # of a method the function: signatures are read off it
    def in_region(*args: Any, **kwargs: Any) -> Any:
        this = args[0] if is_method else model
        with precision.around_forward() if this.training else precision.region:
            result = before(*args, **kwargs)
        return convert(result)

    in_region.__narrowcast_before__ = before, is_method  # type: ignore[attr-defined]
    model.forward = MethodType(in_region, model) if is_method else in_region


def attach(accelerator: Any, precision: TrainingPrecision, asked: str, to_open: str = TO_OPEN) -> None:
    """Have an Accelerator scale with our scaler, end our steps, and refuse to train where no region was opened; to_open
    says what to write there. TrainingError where it would autocast, too, or comes too late.
    """
    mode = getattr(accelerator, "mixed_precision", "no")
    if mode != "no" or getattr(accelerator, "native_amp", False):
        found = f'Accelerator(mixed_precision="{mode}") would autocast inside our region, and rule there'
        advice = 'Write Accelerator(mixed_precision="no"), also in `accelerate launch`, and give dtype= here.'
        raise TrainingError(f"{asked}, policy {precision.policy.name}", found, advice=advice)
    engine = str(getattr(accelerator, "distributed_type", "")).rpartition(".")[2]
    if engine in ENGINES:
        raise TrainingError(asked, f"{engine} scales and steps by itself", advice="Use DDP, or no plugin.")
    if engine == "FSDP":
        given = getattr(getattr(accelerator.state, "fsdp_plugin", None), "mixed_precision_policy", None)
        formats = [name for name in FSDP_FORMATS if getattr(given, name, None) not in (None, torch.float32)]
        if formats:
            found = f"FSDP has a mixed_precision_policy with {formats[0]}={getattr(given, formats[0])}, and would cast "
            found += "weights and inputs before the region does"
            advice = "Leave mixed_precision_policy out of FullyShardedDataParallelPlugin: the policy says the formats."
            raise TrainingError(asked, found, advice=advice)
        if not getattr(accelerator, "is_fsdp2", False):  # its shards are DTensors, which say who has the others
            precision.share_decisions(torch.distributed.group.WORLD)
    scaler = precision.scaler
    if scaler is not None and getattr(accelerator, "_optimizers", None):
        found = "an optimizer is prepared already, and would step without the scaler"
        raise TrainingError(asked, found, advice="Make the plugin before anything is prepared.")
    accelerator.scaler = scaler

    def unscale_gradients(optimizer: Any = None) -> None:
        """Unscale gradients. Accelerate's own function does nothing where `mixed_precision` is `no`."""
        wanted = accelerator._optimizers if optimizer is None else optimizer
        for one in wanted if isinstance(wanted, (tuple, list)) else (wanted,):
            if scaler is not None:
                scaler.unscale_(getattr(one, "optimizer", one))

    accelerator.unscale_gradients = unscale_gradients
    backward, prepare_optimizer = accelerator.backward, accelerator.prepare_optimizer

    @wraps(backward)
    def of_regions(*args: Any, **kwargs: Any) -> Any:
        precision.before_step(to_open)
        return backward(*args, **kwargs)

    @wraps(prepare_optimizer)
    def prepared(*args: Any, **kwargs: Any) -> Any:
        return _end_steps_of(prepare_optimizer(*args, **kwargs), accelerator, precision, to_open)

    accelerator.backward, accelerator.prepare_optimizer = of_regions, prepared
    for one in accelerator._optimizers:
        _end_steps_of(one, accelerator, precision, to_open)


def _end_steps_of(optimizer: Any, accelerator: Any, precision: TrainingPrecision, to_open: str) -> Any:
    """Have what Accelerate prepared report its steps to the precision."""
    step = optimizer.step
    if getattr(step, "__narrowcast_precision__", None) is precision:  # prepared before
        return optimizer

    @wraps(step)
    def ending(_: Any, *args: Any, **kwargs: Any) -> Any:
        if accelerator.sync_gradients:
            precision.before_step(to_open)
        result = step(*args, **kwargs)
        if accelerator.sync_gradients:
            precision.end_step()
        return result

    ending.__narrowcast_precision__ = precision  # type: ignore[attr-defined]
    optimizer.step = MethodType(ending, optimizer)
    return optimizer
