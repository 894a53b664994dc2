"""What steps of training change: restored afterwards, and asked about."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import increment_version

from narrowcast.observation.restore.memory import in_memory
from narrowcast.observation.restore.process import Process
from narrowcast.observation.trial.finiteness import is_finite
from narrowcast.runtime.torch_bridge import LOW
from narrowcast.runtime.torch_surface.autograd import gradient_of
from narrowcast.runtime.torch_surface.dispatch import quietly, storage_key
from narrowcast.runtime.torch_surface.grad_scaling import scale_of
from narrowcast.runtime.torch_surface.modules import optimized_by


class KeptMemory(Process):
    """What steps change is restored, and asked about: weights, gradients, states of optimizers, scales."""

    def __init__(self) -> None:
        super().__init__()
        self._models: dict[int, torch.nn.Module] = {}
        self._optimizers: dict[int, Any] = {}
        self._low_at_end: dict[str, bool] | None = None
        self._scales: dict[int, torch.Tensor] = {}  # of scalers that were made, or first seen, in the steps

    def model(self, model: torch.nn.Module) -> None:
        """Note that a model is called: its state is to be restored."""
        if id(model) not in self._models:
            self._models[id(model)] = model
            super().model(model)

    def optimizer(self, optimizer: Any, is_seen: bool = True) -> None:
        """Note that an optimizer is about to step. is_seen: its ops are; else all that it may write to is copied."""
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = optimizer
            super().optimizer(optimizer, is_seen)

    # -- what is known -------------------------------------------------------------------------------------------------

    def gradients(self) -> dict[int, torch.Tensor]:
        """Return the current gradients of the parameters of models and optimizers, by storage key."""
        return {storage_key(t): t for t in in_memory([gradient_of(parameter) for _, parameter in self._parameters()])}

    def names(self) -> dict[int, str]:
        """Return the names of the models' parameters, by storage key."""
        rows = self._parameters()
        return {storage_key(part): name for name, parameter in rows if name for part in in_memory(parameter)}

    def weights(self) -> list[torch.Tensor]:
        """Return the parameters of models and optimizers as they lie in memory."""
        return in_memory([parameter for _, parameter in self._parameters()])

    def scales(self) -> set[int]:
        """Return the storage keys of the scales of all scalers."""
        scales = [scale_of(scaler) for scaler in self._living.scalers]
        scales += [loss.scale for s in self._living.scalers for loss in vars(s).get("_losses", {}).values()]
        return {storage_key(scale) for scale in scales if scale is not None} | self._scales.keys()

    def meets_scale(self, scale: torch.Tensor) -> None:
        """Note that a scaler updates its scale."""
        self._scales[storage_key(scale)] = scale

    def states(self) -> list[torch.Tensor]:
        """Return the state of the optimizers that have stepped, as it lies in memory."""
        return [t for optimizer in self._optimizers.values() for t in in_memory(list(optimizer.state.values()))]

    def trained(self) -> set[int]:
        """Return the parameters, by identity, of the optimizers that have stepped."""
        return {id(parameter) for optimizer in self._optimizers.values() for parameter in optimized_by(optimizer)}

    def optimized(self) -> set[int]:
        """Return the storage keys of the parameters of the optimizers that have stepped."""
        return {storage_key(t) for o in self._optimizers.values() for t in in_memory(list(optimized_by(o)))}

    @property
    def trains_what_was_there(self) -> bool:
        """Whether weights of an optimizer that has stepped, or else those of models, were there before the steps."""
        stepped = [parameter for optimizer in self._optimizers.values() for parameter in optimized_by(optimizer)]
        trained = stepped or [parameter for _, parameter in self._parameters() if parameter.requires_grad]
        return any(map(self.was_there, in_memory(trained)))

    def low_weights(self) -> dict[str, bool]:
        """Return whether the models' weights in low formats that require gradients were written to, or replaced, by
        name.
        """
        if self._low_at_end is not None:
            return self._low_at_end
        low = [(name, p) for name, p in self._parameters() if name and p.requires_grad and p.dtype in LOW]
        return {name: not all(map(self._is_untouched, in_memory(p))) for name, p in low}

    def no_longer_finite(self) -> list[str]:
        """Return the names of the models' parameters that held numbers before the steps, and now NaN or infinity."""
        names = self.names()
        with quietly():
            return [
                names[key]
                for key, now, before in self._memory.items()
                if key in names and now.is_floating_point() and not is_finite(now) and is_finite(before)
            ]

    def never_numbers(self) -> list[str]:
        """Return the names of the models' parameters that are trained, and hold NaN."""
        trained = [(name, p) for name, p in self._parameters() if name and p.requires_grad and p.is_floating_point()]
        with quietly():
            return [name for name, p in trained if any(bool(part.isnan().any()) for part in in_memory(p))]

    def _is_untouched(self, tensor: torch.Tensor) -> bool:
        return self.was_there(tensor) and tensor not in self._memory

    def _parameters(self) -> list[tuple[str, torch.Tensor]]:
        named = [row for model in self._models.values() for row in model.named_parameters()]
        others = [("", parameter) for optimizer in self._optimizers.values() for parameter in optimized_by(optimizer)]
        return [*others, *named]

    # -- at the end ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> KeptMemory:
        return self

    def __exit__(self, *raised: object) -> None:
        """Restore all memory, objects and generators."""
        with quietly():
            self._low_at_end = self.low_weights()
            self.restore()
            for _, parameter in self._parameters():
                parts = in_memory(parameter)
                if any(part in self._memory for part in parts) and not parameter.is_inference():
                    increment_version(parameter)  # a write through .data does not: cached casts depend on it
