"""What a planted fault is, the places that it is planted in, and how the place that is named is judged."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from program import MISSED, PLACE, RIGHT, Said
from torch import Tensor, nn

Plant = Callable[[Tensor], Tensor]
Places = set[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Fault:
    """One plant. is_faulty: whether the program really differs from its sound twin, without anybody looking."""

    name: str
    cause: str
    verb: str
    judged: Callable[[], Said]
    is_faulty: Callable[[], bool]


def lines_of(*functions: Any, mark: str = "# HERE") -> Places:
    """The lines of functions that end in a mark; of one without any, its first."""
    found: Places = set()
    for function in functions:
        lines, first = inspect.getsourcelines(function)
        name = Path(inspect.getsourcefile(function) or "").name
        marked = {(name, first + n) for n, line in enumerate(lines) if line.rstrip().endswith(mark)}
        found |= marked or {(name, function.__code__.co_firstlineno)}
    return found


def placed(named: list[tuple[Any, Any]], wanted: Places, said: str) -> Said:
    """By the places that are named: the first is to be the planted one."""
    if not named:
        return Said(MISSED, said)
    first = Path(str(named[0][0])).name, int(named[0][1] or 0)
    return Said(RIGHT) if first in wanted else Said(PLACE, f"wanted {sorted(wanted)}, not {first}:\n{said}")


class Applied(nn.Module):
    """A function as a module."""

    def __init__(self, function: Plant) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x)


class Between(nn.Module):
    """A function between two linear layers."""

    def __init__(self, function: Plant, size: int = 64) -> None:
        super().__init__()
        self.up, self.plant, self.down = nn.Linear(size, size), Applied(function), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.plant(self.up(x)))


class Layers(Between):
    """Two small linear layers with the plant between them."""

    def __init__(self, plant: Plant) -> None:
        super().__init__(plant, 16)


class Residual(Layers):
    """Behind a norm, in a branch."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.plant(F.layer_norm(self.up(x), (16,))))


class Squares(Layers):
    """With its loss."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float().square().mean()


class Images(nn.Module):
    """Between convolutions."""

    def __init__(self, plant: Plant) -> None:
        super().__init__()
        self.up, self.plant, self.down = nn.Conv2d(1, 4, 3), Applied(plant), nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.plant(self.up(x.unflatten(-1, (4, 4))[:, None].repeat(1, 1, 3, 3))))
