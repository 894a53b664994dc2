"""Where two programs come to the same: what differs on the way is then a step of one of them, and no fault.

A cache, a fused projection, a factor that stands elsewhere: programs that are written otherwise have other quantities
inside. Whether they are the same is said by what they come to, outputs and gradients of parameters. A difference so
large that it would be seen there, and is not, is made up for.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from narrowcast.analysis.diff.alignment import Aligned
from narrowcast.analysis.diff.sides import Bundle
from narrowcast.core.ledger.identity import BACKWARD
from narrowcast.reports.results.run_differences import DIFFERS, INHERITED, RunRow
from narrowcast.reports.results.verdicts import NOT_COMPARED

UNEXPLAINED = "its inputs do not explain that"
OF_OTHERS = "its inputs are outputs of other calls"
OF_PARTS = "its inputs are other parts of what the same call gives"
_OTHER_WAY = "the programs reach the same outputs by other steps here"
UNLIKE = 0.5
"""Calls whose results have nothing to do with each other are 1.4 apart."""
_PLAIN = 8.0
"""A difference of this many times the widest band of what programs come to would be seen there."""
_BAND_OF_LOW, WIDEST = 1e-3, 0.05
"""Bands of low formats are wider than that, and a fault may lie within; within one that is wider still, anything."""


@dataclass(frozen=True, slots=True)
class EndDifference:
    """How far apart an output is, relative, and what rounding explains of that. Infinite: not known, or not the same
    output.
    """

    difference: float
    band: float = 0.0

    @classmethod
    def of(cls, difference: float, band: float, growth: float) -> EndDifference:
        """growth: how many times larger errors come out of what makes it; it is asked where they need that."""
        return cls(difference, band if difference <= band else band * growth)


class Outcomes:
    """What two programs come to. outputs: of the forward; are_others: whether they are written otherwise; widest: the
    widest band of a call.
    """

    def __init__(self, outputs: Sequence[EndDifference], are_others: bool, widest: float) -> None:
        self._are_equal = all(one.difference == 0 for one in outputs)
        self._band = 0.0 if self._are_equal else max((one.band for one in outputs), default=0.0)
        self._are_others = are_others
        self._widest = widest
        self.are_alike = bool(outputs) and all(one.difference <= one.band <= WIDEST for one in outputs)
        self.are_exact = bool(outputs) and all(
            one.difference == 0 or one.difference <= one.band < _BAND_OF_LOW for one in outputs
        )

    def forward(self, rows: Sequence[RunRow], is_low: bool) -> list[RunRow]:
        """Where outputs are alike: calls that may be no pair, or a choice that is made up for elsewhere (another factor
        of a product), since of their inputs nothing is known, or they differ, too; or they were given something else.
        Of other programs, all calls, and what have nothing in common are no pair. is_low: in low formats a fault may
        hide in what rounding makes.
        """
        are_steps = ((_differs(row, False) and self._is_a_step(row, is_low)) or self._is_no_pair(row) for row in rows)
        return [_other_way(row) if is_step else row for row, is_step in zip(rows, are_steps, strict=True)]

    def _is_no_pair(self, row: RunRow) -> bool:
        are_unlike = row.verdict == INHERITED and row.difference > UNLIKE and row.a[0].direction != BACKWARD
        return are_unlike and self.are_alike and self._are_others

    def _is_a_step(self, row: RunRow, is_low: bool) -> bool:
        if self.are_exact and not is_low and (math.isnan(row.inputs) or row.why != UNEXPLAINED):
            return True
        return self.are_alike and self._are_others and self._would_be_seen(row.difference)

    def _would_be_seen(self, difference: float) -> bool:
        return difference > _PLAIN * self._band

    def alone(self, apart: dict[Bundle, float], is_low: bool) -> dict[Bundle, float]:
        """Of how far apart is what comes of calls without a partner, what does not end in the same outputs."""
        if self.are_exact and not is_low:
            return {bundle: one for bundle, one in apart.items() if bundle.id.direction == BACKWARD}
        if not self.are_alike or not (self._are_others or self._are_equal):
            return apart
        least = _PLAIN * (self._band if self._are_others else self._widest)
        return {bundle: one for bundle, one in apart.items() if bundle.id.direction == BACKWARD or one <= least}

    @staticmethod
    def backward(
        rows: Sequence[RunRow], apart: dict[Bundle, float], of_inputs: Collection[object], band: float
    ) -> tuple[list[RunRow], dict[Bundle, float]]:
        """The same of a backward whose gradients are alike. of_inputs: rows, and calls, that give the gradient of an
        input: nothing is known of what that comes to. band: how far apart gradients are, at most the widest band.
        """
        least = _PLAIN * band
        kept = {b: d for b, d in apart.items() if b.id.direction != BACKWARD or b in of_inputs or d <= least}
        steps = (_differs(row, True) and row.a not in of_inputs and row.difference > least for row in rows)
        return [_other_way(row) if is_step else row for row, is_step in zip(rows, steps, strict=True)], kept


def are_written_otherwise(
    pairs: Sequence[Aligned], rows: Sequence[RunRow], unpaired: Sequence[int], is_low: bool
) -> bool:
    """Whether the forwards of two programs are: either has calls that the other lacks, or what is a pair is no longer
    the same call. In low formats one that has all of the other's calls, and more, is the same with a step put in, if
    nothing else is given to them. unpaired: how many calls of each have no partner.
    """
    if any(unpaired) and (not is_low or any(row.given for row in rows)):
        return True
    return all(unpaired) or any(_is_otherwise(pair, row) for pair, row in zip(pairs, rows, strict=True))


def _is_otherwise(pair: Aligned, row: RunRow) -> bool:
    sides, is_backward = (pair.a, pair.b), row.a[0].direction == BACKWARD
    ops = {tuple(bundle.id.op.split(".")[1] for bundle in bundles) for bundles in sides}
    turns = {tuple(len(bundle.turns) for bundle in bundles) for bundles in sides}
    sizes = {sum(bundle.elements for bundle in bundles) for bundles in sides}  # a part: rows are taken in chunks
    return not is_backward and (len(ops) > 1 or len(turns) > 1 or len(sizes) > 1 or row.why == OF_OTHERS)


def _differs(row: RunRow, is_backward: bool) -> bool:
    return row.verdict == DIFFERS and (row.a[0].direction == BACKWARD) is is_backward


def _other_way(row: RunRow) -> RunRow:
    return replace(row, verdict=NOT_COMPARED, why=_OTHER_WAY)
