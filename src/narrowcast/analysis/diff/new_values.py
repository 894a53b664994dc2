"""Where two programs part: the first calls that give values which the other run has nowhere.

Programs that compute in other ways have values in common up to there, whatever their calls are. A tensor is known by
its size, range, mean and root mean square.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import chain

from narrowcast.analysis.diff.pieces import Piece, in_any_order
from narrowcast.analysis.diff.rows import Judging
from narrowcast.analysis.diff.sides import Side
from narrowcast.core.ledger.identity import BACKWARD, CallId
from narrowcast.formats import FORMATS, fp32
from narrowcast.reports.results.run_differences import Unaligned
from narrowcast.reports.results.run_records import CallRecord

_NEAR, _NEAR_LOW = 3e-5, 0.02
"""How far apart, in parts of the largest magnitude, these numbers of one tensor are by rounding: in fp32, in less."""
_PARTS = 64
"""Into how many parts a batch is divided, at most."""
_LINES = 8
"""On how many lines of a run the calls lie that are named."""
_Numbers = tuple[float, ...]


def front_of(judging: Judging, listed: Sequence[Unaligned]) -> list[Unaligned]:
    """Return the first calls of either run that give new values, of those that are listed, which make a difference, and
    of what these are computed of: as many as lie on a few lines. None where all that are listed do, and the first of
    the others are among them.
    """
    if not listed:
        return []
    values = [_ValuesOfRun(side) for side in judging.values.sides]
    front: list[Unaligned] = []
    begins, are_few = False, True
    for n, (run, own, other) in enumerate(zip("ab", values, reversed(values), strict=True)):
        known = {one.id: one for one in listed if one.run == run}
        calls, begin = _new_calls(own, other, known)
        begins |= begin
        are_few &= len(_lines(known.values())) <= _LINES
        first: list[Unaligned] = []
        for call in calls:
            one = known.get(call.id) or _unlisted(judging, n, call)
            if len(_lines([*first, one])) > _LINES:
                break
            first.append(one)
        front += first
    return [] if begins and are_few else front


def _lines(calls: Iterable[Unaligned]) -> set[str]:
    return {line for one in calls for line in (one.place, *one.views)}


def _unlisted(judging: Judging, side: int, call: CallRecord) -> Unaligned:
    bundles, places = [judging.makers[side].bundle(call)], judging.places
    return Unaligned("ab"[side], call.id, places.of(side, bundles), views=places.beside(side, bundles))


def _new_calls(own: _ValuesOfRun, other: _ValuesOfRun, listed: Collection[CallId]) -> tuple[list[CallRecord], bool]:
    """Return the calls that give new values, of those listed and of what these are computed of, in order; and whether
    one that computes new values of known ones is listed.
    """
    near = max(own.near, other.near)
    read = [own.makers_of(call) for call in own.calls]
    new = set[int]()
    for n, call in enumerate(own.calls):
        if own.is_new(call, other, near, not new.isdisjoint(read[n])):
            new.add(n)
    waiting, region = [n for n in new if own.calls[n].id in listed], set[int]()
    while waiting:
        n = waiting.pop()
        if n not in region:
            region.add(n)
            waiting += new.intersection(read[n])
    begins = any(own.calls[n].id in listed and new.isdisjoint(read[n]) for n in region)
    return [own.calls[n] for n in sorted(region)], begins


class _ValuesOfRun:
    """The calls of a side's first rank, casts left out, and what numbers its tensors have, by size."""

    def __init__(self, side: Side) -> None:
        self._side, self._tensors = side, side.runs[0].tensors
        self.calls = [call for call in side.runs[0].calls if not call.is_cast]
        self._positions = {id(call): n for n, call in enumerate(self.calls)}
        self._together: dict[int, list[Piece]] = {}
        for numbers, piece in self._of_one_line():
            for number in numbers:
                self._together.setdefault(number, []).append(piece)
        floats = [n for n, facts in enumerate(self._tensors) if facts.format in FORMATS and facts.inspected]
        self.near = _NEAR_LOW if any(self._epsilon(n) > fp32.epsilon for n in floats) else _NEAR
        by_size: dict[int, set[_Numbers]] = {}
        for piece in [*(side.piece(0, n) for n in floats), *chain(*self._together.values())]:
            by_size.setdefault(piece.elements, set()).add(_numbers(piece))
        self._by_size = {size: sorted(known) for size, known in by_size.items()}

    def _epsilon(self, number: int) -> float:
        return FORMATS[self._tensors[number].format].epsilon

    def _of_one_line(self) -> Iterator[tuple[Sequence[int], Piece]]:
        """Yield several results that one line gives as one, with their numbers: those of micro-batches are one result
        in a run without. Next to each other, or at equal distances, as where a model calls the line for each layer.
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
            for parts in (n for n in range(2, min(count, _PARTS) + 1) if not count % n):
                apart = count // parts
                neighbours = [numbers[n : n + parts] for n in range(0, count, parts)]
                for of in neighbours if apart == 1 else [*neighbours, *(numbers[n::apart] for n in range(apart))]:
                    yield of, in_any_order([pieces[n] for n in of])

    def makers_of(self, call: CallRecord) -> list[int]:
        """Return which calls made what a call reads."""
        makers = (self._side.maker(0, number) for _, number in call.inputs)
        return [self._positions[id(maker)] for maker in makers if maker is not None and maker is not call]

    def is_new(self, call: CallRecord, other: _ValuesOfRun, near: float, reads_new: bool) -> bool:
        """Return whether a call gives values that another run has nowhere; of one without floats, whether it reads
        such.
        """
        outputs = call.outputs if call.id.direction == BACKWARD else call.outputs[:1]
        floats = [n for _, n in outputs if self._tensors[n].format in FORMATS and self._tensors[n].inspected]
        return reads_new if not floats else any(not other._has(self._pieces(n), near) for n in floats)

    def _pieces(self, number: int) -> list[Piece]:
        return [self._side.piece(0, number), *self._together.get(number, ())]

    def _has(self, pieces: Iterable[Piece], near: float) -> bool:
        """Return whether this run has one of these, or its negative; constants say nothing."""
        return any((p.low == p.high and p.elements > 1) or self._has_one(p, near) for p in pieces)

    def _has_one(self, piece: Piece, near: float) -> bool:
        known, one = self._by_size.get(piece.elements, []), _numbers(piece)
        largest, low, high, *moments = one
        opposite = (largest, -high, -low, *(-mean for mean in moments[:1]), *moments[1:])
        for at in range(bisect_left(known, (largest * (1 - near),)), len(known)):
            if known[at][0] * (1 - near) > largest:
                return False
            if any(_are_near(known[at], numbers, near) for numbers in (one, opposite)):
                return True
        return False


def _numbers(piece: Piece) -> _Numbers:
    """Return the largest magnitude and the range; and mean and root mean square, where they are of all elements."""
    return piece.largest, piece.low, piece.high, *((piece.mean, piece.rms) if piece.is_whole else ())


def _are_near(a: _Numbers, b: _Numbers, near: float) -> bool:
    return all(abs(x - y) <= near * max(a[0], b[0]) for x, y in zip(a, b, strict=False))  # of samples: ranges alone
