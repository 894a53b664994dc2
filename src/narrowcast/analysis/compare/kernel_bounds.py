"""Kernels judged: the results of a call in a run, element by element, against its op in fp64 on the same inputs.

The bounds are those of `core.ops.bounds`. A call without a bound, or whose op has no kernel in fp64, is not judged.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from narrowcast.analysis.compare.kernel_slacks import SLACK, Inputs, Samples, slack_of_low_means, with_flushed_inputs
from narrowcast.core.ops import bounds, is_named
from narrowcast.formats import Format, fp32, widest
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.statistics.rounding import round_to, units_in_last_place
from narrowcast.observation.trial.finiteness import is_floating
from narrowcast.observation.trial.rerun import can_run_again
from narrowcast.runtime.torch_bridge import DTYPES, FORMATS, LOW, is_pointwise, map_tensors, tensors_in

_BIAS, _SIGMAS, _VALUES, _SAMPLE = 0.05, 6.0, 48, 1 << 16
"""A mean error is a bias from this many units in the last place, this many standard errors from zero, and this many
different values on: biased rounding is what breaks attention in bf16 (arXiv 2510.04212).
"""
_PROBED = 32
"""Matmuls of this size are computed by the library's kernels."""
_ROUNDING = 1.5


@dataclass(frozen=True, slots=True)
class Judged:
    """A kernel. share: the largest error over its bound; of samples: error, relative, L2; the largest and mean error
    in units in the last place; sign: the mean of biased roundings, in the same; overflows: its results are infinite or
    NaN where fp64's are not.
    """

    share: float = 0.0
    error: float = 0.0
    largest_ulps: float = 0.0
    mean_ulps: float = 0.0
    sign: float = 0.0
    overflows: bool = False

    @property
    def is_beyond(self) -> bool:
        """Whether it is reported."""
        return self.share >= bounds.NAMED or self.sign != 0.0


def is_low(call: SeenCall) -> bool:
    """Return whether an input or a result has a format of less than 32 bits."""
    planned = call.plan.formats if call.plan is not None else ()
    formats = [FORMATS[t.dtype] for t in [*tensors_in(call.args, call.kwargs), *call.results] if t.dtype in FORMATS]
    return any(format.bits < fp32.bits for format in [*formats, *(f for f in planned if f is not None)])


def judge_kernel(call: SeenCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Judged | None:
    """Judge a call that has run. args, kwargs: its inputs, before it wrote to any."""
    kind = bounds.bound_kind(call.facts.id, is_pointwise(call.facts.op))
    if not kind or not can_run_again(call):
        return None
    inputs = Inputs(call.facts, *_promoted(call, args, kwargs))
    results, exact = [_before_cast(t, call, inputs) for t in call.results if is_floating(t)], inputs.run()
    count = 1 if is_named(call.facts.id, "bound.first_result") else len(results)
    if exact is None or [t.shape for t in exact[:count]] != [t.shape for t in results[:count]]:
        return None
    slack = SLACK[kind](inputs, exact[:count], results[:count])
    has_low_means = any(FORMATS[t.dtype].bits < fp32.bits for t in results[1:])  # which it subtracts
    if slack is not None and has_low_means and is_named(call.facts.id, "bound.rounds_means"):
        slack[0] = slack[0] + bounds.unit(FORMATS[results[0].dtype]) * slack_of_low_means(inputs, exact)
    results, exact = results[:count], exact[:count]
    flushed = [_flushes(kind, t.device, t.dtype) for t in results]
    if slack is not None and any(flushed) and kind == bounds.PRODUCT:
        slack = with_flushed_inputs(inputs, slack, FORMATS[results[0].dtype])
    if slack is None:
        return None
    is_twice = is_named(call.facts.id, "bound.twice") and inputs.with_rounded_numbers(results[0].dtype) is None
    is_twice |= kind == bounds.PRODUCT and isinstance(inputs.given("bias"), torch.Tensor)  # added to a rounded product
    return _judged(results, exact, slack, flushed, is_twice)


def _promoted(call: SeenCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Return the arguments with whole numbers in the format to which torch promotes them: there 798 is 800 in bf16."""
    dtype = next((t.dtype for t in call.results if t.dtype in LOW), None)
    if dtype is None or not is_pointwise(call.facts.op):
        return args, kwargs
    is_whole = lambda t: not (t.dtype is torch.bool or t.is_floating_point() or t.is_complex())  # noqa: E731
    return map_tensors(lambda t: t.to(dtype) if is_whole(t) else t, (args, kwargs))  # type: ignore[no-any-return]


def _before_cast(result: torch.Tensor, call: SeenCall, inputs: Inputs) -> torch.Tensor:
    """Return a result as the kernel returned it, where a rule casts it to a wider format."""
    if call.plan is None or not call.plan.results:
        return result
    read = [FORMATS[t.dtype] for t in tensors_in(inputs.args, inputs.kwargs) if is_floating(t)]
    format = call.plan.computes_in or (widest(read) if read else None)
    if format is None or format.bits >= FORMATS[result.dtype].bits:
        return result
    returned = result.to(DTYPES[format])
    is_same = torch.equal(returned.to(result.dtype).nan_to_num(), result.nan_to_num())
    return returned if is_same else result


def _flushes(kind: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether subnormal values are flushed to zero here: by hardware for products, or in a mode."""
    if device.type != "cpu":
        return False
    size = (_PROBED, _PROBED) if kind == bounds.PRODUCT else (_PROBED,)
    tiny = torch.full(size, FORMATS[dtype].smallest_normal / 4, dtype=torch.float64, device="cpu").to(dtype)
    try:
        product = tiny @ torch.eye(_PROBED, dtype=dtype, device="cpu") if kind == bounds.PRODUCT else tiny * 1.0
    except (RuntimeError, NotImplementedError):  # a format of 8 bits
        return False
    return not bool(product.any())


# -- against the bound -------------------------------------------------------------------------------------------------


def _judged(results: Samples, exact: Samples, slack: Samples, flushed: list[bool], is_twice: bool) -> Judged:
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
        u, least = bounds.rounding(format, flushes)
        bound = y64.abs().mul_(u).add_(s).add_(least)
        share = max(share, float((error / bound).nan_to_num_(0.0, 0.0, 0.0).max()))
        step = -(-y64.numel() // _SAMPLE)
        x, y64, s, error = (t.expand_as(y64).flatten()[::step] for t in (x, y64, s, error))
        noise, signal = noise + float(error.square().sum()), signal + float(y64.square().sum())
        units = error / units_in_last_place(y64, format)
        largest, total, count = max(largest, float(units.max())), total + float(units.sum()), count + units.numel()
        sign = max(sign, _sign(x, y64, s, format, is_twice), key=abs)
    relative = 0.0 if not noise else math.sqrt(noise / signal) if signal else math.inf
    return Judged(share, relative, largest, total / count if count else 0.0, sign, overflows)


def _sign(x: torch.Tensor, y64: torch.Tensor, slack: torch.Tensor, format: Format, is_twice: bool) -> float:
    """Return the mean difference of results from the exact ones rounded once, to nearest, ties to even, if significant:
    in units in the last place, towards +infinity or away from zero, whichever is the larger; else 0.

    Left out are values so near to a tie that the kernel's slack may cross it, unless they are a tie that fp32 holds;
    repeated values; and differences of more than one and a half units, which no rounding makes. is_twice: results that
    are rounded in between, too, are compared with the exact ones: rounding to nearest has no bias.
    """
    if format not in (FORMATS[d] for d in (torch.float16, torch.bfloat16)) or y64.dtype is not torch.float64:
        return 0.0
    rounded = y64 if is_twice else round_to(y64, format).double()
    units = units_in_last_place(y64, format)
    e = (x - rounded) / units
    if float(e.abs().mean()) <= _BIAS:
        return 0.0
    away_from_tie = ((y64 - rounded).abs() - units / 2).abs()
    is_tie = (away_from_tie == 0) & (slack <= 4 * bounds.unit(fp32) * y64.abs())
    is_normal = y64.abs() >= format.smallest_normal  # smaller ones may be flushed to zero
    is_exact = (y64 == round_to(y64, format).double()) & (x == y64)  # in whatever direction a kernel rounds
    # Roundings in between are shared by many results: where they exceed the last one, errors are no samples of it.
    settles = slack <= units if is_twice else (away_from_tie > slack) | is_tie
    settled = is_normal & ~is_exact & (e.abs() <= _ROUNDING) & settles
    e, y64, x = e[settled], y64[settled], x[settled]
    firsts = torch.from_numpy(np.unique(y64.cpu().numpy(), return_index=True)[1])  # of the different values
    e, y64, x = e[firsts], y64[firsts], x[firsts]
    if e.numel() < _VALUES:
        return 0.0
    means, steps = [], torch.unique(x).numel()  # values rounded to one number count once
    for signed in (e, torch.where(y64 < 0, -e, e)):
        mean, spread = float(signed.mean()), float(signed.std()) / math.sqrt(steps)
        means.append(mean if abs(mean) > max(_BIAS, _SIGMAS * spread) else 0.0)
    return max(means, key=abs)
