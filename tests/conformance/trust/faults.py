"""Planted faults: what a verb must name, at which call and line, and whether what it advises helps.

A fault is a cause planted in one of at most three places. `judged` runs the verb, follows its advice, runs it again,
and gives an empty text where all of it was right, or what was said instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import wrong_arguments
import wrong_kernels
import wrong_loops
from torch import Tensor, nn
from wrong_arguments import Applied, Between

import narrowcast as nc


@dataclass(frozen=True, slots=True)
class Fault:
    """One plant. is_faulty: whether the program really differs from its sound twin, without anybody looking."""

    name: str
    cause: str
    verb: str
    judged: Callable[[], str]
    is_faulty: Callable[[], bool]


# -- values that are not finite ---------------------------------------------------------------------------------------

zero = lambda y: F.relu(-y.abs())
just = lambda y, value: torch.zeros_like(y) + value

VALUES: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "logarithm of zero": ("log", lambda y: zero(y).log()),
    "logarithm of less": ("log", lambda y: (y - 10).log()),
    "binary logarithm of zero": ("log2", lambda y: zero(y).log2()),
    "decimal logarithm of zero": ("log10", lambda y: zero(y).log10()),
    "log1p of -1": ("log1p", lambda y: torch.log1p(just(y, -1.0))),
    "root of less than zero": ("sqrt", lambda y: (y - 10).sqrt()),
    "zero by zero": ("div", lambda y: zero(y) / zero(y)),
    "division by zero": ("div", lambda y: just(y, 1.0) / zero(y)),
    "reciprocal of zero": ("reciprocal", lambda y: zero(y).reciprocal()),
    "reciprocal root of zero": ("rsqrt", lambda y: zero(y).rsqrt()),
    "remainder by zero": ("fmod", lambda y: torch.fmod(y, zero(y))),
    "arc cosine beyond one": ("acos", lambda y: (y.abs() + 1.5).acos()),
    "power of a negative": ("pow", lambda y: (-y.abs() - 1).pow(0.5)),
    "negative power of zero": ("pow", lambda y: zero(y).pow(-1.5)),
    "exponential": ("exp", lambda y: just(y, 95.0).exp()),
    "expm1": ("expm1", lambda y: torch.expm1(just(y, 95.0))),
    "hyperbolic cosine": ("cosh", lambda y: torch.cosh(just(y, 95.0))),
    "a row without a key": ("softmax", lambda y: y.masked_fill(y < 1e9, float("-inf")).softmax(-1)),
    "logit of one": ("logit", lambda y: torch.logit(just(y, 1.0))),
    "atanh of one": ("atanh", lambda y: torch.atanh(just(y, 1.0))),
    "erfinv of one": ("erfinv", lambda y: torch.erfinv(just(y, 1.0))),
    "lgamma of zero": ("lgamma", lambda y: torch.lgamma(zero(y))),
    "deviation of one": ("std", lambda y: y + y[..., :1].std(-1, keepdim=True)),
    "mean of nothing": ("mean", lambda y: y + y[..., :0].mean(-1, keepdim=True)),
    "square, fp16": ("pow", lambda y: just(y, 300.0).square()),
    "product, fp16": ("mul", lambda y: just(y, 300.0) * just(y, 300.0)),
    "exponential, fp16": ("exp", lambda y: just(y, 20.0).exp()),
    "cast, fp16": ("copy", lambda y: (y.float() * 0 + 1e6).half()),
    "matrix product, fp16": ("matmul", lambda y: just(y, 200.0) @ just(y, 200.0).transpose(-1, -2) @ y),
    "lost epsilon, fp16": ("div", lambda y: just(y, 1.0) / (zero(y) + 1e-9)),
    "squares of a norm, fp16": ("pow", lambda y: just(y, 400.0).pow(2).sum(-1, keepdim=True).sqrt() + y),
    "addition, fp16": ("add", lambda y: just(y, 4e4) + just(y, 4e4)),
}
BACKWARD: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "backward of a root at zero": ("sqrt", lambda y: (y * 0).sqrt()),
    "backward of a power at zero": ("pow", lambda y: (y * 0).pow(0.5)),
    "backward of a logarithm under where": ("log", lambda y: torch.where(y > 0, (y * (y > 0)).log(), 0.0)),
    "backward of acos at one": ("acos", lambda y: torch.acos(y * 0 + 1)),
    "backward of a quotient under where": ("reciprocal", lambda y: torch.where(y > 0, 1 / (y * (y > 0)), 0.0)),
    "backward of a length of zero": ("sqrt", lambda y: y + (y * 0).square().sum(-1, keepdim=True).sqrt()),
    "backward of a cube root at zero": ("pow", lambda y: (y * 0).pow(1 / 3)),
}


class Layers(Between):
    """Two small linear layers with the plant between them."""

    def __init__(self, plant: Callable[[Tensor], Tensor]) -> None:
        super().__init__(plant, 16)


class Residual(Layers):
    """Behind a norm, in a branch."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.plant(F.layer_norm(self.up(x), (16,))))


class Images(nn.Module):
    """Between convolutions."""

    def __init__(self, plant: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.plant, self.down = nn.Conv2d(1, 4, 3), Applied(plant), nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.plant(self.up(x.unflatten(-1, (4, 4))[:, None].repeat(1, 1, 3, 3))))


PLACES: tuple[type[nn.Module], ...] = (Layers, Residual, Images)


def ran(place: Any, plant: Any, backward: bool, region: Any) -> tuple[Tensor, nn.Module]:
    torch.manual_seed(0)
    model = place(plant)
    with region:
        out = model(torch.randn(8, 16))
    if backward:
        out.float().sum().backward()
    return out, model


def not_finite(place: Any, plant: Any, backward: bool) -> bool:
    out, model = ran(place, plant, backward, nc.autocast("cpu", torch.float16))
    return not all(bool(t.isfinite().all()) for t in (out, *(p.grad for p in model.parameters() if p.grad is not None)))


def watch(place: Any, plant: Any, op: str, backward: bool) -> str:
    """The call, its line, and its advice: a rule moves the finding on; without one, fp32 has it too."""
    low = partial(nc.autocast, "cpu", torch.float16)
    with nc.watch() as found:
        ran(place, plant, backward, low())
    first = found.first
    if first is None:
        return f"nothing found: {found}"
    calls = first.id.op if first.forward is None else f"{first.id.op} {first.forward.op}"
    is_named = op in calls or first.id.direction == "backward"  # which calls ops of autograd's own
    if not is_named or first.file != __file__ or first.line != plant.__code__.co_firstlineno:
        return f"wanted {op} at line {plant.__code__.co_firstlineno}: {first}"
    rule = re.search(r'op = "([^"]*)"(?:, module = "([^"]*)")?', first.advice)
    policy = nc.Policy.native()
    if rule is not None:
        policy = policy.with_rules(nc.Rule(rule[1], "full", module=rule[2]))
    elif "No format" in first.advice:
        policy = nc.Policy("fp32", extends=())
    else:
        return "" if first.advice else f"no advice: {first}"
    with nc.watch() as again:
        ran(place, plant, backward, low(policy=policy))
    is_there = any((f.id.op, f.line) == (first.id.op, first.line) for f in again.findings)
    if rule is not None and is_there:
        return f"the rule did not help: {first}"
    if rule is None and not is_there:
        return f"a format does mend it: {first}"
    return ""


def values() -> Iterator[Fault]:
    for table, backward in ((VALUES, False), (BACKWARD, True)):
        for cause, (op, plant) in table.items():
            for place in PLACES[: 3 if backward else 2]:
                yield Fault(
                    f"{cause}, {place.__name__}", cause, f"watch {'backward' if backward else 'forward'}",
                    partial(watch, place, plant, op, backward), partial(not_finite, place, plant, backward),
                )  # fmt: skip


def all_faults() -> list[Fault]:
    """All of them."""
    others = [wrong_kernels.faults(), wrong_arguments.faults(), wrong_loops.faults()]
    return [*values(), *(Fault(*row) for rows in others for row in rows)]
