"""Where two programs part: the first calls whose results the other run has nowhere, and that lead to what differs.

Programs that compute in other ways have values in common up to there, whatever their calls are. A tensor is known by
its size, range, mean and root mean square.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain

from narrowcast.analysis.diff.makers import Makers
from narrowcast.analysis.diff.pieces import Piece, in_any_order
from narrowcast.analysis.diff.rows import Judging
from narrowcast.analysis.diff.sides import Side
from narrowcast.core.ledger.identity import BACKWARD, FORWARD
from narrowcast.core.ops.facts import CONV, GEMM, op_kind
from narrowcast.formats import FORMATS, fp32
from narrowcast.reports.results.run_differences import NewCall
from narrowcast.reports.results.run_records import CallRecord

_NEAR, _NEAR_LOW = 3e-5, 0.02
"""How far apart, in parts of the largest magnitude, these numbers of one tensor are by rounding: in fp32, in less."""
_PARTS = 64
"""Into how many parts a batch is divided, at most."""
_LINES, _BEFORE = 8, 2
"""On how many lines of a run the calls lie that are named, and those that made what the first of them read."""
_Numbers = tuple[float, ...]


def front_of(judging: Judging) -> list[NewCall]:
    """Return the first calls of either run whose results are new, of values that both have, and from which only new
    values lead to what the run comes to: these make the difference. Then the other new ones up to the next backward,
    and those of later steps; as many as lie on a few lines.
    """
    front = list[NewCall]()
    values = [_ValuesOfRun(side) for side in judging.values.sides]
    regions = [_Region(own, values[1 - n]) for n, own in enumerate(values)]
    for n, (own, region) in enumerate(zip(values, regions, strict=True)):
        first, lines = list[NewCall](), set[str]()
        for number in dict.fromkeys(region.ordered()):
            call = own.calls[number]
            bundles = [judging.makers[n].bundle(call)]
            place, views = judging.places.of(n, bundles), judging.places.beside(n, bundles)
            lines |= {place, *views}
            if len(lines) > _LINES:
                break
            first.append(NewCall("ab"[n], call.id, place, views))
        before = [own.calls[m] for m in region.before()]
        after = _lines_of(judging, n, before, lines)
        if not regions[1 - n].has_calls:  # what the other run lacks lies there
            same = (call for one in before for call in values[1 - n].alike(own.result(one), own.near))
            after += _lines_of(judging, 1 - n, same, ())
        front += [replace(one, after=() if m else tuple(after)) for m, one in enumerate(first)]
    return front


def new_outputs_apart(judging: Judging) -> float:
    """Return how far apart is what two programs compute in fp32 after the last backward, if there is one: the last
    results of products and of what reads them, of as many in one size, which neither run has anywhere of the other. 0
    if none is.
    """
    values = [_ValuesOfRun(side) for side in judging.values.sides]
    if any(own.near > _NEAR for own in values):
        return 0.0
    ends, others = (_new_outputs(judging.makers[n], own, values[1 - n]) for n, own in enumerate(values))
    alike = [(of, others[size]) for size, of in ends.items() if len(of) == len(others.get(size, ()))]
    pairs = [both for of in alike for both in zip(*of, strict=True)]
    return max((abs(x - y) / max(a[0], b[0]) for a, b in pairs for x, y in zip(a, b, strict=False)), default=0.0)


def come_to_the_same(judging: Judging) -> bool:
    """Return whether two runs in fp32 without a backward come to the same, whatever they compute on the way: each last
    result of a product, and of what reads it, is one of the other run's, too.
    """
    if any(side.has_backward for side in judging.values.sides):
        return False
    values = [_ValuesOfRun(side) for side in judging.values.sides]
    if any(own.near > _NEAR for own in values):
        return False
    return not any(own.is_new(call, other, _NEAR, False)
                   for own, other in (values, values[::-1]) for call in own.ends())  # fmt: skip


def _new_outputs(makers: Makers, own: _ValuesOfRun, other: _ValuesOfRun) -> dict[int, list[_Numbers]]:
    """Return the numbers of these results of one run, by size."""
    found: dict[int, list[_Numbers]] = {}
    last = max((n for n, call in enumerate(own.calls) if call.id.direction == BACKWARD), default=-1)
    for call in own.ends(last + 1):
        piece = own.result(call)
        is_later = piece is not None and makers.bundle(call) not in makers.of_gradients
        if piece is not None and is_later and own.is_new(call, other, _NEAR, False):
            found.setdefault(piece.elements, []).append(_numbers(piece))
    return found


def _lines_of(judging: Judging, side: int, calls: Iterable[CallRecord], known: Collection[str]) -> list[str]:
    """Return the first lines of these calls, other than those known."""
    places = (judging.places.of(side, [judging.makers[side].bundle(call)]) for call in calls)
    return [line for line in dict.fromkeys(places) if line and line not in known][:_BEFORE]


class _Region:
    """The calls of a run that give new values, by their numbers in order, and lead to what it comes to by such alone: a
    value that is new on the way to one which the other run has is merely computed otherwise.
    """

    def __init__(self, own: _ValuesOfRun, other: _ValuesOfRun) -> None:
        self._own, self._calls = own, own.calls
        self._read = own.read
        self._new = self._new_calls(other, max(own.near, other.near))
        self._region = self._leading()
        self._first = [n for n in self._region if self._new.isdisjoint(self._read[n])]

    @property
    def has_calls(self) -> bool:
        """Whether there are any."""
        return bool(self._region)

    def ordered(self) -> Iterator[int]:
        """Yield the calls: those that read known values alone come first."""
        if not self._first:
            return
        end = self._end_of_direction(self._first[0])
        for n in self._first:
            if n < end:
                yield from (n, *self._unknown(n)[0])
        yield from (n for n in self._region if n < end)
        yield from (n for n in self._first if n >= end)
        yield from self._region

    def before(self) -> list[int]:
        """Return the calls that made the known values which the first new one reads: what one run lacks lies there."""
        return self._unknown(self._first[0])[1] if self._first else []

    def _new_calls(self, other: _ValuesOfRun, near: float) -> set[int]:
        """Return the calls that give new values. What is computed of weights alone, fused or transposed, is none; nor
        does a result say anything that is near to what it is computed of, as that of a small step.
        """
        new, of_weights, own = set[int](), set[int](), self._own
        for n, call in enumerate(self._calls):
            reads_new = not new.isdisjoint(self._read[n])
            if call.id.direction == FORWARD and own.reads_weights_alone(call, of_weights):
                of_weights.add(n)
                is_new = reads_new
            else:
                is_new = own.is_new(call, other, near, reads_new) or (reads_new and own.is_near_to_read(call, near))
            if is_new:
                new.add(n)
        return new

    def _leading(self) -> list[int]:
        """Return the new calls from which new values lead to one that nothing reads. In a forward, what only a backward
        reads besides leads nowhere.
        """
        leads, ends = set[int](), set(self._new)
        for n in range(len(self._calls) - 1, -1, -1):
            if n in ends:
                leads.add(n)
            for made in self._read[n]:
                if self._is_backward(made) or not self._is_backward(n):
                    ends.discard(made)
                    if n in leads and made in self._new:
                        leads.add(made)
        return sorted(leads)

    def _is_backward(self, n: int) -> bool:
        return self._calls[n].id.direction == BACKWARD

    def _end_of_direction(self, n: int) -> int:
        """Return where the forward or backward ends in which a call is."""
        later = range(n, len(self._calls))
        return next((m for m in later if self._is_backward(m) != self._is_backward(n)), len(self._calls))

    def _unknown(self, n: int) -> tuple[list[int], list[int]]:
        """Return the calls that made indices and conditions which a call reads, of which no value is known; and those
        before all of these, which made values that are.
        """
        unknown, known, waiting = dict[int, None](), dict[int, None](), list(self._read[n])
        while waiting:
            made = waiting.pop(0)
            if self._own.has_floats(self._calls[made]):
                known[made] = None
            elif made not in unknown:
                unknown[made] = None
                waiting += self._read[made]
        return [*unknown], [*known]


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
        floats = [n for n in range(len(self._tensors)) if self._is_seen(n)]
        self.near = _NEAR_LOW if any(self._epsilon(n) > fp32.epsilon for n in floats) else _NEAR
        by_size: dict[int, set[_Numbers]] = {}
        for piece in [*(side.piece(0, n) for n in floats), *chain(*self._together.values())]:
            by_size.setdefault(piece.elements, set()).add(_numbers(piece))
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

    def is_new(self, call: CallRecord, other: _ValuesOfRun, near: float, reads_new: bool) -> bool:
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
            x.elements == one.elements and _are_near(_numbers(x), _numbers(one), near) for x in read
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
            if own is not None and piece is not None and is_one and _are_near(_numbers(own), _numbers(piece), near):
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
