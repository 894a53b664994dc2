"""Where two programs part: the first calls whose results the other run has nowhere, and that lead to what differs.

Programs that compute in other ways have values in common up to there, whatever their calls are.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import cached_property

from narrowcast.analysis.diff.known_values import IN_FP32, KnownValues, Numbers, numbers_of
from narrowcast.analysis.diff.makers import Makers
from narrowcast.analysis.diff.new_values import NewValues
from narrowcast.analysis.diff.returned import difference_as_returned, returned
from narrowcast.analysis.diff.rows import Judging
from narrowcast.core.ledger.identity import BACKWARD
from narrowcast.reports.results.run_differences import NewCall
from narrowcast.reports.results.run_records import CallRecord

_LINES, _BEFORE = 8, 2
"""On how many lines of a run the calls lie that are named, and those that made what the first of them read."""
_JUMP, _OF_ONE_CALL = 3.0, 10.0
"""Outputs of sound programs in low formats were 2.5 times further apart at most than values before, where nothing
cancels. One call makes errors of that part of what is near.
"""


class Front:
    """What two programs compute, known by its values, whatever their calls are."""

    def __init__(self, judging: Judging) -> None:
        self._judging = judging

    @cached_property
    def _values(self) -> list[KnownValues]:
        return [KnownValues(side) for side in self._judging.values.sides]

    @cached_property
    def _new(self) -> list[NewValues]:
        a, b = self._values
        return [NewValues(a, b), NewValues(b, a)]

    def calls(self) -> list[NewCall]:
        """Return the first calls of either run whose results are new, of values that both have, and from which only new
        values lead to what the run comes to: these make the difference. Then the other new ones up to the next
        backward, and those of later steps; as many as lie on a few lines.
        """
        front, judging = list[NewCall](), self._judging
        for n, (own, region) in enumerate(zip(self._values, self._new, strict=True)):
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
            after = self._lines_of(n, before, lines)
            if not self._new[1 - n].has_calls:  # what the other run lacks lies there
                same = (call for one in before for call in self._values[1 - n].alike(own.result(one), own.near))
                after += self._lines_of(1 - n, same, ())
            front += [replace(one, after=() if m else tuple(after)) for m, one in enumerate(first)]
        return front

    def new_outputs_apart(self) -> float:
        """Return how far apart is what two programs compute in fp32 after the last backward, if there is one: the last
        results of products and of what reads them, of as many in one size, which neither run has anywhere of the other.
        0 if none is.
        """
        values = self._values
        if any(own.near != IN_FP32 for own in values):
            return 0.0
        ends, others = (_new_outputs(self._judging.makers[n], own, values[1 - n]) for n, own in enumerate(values))
        alike = [(of, others[size]) for size, of in ends.items() if len(of) == len(others.get(size, ()))]
        pairs = [both for of in alike for both in zip(*of, strict=True)]
        return max((abs(x - y) / max(a[0], b[0]) for a, b in pairs for x, y in zip(a, b, strict=False)), default=0.0)

    def come_to_the_same(self) -> bool:
        """Return whether two runs in fp32 without a backward come to the same, whatever they compute on the way: each
        last result of a product, and of what reads it, is one of the other run's, too.
        """
        if any(side.has_backward for side in self._judging.values.sides):
            return False
        values = self._values
        if any(own.near != IN_FP32 for own in values):
            return False
        return not any(own.is_new(call, other, IN_FP32, False)
                       for own, other in (values, values[::-1]) for call in own.ends())  # fmt: skip

    def beyond_rounding(self) -> float:
        """Return how far apart is what two forwards come to whose products are of one low format, if that is more than
        rounding makes: new values lead to it, and what the first of these are computed of is several times nearer.
        Else 0.
        """
        values, judging = self._values, self._judging
        is_one = len({own.low_of_products for own in values}) == 1 and values[0].low_of_products
        sides = judging.values.sides
        if not is_one or judging.are_alike_as_a_whole or any(x.has_backward or len(x.runs) > 1 for x in sides):
            return 0.0
        both = (
            (numbers, difference_as_returned(judging.values, numbers) or 0.0) for numbers in returned(judging.values)
        )
        known = [(numbers, apart) for numbers, apart in both if values[0].elements(numbers[0]) > 1]
        near, found = max(own.near for own in values), 0.0
        for n, (own, other) in enumerate((values, values[::-1])):
            ends = {numbers[n]: apart for numbers, apart in known} or {
                call.outputs[0][1]: apart for call in own.ends() if (apart := own.apart_from(call, other)) < math.inf
            }
            if max(ends.values(), default=0.0) > near.elements:
                region = self._new[n]
                apart = max((ends.get(number, 0.0) for number in region.results()), default=0.0)
                growth = max((judging.values.growth_of(n, call) for call in region.first()), default=1.0)
                noise = growth * max(region.apart_before(), near.elements / _OF_ONE_CALL)
                found = apart if apart > max(found, near.elements, _JUMP * noise) else found
        return found

    def _lines_of(self, side: int, calls: Iterable[CallRecord], known: Collection[str]) -> list[str]:
        """Return the first lines of these calls, other than those known."""
        places = (self._judging.places.of(side, [self._judging.makers[side].bundle(call)]) for call in calls)
        return [line for line in dict.fromkeys(places) if line and line not in known][:_BEFORE]


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
