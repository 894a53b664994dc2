"""Two models of which one has another argument, or a step more, less or elsewhere; compare and diff name it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from planting import Between, Fault, Places, Plant, lines_of, placed
from program import DEVICE, DTYPES, MISSED, PLACE, RIGHT, Said
from torch import Tensor, nn

import narrowcast as nc

later = torch.ones(64, 64, dtype=torch.bool).triu(1)
heads = lambda y: y.view(1, 64, 4, 16).transpose(1, 2)
flat = lambda y: y.transpose(1, 2).reshape(64, 64)
image = lambda y: y.view(1, 4, 32, 32)

# cause: the op, a right call, a wrong one
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


class Layer(nn.Module):
    """Of everything a little, with options that one may get wrong; the lines are those that the plants mean."""

    def __init__(self, **options):
        super().__init__()
        self.options = {"eps": 1e-5, "scale": 0.25, "dim": -1, "fill": -1e4, "slope": 0.01, "beta": 1.0, "approximate":
                        "none", "stride": 1, "dilation": 1, "p": 2.0, "alpha": 1.0, "low": -1.0, "groups": 4,
                        "shift": 0, "times": 1.0, "causal": True} | options  # fmt: skip
        self.qkv, self.up = nn.Linear(64, 48), nn.Linear(16, 16)
        self.kernel = nn.Parameter(torch.randn(16, 16, 3) * 0.1)

    def forward(self, x):
        o = self.options
        q, k, v = self.qkv(x).chunk(3, -1)
        s = torch.mul(q @ k.T, o["scale"])  # scale
        s = s.masked_fill(torch.ones(16, 16, dtype=torch.bool).triu(1), o["fill"])  # fill
        y = torch.softmax(s, o["dim"]) @ v  # dim
        y = F.layer_norm(0.02 * y, (16,), eps=o["eps"])  # eps
        y = F.leaky_relu(y, o["slope"])  # slope
        y = F.softplus(y, o["beta"])  # beta
        y = F.gelu(y, approximate=o["approximate"]) - 0.5  # approximate
        y = y + F.conv1d(y.T[None], self.kernel, padding=o["dilation"], dilation=o["dilation"])[0].T  # dilation
        y = F.elu(y, o["alpha"])  # alpha
        y = y.clamp(o["low"], 2.0)  # low
        y = F.group_norm(y, o["groups"])  # groups
        y = y.roll(o["shift"], -1)  # shift
        z = y[None, None]
        y = F.scaled_dot_product_attention(z, z, z, is_causal=o["causal"])[0, 0]  # causal
        y = self.up(y)
        return torch.mul(y, o["times"])  # times


# the option, and its wrong value
OPTIONS = [
    ("eps", 1e-3), ("eps", 1e-2), ("scale", 0.5), ("scale", 0.2), ("dim", 0), ("fill", 0.0), ("fill", -1.0),
    ("slope", 0.2), ("slope", 0.1), ("beta", 2.0), ("beta", 0.5), ("approximate", "tanh"), ("dilation", 2),
    ("alpha", 0.1), ("alpha", 2.0), ("low", 0.0), ("low", -0.1), ("groups", 1), ("groups", 16), ("shift", 1),
    ("causal", False), ("times", 0.9), ("times", 1.05),
]  # fmt: skip


class Steps(nn.Module):
    """Steps of which one is wrong, left out or one too many: no argument tells."""

    def __init__(self, wrong=""):
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(64, 32), nn.Linear(32, 32), nn.LayerNorm(32)
        self.places, self.wrong = nn.Parameter(torch.randn(16, 32)), wrong

    def forward(self, x):
        wrong = self.wrong
        y = self.first(x)
        y = y + (self.places.flip(0) if wrong == "places" else self.places)  # places
        y = y if wrong == "residual" else y + torch.tanh(y)  # residual
        y = F.relu(self.norm(y)) if wrong == "order" else self.norm(F.relu(y))  # order
        y = self.second(y)
        y = y.to(torch.float8_e5m2).to(y.dtype) if wrong == "rounded" else y  # rounded
        y = y + 0.5 * y.mean(0) if wrong == "leak" else y  # leak
        y = y / 0.9 if wrong == "temperature" else y  # temperature
        y = torch.tanh(y) if wrong == "softcap" else y  # softcap
        return y.abs() if wrong == "sign" else y  # sign


# what is wrong, and the op that only one of two models has
STEPS = [("places", "flip"), ("residual", "tanh"), ("order", "native_layer_norm"), ("rounded", "_to_copy"),
         ("leak", "mean"), ("temperature", "div"), ("softcap", "tanh"), ("sign", "abs")]  # fmt: skip

X = torch.linspace(-1, 1, 16 * 64).reshape(16, 64).mul(37).sin()


@dataclass(frozen=True, slots=True)
class Pair:
    """A right model and a wrong one. op: must be in what is named. is_step: a call that only one of the two has."""

    right: Callable[[], nn.Module]
    wrong: Callable[[], nn.Module]
    lines: Places
    dtype: torch.dtype
    op: str = ""
    is_step: bool = False

    def made(self) -> tuple[nn.Module, nn.Module, Tensor]:
        torch.manual_seed(0)
        right, wrong = self.right(), self.wrong()
        wrong.load_state_dict(right.state_dict())
        return right, wrong, torch.randn(64, 64) if isinstance(right, Between) else X


def compared(pair: Pair) -> Said:
    """Both in the region: the call, its line, and that it is an argument, or a call that the other one has not."""
    right, wrong, x = pair.made()

    def low(model: nn.Module) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            with nc.autocast(DEVICE, pair.dtype):
                return model(x)

        return run

    found = nc.compare(low(wrong), (x,), reference=low(right))
    if pair.is_step and not found.faults and found.verdict == "fault" and found.unmatched:
        return Said(RIGHT if f"aten.{pair.op}." in found.unmatched[0] else PLACE, f"wanted {pair.op}:\n{found}")
    said = placed([(row.file, row.line) for row in found.faults], pair.lines, str(found))
    if said.word != RIGHT or pair.is_step:
        return said
    first = found.faults[0]
    if pair.op not in first.id.op or not ("argument" in first.why or "in the reference" in first.why):
        return Said(PLACE, f"wanted the argument of {pair.op}:\n{found}")
    return said


def compared_runs(pair: Pair) -> Said:
    """The first call that differs, or that only one run has, and its line."""
    right, wrong, x = pair.made()
    found = nc.diff(*(nc.capture(model, (x,), under=pair.dtype) for model in (right, wrong)))
    if found.verdict != "values differ":
        return Said(MISSED, f"wanted {sorted(pair.lines)}:\n{found}")
    named = [(str(one.id), one.place) for one in found.alone[:1]]
    named += [(f"{row.a} {row.b}", row.place_b or row.place_a) for row in found.producers]
    said = placed([place.rpartition(":")[::2] for _, place in named], pair.lines, str(found))
    if said.word == RIGHT and not pair.is_step and pair.op not in named[0][0]:
        return Said(PLACE, f"wanted {pair.op}:\n{found}")
    return said


def is_faulty(pair: Pair) -> bool:
    right, wrong, x = pair.made()
    return not torch.allclose(right(x), wrong(x), rtol=1e-3, atol=1e-5)


def pairs() -> Iterator[tuple[str, str, Pair]]:
    """Names, causes, and the models."""
    for number, (cause, (op, right, wrong)) in enumerate(ARGUMENTS.items()):
        dtype = list(DTYPES.values())[number % 2]
        yield cause, cause, Pair(partial(Between, right), partial(Between, wrong), lines_of(right, wrong), dtype, op)
    for number, (option, value) in enumerate(OPTIONS):
        dtype = list(DTYPES.values())[number % 2]
        lines = lines_of(Layer.forward, mark=f"# {option}")
        yield f"argument/{option} = {value}", option, Pair(Layer, partial(Layer, **{option: value}), lines, dtype)
    for step, op in STEPS:
        lines = lines_of(Steps.forward, mark=f"# {step}")
        for short, dtype in DTYPES.items():
            yield f"step/{step}/{short}", step, Pair(Steps, partial(Steps, step), lines, dtype, op, is_step=True)


def faults() -> Iterator[Fault]:
    ways: Any = {"compare": compared, "diff": compared_runs}
    for name, cause, pair in pairs():
        for verb, way in ways.items():
            of = f"{verb}, {'steps' if pair.is_step else 'arguments'}"
            yield Fault(f"{name}, {verb}", f"{cause}, {verb}", of, partial(way, pair), partial(is_faulty, pair))
