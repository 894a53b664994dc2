"""Restores what steps of training change: all memory that existed before and is written to, and objects."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import increment_version

from narrowcast.observation.restore.memory import CopiedMemory, in_memory
from narrowcast.observation.restore.objects import LivingObjects
from narrowcast.observation.trial.finiteness import is_finite
from narrowcast.reports.results.scaler_history import History
from narrowcast.runtime.torch_bridge import LOW, OpFacts, written_tensors
from narrowcast.runtime.torch_surface.autograd import gradient_of
from narrowcast.runtime.torch_surface.dispatch import StorageWeakRef, quietly, storage_key
from narrowcast.runtime.torch_surface.grad_scaling import scale_of
from narrowcast.runtime.torch_surface.modules import optimized_by
from narrowcast.training.scaler.findings import Findings
from narrowcast.training.scaler.losses import LossScale
from narrowcast.training.scaler.steps import Steps


class KeptMemory:
    """Copies of memory, taken before it is written to for the first time, and objects as they were at the start.

    Memory is copied if a tensor in it was alive at the start. Other memory is left as the steps leave it: restoring
    older values would overwrite a tensor that was made in them.
    """

    def __init__(self) -> None:
        with quietly():
            self._living = LivingObjects((Findings, History, LossScale, Steps))
            there = in_memory(self._living.tensors())
            self._there = {storage_key(t): StorageWeakRef(t.untyped_storage()) for t in there}
        self._models: dict[int, torch.nn.Module] = {}
        self._optimizers: dict[int, Any] = {}
        self._memory = CopiedMemory()
        self._generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        self._low_at_end: dict[str, bool] | None = None
        self._scales: dict[int, torch.Tensor] = {}  # of scalers that were made, or first seen, in the steps

    # -- as it runs ----------------------------------------------------------------------------------------------------

    def model(self, model: torch.nn.Module) -> None:
        """Note that a model is called: its state is to be restored."""
        if id(model) not in self._models:
            self._models[id(model)] = model
            with quietly():
                self._living.model(model)

    def optimizer(self, optimizer: Any, is_seen: bool = True) -> None:
        """Note that an optimizer is about to step. is_seen: its ops are; else all that it may write to is copied."""
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = optimizer
            with quietly():
                self._living.optimizer(optimizer)
                if not is_seen:
                    for tensor in in_memory(*optimized_by(optimizer), *optimizer.state.values()):
                        self._copy(tensor)

    def before_op(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Copy what an op is about to write to, if it existed before the steps, and the state of its generator; return
        all tensors that it writes to.
        """
        generator = kwargs.get("generator")
        if generator is not None and id(generator) not in self._generators:
            self._generators[id(generator)] = generator, generator.get_state()
        targets = written(facts, args, kwargs)
        with quietly():
            for tensor in targets:
                self._copy(tensor)
        return targets

    def _copy(self, tensor: torch.Tensor) -> None:
        if storage_key(tensor) in self._there:
            self._memory.copy(tensor)

    # -- what is known -------------------------------------------------------------------------------------------------

    def was_there(self, tensor: torch.Tensor) -> bool:
        """Return whether the memory of a tensor existed before the steps."""
        return storage_key(tensor) in self._there

    def gradients(self) -> set[int]:
        """Return the storage keys of the current gradients of the parameters of models and optimizers."""
        return {storage_key(t) for t in in_memory([gradient_of(parameter) for _, parameter in self._parameters()])}

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
            self._memory.restore()
            self._living.restore()
            for _, parameter in self._parameters():
                parts = in_memory(parameter)
                if any(part in self._memory for part in parts) and not parameter.is_inference():
                    increment_version(parameter)  # a write through .data does not: cached casts depend on it
            for generator, state in self._generators.values():
                generator.set_state(state)


def written(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a call writes to, as they lie in memory."""
    return in_memory(written_tensors(facts, args, kwargs))
