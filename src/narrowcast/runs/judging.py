"""Is an error round-off or a fault? Judged by bands that are measured, not assumed (TTrace, arXiv 2506.09280)."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from narrowcast.ledger.identity import CallId
from narrowcast.report.differences import (
    EXACT,
    FAULT,
    NONDETERMINISTIC,
    NOT_FINITE,
    NOT_JUDGED,
    ROUND_OFF,
    UNKNOWN,
    CallError,
    GradientError,
)
from narrowcast.runs.alone import Alone, Samples, bias, differences, relative, ulps
from narrowcast.runs.output_errors import as_real, decibels, dense
from narrowcast.runs.reference import Kept, sample_like
from narrowcast.torch_bridge import FORMATS, is_random, short_type

FACTOR = 2.5
"""A kernel is at fault from so many times the band on."""
OUTPUT_FACTOR = 4.0
"""The same of what inherits, and of whole outputs, whose bands are measured with two seeds."""
_BIAS, _SIGMAS, _VALUES = 0.05, 8.0, 256
"""A mean error of so many units in the last place, so many standard errors from zero, over so many values at least, is
no accident: a systematic sign is what breaks attention in bf16 (arXiv 2510.04212).
"""


def judge_call(identity: CallId, kept: Kept, expected: Kept, alone: Alone | None, moved: list[Samples]) -> CallError:
    """The errors of one call under the policy (`kept`) against the reference, and the verdict. moved: what the
    reference gave in runs in which every result moved.
    """
    r = [s.double() for s in expected.samples]
    y = _at_places_of(kept, expected)
    call = kept.call
    row = CallError(
        identity, call.site.file, call.site.line, call.computes, expected.call.computes, EXACT, forward=call.forward
    )
    if not has_same_shapes(kept, expected):
        return replace(row, verdict=FAULT, why="its results have other shapes than in the reference")
    got = [x for x in y if x is not None]
    total = relative(differences(got, r), r)
    row = replace(row, total=total, sqnr_db=decibels(1.0, total * total))
    row = _with_shares(replace(row, inherited=total), got, r, kept)
    if alone is not None and not alone.is_same:
        return replace(row, verdict=NONDETERMINISTIC)
    other = other_arguments(kept, expected)
    if other and total:
        (name, was), (_, now) = other[0]
        return replace(row, verdict=FAULT, why=f"its argument {name} is {now}, {was} in the reference")
    if math.isnan(total) or _lost(got, r):
        row = replace(row, verdict=NOT_FINITE, why="NaN or infinity where the reference has none")
    if alone is None or not alone.low:
        return _without_own(row, moved, r, row.is_low and is_random(call.facts.op)) if total else row
    return _with_own(row, kept, got, r, alone)


def has_same_shapes(kept: Kept, expected: Kept) -> bool:
    """Whether two calls gave results of the same shapes."""
    y = _at_places_of(kept, expected)
    return all(x is not None for x in y) and len(kept.samples) == len(expected.samples)


def other_arguments(kept: Kept, expected: Kept) -> list[tuple[tuple[str, str], tuple[str, str]]]:
    """Arguments that are no tensors, nor dtypes, and differ: as the reference has them, and as they are here.

    None where the tensors are others, too: a mask is given where the reference says `is_causal`.
    """
    if len(kept.dtypes) != len(expected.dtypes):
        return []
    return [(a, b) for a, b in zip(expected.given, kept.given, strict=False) if a != b and "dtype" not in a[0]]


def _at_places_of(kept: Kept, expected: Kept) -> list[torch.Tensor | None]:
    return [sample_like(s.double(), want) for s, want in zip(kept.samples, expected.samples, strict=False)]


def _without_own(row: CallError, moved: list[Samples], r: Samples, draws: bool) -> CallError:
    """A call that was not run alone: it inherits, unless what it gives is further off than moved inputs make it."""
    band = max((relative(differences(m, r), r) for m in moved), default=0.0)
    row = replace(row, band=band)
    if row.verdict != EXACT:
        return row
    if not moved:
        return replace(row, verdict=NOT_JUDGED)
    if row.total > OUTPUT_FACTOR * max(band, FORMATS[torch.float32].epsilon):
        why = f"{row.total:.1e} off, where one unit in the last place of every call makes {band:.1e}"
        return replace(row, verdict=FAULT, why=why)
    return replace(row, verdict=UNKNOWN if draws else ROUND_OFF)


def _with_own(row: CallError, kept: Kept, got: Samples, r: Samples, alone: Alone) -> CallError:
    """The same with what the call does by itself."""
    own = relative(differences(alone.low, r), r)
    inherited = relative(differences(got, alone.low), r)
    band = max((relative(differences(m, r), r) for m in alone.moved), default=0.0)
    row = replace(row, own=own, inherited=inherited, band=band)
    if _lost(alone.low, r):
        why = "alone, on the reference's inputs, it gives NaN or infinity where the reference has none"
        return _with_shares(replace(row, verdict=NOT_FINITE, why=why), alone.low, r, kept)
    if row.verdict == NOT_FINITE:
        return replace(row, why="NaN or infinity came with its inputs")
    row = _with_shares(row, alone.low, r, kept)
    verdict, why = (ROUND_OFF if row.total or own else EXACT), ""
    if alone.exact:
        kernel = relative(differences(alone.low, alone.exact), alone.exact)
        errors = ulps(alone.low, alone.exact, kept.output)
        mean, spread, values = bias(alone.low, alone.exact, kept.output)
        row = replace(
            row, kernel=kernel, bias_ulps=mean, largest_ulps=float(errors.abs().max()) if errors.numel() else 0.0,
            mean_ulps=float(errors.abs().mean()) if errors.numel() else 0.0,
        )  # fmt: skip
        if kernel > FACTOR * band > 0:
            verdict = FAULT
            why = f"its kernel is off by {kernel:.1e} from the same op in fp64 on the same rounded inputs, " \
                  f"{kernel / band:.1f} times what one unit in the last place makes"  # fmt: skip
        elif abs(mean) > _BIAS and abs(mean) > _SIGMAS * spread and values >= _VALUES:
            verdict = FAULT
            why = f"its roundings have a sign: {mean:+.2f} units in the last place on average of {values} values"
    return replace(row, verdict=verdict, why=why)


def _with_shares(row: CallError, got: Samples, r: Samples, kept: Kept) -> CallError:
    """The row with the shares of elements that the format lost."""
    elements = sum(x.numel() for x in r) or 1
    over = under = saturated = 0
    for x, want, dtype in zip(got, r, kept.output, strict=False):
        over += int((torch.isinf(x) & torch.isfinite(want)).sum())
        under += int(((x == 0) & (want != 0)).sum())
        saturated += int(((x.abs() == FORMATS[dtype].max) & (want.abs() != FORMATS[dtype].max)).sum())
    return replace(row, overflow=over / elements, underflow=under / elements, saturated=saturated / elements)


def _lost(got: Samples, r: Samples) -> bool:
    """Whether a value is not finite where the reference's is."""
    return any(bool((~torch.isfinite(x) & torch.isfinite(want)).any()) for x, want in zip(got, r, strict=False))


def root_mean_square(gradient: torch.Tensor) -> float:
    """Of a gradient, which may be sparse or empty."""
    values = _flat(gradient)
    return float(values.norm()) / math.sqrt(values.numel()) if values.numel() else 0.0


def _flat(gradient: torch.Tensor) -> torch.Tensor:
    return as_real(dense(gradient.detach())).double().flatten()


def judge_gradient(name: str, r: torch.Tensor, x: torch.Tensor, moved: Samples, largest: float) -> GradientError:
    """The error of a parameter's gradient x against the reference's r. moved: r where every call's result moved.
    largest: the root mean square of the model's largest gradient.
    """
    ref, got, *others = map(_flat, (r, x, *moved))
    error = relative(differences([got], [ref]), [ref])
    band = max((relative(differences([m], [ref]), [ref]) for m in others), default=0.0)
    size = float(ref.norm() * got.norm())
    cosine = float(ref @ got) / size if size else float(not ref.any() and not got.any())
    under = float(((got == 0) & (ref != 0)).double().mean()) if ref.numel() else 0.0
    share = root_mean_square(r) / largest if largest else 1.0
    format = short_type(x.dtype)
    row = GradientError(name, format, error, cosine, under, ROUND_OFF if error else EXACT, band, share)
    if _lost([got], [ref]) or math.isnan(error):
        return replace(row, verdict=NOT_FINITE)
    is_far = band and error > OUTPUT_FACTOR * band and error > FORMATS[torch.float32].epsilon * 8
    return replace(row, verdict=FAULT) if is_far and not row.is_round_off_alone else row
