"""AdamW and SGD over parameters as they are stored: one pass over the memory of each, compiled where that pays.

The formulas are those of torch.optim (`_single_tensor_adam`, `_single_tensor_sgd` in 2.13), computed in fp32.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import torch

from narrowcast.core.policy.storage import FP32, KAHAN, NEAREST, REMAINDER, STOCHASTIC
from narrowcast.errors import first_line
from narrowcast.runtime.torch_surface.dynamo import load_cpp
from narrowcast.training.storage.rounding import PLAIN, joined, numbered, parted, rounded_state, sum_of_bits, words

MOMENTS: dict[type, tuple[str, ...]] = {
    torch.optim.AdamW: ("exp_avg", "exp_avg_sq"),
    torch.optim.Adam: ("exp_avg", "exp_avg_sq"),
    torch.optim.SGD: ("momentum_buffer",),
}
"""The optimizers that are stepped here, with the names of their states in the shape of the weight."""
_NOT_HERE = ("amsgrad", "differentiable", "capturable")
_PAYS, _EACH, _AT_ONCE = 1 << 18, 1 << 13, 1 << 20
"""Elements that are worth compiling for, as which each parameter counts besides; those of a part of what is not."""
Pieces = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Formula:
    """What a group's settings ask: is_adam, else SGD; whether weight decay is a part of the gradient; momentum."""

    is_adam: bool
    couples: bool
    momentum: bool = False
    nesterov: bool = False


def formula_of(optimizer: Any, group: Mapping[str, Any]) -> Formula | None:
    """Return the formula of a group; None if the optimizer steps it itself."""
    if type(optimizer) not in MOMENTS or any(group.get(name) for name in _NOT_HERE):
        return None
    if type(optimizer) is torch.optim.SGD:
        return Formula(False, bool(group["weight_decay"]), bool(group["momentum"]), bool(group["nesterov"]))
    is_decoupled = bool(group.get("decoupled_weight_decay", type(optimizer) is torch.optim.AdamW))
    return Formula(True, bool(group["weight_decay"]) and not is_decoupled)


def numbers_of(formula: Formula, group: Mapping[str, Any], step: int) -> list[float]:
    """Return the numbers of a formula in a group's n-th step, from 1."""
    lr, sign, decay = float(group["lr"]), -1.0 if group["maximize"] else 1.0, float(group["weight_decay"])
    if not formula.is_adam:
        return [sign, decay, lr, float(group["momentum"]), 1.0 if step == 1 else 1.0 - float(group["dampening"])]
    one, two = map(float, group["betas"])
    kept = 1.0 if formula.couples else 1.0 - lr * decay
    first, second = 1.0 - one**step, 1.0 - two**step
    return [sign, decay, kept, 1.0 - one, two, 1.0 - two, 1.0 / math.sqrt(second), float(group["eps"]), lr / first]


def _stepped(
    formula: Formula, wide: torch.Tensor, gradient: torch.Tensor, moments: Pieces, n: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return a weight in fp32 and its moments after a step."""
    gradient = gradient.float() * n[0]
    if formula.couples:
        gradient = gradient + n[1] * wide
    if formula.is_adam:
        first, second = moments
        first, second = first + n[3] * (gradient - first), second * n[4] + n[5] * gradient * gradient
        root = second.double().sqrt().float() if second.device.type == "cpu" else second.sqrt()  # MKL's is not rounded
        return wide * n[2] - n[8] * (first / (root * n[6] + n[7])), [first, second]
    if not formula.momentum:
        return wide - n[2] * gradient, []
    buffer = moments[0] * n[3] + n[4] * gradient
    return wide - n[2] * (gradient + n[3] * buffer if formula.nesterov else buffer), [buffer]


def _pass(
    formula: Formula,
    way: str,
    weight: torch.Tensor,
    rest: torch.Tensor | None,
    gradient: torch.Tensor,
    moments: Pieces,
    keyed: torch.Tensor,
    n: torch.Tensor,
) -> list[torch.Tensor]:
    """Step a parameter, and write all of it. keyed: `numbered` places with a key added.

    Returns how many elements moved, and how many of those rounding keeps in place; how many masters were not their
    weights; `run` returns the sums of a weight's bits besides, before and after.
    """
    wide = joined(way, weight, rest)
    after, own = _stepped(formula, wide, gradient, [one.float() for one in moments], n)
    stored, beside = parted(way, after, weight.dtype, words(keyed) if way == STOCHASTIC else None)
    told = []
    if way == NEAREST:
        told = [(after != wide).sum(), ((after != wide) & (stored == wide)).sum()]
    if way == FP32 and rest is not None:
        told = [((wide != rest) & (wide == wide)).sum()]
    weight.copy_(stored)
    if rest is not None and beside is not None:
        rest.copy_(beside)
    for salt, (state, value) in enumerate(zip(moments, own, strict=True), 1):
        state.copy_(rounded_state(value, state.dtype, keyed, salt))
    return told


@cache
def _compiled(formula: Formula, way: str) -> Callable[..., list[torch.Tensor]]:
    """Return the pass, compiled by torch.compile for any number of elements; each has a code of its own, since Dynamo
    keeps few compilations of one.
    """
    code = _pass.__code__.replace(co_name=f"step_{way}_{abs(hash(formula))}")
    function = FunctionType(code, _pass.__globals__, code.co_name)
    return partial(torch.compile(function, dynamic=True, fullgraph=True), formula, way)


_NAMES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}
_WAYS = {
    PLAIN: "PLAIN",
    NEAREST: "NEAREST",
    FP32: "MASTER",
    REMAINDER: "REMAINDER",
    STOCHASTIC: "STOCHASTIC",
    KAHAN: "KAHAN",
}


@cache
def _in_cpp(formula: Formula, way: str, dtypes: tuple[torch.dtype, ...]) -> Callable[..., Any]:
    """Return the same in C++, as Inductor compiles it: vector code of its own takes twice as long for bf16."""
    names = ("WEIGHT", "GRADIENT", "MOMENT")
    facts = dict(zip(names, [_NAMES[one] for one in (*dtypes, torch.float32)], strict=False)) | {"WAY": _WAYS[way]}
    flags = {
        "ADAM": formula.is_adam,
        "COUPLES": formula.couples,
        "MOMENTUM": formula.momentum,
        "NESTEROV": formula.nesterov,
    }
    head = "".join(
        f"#define {name} {value}\n" for name, value in (facts | {k: int(v) for k, v in flags.items()}).items()
    )
    library = load_cpp(head + Path(__file__).with_name("step.cpp").read_text(encoding="utf-8"))
    step: Callable[..., Any] = library.step
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    library.step.argtypes = [number, *[pointer] * 6, ctypes.c_int32, pointer, pointer, ctypes.c_int]
    library.step.restype = None
    return step


class Passes:
    """Runs passes over some parameters. notes: why they are not compiled, if they cannot be."""

    def __init__(self, elements: int, parameters: int = 0) -> None:
        """elements: of all parameters together."""
        self._compiles = elements + parameters * _EACH >= _PAYS
        self.notes: list[str] = []
        self._last: tuple[Any, ...] = (None, None, None)

    def run(
        self,
        formula: Formula,
        way: str,
        weight: torch.Tensor,
        rest: torch.Tensor | None,
        gradient: torch.Tensor,
        moments: Pieces,
        places: torch.Tensor | None,
        key: int,
        numbers: list[float],
    ) -> list[torch.Tensor]:
        """Step one parameter; see `_pass`. rest, places: flat, the latter of its elements if they are not in order."""
        laid = [one.contiguous().view(-1) for one in (weight, gradient, *moments)]
        if (numbers, weight.device) != self._last[:2]:  # those of a group are the same for all its parameters
            self._last = numbers, weight.device, torch.tensor(numbers, dtype=torch.float32, device=weight.device)
        n = self._last[2]
        told = self._run(formula, way, laid, rest, places, key, n)
        for given, flat in zip((weight, *moments), (laid[0], *laid[2:]), strict=True):
            if not given.is_contiguous():
                given.copy_(flat.view(given.shape))
        return told

    def _run(
        self,
        formula: Formula,
        way: str,
        laid: list[torch.Tensor],
        rest: torch.Tensor | None,
        places: torch.Tensor | None,
        key: int,
        n: torch.Tensor,
    ) -> list[torch.Tensor]:
        weight, gradient, *moments = laid
        is_simple = all(one.dtype in _NAMES for one in laid) and len({one.dtype for one in moments}) < 2
        if self._compiles and is_simple and weight.device.type == "cpu":
            function = self._compile(_in_cpp, formula, way, tuple(one.dtype for one in laid[:3]))
            if function is not None:
                found = torch.zeros(0 if way in (PLAIN, STOCHASTIC) else 2, dtype=torch.int64, device="cpu")
                first, second, *_ = [*(one.data_ptr() for one in moments), 0, 0]
                beside, at = (0 if one is None else one.data_ptr() for one in (rest, places))
                given = weight.data_ptr(), beside, gradient.data_ptr(), first, second, at, key
                function(weight.numel(), *given, n.data_ptr(), found.data_ptr(), torch.get_num_threads())
                return [found[0]] if way == FP32 else [*found]
        told: list[torch.Tensor] = []
        whole = self._compiles and is_simple and weight.device.type != "cpu"
        step = (self._compile(_compiled, formula, way) if whole else None) or partial(_pass, formula, way)
        length = max(1, weight.numel()) if whole else _AT_ONCE
        before = sum_of_bits(weight) if way in (REMAINDER, KAHAN) else None
        for start in range(0, weight.numel(), length):
            part = slice(start, min(weight.numel(), start + length))
            order = torch.arange(part.start, part.stop, dtype=torch.int32, device=weight.device)
            keyed = numbered(order if places is None else places[part]) + key
            own = [one[part] for one in laid]
            some = step(own[0], None if rest is None else rest[part], own[1], own[2:], keyed, n)
            told = some if not told else [a + b for a, b in zip(told, some, strict=True)]
        return told if before is None else [before, sum_of_bits(weight)]

    def _compile(self, make: Callable[..., Any], *given: Any) -> Callable[..., Any] | None:
        """Return a pass that is compiled; None, from now on, where there is no compiler."""
        try:
            return cast("Callable[..., Any]", make(*given))
        except Exception as error:  # of whatever compiler is there, or is not
            self._compiles = False
            self.notes.append(f"steps are not compiled: {first_line(error)}")
            return None
