"""The values that a run has: a tensor is known by its size, range, mean and root mean square, wherever it is made."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain

from narrowcast.analysis.diff.pieces import Piece, in_any_order
from narrowcast.analysis.diff.sides import Side
from narrowcast.core.ledger.identity import BACKWARD
from narrowcast.core.ops.facts import CONV, GEMM, op_kind
from narrowcast.formats import FORMATS, fp32
from narrowcast.reports.results.run_records import CallRecord

NEAR, NEAR_LOW = 3e-5, 0.02
"""How far apart, in parts of the largest magnitude, these numbers of one tensor are by rounding: in fp32, in less."""
_PARTS = 64
"""Into how many parts a batch is divided, at most."""
Numbers = tuple[float, ...]


class KnownValues:
    """The calls of a side's first rank, casts left out, and what numbers its tensors have, by size."""

    def __init__(self, side: Side) -> None:
        self._side, self._tensors = side, side.runs[0].tensors
        self.calls = [call for call in side.runs[0].calls if not call.is_cast]
        self._positions = {id(call): n for n, call in enumerate(self.calls)}
        self._together: dict[int, list[Piece]] = {}
        for numbers, piece in self._of_one_line():
            for number in numbers:
                self._together.setdefault(number, []).append(piece)
        floats = [n for n in range(len(self._tensors)) if self._is_seen(n)]
        self.near = NEAR_LOW if any(self._epsilon(n) > fp32.epsilon for n in floats) else NEAR
        by_size: dict[int, set[Numbers]] = {}
        for piece in [*(side.piece(0, n) for n in floats), *chain(*self._together.values())]:
            by_size.setdefault(piece.elements, set()).add(numbers_of(piece))
        self._by_size = {size: sorted(known) for size, known in by_size.items()}

    def _epsilon(self, number: int) -> float:
        return FORMATS[self._tensors[number].format].epsilon

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
        for numbers in groups.values():
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
                    piece = in_any_order([pieces[n] for n in of])
                    yield of, piece
                    if piece.elements == parts:  # of losses the mean
                        mean = piece.mean
                        yield of, replace(piece, columns=1, low=mean, high=mean, rms=abs(mean))

    @cached_property
    def read(self) -> list[list[int]]:
        """By call, which calls made what it reads."""
        return [self._makers_of(call) for call in self.calls]

    def _makers_of(self, call: CallRecord) -> list[int]:
        makers = (self._side.maker(0, number) for _, number in call.inputs)
        return [self._positions[id(maker)] for maker in makers if maker is not None and maker is not call]

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

    def is_new(self, call: CallRecord, other: KnownValues, near: float, reads_new: bool) -> bool:
        """Return whether a call gives values that another run has nowhere; of one without floats, whether it reads
        such.
        """
        outputs = call.outputs if call.id.direction == BACKWARD else call.outputs[:1]
        floats = [n for _, n in outputs if self._is_seen(n)]
        return reads_new if not floats else any(not other._has(self._pieces(n), near) for n in floats)

    def is_near_to_read(self, call: CallRecord, near: float) -> bool:
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

    def result(self, call: CallRecord) -> Piece | None:
        """Return a call's first result, if its floating-point numbers are known."""
        return next((self._side.piece(0, n) for _, n in call.outputs[:1] if self._is_seen(n)), None)

    def alike(self, piece: Piece | None, near: float) -> Iterator[CallRecord]:
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

    def _pieces(self, number: int) -> list[Piece]:
        return [self._side.piece(0, number), *self._together.get(number, ())]

    def _has(self, pieces: Iterable[Piece], near: float) -> bool:
        """Return whether this run has one of these, or its negative; constants say nothing."""
        return any((p.low == p.high and p.elements > 1) or self._has_one(p, near) for p in pieces)

    def _has_one(self, piece: Piece, near: float) -> bool:
        known, one = self._by_size.get(piece.elements, []), numbers_of(piece)
        largest, low, high, *moments = one
        opposite = (largest, -high, -low, *(-mean for mean in moments[:1]), *moments[1:])
        for at in range(bisect_left(known, (largest * (1 - near),)), len(known)):
            if known[at][0] * (1 - near) > largest:
                return False
            if any(are_near(known[at], numbers, near) for numbers in (one, opposite)):
                return True
        return False


def numbers_of(piece: Piece) -> Numbers:
    """Return the largest magnitude and the range; and mean and root mean square, where they are of all elements."""
    return piece.largest, piece.low, piece.high, *((piece.mean, piece.rms) if piece.is_whole else ())


def are_near(a: Numbers, b: Numbers, near: float) -> bool:
    """Return whether the numbers of two tensors of one size are as near as rounding brings them."""
    return all(abs(x - y) <= near * max(a[0], b[0]) for x, y in zip(a, b, strict=False))  # of samples: ranges alone
