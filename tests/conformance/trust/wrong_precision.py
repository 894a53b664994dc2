"""Numbers that a low format rounds too coarsely: `nc.compare` must name the line, and what it advises must help.

What is advised is tried: rules under the policy with them. Lines that ask for a low format themselves are to be those
that were planted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from planting import Fault, Layers, Plant, Residual, lines_of
from program import ADVICE, DEVICE, DTYPES, MISSED, PLACE, RIGHT, Said
from torch import Tensor, nn

import narrowcast as nc
from narrowcast.formats import FORMATS

FIRST = torch.arange(8) == 0
centred = lambda y: y - y.mean(-1, keepdim=True)
rows = lambda y: (y[:, None] - y[None]).float()
spread = lambda y: y.var(-1, keepdim=True)
faint = lambda y: (-18 - y.abs()).sigmoid()
zeroed = lambda y: torch.where(FIRST[:, None], torch.zeros_like(y), y)
frequencies = torch.exp(-math.log(1e4) * torch.arange(16) / 16)


def positions(y: Tensor) -> Tensor:
    at = torch.arange(1001, 1009).to(y.dtype)  # HERE
    return y * torch.cos(at[:, None] * 0.7)


def positions_made_low(y: Tensor) -> Tensor:
    at = torch.arange(3001, 3009, dtype=y.dtype)  # HERE
    return y * torch.cos(at[:, None] * 0.7)


def time_steps(y: Tensor) -> Tensor:
    angles = torch.arange(917, 925).to(y.dtype)[:, None] * frequencies.to(y.dtype)  # HERE
    return y + torch.sin(angles)


def row_numbers(y: Tensor) -> Tensor:
    numbers = (7 * torch.arange(8) + 901).to(y.dtype)  # HERE
    return y * F.one_hot(numbers.long() % 16, 16)


def grid(y: Tensor) -> Tensor:
    at = torch.linspace(0, 1, 16).to(y.dtype) * 37 + 200  # HERE
    return y * torch.sin(3 * at)


def variance(y: Tensor) -> Tensor:
    h = y + 20
    spread = (h * h).mean(-1, keepdim=True) - h.mean(-1, keepdim=True) ** 2  # HERE
    return centred(h) / (spread.abs() + 1e-3).sqrt()


def decay(y: Tensor) -> Tensor:
    total = torch.zeros_like(y)
    for _ in range(150):
        total = total - 0.02 * torch.sigmoid(y)  # HERE
    return 10 * total.exp() * y


def small_steps(y: Tensor) -> Tensor:
    h = y.tanh() + 4
    for _ in range(120):
        h = h + 0.005 * torch.sin(h)  # HERE
    return centred(h)


def distances(y: Tensor) -> Tensor:
    h = y[:1] + 4 + 0.05 * y
    squares = h.square().sum(-1)
    return y * (squares[:, None] + squares - 2 * h @ h.mT).clamp(min=0).sum(-1, keepdim=True)  # HERE


def areas(y: Tensor) -> Tensor:
    low, high = y + 600, y + 602 + y.abs()  # HERE
    return high - low


def taylor(y: Tensor) -> Tensor:
    h = 0.05 * y
    return (1 - torch.cos(h)) / (h * h + 1e-4)  # HERE


def angles(y: Tensor) -> Tensor:
    h = y[:1] + 0.02 * y
    unit = h / h.norm(dim=-1, keepdim=True)
    return y * torch.acos((unit @ unit.mT).clamp(-1 + 1e-4, 1 - 1e-4)).sum(-1, keepdim=True)  # HERE


def running(y: Tensor) -> Tensor:
    mean = torch.zeros(16, dtype=y.dtype)  # HERE
    for row in y.repeat(12, 1):
        mean = 0.999 * mean + 0.001 * row  # HERE
    return 100 * mean + 0 * y


class Squares(torch.autograd.Function):
    """A function of the user's own, in which squares overflow."""

    @staticmethod
    def forward(ctx, h):  # type: ignore[no-untyped-def, override]
        return (h * h).sum(-1, keepdim=True)  # HERE

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def, override]
        return gradient


def determinant(y: Tensor) -> Tensor:
    h = y[:, :2] + 10
    gram = h.mT @ h  # HERE
    return y * (gram[0, 0] * gram[1, 1] - gram[0, 1] * gram[1, 0])  # HERE


def running_share(y: Tensor) -> Tensor:
    shares = F.softplus(y).to(y.dtype)  # HERE
    total = shares + 60  # HERE
    return total - total[:, :1]


PLANTS: dict[str, tuple[str, Plant]] = {
    "positions": ("bf16", positions), "positions that are made low": ("fp16", positions_made_low),
    "time steps": ("bf16", time_steps), "numbers of rows": ("bf16", row_numbers), "grid": ("bf16", grid),
    "variance as a difference": ("bf16", variance), "decay, added up": ("bf16", decay),
    "small steps": ("bf16", small_steps), "distances as a difference": ("bf16", distances),
    "lengths as a difference": ("bf16", areas), "one less a cosine": ("bf16", taylor),
    "angle of what is alike": ("bf16", angles), "running mean": ("bf16", running), "determinant": ("bf16", determinant),
    "difference of running shares": ("bf16", running_share),
    "logarithm of one and little": ("bf16", lambda y: 1e4 * torch.log(1 + 1e-3 * y.abs())),
    "mean of what is far off": ("bf16", lambda y: centred(y + 100)),
    "odds of what is nearly sure": ("bf16", lambda y: torch.log(torch.sigmoid(y + 6) / (1 - torch.sigmoid(y + 6)))),
    "loss by hand": ("bf16", lambda y: torch.log(1 - torch.sigmoid(9 + y) + 1e-7)),
    "geometric series": ("bf16", lambda y: torch.sigmoid(y + 5).pow(100) / (1 - torch.sigmoid(y + 5))),
    "angle of a small difference": ("bf16", lambda y: torch.atan2((y + 50) - 50, (y + 50) - 49.5)),
    "two passes, far from zero": ("bf16", lambda y: 8 * F.normalize(centred(y + 64).float(), dim=-1)),
    "epsilon of a mean of squares": ("fp16", lambda y: zeroed(y) * (zeroed(y).square().mean(-1, True) + 1e-8).rsqrt()),
    "epsilon of a length": ("fp16", lambda y: zeroed(y) / (zeroed(y).square().sum(-1, True) + 1e-9).sqrt()),
    "sum of exponentials": ("fp16", lambda y: y + (20 * y.abs()).exp().sum(-1, keepdim=True).log().to(y.dtype)),
    "squares of a length": ("fp16", lambda y: 400 * y / ((400 * y) * (400 * y)).sum(-1, keepdim=True).sqrt()),
    "scale behind the product": ("fp16", lambda y: ((300 * y) @ (300 * y).mT / 9e4).softmax(-1).to(y.dtype) @ y),
    "own function": ("fp16", lambda y: 400 * y * Squares.apply(400 * y).rsqrt()),
    "cast of its own": ("fp16", lambda y: torch.log1p((1e6 * y.float()).to(y.dtype).float().abs())),
    "cubes": ("fp16", lambda y: (80 * y) ** 3 / ((80 * y) ** 6 + 1).sqrt()),
    "weights that are zero": ("fp16", lambda y: y * faint(y) / faint(y).sum(-1, keepdim=True)),
    "squares that are zero": ("fp16", lambda y: 1e5 * (1e-5 * y * (1e-5 * y)).sqrt()),
    "mean of eighth powers": ("fp16", lambda y: ((8 * y.abs()) ** 8).mean(-1, keepdim=True) ** (1 / 8) + y),
    "variance that is zero": ("fp16", lambda y: centred(zeroed(y)) / (spread(zeroed(y)) + 1e-8).sqrt()),
}  # fmt: skip


def made(place: type[Layers], plant: Plant) -> tuple[nn.Module, Tensor]:
    """The same one each time."""
    torch.manual_seed(0)
    return place(plant), torch.randn(8, 16)


def error(place: type[Layers], plant: Plant, dtype: torch.dtype, policy: nc.Policy | None = None) -> float:
    """Of the output, against fp32; infinity for one that is not finite."""
    model, x = made(place, plant)
    with torch.no_grad():
        expected = model(x).double()
        with nc.autocast(DEVICE, dtype, policy=policy):
            found = model(x).double()
    return float((found - expected).norm() / expected.norm()) if bool(found.isfinite().all()) else math.inf


def is_visible(place: type[Layers], plant: Plant, dtype: torch.dtype) -> bool:
    """Whether it is off by more than some units in the last place."""
    return error(place, plant, dtype) > 4 * FORMATS["bf16" if dtype is torch.bfloat16 else "fp16"].epsilon


def judged(place: type[Layers], plant: Plant, dtype: torch.dtype) -> Said:
    """Its line is named, and what is advised at least halves the error."""
    model, x = made(place, plant)
    found = nc.compare(model, (x,), under=dtype)
    remedy, wanted = found.remedy, lines_of(plant, *([Squares.forward] if "Squares" in plant.__code__.co_names else []))
    places = [(row.file, row.line) for row in found.faults[:1]]
    places += [(found.growth.file, found.growth.line)] if found.growth is not None else []
    places += [*(asked.at for asked in remedy.asked), *remedy.lines] if remedy is not None else []
    if not places:
        return Said(MISSED, str(found))
    if not any((Path(file).name, line) in wanted for file, line in places):
        return Said(PLACE, f"wanted {sorted(wanted)}:\n{found}")
    if remedy is None or not remedy.rules:
        return Said(RIGHT)
    before, policy = error(place, plant, dtype), nc.Policy.native().with_rules(remedy.rules)
    left = error(place, plant, dtype, policy)
    return Said(RIGHT) if left <= min(before, 1.0) / 2 else Said(ADVICE, f"{before} was, {left} is left:\n{found}")


def faults() -> Iterator[Fault]:
    for cause, (format, plant) in PLANTS.items():
        for place in (Layers, Residual):
            whole = place, plant, DTYPES[format]
            yield Fault(
                f"{cause}, {place.__name__}", cause, "compare", partial(judged, *whole), partial(is_visible, *whole)
            )
