"""What a step of training changes, put back: weights, buffers, gradients, optimizers, the scale of a GradScaler."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from narrowcast.runs.arguments import tensors_by_name
from narrowcast.runs.by_storage import has_storage
from narrowcast.runs.observer import SeenCall, quietly
from narrowcast.torch_surface.dispatch import storage_key

UNSCALE = "aten._amp_foreach_non_finite_check_and_unscale_.default"
UPDATE_SCALE = "aten._amp_update_scale_.default"


class Kept:
    """Copies of what the steps write to, taken before they do."""

    def __init__(self) -> None:
        self._models: dict[int, torch.nn.Module] = {}
        self._gradients: list[tuple[torch.nn.Parameter, torch.Tensor | None]] = []
        self._lying_in: dict[int, list[torch.Tensor]] = {}
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._optimizers: dict[int, tuple[Any, Any]] = {}

    def model(self, model: torch.nn.Module) -> None:
        """A model is called: what it holds is to be put back."""
        if id(model) in self._models:
            return
        self._models[id(model)] = model
        for tensor in (*model.parameters(), *model.buffers()):
            self._add(tensor)
        for parameter in model.parameters():
            self._gradients.append((parameter, parameter.grad))
            if parameter.grad is not None:
                self._add(parameter.grad)

    def optimizer(self, optimizer: Any) -> None:
        """An optimizer is about to step."""
        if id(optimizer) not in self._optimizers:
            with quietly():
                self._optimizers[id(optimizer)] = optimizer, copy.deepcopy(optimizer.state_dict())

    def before_write(self, call: SeenCall) -> None:
        """Copy what the call is about to write to, if it is to be put back."""
        for tensor in written(call):
            if call.facts.id == UPDATE_SCALE:
                self._add(tensor)
            for found in self._lying_in.get(storage_key(tensor), ()):
                if id(found) not in self._copies:
                    self._copies[id(found)] = found, found.detach().clone()

    def gradients(self) -> dict[int, str]:
        """The gradients that the models' parameters have now: names by where they lie."""
        return {
            storage_key(parameter.grad): name
            for model in self._models.values()
            for name, parameter in model.named_parameters()
            if parameter.grad is not None and has_storage(parameter.grad)
        }

    def names(self) -> dict[int, str]:
        """The models' parameters: names by where they lie."""
        return {
            storage_key(parameter): name
            for model in self._models.values()
            for name, parameter in model.named_parameters()
            if has_storage(parameter)
        }

    def put_back(self) -> None:
        """Give all of it its values back."""
        with quietly():
            for tensor, before in self._copies.values():
                tensor.detach().copy_(before)
            for optimizer, state in self._optimizers.values():
                optimizer.load_state_dict(state)
            for parameter, gradient in self._gradients:
                parameter.grad = gradient

    def _add(self, tensor: torch.Tensor) -> None:
        if has_storage(tensor):
            lying = self._lying_in.setdefault(storage_key(tensor), [])
            if not any(found is tensor for found in lying):
                lying.append(tensor)


def written(call: SeenCall) -> Iterator[torch.Tensor]:
    """The tensors that a call writes to."""
    names = {slot.name for slot in call.facts.slots if slot.written}
    for argument, tensor in tensors_by_name(call.facts, call.args, call.kwargs):
        if argument.partition(".")[0] in names and has_storage(tensor):
            yield tensor
