"""Which calls read one weight, in whatever formats."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from narrowcast.analysis.diff.pieces import Piece, distance
from narrowcast.analysis.diff.sides import Bundle
from narrowcast.formats import FORMATS

_ROUNDED = 16.0
"""Rounding moves the mean and the root mean square of a weight this many times less than single elements, at least."""


def same_weight(a: Piece | None, b: Piece | None) -> bool:
    """Return whether two weights are one, but for rounding to the format of either."""
    if a is None or b is None or a.elements != b.elements:
        return False
    most = _most_apart(a.format, b.format)
    moments = max(abs(a.mean - b.mean), abs(a.rms - b.rms)) if a.is_whole and b.is_whole else 0.0
    return range_difference(a, b) <= most and moments <= max(most / _ROUNDED, 1e-6) * a.rms


def _most_apart(*formats: str) -> float:
    """Return how far apart the ranges of one weight in two formats are at most, in parts of its largest magnitude."""
    if formats[0] == formats[1]:
        return 1e-6
    return 2 * max((FORMATS[name].epsilon for name in formats if name in FORMATS), default=1.0)


_Waiting = dict[tuple[int, str], list[tuple[float, int, Bundle]]]


def by_lowest(bundles: Iterable[Bundle]) -> _Waiting:
    """Return the calls with weights by the size and the format of these, in the order of their smallest values."""
    waiting: _Waiting = {}
    for n, x in enumerate(bundles):
        if x.weight is not None:
            waiting.setdefault((x.weight.elements, x.weight.format), []).append((x.weight.low, n, x))
    return {key: sorted(rows, key=lambda row: row[:2]) for key, rows in waiting.items()}


def near_to(a: Bundle, waiting: _Waiting) -> list[Bundle]:
    """Return those whose weights may be that of a call, in their own order."""
    found: list[tuple[int, Bundle]] = []
    for (elements, format), rows in waiting.items():
        if a.weight is not None and elements == a.weight.elements:
            apart = _most_apart(a.weight.format, format)
            most = 2 * apart * a.weight.largest if apart <= 0.5 else math.inf  # as the other's may be larger
            first = bisect_left(rows, a.weight.low - most, key=lambda row: row[0])
            end = bisect_right(rows, a.weight.low + most, key=lambda row: row[0])
            found += [row[1:] for row in rows[first:end]]
    return [x for _, x in sorted(found, key=lambda one: one[0])]


def weight_distance(a: Piece | None, b: Piece | None) -> float:
    """Return the distance of two weights; infinity if their rows do not match (one is transposed)."""
    result = distance(a, b)
    return result.relative if result.is_known else math.inf


def range_difference(a: Bundle | Piece, b: Bundle | Piece) -> float:
    """Return the difference of the smallest and the largest values, relative to the largest magnitude."""
    largest = max(abs(a.low), abs(a.high), abs(b.low), abs(b.high))
    return max(abs(a.low - b.low), abs(a.high - b.high)) / largest if largest else 0.0
