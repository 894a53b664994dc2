"""Two programs of which one has another argument; compare and compare_runs must name the call and its line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import narrowcast as nc


class Applied(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x)


class Between(nn.Module):
    """A function between two linear layers."""

    def __init__(self, function: Callable[[Tensor], Tensor], size: int = 64) -> None:
        super().__init__()
        self.up, self.plant, self.down = nn.Linear(size, size), Applied(function), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.plant(self.up(x)))


later = torch.ones(64, 64, dtype=torch.bool).triu(1)
heads = lambda y: y.view(1, 64, 4, 16).transpose(1, 2)
flat = lambda y: y.transpose(1, 2).reshape(64, 64)
image = lambda y: y.view(1, 4, 32, 32)

# cause: the op, a right call, a wrong one
Plant = Callable[[Tensor], Tensor]
ARGUMENTS: dict[str, tuple[str, Plant, Plant]] = {
    "epsilon of a layer norm": ("layer_norm", lambda y: F.layer_norm(y, (64,), eps=1e-5),
                                lambda y: F.layer_norm(y, (64,), eps=1e-1)),
    "epsilon of a group norm": ("group_norm", lambda y: F.group_norm(y, 8, eps=1e-5),
                                lambda y: F.group_norm(y, 8, eps=1e-1)),
    "groups of a norm": ("group_norm", lambda y: F.group_norm(y, 8), lambda y: F.group_norm(y, 4)),
    "scale of attention": ("attention", lambda y: flat(F.scaled_dot_product_attention(*[heads(y)] * 3, scale=1.0)),
                           lambda y: flat(F.scaled_dot_product_attention(*[heads(y)] * 3, scale=0.25))),
    "a causal mask": ("attention", lambda y: flat(F.scaled_dot_product_attention(*[heads(y)] * 3, is_causal=True)),
                      lambda y: flat(F.scaled_dot_product_attention(*[heads(y)] * 3))),
    "the axis of a softmax": ("softmax", lambda y: y.softmax(-1) * 64, lambda y: y.softmax(0) * 64),
    "the value of a mask": ("masked_fill", lambda y: y.masked_fill(later, -9.0).softmax(-1) * 64,
                            lambda y: y.masked_fill(later, -2.0).softmax(-1) * 64),
    "gelu by tanh": ("gelu", lambda y: F.gelu(8 * y), lambda y: F.gelu(8 * y, approximate="tanh")),
    "the slope of leaky relu": ("leaky_relu", lambda y: F.leaky_relu(y, 0.01), lambda y: F.leaky_relu(y, 0.2)),
    "the temperature": ("div", lambda y: (y / 1.0).softmax(-1) * 64, lambda y: (y / 0.9).softmax(-1) * 64),
    "the bounds of a clamp": ("clamp", lambda y: y.clamp(-1, 1), lambda y: y.clamp(-0.5, 1)),
    "the slope of softplus": ("softplus", lambda y: F.softplus(y, beta=1), lambda y: F.softplus(y, beta=2)),
    "the exponent": ("pow", lambda y: y.abs().pow(2.0), lambda y: y.abs().pow(2.2)),
    "a softcap": ("mul", lambda y: torch.tanh(y * 1.0), lambda y: torch.tanh(y * 0.8)),
    "alpha of elu": ("elu", lambda y: F.elu(y, 1.0), lambda y: F.elu(y, 0.5)),
    "the shift of a roll": ("roll", lambda y: y.roll(1, 0), lambda y: y.roll(2, 0)),
    "the axis of a sum": ("cumsum", lambda y: y.cumsum(-1) / 9, lambda y: y.cumsum(0) / 9),
    "the weight of a sum": ("add", lambda y: torch.add(y, y, alpha=0.5), lambda y: torch.add(y, y, alpha=0.6)),
    "weight of lerp": ("lerp", lambda y: torch.lerp(y, -y, 0.1), lambda y: torch.lerp(y, -y, 0.2)),
    "unbiased variance": ("var", lambda y: y / y.var(-1, keepdim=True, correction=0),
                          lambda y: y / y.var(-1, keepdim=True, correction=8)),
    "the padding of a pool": ("avg_pool2d", lambda y: F.avg_pool2d(image(y), 3, 1, 1).view(64, 64),
                              lambda y: F.avg_pool2d(image(y), 3, 1, 1, count_include_pad=False).view(64, 64)),
    "the order of a norm": ("norm", lambda y: y / torch.linalg.vector_norm(y, 2, -1, keepdim=True),
                            lambda y: y / torch.linalg.vector_norm(y, 3, -1, keepdim=True)),
    "the number of the largest": ("topk", lambda y: y.topk(64, -1).values,
                                  lambda y: y.topk(64, -1, largest=False).values),
    "the diagonal of a mask": ("tril", lambda y: y.tril(0), lambda y: y.tril(-1)),
}  # fmt: skip


def pair(cause: str) -> tuple[Between, Between, tuple[Tensor]]:
    _, right, wrong = ARGUMENTS[cause]
    torch.manual_seed(0)
    these, those = Between(right), Between(wrong)
    those.load_state_dict(these.state_dict())
    return these, those, (torch.randn(64, 64),)


def compared(cause: str, dtype: torch.dtype) -> str:
    op, right, wrong = ARGUMENTS[cause]
    these, those, args = pair(cause)
    found = nc.compare(those, args, reference=these, dtype=dtype, isolate=0)
    rows = [row for row in found.faults if row.line in (wrong.__code__.co_firstlineno, right.__code__.co_firstlineno)]
    if found.verdict == "round-off" or not rows or op not in rows[0].id.op or found.faults[0] not in rows:
        return f"wanted {op} at line {wrong.__code__.co_firstlineno}:\n{found}"
    return "" if "argument" in rows[0].why or "in the reference" in rows[0].why else f"without its arguments:\n{found}"


def compared_runs(cause: str, dtype: torch.dtype) -> str:
    op, right, wrong = ARGUMENTS[cause]
    these, those, args = pair(cause)
    found = nc.compare_runs(nc.capture(these, args, dtype=dtype), nc.capture(those, args, dtype=dtype))
    first = found.first_value
    lines = [f":{one.__code__.co_firstlineno}" for one in (right, wrong)]
    said = "" if first is None else f"{first.a} {first.b}"
    if found.verdict != "values differ" or first is None or op not in said or not first.place_a.endswith(lines[0]):
        return f"wanted {op} at {lines}:\n{found}"
    return ""


def is_faulty(cause: str) -> bool:
    these, those, args = pair(cause)
    return not torch.allclose(these(*args), those(*args), rtol=1e-3, atol=1e-5)


def faults() -> Iterator[tuple[str, str, str, Callable[[], str], Callable[[], bool]]]:
    ways: Any = {"compare": compared, "compare_runs": compared_runs}
    for number, cause in enumerate(ARGUMENTS):
        dtype = (torch.bfloat16, torch.float16)[number % 2]
        for verb, way in ways.items():
            yield f"{cause}, {verb}", cause, f"{verb}, arguments", partial(way, cause, dtype), partial(is_faulty, cause)
