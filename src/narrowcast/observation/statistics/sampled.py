"""The facts of tensors out of what was taken of them, many at once: those of one shape are computed as one array.

Each tensor's own numbers come out the same, whatever stands beside it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from narrowcast.formats import FORMATS, Format
from narrowcast.reports.results.run_records import Histogram, TensorFacts
from narrowcast.reports.results.sketch import SUMS, sketch_text

_TOGETHER = 1 << 22
"""How many elements are computed as one array at most."""
_UNDER_ALL = -(1 << 20)


@dataclass(slots=True)
class Taken:
    """What was taken of a tensor while the run went on: what its facts begin with, and of a floating one its range, a
    sample and the rows of a sketch, which are 2-d. everything: all its elements, where they are at hand.
    """

    format: str
    shape: tuple[int, ...]
    device: str
    elements: int
    lies_in: int = -1
    checksum: str = ""
    file: str = ""
    range: tuple[torch.Tensor, torch.Tensor] | None = None
    sample: Any = None
    rows: Any = None
    everything: torch.Tensor | None = None

    def without_values(self) -> TensorFacts:
        """Return the facts that need no inspection of its values."""
        begin = (self.format, self.shape, self.device, self.elements)
        return TensorFacts(*begin, lies_in=self.lies_in, checksum=self.checksum, file=self.file)


@dataclass(slots=True)
class _Finite:
    """The range of a tensor's finite values, and the shares of the others; sample: with zeros in their place."""

    low: float
    high: float
    nan: float
    infinite: float
    sample: Any


def _finite(each: Taken, low: float, high: float, sample: Any) -> _Finite:
    if math.isfinite(low) and math.isfinite(high):
        return _Finite(low, high, 0.0, 0.0, sample)
    values = sample if each.everything is None else _array(each.everything.clone())
    nan, infinite = float(np.isnan(values).mean()), float(np.isinf(values).mean())
    nan = max(nan, 1 / each.elements) if math.isnan(low) else nan
    infinite = max(infinite, 1 / each.elements) if math.isinf(low) or math.isinf(high) else infinite
    finite = values[np.isfinite(values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    return _Finite(low, high, nan, infinite, np.where(np.isfinite(sample), sample, 0))


def _array(x: torch.Tensor) -> Any:
    """Return the values, in the memory of a tensor of ours: torch refuses to resize what numpy has read."""
    return x.to("cpu", x.dtype if x.dtype is torch.float64 else torch.float32).resolve_neg().numpy()


def facts_of(all_taken: Sequence[Taken]) -> list[TensorFacts]:
    """Return the facts of each tensor, in their order; read of an accelerator in few transfers."""
    alike: defaultdict[Any, list[int]] = defaultdict(list)
    facts: dict[int, TensorFacts] = {}
    for number, t in enumerate(all_taken):
        if t.range is None:
            facts[number] = t.without_values()
        else:
            alike[t.sample.shape, t.sample.dtype, t.sample.device, t.rows.shape].append(number)
    for (shape, *_, rows), numbers in alike.items():
        step = max(1, _TOGETHER // max(1, math.prod(shape), math.prod(rows)))
        for start in range(0, len(numbers), step):
            some = numbers[start : start + step]
            facts.update(zip(some, _facts([all_taken[n] for n in some]), strict=True))
    return [facts[number] for number in range(len(all_taken))]


def _facts(alike: list[Taken]) -> Iterator[TensorFacts]:
    lows, highs = zip(*[each.range for each in alike if each.range is not None], strict=True)
    ranges = zip(torch.stack(lows).tolist(), torch.stack(highs).tolist(), strict=True)
    values = _array(torch.stack([each.sample for each in alike]))
    finite = [_finite(each, *range, sample) for each, range, sample in zip(alike, ranges, values, strict=True)]
    if any(each.nan or each.infinite for each in finite):
        values = np.stack([each.sample for each in finite])
    inspected = values[0].size
    exponents, is_zero = exponents_of(values)
    below = exponents.max(axis=-1, keepdims=True) - exponents
    zeros = np.count_nonzero(is_zero, axis=(1, 2)).tolist()
    keep = ~is_zero.reshape(len(alike), -1) if any(zeros) else None
    flat = _wide(values.reshape(len(alike), -1))
    means = (flat.sum(axis=1) / inspected).tolist()
    squares = (np.einsum("ij,ij->i", flat, flat) / inspected).tolist()
    counted = zip(
        alike, finite, zeros, means, squares, _histograms(exponents, keep), _histograms(below, keep),
        _sketches(_array(torch.stack([each.rows for each in alike]))), strict=True,
    )  # fmt: skip
    for t, each, zero, mean, square, histogram, under, sketch in counted:
        format = FORMATS[t.format]
        yield TensorFacts(
            t.format, t.shape, t.device, t.elements, low=each.low, high=each.high, mean=mean,
            rms=math.sqrt(square), zeros=zero / inspected - each.nan - each.infinite,
            subnormal=_subnormal(histogram, format) / inspected, saturated=_saturated(each, format), nan=each.nan,
            infinite=each.infinite, exponents=histogram, below=under, inspected=inspected, lies_in=t.lies_in,
            checksum=t.checksum, file=t.file, sketch=sketch,
        )  # fmt: skip


def _subnormal(counts: Histogram, format: Format) -> int:
    smallest = math.frexp(format.smallest_normal)[1] - 1
    return sum(counts.counts[: smallest - counts.first]) if counts.counts and counts.first < smallest else 0


def _saturated(each: _Finite, format: Format) -> float:
    if max(-each.low, each.high) < format.max:
        return 0.0
    return float(np.count_nonzero(np.abs(each.sample) == format.max) / each.sample.size)


def exponents_of(values: Any) -> tuple[Any, Any]:
    """Return the binary exponent of each number, far below all others for zeros; and which are zeros. Read off the
    bits, in a fifth of the time of frexp, which is asked where there are fp32's or fp64's own subnormal numbers.
    """
    mantissa_bits, integer = (23, np.int32) if values.dtype == np.float32 else (52, np.int64)
    bits = values.view(integer) & np.iinfo(integer).max
    is_zero = bits == 0
    exponents = (bits >> mantissa_bits).astype(np.int32, copy=False)
    exponents -= (1 << (30 if mantissa_bits == 23 else 62) - mantissa_bits) - 1
    lowest = -126 if mantissa_bits == 23 else -1022
    is_low = exponents < lowest
    if is_low.any():
        exponents[is_low] = np.frexp(values[is_low])[1] - 1
        exponents[is_zero] = _UNDER_ALL
    return exponents, is_zero


def _histograms(numbers: Any, keep: Any) -> list[Histogram]:
    """Return one histogram of each array of the first dimension, of the elements that are kept."""
    count = len(numbers)
    flat = numbers.reshape(count, -1)
    kept = flat.ravel() if keep is None else flat[keep]
    if not kept.size:
        return [Histogram()] * count
    first = int(kept.min())
    span = int(kept.max()) - first + 1
    places = flat - first + np.arange(0, count * span, span)[:, None]
    places = places.ravel() if keep is None else places[keep]
    counts = np.bincount(places, minlength=count * span).reshape(count, span)
    return [_histogram(first, row) for row in counts]


def _histogram(first: int, counts: Any) -> Histogram:
    there = np.flatnonzero(counts)
    if not there.size:
        return Histogram()
    start, stop = int(there[0]), int(there[-1]) + 1
    return Histogram(first + start, tuple(counts[start:stop].tolist()))


def _wide(values: Any) -> Any:
    with np.errstate(invalid="ignore"):  # memory that nothing wrote may hold signaling NaN
        return values.astype(np.float64)


def _sketches(rows: Any) -> Iterator[str]:
    """Yield the sums and the length of each row, as a run keeps them."""
    values = _wide(rows)
    with np.errstate(all="ignore"):
        lengths = np.sqrt(np.einsum("nij,nij->ni", values, values))
        sums = np.stack([each @ _sums_of(values.shape[2]) for each in values])  # one by one: a product's sums may
        raw = np.concatenate([sums, lengths[:, :, None]], axis=2).astype("<f4")  # depend on how many rows it has
    return (sketch_text(each.tobytes()) for each in raw)


@lru_cache(maxsize=16)
def _sums_of(columns: int) -> Any:
    """Return a matrix that sums every sixteenth element: multiplying takes a fifth of the time of numpy's sum."""
    return np.tile(np.eye(SUMS), (-(-columns // SUMS), 1))[:columns]
