"""Where the weights of training are kept in more digits than they have: masters, in the optimizer's state or as what it
steps in the place of the model's weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from narrowcast.observation.statistics.rounding import units_in_last_place
from narrowcast.runtime.torch_bridge import FORMATS, LOW, values_of
from narrowcast.runtime.torch_surface.modules import optimized_by

_SAME = 0.99
"""The share of elements that are a master's, rounded, so that it is one."""
MASTER = "master"


@dataclass(slots=True)
class Master:
    """A weight in more digits. value: a tensor of the weight's shape. where: the name of the state that holds it; empty
    where the optimizer steps it in the place of the weight. apart: the share of the weight's elements that are more
    than a unit in the last place from it.
    """

    value: torch.Tensor
    where: str
    apart: float

    @property
    def matches(self) -> bool:
        """Whether the weight is this one, rounded in whichever way."""
        return self.apart == 0


def masters_of(model_weights: Mapping[str, torch.Tensor], optimizer: Any) -> dict[str, Master]:
    """Return the masters of weights in low formats, by the weights' names."""
    low = {name: weight for name, weight in model_weights.items() if weight.dtype in LOW and weight.requires_grad}
    return _in_state(low, optimizer) | _in_place(low, model_weights, optimizer)


def _in_state(low: Mapping[str, torch.Tensor], optimizer: Any) -> dict[str, Master]:
    """Return the masters that are a state: one of that name, or most of which are their weights in more digits."""
    found: dict[str, dict[str, Master]] = {}
    for name, weight in low.items():
        for key, value in dict(optimizer.state.get(weight, {})).items():
            if _is_wider(value, weight):
                found.setdefault(str(key), {})[name] = Master(value, str(key), units_apart(value, weight))
    are = [key for key, rows in found.items() if MASTER in key or _are_masters(rows.values())]
    return {name: master for key in are for name, master in found[key].items()}


def _are_masters(rows: Collection[Master]) -> bool:
    """Return whether most of the states of one name are their weights in more digits; an average is so of few."""
    return 2 * sum(1 - master.apart >= _SAME for master in rows) > len(rows)


def _in_place(
    low: Mapping[str, torch.Tensor], model_weights: Mapping[str, torch.Tensor], optimizer: Any
) -> dict[str, Master]:
    """Return what the optimizer steps in the place of the model's weights: as many tensors that are none of the
    model's, of the same shapes in the same order, in more digits.
    """
    own = {id(weight) for weight in model_weights.values()}
    stepped = [parameter for parameter in optimized_by(optimizer) if id(parameter) not in own]
    held = {id(parameter) for parameter in optimized_by(optimizer)}
    rows = [(name, weight) for name, weight in low.items() if id(weight) not in held]
    if len(rows) != len(stepped) or not all(_is_wider(m, w) for m, (_, w) in zip(stepped, rows, strict=True)):
        return {}
    pairs = zip(stepped, rows, strict=True)
    return {name: Master(master, "", units_apart(master, weight)) for master, (name, weight) in pairs}


def _is_wider(value: Any, weight: torch.Tensor) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.shape == weight.shape
        and value.dtype in (torch.float32, torch.float64)
        and value.numel() > 0
    )


def units_apart(value: torch.Tensor, weight: torch.Tensor) -> float:
    """Return the share of a weight's elements that are more than a unit in the last place from a value: rounding, to
    nearest or stochastic, leaves none.
    """
    own, wide = values_of(weight.detach()), values_of(value.detach()).to(weight.device)
    if own.shape != wide.shape or not own.numel():
        return 0.0
    return float(((wide - own).abs() > units_of(own) * 1.001).float().mean())


def units_of(weight: torch.Tensor) -> torch.Tensor:
    """Return the unit in the last place of each element of a weight, in fp32; of zero that of the smallest normal."""
    sizes = weight.float().abs().clamp(min=torch.finfo(weight.dtype).smallest_normal)
    return units_in_last_place(sizes, FORMATS[weight.dtype])
