"""The values that a run has: a tensor is known by its size, range, mean and root mean square, wherever it is made; and
by its elements, where both runs have it in one layout.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice
from typing import NamedTuple

from narrowcast.analysis.diff.pieces import SKETCHES, UNLIKE, Piece, distance, in_any_order, stacked
from narrowcast.analysis.diff.sides import Side
from narrowcast.core.ledger.identity import BACKWARD
from narrowcast.core.ops.facts import CONV, GEMM, op_kind
from narrowcast.formats import FORMATS, fp32
from narrowcast.reports.results.run_records import CallRecord


class Near(NamedTuple):
    """How far apart numbers of one value are by rounding, at most: its range and its averages, in parts of the largest
    magnitude; its elements (L2), relatively.
    """

    range: float
    averages: float
    elements: float

    @classmethod
    def of(cls, epsilon: float, has_backward: bool) -> Near:
        """Return it for the largest epsilon of a run's formats. Forwards in low formats are nearer than what steps have
        moved: in 60 sound pairs in bf16 elements were 1.6 % apart, and root mean squares 0.2 %.
        """
        if epsilon <= fp32.epsilon:
            return IN_FP32
        low = min(_LOW, _EPSILONS * epsilon)
        return cls(_LOW, _LOW, _LOW) if has_backward else cls(low, low / 8, low)


IN_FP32 = Near(3e-5, 3e-5, 3e-5)
_LOW, _EPSILONS = 0.02, 2.5
_PARTS, _MOST = 64, 64
"""Into how many parts a batch is divided, at most; and with how many values of about its size elements are compared."""
Numbers = tuple[float, ...]
_RANGE = 3
"""How many of the numbers of a tensor are its range; the others are averages."""


class KnownValues:
    """The calls of a side's first rank, casts left out, and what numbers its tensors have, by size."""

    def __init__(self, side: Side) -> None:
        self._side, self._tensors, self.has_backward = side, side.runs[0].tensors, side.has_backward
        self.calls = [call for call in side.runs[0].calls if not call.is_cast]
        self._positions = {id(call): n for n, call in enumerate(self.calls)}
        self._floats = [n for n in range(len(self._tensors)) if self._is_seen(n)]
        formats = {self._tensors[n].format for n in self._floats}
        self.near = Near.of(max((FORMATS[name].epsilon for name in formats), default=0.0), side.has_backward)

    @cached_property
    def _together(self) -> dict[int, list[Piece]]:
        together: dict[int, list[Piece]] = {}
        for numbers, piece in self._of_one_line():
            for number in numbers:
                together.setdefault(number, []).append(piece)
        return together

    @cached_property
    def _one_by_one(self) -> _BySize:
        return _by_size([self._side.piece(0, n) for n in self._floats])

    @cached_property
    def _of_lines(self) -> _BySize:
        return _by_size(chain(*self._together.values()))

    def _of_one_line(self) -> Iterator[tuple[Sequence[int], Piece]]:
        """Yield several results that one line gives as one, with their numbers: those of micro-batches are one result
        in a run without. Next to each other, or at equal distances, as where a model calls the line for each layer; the
        first or the last of them, where there are others besides.
        """
        groups: dict[tuple[object, ...], list[int]] = {}
        for call in self.calls:
            for _, number in call.outputs[:1]:
                key = (call.id.op, call.file, call.line, call.id.direction)
                groups.setdefault((*key, self._tensors[number].shape), []).append(number)
                groups.setdefault(key, []).append(number)  # a prompt, and then tokens
        for numbers in dict.fromkeys(map(tuple, groups.values())):
            count, pieces = len(numbers), {n: self._side.piece(0, n) for n in numbers}
            if not all(piece.is_seen and piece.is_whole for piece in pieces.values()):
                continue
            for parts in range(2, min(count, _PARTS) + 1):
                apart = count // parts
                blocks = [numbers[n : n + parts] for n in range(0, count, parts)]
                if count % parts:
                    blocks = [numbers[:parts], numbers[-parts:]]
                elif apart > 1:
                    blocks += [numbers[n::apart] for n in range(apart)]
                for of in blocks:
                    piece = _as_one([pieces[n] for n in of])
                    yield of, piece
                    if piece.elements == parts:  # of losses the mean
                        mean = piece.mean
                        of_one = replace(in_any_order([piece]), columns=1, low=mean, high=mean, rms=abs(mean))
                        yield of, of_one

    @cached_property
    def low_of_products(self) -> frozenset[str]:
        """The formats below fp32 in which products are computed."""
        products = (call for call in self.calls if op_kind(call.id.op).family in (GEMM, CONV))
        return frozenset(
            name for call in products for name in call.computes.split(",") if name in FORMATS and name != fp32.name
        )

    @cached_property
    def read(self) -> list[list[int]]:
        """By call, which calls made what it reads."""
        return [self._makers_of(call) for call in self.calls]

    def _makers_of(self, call: CallRecord) -> list[int]:
        makers = (self._side.maker(0, number) for _, number in call.inputs)
        return [self._positions[id(maker)] for maker in makers if maker is not None and maker is not call]

    def elements(self, number: int) -> int:
        """Return how many elements a tensor has."""
        return self._tensors[number].elements

    def ends(self, first: int = 0) -> list[CallRecord]:
        """Return the calls, from a number on, that compute with results of products, and whose results nothing reads
        but what makes one number of them, if they have more.
        """
        results = [self.result(call) for call in self.calls]
        read = {made for x, of in zip(results, self.read, strict=True) if x is None or x.elements > 1 for made in of}
        of_products = set[int]()
        for n in range(first, len(self.calls)):
            if op_kind(self.calls[n].id.op).family in (GEMM, CONV) or not of_products.isdisjoint(self.read[n]):
                of_products.add(n)
        return [self.calls[n] for n in sorted(of_products - read) if (x := results[n]) is not None and x.elements > 1]

    def is_new(self, call: CallRecord, other: KnownValues, near: Near, reads_new: bool) -> bool:
        """Return whether a call gives values that another run has nowhere; of one without floats, whether it reads
        such.
        """
        outputs = call.outputs if call.id.direction == BACKWARD else call.outputs[:1]
        floats = [n for _, n in outputs if self._is_seen(n)]
        return reads_new if not floats else any(not other._has(n, self, near, reads_new) for n in floats)

    def is_surely_in(self, call: CallRecord, other: KnownValues) -> bool:
        """Return whether another run in fp32 has a call's result by its averages or elements, whose range may be that
        of a few that nothing has changed. Constants say nothing.
        """
        one = self.result(call)
        if one is None or not one.low < one.high:
            return False
        return _has_numbers(other._one_by_one, one, IN_FP32, by_range=False) or (
            self.apart_from(call, other) <= IN_FP32.elements
        )

    def is_near_to_read(self, call: CallRecord, near: Near) -> bool:
        """Return whether a call's result is as near to a tensor of its size that it reads as rounding brings it."""
        one = self.result(call)
        read = [self._side.piece(0, n) for _, n in call.inputs if self._is_seen(n) and n != call.outputs[0][1]]
        return one is not None and any(
            x.elements == one.elements and are_near(numbers_of(x), numbers_of(one), near) for x in read
        )

    def reads_weights_alone(self, call: CallRecord, of_weights: Collection[int]) -> bool:
        """Return whether all that a call reads is a weight, or what one of these calls made."""
        makers = ((number, self._side.maker(0, number)) for _, number in call.inputs)
        return bool(call.inputs) and all(
            self._is_weight(number) or (made is not None and self._positions.get(id(made)) in of_weights)
            for number, made in makers
        )

    def _is_weight(self, number: int) -> bool:
        return number in self._weights or self._side.has_moved(number)

    @cached_property
    def _weights(self) -> frozenset[int]:
        rows = self._side.runs[0].parameters.values()
        return frozenset(row[state] for row in rows for state in ("before", "value") if state in row)

    def apart_from(self, call: CallRecord, other: KnownValues) -> float:
        """Return how far the elements of a call's result are from those of the nearest value of another run in one
        layout; infinity if that has none.
        """
        results = [number for _, number in call.outputs[:1] if self._is_seen(number)]
        return min((_apart(of, one) for n in results for one, of in other._beside(n, self)), default=math.inf)

    def result(self, call: CallRecord) -> Piece | None:
        """Return a call's first result, if its floating-point numbers are known."""
        return next((self._side.piece(0, n) for _, n in call.outputs[:1] if self._is_seen(n)), None)

    def alike(self, piece: Piece | None, near: Near) -> Iterator[CallRecord]:
        """Yield the calls that give a value of another run."""
        for call in self.calls:
            own = self.result(call)
            is_one = own is not None and piece is not None and own.elements == piece.elements
            if own is not None and piece is not None and is_one and are_near(numbers_of(own), numbers_of(piece), near):
                yield call

    def has_floats(self, call: CallRecord) -> bool:
        """Return whether a call's first result is of floating-point numbers, or it has none."""
        return all(self._tensors[n].format in FORMATS for _, n in call.outputs[:1])

    def _is_seen(self, number: int) -> bool:
        return self._tensors[number].format in FORMATS and self._tensors[number].inspected > 0

    def _has(self, number: int, own: KnownValues, near: Near, reads_new: bool) -> bool:
        """Return whether this run has a tensor of another run, or its negative: as one, or as several that one line
        gives, in either of the two. Constants say nothing; nor does the range alone of several, which may be that of
        another of them, of a call that reads_new.
        """
        apart = math.inf
        for one, of in self._beside(number, own):
            if one.low == one.high and one.elements > 1:
                return True
            if near == IN_FP32:
                is_one = one.elements == own.elements(number)
                if _has_numbers(of, one, near, by_range=is_one or not reads_new):
                    return True
            elif (apart := min(apart, _apart(of, one, near.elements))) <= near.elements:
                return True
        is_unknown = near != IN_FP32 and apart == math.inf
        return is_unknown and any(_has_numbers(of, one, near) for one, of in self._beside(number, own))

    def _beside(self, number: int, own: KnownValues) -> Iterator[tuple[Piece, _BySize]]:
        """Yield a tensor of another run, and what it is part of, each with those of this one among which it may be."""
        piece = own.piece(number)
        yield piece, self._one_by_one
        yield piece, self._of_lines
        yield from ((part, self._one_by_one) for part in own.together(number))

    def piece(self, number: int) -> Piece:
        """Return a tensor."""
        return self._side.piece(0, number)

    def together(self, number: int) -> Sequence[Piece]:
        """Return what a tensor is part of."""
        return self._together.get(number, ())


def _as_one(pieces: Sequence[Piece]) -> Piece:
    """Return results of one line as one: sequences one after the other, or each with what is added to it."""
    are_added = len({piece.tokens for piece in pieces}) > 1
    return stacked(pieces, pieces[0].sequences if are_added else 1) or in_any_order(pieces)


_BySize = dict[int, tuple[list[Numbers], dict[Numbers, Piece]]]
"""Tensors by size: their numbers in order, and one that has these."""


def _by_size(pieces: Iterable[Piece]) -> _BySize:
    known: dict[int, dict[Numbers, Piece]] = {}
    for piece in pieces:
        known.setdefault(piece.elements, {}).setdefault(numbers_of(piece), piece)
    return {size: (sorted(of), of) for size, of in known.items()}


def _near(known: _BySize, piece: Piece, near: float) -> Iterator[tuple[Numbers, Piece]]:
    """Yield what has a piece's size, and a largest magnitude that is near to its own, the nearest first."""
    ordered, pieces = known.get(piece.elements, ([], {}))
    largest, above = piece.largest, bisect_left(ordered, (piece.largest,))
    below, end = above - 1, len(ordered)
    while above < end or below >= 0:
        up = ordered[above][0] - largest if above < end else math.inf
        down = largest - ordered[below][0] if below >= 0 else math.inf
        numbers = ordered[above] if up <= down else ordered[below]
        if min(up, down) > near * max(largest, numbers[0]):
            return
        yield numbers, pieces[numbers]
        above, below = above + (up <= down), below - (up > down)


def _apart(known: _BySize, piece: Piece, enough: float = 0.0) -> float:
    """Return how far the elements of the nearest value in one layout are from those of a piece, or of the first that is
    near enough; infinity if there is none: then its rows differ by about as much as one of them varies.
    """
    if not piece.rows:
        return math.inf
    numbers = numbers_of(piece)
    varies = math.sqrt(max(0.0, piece.rms**2 - piece.mean**2)) if piece.is_whole else piece.rms
    nearest = most = UNLIKE * varies / piece.rms if piece.rms else 0.0
    for one, of in islice(_near(known, piece, most), _MOST):
        has_same = of.rows and of.columns == piece.columns and _apart_at_least(numbers, one) < nearest
        if has_same and (apart := distance(piece, of)).by == SKETCHES:
            nearest = min(nearest, apart.relative)
            if nearest <= enough:
                break
    return nearest if nearest < most else math.inf


def _apart_at_least(a: Numbers, b: Numbers) -> float:
    """Return how far apart, relatively, two tensors of one size are at least, by their range and averages."""
    of_range = max((abs(x - y) for x, y in zip(a[1:3], b[1:3], strict=True)), default=0.0) / (max(a[0], b[0]) or 1.0)
    averages = max((abs(x - y) for x, y in zip(a[3:], b[3:], strict=False)), default=0.0)
    return max(of_range, averages / (max(a[-1], b[-1]) or 1.0) if averages else 0.0)


def _has_numbers(known: _BySize, piece: Piece, near: Near, by_range: bool = True) -> bool:
    """Return whether one of these has the numbers of a piece, or of its negative. by_range: the range alone will do,
    where averages are not known.
    """
    largest, low, high, *moments = one = numbers_of(piece)
    opposite = (largest, -high, -low, *(-mean for mean in moments[:1]), *moments[1:])
    of_size = (of for of, _ in _near(known, piece, near.range) if by_range or min(len(of), len(one)) > _RANGE)
    return any(are_near(of, one, near) or are_near(of, opposite, near) for of in of_size)


def numbers_of(piece: Piece) -> Numbers:
    """Return the largest magnitude and the range; and mean and root mean square, where they are of all elements."""
    return piece.largest, piece.low, piece.high, *((piece.mean, piece.rms) if piece.is_whole else ())


def are_near(a: Numbers, b: Numbers, near: Near) -> bool:
    """Return whether the numbers of two tensors of one size are as near as rounding brings them."""
    most = (near.range,) * 3 + (near.averages,) * 2
    return all(abs(x - y) <= limit * max(a[0], b[0]) for x, y, limit in zip(a, b, most, strict=False))  # some: ranges
