"""Where two programs part: the first calls whose results the other run has nowhere, and that lead to what differs.

Programs that compute in other ways have values in common up to there, whatever their calls are.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from narrowcast.analysis.diff.known_values import IN_FP32, KnownValues, Near, Numbers, numbers_of
from narrowcast.analysis.diff.makers import Makers
from narrowcast.analysis.diff.returned import difference_as_returned, returned
from narrowcast.analysis.diff.rows import Judging
from narrowcast.core.ledger.identity import BACKWARD, FORWARD
from narrowcast.reports.results.run_differences import NewCall
from narrowcast.reports.results.run_records import CallRecord

_LINES, _BEFORE = 8, 2
"""On how many lines of a run the calls lie that are named, and those that made what the first of them read."""
_JUMP, _OF_ONE_CALL = 3.0, 10.0
"""Outputs of sound programs in low formats were 2.5 times further apart at most than values before, where nothing
cancels. One call makes errors of that part of what is near.
"""


def front_of(judging: Judging) -> list[NewCall]:
    """Return the first calls of either run whose results are new, of values that both have, and from which only new
    values lead to what the run comes to: these make the difference. Then the other new ones up to the next backward,
    and those of later steps; as many as lie on a few lines.
    """
    front = list[NewCall]()
    values = judging.known_values
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
    values = judging.known_values
    if any(own.near != IN_FP32 for own in values):
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
    values = judging.known_values
    if any(own.near != IN_FP32 for own in values):
        return False
    return not any(own.is_new(call, other, IN_FP32, False)
                   for own, other in (values, values[::-1]) for call in own.ends())  # fmt: skip


def beyond_rounding(judging: Judging) -> float:
    """Return how far apart is what two forwards come to whose products are of one low format, if that is more than
    rounding makes: new values lead to it, and what the first of these are computed of is several times nearer. Else 0.
    """
    values = judging.known_values
    is_one = len({own.low_of_products for own in values}) == 1 and values[0].low_of_products
    sides = judging.values.sides
    if not is_one or judging.are_alike_as_a_whole or any(x.has_backward or len(x.runs) > 1 for x in sides):
        return 0.0
    both = ((numbers, difference_as_returned(judging.values, numbers) or 0.0) for numbers in returned(judging.values))
    known = [(numbers, apart) for numbers, apart in both if values[0].elements(numbers[0]) > 1]
    near, found = max(own.near for own in values), 0.0
    for n, (own, other) in enumerate((values, values[::-1])):
        ends = {numbers[n]: apart for numbers, apart in known} or {
            call.outputs[0][1]: apart for call in own.ends() if (apart := own.apart_from(call, other)) < math.inf
        }
        if max(ends.values(), default=0.0) > near.elements:
            region = _Region(own, other)
            apart = max((ends.get(number, 0.0) for number in region.results()), default=0.0)
            growth = max((judging.values.growth_of(n, call) for call in region.first()), default=1.0)
            noise = growth * max(region.apart_before(), near.elements / _OF_ONE_CALL)
            found = apart if apart > max(found, near.elements, _JUMP * noise) else found
    return found


def _new_outputs(makers: Makers, own: KnownValues, other: KnownValues) -> dict[int, list[Numbers]]:
    """Return the numbers of these results of one run, by size."""
    found: dict[int, list[Numbers]] = {}
    last = max((n for n, call in enumerate(own.calls) if call.id.direction == BACKWARD), default=-1)
    for call in own.ends(last + 1):
        piece = own.result(call)
        is_later = piece is not None and makers.bundle(call) not in makers.of_gradients
        if piece is not None and is_later and own.is_new(call, other, IN_FP32, False):
            found.setdefault(piece.elements, []).append(numbers_of(piece))
    return found


def _lines_of(judging: Judging, side: int, calls: Iterable[CallRecord], known: Collection[str]) -> list[str]:
    """Return the first lines of these calls, other than those known."""
    places = (judging.places.of(side, [judging.makers[side].bundle(call)]) for call in calls)
    return [line for line in dict.fromkeys(places) if line and line not in known][:_BEFORE]


class _Region:
    """The calls of a run that give new values, by their numbers in order, and lead to what it comes to by such alone: a
    value that is new on the way to one which the other run has is merely computed otherwise.
    """

    def __init__(self, own: KnownValues, other: KnownValues) -> None:
        self._own, self._other, self._calls = own, other, own.calls
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

    def first(self) -> list[CallRecord]:
        """Return those that read known values alone."""
        return [self._calls[n] for n in self._first]

    def results(self) -> list[int]:
        """Return the numbers of what they give."""
        return [number for n in self._region for _, number in self._calls[n].outputs[:1]]

    def apart_before(self) -> float:
        """Return how far the values that the first of them read are from those of the other run, as far as elements
        show that.
        """
        read = (self._own.apart_from(self._calls[made], self._other) for n in self._first for made in self._read[n])
        return max((apart for apart in read if apart < math.inf), default=0.0)

    def _new_calls(self, other: KnownValues, near: Near) -> set[int]:
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
