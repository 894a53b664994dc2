"""What the models of two runs returned, which is what they come to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from narrowcast.analysis.diff.aligned_values import Values
from narrowcast.analysis.diff.alignment import Aligned
from narrowcast.analysis.diff.makers import Makers
from narrowcast.analysis.diff.outcomes import OUTPUTS, EndDifference, band_of_all
from narrowcast.analysis.diff.pieces import SKETCHES, TENSORS
from narrowcast.analysis.diff.sides import Bundle


def returned(values: Values) -> list[tuple[int, int]]:
    """Return the numbers of what both models returned, if they returned as much."""
    a, b = (side.runs[0].returned for side in values.sides)
    return list(zip(a, b, strict=True)) if len(a) == len(b) else []


def difference_as_returned(values: Values, numbers: tuple[int, int]) -> float | None:
    """Return the difference of two tensors of one shape; None of others, and where statistics alone show it."""
    shapes = {side.runs[0].tensors[n].shape for side, n in zip(values.sides, numbers, strict=True)}
    seen = values.between(*numbers)
    return seen.relative if len(shapes) == 1 and seen.by in (SKETCHES, TENSORS) else None


class Returned:
    """What both models returned. of_pairs, by: the difference of each pair of calls, and how it was measured. widest:
    the widest rounding bound of a call.
    """

    def __init__(
        self,
        values: Values,
        makers: Sequence[Makers],
        paired: Sequence[Mapping[Bundle, Aligned]],
        of_pairs: Mapping[Aligned, float],
        by: Mapping[Aligned, str],
        widest: float,
    ) -> None:
        self._values, self._makers, self._paired = values, makers, paired
        self._of_pairs, self._by, self._widest = of_pairs, by, widest
        self.are_gradients_alike = False
        """Then what the other program has in another place is not compared: one may call a layer where the other calls
        a module around it.
        """

    def one_by_one(self, with_losses: bool = True) -> list[EndDifference]:
        """Compare it; nothing unless all of it can be compared."""
        found = list[EndDifference]()
        for numbers in self._compared():
            if not with_losses and self._values.sides[0].piece(0, numbers[0]).elements == 1:
                continue
            difference = difference_as_returned(self._values, numbers)
            if difference is None or None in self._made(numbers):
                return []
            found.append(EndDifference(difference, band_of_all(self._widest, OUTPUTS), self._widest))
        return found

    def are_alike(self) -> bool:
        """Return whether it is alike, or of other calls: the models were called in other numbers."""
        times = {max(len(x.module_calls) for x in side.bundles) for side in self._values.sides}
        return len(times) > 1 or all(one.difference <= one.band for one in self.one_by_one())

    def apart(self) -> float:
        """Return how far apart is what was returned in one shape, and no compared pair of calls made."""
        largest = 0.0
        for numbers in self._compared():
            made = zip(self._paired, self._made(numbers), strict=True)
            a, b = (None if bundle is None else of.get(bundle) for of, bundle in made)
            if a is None or a is not b or not self._by.get(a):
                largest = max(largest, difference_as_returned(self._values, numbers) or 0.0)
        return largest

    def others(self) -> set[Bundle | None]:
        """Return the calls that made what is not compared."""
        compared = self._compared()
        return {x for numbers in returned(self._values) if numbers not in compared for x in self._made(numbers)}

    def _compared(self) -> list[tuple[int, int]]:
        found = returned(self._values)
        return [numbers for numbers in found if not (self.are_gradients_alike and self._are_of_others(numbers))]

    def _are_of_others(self, numbers: tuple[int, int]) -> bool:
        """Return whether the calls that made two tensors have other partners, from which they do not differ."""
        made = self._made(numbers)
        pairs = [of[x] for of, x in zip(self._paired, made, strict=True) if x is not None and x in of]
        return any(not {*pair.a, *pair.b}.issuperset(made) and self._of_pairs[pair] <= self._widest for pair in pairs)

    def _made(self, numbers: tuple[int, int]) -> list[Bundle | None]:
        """Return the calls that made two tensors."""
        return [makers.of(number) for makers, number in zip(self._makers, numbers, strict=True)]
