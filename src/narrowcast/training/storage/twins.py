"""A few weights that step as an optimizer would step them: one of its class, with its settings, over copies."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from narrowcast.runtime.torch_bridge import evenly_spaced, values_of
from narrowcast.runtime.torch_surface.modules import step_without_hooks
from narrowcast.training.storage.slots import StoredParameter
from narrowcast.training.storage.store import Stored, stored_of

_SIDE, _MOST = 32, 1024
"""How many places of each dimension are taken of a parameter, and elements of a vector."""
Settings = Mapping[str, Any]
"""The settings of a group of parameters."""


def settings_of(group: Mapping[str, Any], rate: float | None) -> dict[str, Any]:
    """Return a group's settings, with its highest learning rate so far, or this one."""
    own = {name: value for name, value in group.items() if name != "params"}
    found = {
        name: value.clone() if isinstance(value, torch.Tensor) else copy.copy(value) for name, value in own.items()
    }
    if "lr" in found:
        lr = rate if rate is not None else max(float(found["lr"]), float(found.get("initial_lr", 0.0)))
        found["lr"] = torch.full_like(found["lr"], lr) if isinstance(found["lr"], torch.Tensor) else lr
    return found


def part_of_parameter(parameter: torch.Tensor) -> torch.Tensor:
    """Return some elements of a parameter, evenly spaced, in as many dimensions."""
    values = values_of(parameter.detach())
    return evenly_spaced(values, _MOST if values.dim() == 1 else _SIDE)


class Twin:
    """Copies of weights, and an optimizer over them; stored as a parameter is, if that is given. Raises what its class
    raises where it takes other arguments than its groups' settings, and where a step needs a closure.
    """

    def __init__(
        self,
        optimizer: Any,
        settings: Settings,
        weights: Sequence[torch.Tensor],
        as_stored: StoredParameter | None = None,
    ) -> None:
        self.weights = [torch.nn.Parameter(weight.clone()) for weight in weights]
        parameters = list(inspect.signature(type(optimizer).__init__).parameters.values())[2:]  # after self, parameters
        is_open = any(one.kind is one.VAR_KEYWORD for one in parameters)
        accepted = dict.fromkeys(optimizer.defaults) if is_open else {one.name for one in parameters}
        known = {**vars(optimizer), **settings}  # what else a group holds is what its steps have noted
        given = {name: known[name] for name in accepted if name in known}
        group = {name: value for name, value in settings.items() if name in accepted}
        self.optimizer = type(optimizer)([{**group, "params": self.weights}], **given)
        self._step = step_without_hooks(self.optimizer)
        stored = stored_of(optimizer)
        if stored is not None and as_stored is not None:
            slots = [StoredParameter.of(f"{n}", weight, as_stored.kept, 0) for n, weight in enumerate(self.weights)]
            self._step = Stored(self.optimizer, stored.name, stored.storage, slots).step

    def step(self, gradients: Sequence[torch.Tensor], times: int = 1) -> None:
        """Step with these gradients, in the dtype of the weights."""
        for _ in range(times):
            for weight, gradient in zip(self.weights, gradients, strict=True):
                weight.grad = gradient.to(weight.grad_dtype or weight.dtype).clone()
            with torch.enable_grad():  # which steps switch off themselves
                self._step()

    def values(self) -> torch.Tensor:
        """Return all weights in fp64, in a row."""
        return torch.cat([weight.detach().double().flatten() for weight in self.weights])

    def states(self) -> dict[tuple[int, str], torch.Tensor]:
        """Return the tensors of the optimizer's state, by the weight's number and the name."""
        own = self.optimizer.state
        return {
            (n, str(name)): value
            for n, weight in enumerate(self.weights)
            for name, value in own.get(weight, {}).items()
            if isinstance(value, torch.Tensor)
        }
