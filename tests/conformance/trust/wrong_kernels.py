"""Kernels that are wrong in low formats alone, by op and by how; `nc.compare` must name the op and its line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from planting import Between, Fault, Plant, lines_of, placed
from program import ADVICE, DEVICE, DTYPES, PLACE, RIGHT, Said
from torch import Tensor

import narrowcast as nc

sys.path.insert(0, str(Path(__file__).parents[2] / "analysis"))
from kernels_to_judge import kernel


def layer_norm(x: Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    mean, scale = x.mean(-1, keepdim=True), 1 / (x.var(-1, keepdim=True, unbiased=False) + eps).pow(0.5)
    return (x - mean) * scale * (1 if weight is None else weight) + (0 if bias is None else bias), mean, scale


def bmm(a: Tensor, b: Tensor) -> Tensor:
    return (a[..., None] * b[:, None]).sum(2)


# op: the same in fp64 by other ops; the line that calls it; the op as it is named
OPS: dict[str, tuple[Callable[..., Any], Plant, str]] = {
    "silu": (lambda x: x / (1 + (-x).exp()), lambda y: F.silu(y), "silu"),
    "gelu": (lambda x, *, approximate="none": x * (1 + (x / 2**0.5).erf()) / 2, lambda y: F.gelu(y), "gelu"),
    "tanh": (lambda x: 1 - 2 / (1 + (2 * x).exp()), lambda y: torch.tanh(y), "tanh"),
    "sigmoid": (lambda x: 1 / (1 + (-x).exp()), lambda y: y.sigmoid(), "sigmoid"),
    "exp": (lambda x: torch.exp2(x * 1.4426950408889634), lambda y: y.exp(), "exp"),
    "softplus": (lambda x, beta=1, threshold=20: (1 + x.exp()).log(), lambda y: F.softplus(y), "softplus"),
    "hardswish": (lambda x: x * (x + 3).clamp(0, 6) / 6, lambda y: F.hardswish(y), "hardswish"),
    "leaky_relu": (lambda x, s=0.01: torch.where(x > 0, x, x * s), lambda y: F.leaky_relu(y, 0.1), "leaky_relu"),
    "elu": (lambda x, a=1, b=1, c=1: torch.where(x > 0, x, x.expm1()), lambda y: F.elu(y), "elu"),
    "sqrt": (lambda x: x.pow(0.5), lambda y: (y.abs() + 1).sqrt(), "sqrt"),
    "rsqrt": (lambda x: x.pow(-0.5), lambda y: (y.abs() + 1).rsqrt(), "rsqrt"),
    "_softmax": (lambda x, dim, half: x.exp() / x.exp().sum(dim, keepdim=True), lambda y: y.softmax(-1), "softmax"),
    "bmm": (bmm, lambda y: torch.bmm(y[None], y[None].transpose(1, 2))[0] @ y, "bmm"),
    "native_layer_norm": (layer_norm, lambda y: F.layer_norm(y, (64,)), "layer_norm"),
    "cumsum": (lambda x, dim, *, dtype=None: x @ torch.ones(64, 64).triu().to(x), lambda y: y.cumsum(-1) / 9, "cumsum"),
    "mm": (lambda a, b: bmm(a[None], b[None])[0], lambda y: torch.mm(y.repeat(1, 8), y.repeat(8, 1)) / 64, "mm"),
}


def three_bits_less(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to four bits behind the first."""
    size = 2.0 ** exact.abs().clamp(min=1e-30).log2().floor()
    return ((exact / size * 16).round() / 16 * size).to(dtype)


def up(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Always away from zero."""
    low = exact.to(dtype)
    short = low.double().abs() < exact.abs()
    return torch.where(short, torch.nextafter(low, exact.sign().to(dtype) * 1e4), low)


def towards_zero(exact: Tensor, dtype: torch.dtype) -> Tensor:
    low = exact.to(dtype)
    return torch.where(low.double().abs() > exact.abs(), torch.nextafter(low, torch.zeros_like(low)), low)


WRONG: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "is off by 5 %": lambda exact, dtype: (exact * 1.05).to(dtype),
    "loses three bits": three_bits_less,
    "always rounds away": up,
    "leaves its tail out": lambda exact, dtype: torch.where(
        torch.arange(exact.shape[-1], device=exact.device) < exact.shape[-1] - 3, exact, 0.0).to(dtype),
    "has a wrong sign in one row": lambda exact, dtype: torch.cat([-exact[:1], exact[1:]]).to(dtype),
    "rounds towards zero": towards_zero,
}  # fmt: skip
ADDS = {"adds up in its format, one by one": 1, "adds up in its format, by 8": 8, "adds up in its format, by 32": 32}
LOW = nc.Policy.native().with_rules(
    *(nc.Rule(f"aten.{name}", "lower") for name in dict.fromkeys(["softmax", "layer_norm", *OPS]))
)  # else they compute in fp32, where the kernel is right


def planted(op: str, how: str) -> Any:
    """The kernel: in other formats it is right."""

    def wrong(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        is_low = x.dtype in DTYPES.values()
        if how in ADDS and is_low:
            total = torch.zeros(x.shape[0], args[0].shape[1], dtype=x.dtype, device=x.device)
            for a, b in zip(x.split(ADDS[how], 1), args[0].split(ADDS[how]), strict=True):
                total = total + bmm(a[None].float(), b[None].float())[0].to(x.dtype)
            return total
        rest = [t.double() if isinstance(t, Tensor) else t for t in args]
        gave = OPS[op][0](x.double(), *rest, **kwargs)
        bad = WRONG[how] if is_low else lambda exact, dtype: exact.to(dtype)
        if not isinstance(gave, tuple):
            return bad(gave, x.dtype).contiguous()
        return bad(gave[0], x.dtype), *(t.float() for t in gave[1:])

    return kernel(op, wrong)


def judged(op: str, how: str, dtype: torch.dtype) -> Said:
    """The op at its line and no other, and a rule for it fixes it."""
    _, plant, name = OPS[op]
    torch.manual_seed(0)
    model, args = Between(plant), (torch.randn(64, 64),)
    with planted(op, how):
        found = nc.compare(model, args, under=nc.autocast(DEVICE, dtype, policy=LOW))
        said = placed([(row.file, row.line) for row in found.faults], lines_of(plant), str(found))
        if said.word != RIGHT:
            return said
        if not all(name in row.id.op for row in found.faults):
            return Said(PLACE, f"wanted {name}:\n{found}")
        first = found.faults[0].id
        rule = nc.Rule(first.op, "full", module=first.module_path)
        again = nc.compare(model, args, under=nc.autocast(DEVICE, dtype, policy=LOW.with_rules(rule)))
        return Said(ADVICE, f"the rule did not help:\n{again}") if again.faults else said


def is_faulty(op: str, how: str, dtype: torch.dtype) -> bool:
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0), device="cpu").to(
        torch.get_default_device(), dtype
    )
    right = OPS[op][1](x)
    with planted(op, how):
        return not torch.equal(OPS[op][1](x), right)


def faults() -> Iterator[Fault]:
    rows = [(n + turn, op, how) for n, op in enumerate(OPS) for turn, how in enumerate(WRONG)]
    for number, op, how in [*rows, *((n, "mm", how) for n, how in enumerate(ADDS))]:
        whole = op, how, list(DTYPES.values())[number % 2]
        name = f"{op} {how}, {whole[2]}"
        yield Fault(name, f"{op} {how}", "compare", partial(judged, *whole), partial(is_faulty, *whole))
