"""Values that are not finite: `nc.watch` must name the call and its line, and what it advises must help."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from planting import Fault, Images, Layers, Plant, Residual, Squares, lines_of, placed
from program import ADVICE, DEVICE, DTYPES, PLACE, RIGHT, Said
from torch import Tensor, nn

import narrowcast as nc

zero = lambda y: F.relu(-y.abs())
just = lambda y, value: torch.zeros_like(y) + value
large = lambda y, value: value * (y.half().abs() + 1)
infinity = torch.full((), float("inf"))

# cause: the ops of which one must be named, and the line
VALUES: dict[str, tuple[str, Plant]] = {
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
    "infinity less itself": ("sub", lambda y: y * (infinity - infinity)),
    "all labels ignored": ("nll_loss|cross_entropy", lambda y: y + F.cross_entropy(y.float(), torch.full((8,), -100))),
    "length of zero": ("div", lambda y: zero(y) / zero(y).float().norm(dim=-1, keepdim=True)),
    "square, fp16": ("pow", lambda y: just(y, 300.0).square()),
    "product, fp16": ("mul", lambda y: just(y, 300.0) * just(y, 300.0)),
    "exponential, fp16": ("exp", lambda y: just(y, 20.0).exp()),
    "cast, fp16": ("copy", lambda y: (y.float() * 0 + 1e6).half()),
    "matrix product, fp16": ("matmul", lambda y: just(y, 200.0) @ just(y, 200.0).transpose(-1, -2) @ y),
    "lost epsilon, fp16": ("div", lambda y: just(y, 1.0) / (zero(y) + 1e-9)),
    "squares of a norm, fp16": ("pow", lambda y: just(y, 400.0).pow(2).sum(-1, keepdim=True).sqrt() + y),
    "addition, fp16": ("add", lambda y: just(y, 4e4) + just(y, 4e4)),
    "layer, fp16": ("linear", lambda y: F.linear(3e3 * y.abs(), 100 * torch.ones(16, 16))),
    "scores, fp16": ("matmul", lambda y: ((300 * y) @ (300 * y).T).softmax(-1) @ y),
    "scores of a batch, fp16": ("bmm", lambda y: torch.bmm(300 * y[None], 300 * y[None].mT)[0].softmax(-1) @ y),
    "cast of a layer's input, fp16": ("linear|copy", lambda y: F.linear(1e6 * y.float(), torch.eye(16))),
    "scaled by hand, fp16": ("mul", lambda y: y.half() * 1e6 * 1e-6),
    "total, fp16": ("sum", lambda y: y + 1e-6 * large(y, 3e3).sum(dtype=torch.float16).float()),
    "running sum, fp16": ("cumsum", lambda y: y + 1e-6 * large(y, 9e3).cumsum(-1).float()),
    "cube, fp16": ("pow", lambda y: y + 1e-6 * large(y, 50.0).pow(3).float()),
    "reciprocal, fp16": ("reciprocal", lambda y: y * (1 / (y.half() * 0 + 1e-5)).float()),
    "epsilon of a norm, fp16": ("div", lambda y: y.half() / (zero(y).half().square().mean(-1, True) + 1e-8).sqrt()),
    "convolution, fp16": ("conv", lambda y: F.conv1d((400 * y)[None], 400 * torch.ones(8, 8, 3), padding=1)[0]),
}
# ops of a backward: the one of which it is, or those of autograd's formula for it
BACKWARD: dict[str, tuple[str, Plant]] = {
    "backward of a root at zero": ("sqrt|div", lambda y: (y * 0).sqrt()),
    "backward of a power at zero": ("pow", lambda y: (y * 0).pow(0.5)),
    "backward of a logarithm under where": ("log|div", lambda y: torch.where(y > 0, (y * (y > 0)).log(), 0.0)),
    "backward of acos at one": ("acos|rsqrt", lambda y: torch.acos(y * 0 + 1)),
    "backward of a quotient under where": ("reciprocal|mul", lambda y: torch.where(y > 0, 1 / (y * (y > 0)), 0.0)),
    "backward of a length of zero": ("sqrt|div", lambda y: y + (y * 0).square().sum(-1, keepdim=True).sqrt()),
    "backward of a cube root at zero": ("pow", lambda y: (y * 0).pow(1 / 3)),
    "backward of a root under where": ("sqrt|div", lambda y: torch.where(y > 0, (y * (y > 0)).square().sqrt(), 0.0)),
}


def run(place: Any, plant: Plant, region: Any) -> tuple[Tensor, nn.Module]:
    torch.manual_seed(0)
    model = place(plant)
    with region:
        return model(torch.randn(8, 16)), model


def not_finite(place: Any, plant: Plant, backward: bool, dtype: torch.dtype) -> bool:
    out, model = run(place, plant, nc.autocast(DEVICE, dtype))
    if backward:
        out.float().sum().backward()
    return not all(bool(t.isfinite().all()) for t in (out, *(p.grad for p in model.parameters() if p.grad is not None)))


def watched(place: Any, plant: Plant, ops: str, backward: bool, dtype: torch.dtype) -> Said:
    """The call, its line, and its advice: a rule moves the finding on; without one, fp32 has it too."""

    def watch(policy: Any = None) -> Any:
        with nc.watch(at="op") as found:
            out, _ = run(place, plant, nc.autocast(DEVICE, dtype, policy=policy))
            if backward:
                out.float().sum().backward()
        return found

    found = watch()
    said = placed([(f.file, f.line) for f in found.findings], lines_of(plant), str(found))
    if said.word != RIGHT:
        return said
    first = found.first
    calls = first.id.op if first.forward is None else f"{first.id.op} {first.forward.op}"
    if not re.search(ops, calls):
        return Said(PLACE, f"wanted {ops}: {first}")
    return followed(first, watch)


def followed(first: Any, watch: Any) -> Said:
    """What is advised, tried."""
    rules = first.rules
    if rules and "No format" not in first.advice:
        policy = nc.Policy.native().with_rules(*rules)
    elif "No format" in first.advice:
        policy = nc.Policy("fp32", extends=())
    else:
        return Said(RIGHT) if first.advice else Said(ADVICE, f"no advice: {first}")
    is_there = any((f.id.op, f.line) == (first.id.op, first.line) for f in watch(policy).findings)
    if rules and is_there and "No format" not in first.advice:
        return Said(ADVICE, f"its rules do not help: {first}")
    return Said(RIGHT) if rules or is_there else Said(ADVICE, f"a format does fix it: {first}")


def faults() -> Iterator[Fault]:
    for table, verb in ((VALUES, "watch forward"), (BACKWARD, "watch backward")):
        for cause, (ops, plant) in table.items():
            third = [(Images, "bf16")] if table is BACKWARD else [(Squares, "bf16")] * ("fp16" not in cause)
            for place, format in ((Layers, "fp16"), (Residual, "fp16"), *third):
                backward = table is BACKWARD or place is Squares
                whole = place, plant, backward, DTYPES[format]
                yield Fault(
                    f"{cause}, {place.__name__}", cause, verb, partial(watched, place, plant, ops, *whole[2:]),
                    partial(not_finite, *whole),
                )  # fmt: skip
