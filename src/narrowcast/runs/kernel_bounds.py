"""Kernels judged: what a call of a run really gave, element by element, against its op in fp64 on the same inputs.

The bounds are those of `ops.bounds`. A call that nothing bounds, and one whose op has no kernel in fp64, is not judged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from narrowcast.formats import Format, fp32
from narrowcast.ops.bounds import (
    NAMED,
    PRODUCT,
    SCATTER,
    SUM,
    WEIGHTS,
    WIDE,
    WIDE_FACTOR,
    accumulated,
    bound_kind,
    cancels,
    gamma,
    judged_results,
    rounded_between,
    rounded_logarithm,
    rounding,
    rounds_means,
    steps_in_between,
    terms_of,
    unit,
    weights_error,
)
from narrowcast.runs.arguments import others_as_text
from narrowcast.runs.finiteness import is_floating
from narrowcast.runs.noise import Noise
from narrowcast.runs.rerun import Change, can_run_again, run_wide
from narrowcast.runs.rounding import round_to
from narrowcast.runs.seen_call import SeenCall
from narrowcast.torch_bridge import FORMATS, OpFacts, is_pointwise, tensors_in

Samples = list[torch.Tensor]

_BIAS, _SIGMAS, _VALUES, _SAMPLE = 0.05, 8.0, 256, 1 << 16
"""A mean error of so many units in the last place, so many standard errors from zero, over so many different values at
least, is no accident: a systematic sign is what breaks attention in bf16 (arXiv 2510.04212).
"""
_MASKED_OUT = 200.0
"""What a mask adds of this size or more leaves a weight of zero, however it is rounded."""
_SPLITS = 32
"""Into so many parts an inner dimension is split at most."""
_MOVED = 4 * fp32.epsilon
"""So far inputs are moved to see what cancels."""
_PROBED = 32
"""Products of this size are the library's own."""


def shapes_of(*trees: Any) -> list[tuple[int, ...]]:
    """The shapes of the tensors in nested arguments."""
    return [tuple(t.shape) for t in tensors_in(*trees)]


@dataclass(frozen=True, slots=True)
class Judged:
    """A kernel. share: the largest error over its bound; of samples: error, relative, L2; the largest and mean error
    in units in the last place; sign: the mean of roundings that have one, in the same; overflows: it gives infinity or
    NaN where fp64 does not.
    """

    share: float = 0.0
    error: float = 0.0
    largest_ulps: float = 0.0
    mean_ulps: float = 0.0
    sign: float = 0.0
    overflows: bool = False

    @property
    def is_beyond(self) -> bool:
        """Whether it is named."""
        return self.share >= NAMED or self.sign != 0.0


def is_low(call: SeenCall) -> bool:
    """Whether it reads or gives a format of less than 32 bits."""
    planned = call.plan.formats if call.plan is not None else ()
    found = [FORMATS[t.dtype] for t in [*tensors_in(call.args, call.kwargs), *call.results] if t.dtype in FORMATS]
    return any(format.bits < fp32.bits for format in [*found, *(f for f in planned if f is not None)])


def judge_kernel(call: SeenCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Judged | None:
    """Judge a call that has run. args, kwargs: as it read them, before it wrote to any."""
    kind = bound_kind(call.facts.id, is_pointwise(call.facts.op))
    if not kind or not can_run_again(call):
        return None
    inputs = _Inputs(call.facts, args, kwargs)
    results, exact = [t for t in call.results if is_floating(t)], inputs.run()
    if exact is None or [t.shape for t in exact] != [t.shape for t in results]:
        return None
    count = judged_results(call.facts.id, len(results))
    if rounds_means(call.facts.id, [FORMATS[t.dtype] for t in results[1:]]):
        return None
    results, exact = results[:count], exact[:count]
    slack = _SLACK[kind](inputs, exact, results)
    flushed = [_flushes(kind, t.device, t.dtype) for t in results]
    if slack is not None and any(flushed) and kind == PRODUCT:
        slack = _with_flushed_inputs(inputs, slack, FORMATS[results[0].dtype])
    return None if slack is None else _judged(results, exact, slack, flushed)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """A call's op with what it read."""

    facts: OpFacts
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, dtype: torch.dtype = torch.float64, change: Change | None = None) -> list[torch.Tensor] | None:
        """The floating results in a wide format, each tensor changed before."""
        found = run_wide(self.facts, self.args, self.kwargs, dtype, change)
        return None if found is None else [t for t in found if is_floating(t)]

    def on_absolute_values(self, more: float = 0.0) -> list[torch.Tensor] | None:
        """The op on the absolute values of all that it adds up, and so much more."""
        kwargs = {k: abs(v) if k in ("alpha", "beta") else v for k, v in self.kwargs.items()}
        return _Inputs(self.facts, self.args, kwargs).run(change=lambda t: t.abs() + more if more else t.abs())

    def with_rounded_numbers(self, dtype: torch.dtype) -> _Inputs | None:
        """The same with numbers in a low format, as some kernels read them; None where that changes none."""

        def rounded(value: Any) -> Any:
            return float(torch.tensor(value, dtype=dtype)) if isinstance(value, float) else value

        args, kwargs = tuple(map(rounded, self.args)), {k: rounded(v) for k, v in self.kwargs.items()}
        pairs = zip((*self.args, *self.kwargs.values()), (*args, *kwargs.values()), strict=True)
        is_changed = any(isinstance(a, float) and a != b and math.isfinite(b) for a, b in pairs)
        return _Inputs(self.facts, args, kwargs) if is_changed else None

    @property
    def is_transposed(self) -> bool:
        """Of a convolution: whether an argument says that it is transposed."""
        return ("transposed", "True") in others_as_text(self.facts, self.args, self.kwargs)

    def given(self, name: str) -> Any:
        """A tensor, by its argument's name."""
        position = next((slot.position for slot in self.facts.slots if slot.name == name), len(self.args))
        return self.args[position] if position < len(self.args) else self.kwargs.get(name)


# -- what a kernel may be off before it rounds -------------------------------------------------------------------------


def _slack_of_sums(inputs: _Inputs, exact: Samples, results: Samples) -> Samples | None:
    size = inputs.on_absolute_values()
    if size is None:
        return None
    factor = accumulated(terms_of(inputs.facts.id, shapes_of(inputs.args, inputs.kwargs), shapes_of(results)))
    return [s * factor for s in size[: len(results)]]


def _slack_of_products(inputs: _Inputs, exact: Samples, results: Samples) -> Samples | None:
    found = _slack_of_sums(inputs, exact, results)
    if found is None or not found:
        return found
    low = unit(FORMATS[results[0].dtype])
    if _splits_sums(results[0]):
        size = inputs.on_absolute_values() or []
        found = [f + s * gamma(_SPLITS, low) for f, s in zip(found, size, strict=False)]
    shapes = shapes_of(inputs.args, inputs.kwargs)
    steps = steps_in_between(inputs.facts.id, shapes, inputs.is_transposed) if results[0].is_cpu else 0
    if steps:
        size = inputs.on_absolute_values() or []
        found = [f + s * gamma(steps, low) for f, s in zip(found, size, strict=False)]
    bias, weight = inputs.given("bias"), inputs.given("weight")
    if isinstance(bias, torch.Tensor) and isinstance(weight, torch.Tensor):  # the product was rounded before
        wide = bias.detach().double().abs().view(-1, *[1] * (weight.dim() - 2))
        found[0] = found[0] + low * (exact[0].abs() + wide)
    return found


def _slack_of_scattered(inputs: _Inputs, exact: Samples, results: Samples) -> Samples | None:
    size, counts = inputs.on_absolute_values(), inputs.run(change=torch.ones_like)
    if size is None or counts is None:
        return None
    terms = int(max((float(t.abs().max()) for t in counts if t.numel()), default=1.0)) + 1
    return [s * gamma(terms, unit(FORMATS[t.dtype])) for s, t in zip(size, results, strict=True)]


def _slack_in_fp32(inputs: _Inputs, exact: Samples, results: Samples) -> Samples | None:
    """How far the op in fp32 is off, at most over all elements, and what it makes that numbers are rounded."""
    others = [inputs.run(torch.float32)]
    if cancels(inputs.facts.id):
        others.append(inputs.run(change=lambda t: _noise().moved(t, _MOVED)))
    if any(found is None for found in others):
        return None
    low = unit(FORMATS[results[0].dtype])
    logarithm = rounded_logarithm(inputs.facts.id, shapes_of(inputs.args, inputs.kwargs), low)
    between = rounded_between(inputs.facts.id, low)
    slack = []
    for n, y64 in enumerate(exact):
        off = [_distance(found[n], y64) for found in others if found is not None]
        largest = max((float(each.max()) for each in off if each.numel()), default=0.0)
        slack.append(y64.abs().mul_(2 * unit(fp32) + between).add_(WIDE_FACTOR * largest + logarithm))
    if is_pointwise(inputs.facts.op):
        rounded = inputs.with_rounded_numbers(results[0].dtype)
        numbers = rounded.run() if rounded is not None else None
        if numbers is not None:
            slack[0] += _distance(numbers[0], exact[0])
        if inputs.kwargs.get("alpha", 1) != 1 and isinstance(inputs.args[0], torch.Tensor):  # that product is rounded
            slack[0] += low * _distance(inputs.args[0], exact[0])
    return slack


def _distance(x: torch.Tensor, y64: torch.Tensor) -> torch.Tensor:
    """|x - y64|, 0 where that is not finite."""
    return (x.double() - y64).abs_().nan_to_num_(0.0, 0.0, 0.0)


@cache
def _noise() -> Noise:
    return Noise(1)


def _slack_of_weights(inputs: _Inputs, exact: Samples, results: Samples) -> Samples | None:
    """Attention: its weights are rounded to the low format, and its scores are off as sums of products are."""
    query, key, mask = (inputs.given(name) for name in ("query", "key", "attn_mask"))
    position = next(slot.position for slot in inputs.facts.slots if slot.name == "value")
    if position >= len(inputs.args) or not query.numel() or not key.numel():
        return None
    args = tuple(v.abs() if n == position else v for n, v in enumerate(inputs.args))
    size = _Inputs(inputs.facts, args, inputs.kwargs).run()
    if size is None:
        return None
    low, scale = unit(FORMATS[query.dtype]), inputs.kwargs.get("scale") or 1 / math.sqrt(query.shape[-1])
    scores = abs(scale) * float(query.double().norm(dim=-1).max() * key.double().norm(dim=-1).max())
    if isinstance(mask, torch.Tensor) and mask.dtype in FORMATS and mask.numel():
        sizes = mask.detach().double().abs()
        scores += float(torch.where(sizes < _MASKED_OUT, sizes, 0.0).max())
    reduces_low = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    off = scores * (accumulated(query.shape[-1]) + 4 * (low if reduces_low else unit(fp32)))
    factor = weights_error(off, 2 * low + accumulated(key.shape[-2]))
    return [size[0] * factor]


_SLACK: dict[str, Callable[[_Inputs, Samples, Samples], Samples | None]] = {
    SUM: _slack_of_sums, PRODUCT: _slack_of_products, SCATTER: _slack_of_scattered, WIDE: _slack_in_fp32,
    WEIGHTS: _slack_of_weights,
}  # fmt: skip


def _with_flushed_inputs(inputs: _Inputs, slack: Samples, format: Format) -> Samples | None:
    """The slack of a product whose inputs below the smallest normal count as zero."""
    given = [t for t in tensors_in(inputs.args, inputs.kwargs) if is_floating(t)]
    if not any(bool(((t != 0) & (t.abs() < format.smallest_normal)).any()) for t in given):
        return slack
    size, more = inputs.on_absolute_values(), inputs.on_absolute_values(format.smallest_normal)
    if size is None or more is None:
        return None
    return [s + (b - a) for s, a, b in zip(slack, size, more, strict=False)]


# -- asked of torch ----------------------------------------------------------------------------------------------------


def _splits_sums(result: torch.Tensor) -> bool:
    """Whether a product on cuda may add partial sums in its low format: a setting, on unless it is turned off."""
    name = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(result.dtype)
    if not result.is_cuda or name is None:
        return False
    return bool(getattr(torch.backends.cuda.matmul, f"allow_{name}_reduced_precision_reduction"))


def _flushes(kind: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether values below the smallest normal become zero here: units for products do that, and a mode does."""
    if device.type != "cpu":
        return False
    size = (_PROBED, _PROBED) if kind == PRODUCT else (_PROBED,)
    tiny = torch.full(size, FORMATS[dtype].smallest_normal / 4, dtype=torch.float64).to(dtype)
    try:
        found = tiny @ torch.eye(_PROBED, dtype=dtype) if kind == PRODUCT else tiny * 1.0
    except (RuntimeError, NotImplementedError):  # a format of 8 bits
        return False
    return not bool(found.any())


# -- against the bound -------------------------------------------------------------------------------------------------


def _judged(results: Samples, exact: Samples, slack: Samples, flushed: list[bool]) -> Judged:
    share = largest = total = noise = signal = 0.0
    count, overflows, sign = 0, False, 0.0
    for y, y64, s, flushes in zip(results, exact, slack, flushed, strict=True):
        if not y.numel():
            continue
        format, x = FORMATS[y.dtype], y.detach().double()
        error = (x - y64).abs_()
        known = torch.isfinite(error)
        if not bool(known.all()):
            overflows = overflows or bool((torch.isfinite(y64) & ~torch.isfinite(x)).any())
            error = torch.where(known, error, 0.0)
            y64 = torch.where(known, y64, 0.0)
        u, least = rounding(format, flushes)
        bound = y64.abs().mul_(u).add_(s).add_(least)
        share = max(share, float((error / bound).nan_to_num_(0.0, 0.0, 0.0).max()))
        step = -(-y64.numel() // _SAMPLE)
        x, y64, s, error = (t.expand_as(y64).flatten()[::step] for t in (x, y64, s, error))
        noise, signal = noise + float(error.square().sum()), signal + float(y64.square().sum())
        units = error / units_in_last_place(y64, format)
        largest, total, count = max(largest, float(units.max())), total + float(units.sum()), count + units.numel()
        sign = max(sign, _sign(x, y64, s, format), key=abs)
    relative = 0.0 if not noise else math.sqrt(noise / signal) if signal else math.inf
    return Judged(share, relative, largest, total / count if count else 0.0, sign, overflows)


def units_in_last_place(reference: torch.Tensor, format: Format) -> torch.Tensor:
    """The distance between neighbours of a format at each value."""
    _, exponents = torch.frexp(reference)
    steps = (exponents.to(torch.int64) - 1).clamp(min=format.min_exponent, max=format.max_exponent)
    return torch.ldexp(torch.ones_like(reference), steps - format.mantissa_bits)


def _sign(x: torch.Tensor, y64: torch.Tensor, slack: torch.Tensor, format: Format) -> float:
    """The mean of what sets results apart from the exact ones rounded once, to nearest, ties to even, where it is no
    accident: in units in the last place, towards +infinity or away from zero, whichever is the larger; else 0.

    What is so near to a tie that the kernel's slack takes it across says nothing, unless it is one and fp32 has it; nor
    do values that come twice. Those that are off by more than one and a half units are no matter of rounding.
    """
    if format not in (FORMATS[d] for d in (torch.float16, torch.bfloat16)):
        return 0.0
    rounded = round_to(y64, format).double()
    units = units_in_last_place(y64, format)
    e = (x - rounded) / units
    if float(e.abs().mean()) <= _BIAS:
        return 0.0
    away_from_tie = ((y64 - rounded).abs() - units / 2).abs()
    is_tie = (away_from_tie == 0) & (slack <= 4 * unit(fp32) * y64.abs())
    settled = (e.abs() <= _ROUNDING) & ((away_from_tie > slack) | is_tie)
    e, y64 = e[settled], y64[settled]
    firsts = _firsts_of(y64)
    e, y64 = e[firsts], y64[firsts]
    if e.numel() < _VALUES:
        return 0.0
    means = []
    for signed in (e, torch.where(y64 < 0, -e, e)):
        mean, spread = float(signed.mean()), float(signed.std()) / math.sqrt(signed.numel())
        means.append(mean if abs(mean) > max(_BIAS, _SIGMAS * spread) else 0.0)
    return max(means, key=abs)


_ROUNDING = 1.5


def _firsts_of(values: torch.Tensor) -> torch.Tensor:
    """Where each of the different values comes first."""
    found, numbers = torch.unique(values, return_inverse=True)
    firsts = torch.full((found.numel(),), values.numel(), dtype=torch.int64, device=values.device)
    firsts.scatter_reduce_(0, numbers, torch.arange(values.numel(), device=values.device), "amin")
    return firsts
