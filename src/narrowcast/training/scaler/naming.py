"""Names of parameters: the model's, the optimizer's own, those of a model that is watched, or where it stands."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from narrowcast.runtime.torch_surface.modules import without_wrapper


def name_of(parameter: torch.Tensor, number: int, optimizer: Any, models: Iterable[torch.nn.Module]) -> str:
    """The name under which the user knows a parameter, by identity. number: in the optimizer, from 0."""
    for model in models:
        for name, other in model.named_parameters():
            if other is parameter:
                return without_wrapper(name)
    for index, group in enumerate(optimizer.param_groups):
        if number < len(group["params"]):
            names = group.get("param_names")
            if names is not None:
                return str(names[number])
            return f"parameter {number} of group {index} {tuple(parameter.shape)}"
        number -= len(group["params"])
    return f"a parameter {tuple(parameter.shape)}"
