"""Where two programs have the same outcome: differences before it are then other steps, and no faults.

A cache, a fused projection, a factor applied elsewhere: programs that are written differently have other intermediate
values. Whether they are equivalent, their outputs and gradients of parameters show. A difference that is so large that
it would be visible there, and is not, is compensated by another step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from narrowcast.analysis.diff.aligned_values import Values
from narrowcast.analysis.diff.alignment import Aligned
from narrowcast.analysis.diff.effects import ABSORBED, GOES_ON, REARRANGED, SHOWS, UNDONE
from narrowcast.analysis.diff.pieces import UNLIKE, together
from narrowcast.analysis.diff.sides import Bundle
from narrowcast.core.ledger.identity import BACKWARD, FORWARD
from narrowcast.reports.documents.rules import alike_module
from narrowcast.reports.results.run_differences import DIFFERS, INHERITED, RunRow
from narrowcast.reports.results.verdicts import NOT_COMPARED

UNEXPLAINED = "its inputs do not explain that"
OF_OTHERS = "it reads what another call made than in the other run"
OF_PARTS = "its inputs are other parts of what the same call gives"
_OTHER_WAY = "the programs reach the same outputs by other steps here"
_PLAIN = 8.0
"""A difference of this many times the widest rounding bound of the outcome would be visible there."""
BAND_OF_LOW, WIDEST = 1e-3, 0.05
"""Bounds of low formats exceed the first, and a fault may lie within; within one above the second, anything may."""
_OF_ONE_SIZE = 2.0
"""In low formats ranges, and root mean squares, of the same values are this many times nearer than the widest bound of
a call.
"""
OUTPUTS, GRADIENTS = (4.0, 32.0), (8.0, 128.0)
"""What is computed by many calls, one after the other, may be the first factor times the widest rounding bound of one
call apart; in fp32, where all that two programs share not rounds otherwise, the second.
"""


def band_of_all(widest: float, factors: tuple[float, float], are_others: bool = True) -> float:
    """Return the rounding bound of OUTPUTS or GRADIENTS, at most WIDEST. widest: of these calls; are_others: whether
    the programs are written differently.
    """
    return min(WIDEST, widest * factors[are_others and widest < BAND_OF_LOW])


@dataclass(frozen=True, slots=True)
class EndDifference:
    """The relative difference of an output, and the rounding bound of that. Infinite: not known, or not the same
    output. of_call: the bound of a single call, if the former is that of all. is_later: made after the last backward.
    """

    difference: float
    band: float = 0.0
    of_call: float = math.inf
    is_later: bool = False

    @classmethod
    def of(cls, difference: float, band: float, growth: float, is_later: bool) -> EndDifference:
        """Make one whose bound is multiplied by `growth`, the growth of errors in its call, only if needed."""
        return cls(difference, band if difference <= band else band * growth, is_later=is_later)


class Outcomes:
    """The outcome of two programs. outputs: of the forward; are_others: whether they are written differently; widest:
    the widest rounding bound of a call; are_formulas: whether each has calls that the other lacks, so
    that none is the other with an added step; most: the widest bound of an output that shows anything.
    """

    def __init__(
        self, outputs: Sequence[EndDifference], are_others: bool, widest: float, are_formulas: bool = False,
        most: float = WIDEST,
    ) -> None:  # fmt: skip
        self._are_formulas = are_others and are_formulas
        self._are_equal = all(one.difference == 0 for one in outputs)
        self._band = 0.0 if self._are_equal else max((min(one.band, one.of_call) for one in outputs), default=0.0)
        self._are_others = are_others
        self._widest = widest
        self.are_alike = bool(outputs) and all(one.difference <= one.band <= most for one in outputs)
        self._is_visible = any(one.difference > min(one.band, one.of_call) / SHOWS for one in outputs)
        self.are_exact = bool(outputs) and all(
            one.difference == 0 or one.difference <= one.band < BAND_OF_LOW for one in outputs
        )

    def forward(self, rows: Sequence[RunRow], is_low: bool, effects: Sequence[str]) -> list[RunRow]:
        """Return the rows; if outputs are alike, with differences that are other steps marked as such: where inputs are
        unknown, or others, calls may be no pair, or compensated elsewhere (a factor of a product). In programs that are
        written differently, so is every visible difference, and unrelated results are no pair. In a backward only what
        later calls cancel is. is_low: in low formats rounding may hide a fault. effects: what comes of each row's
        difference.
        """
        steps = [
            (_differs(row, False) and self._is_a_step(row, is_low, effect))
            or self._is_no_pair(row)
            or (self.are_alike and self._are_others and _is_crossed(row, rows))
            or (self.are_alike and _differs(row, True) and effect == ABSORBED and not row.given)
            for row, effect in zip(rows, effects, strict=True)
        ]
        return [other_way(row) if is_step else row for row, is_step in zip(rows, steps, strict=True)]

    def _is_no_pair(self, row: RunRow) -> bool:
        are_unlike = row.verdict == INHERITED and row.difference > UNLIKE and row.a[0].direction != BACKWARD
        return are_unlike and self.are_alike and self._are_others

    def _is_a_step(self, row: RunRow, is_low: bool, effect: str) -> bool:
        if effect == GOES_ON and self._is_visible and row.inputs <= row.round_off_bound:
            return False
        if self.are_exact and not is_low and (math.isnan(row.inputs) or row.why != UNEXPLAINED):
            return True
        if effect == ABSORBED and not row.given:
            return self.are_alike
        is_no_pair = row.why in (OF_OTHERS, OF_PARTS) or (bool(row.given) and row.inputs > row.round_off_bound)
        return self.are_alike and self._are_others and (is_no_pair or self._would_be_seen(row.difference))

    def _would_be_seen(self, difference: float) -> bool:
        return difference > _PLAIN * self._band

    def alone(
        self, of_unpaired: dict[Bundle, float], of_backward: Collection[Bundle], is_low: bool,
        effects: Mapping[Bundle, str],
    ) -> dict[Bundle, float]:  # fmt: skip
        """Return the differences due to calls without a partner that the outputs do not rule out as faults: of a
        backward none. effects: what comes of each. In low formats rounding explains what no call's bound exceeds.
        """
        if is_low:
            of_unpaired = {bundle: one for bundle, one in of_unpaired.items() if one > self._widest}
        if not self.are_alike:
            return of_unpaired
        of_backward = {bundle for bundle in of_backward if effects[bundle] != ABSORBED}
        if self.are_exact and not is_low:
            return {bundle: one for bundle, one in of_unpaired.items() if bundle in of_backward}
        if not (self._are_others or self._are_equal):  # what reads unrelated values is no pair
            return {bundle: one for bundle, one in of_unpaired.items() if one <= UNLIKE or bundle in of_backward}
        least = _PLAIN * (self._band if self._are_others else self._widest)
        return {
            bundle: one
            for bundle, one in of_unpaired.items()
            if bundle in of_backward
            or (self._is_visible and effects[bundle] == GOES_ON)
            or (not self._are_formulas and one <= least and effects[bundle] != ABSORBED)
        }

    def first(
        self, rows: list[RunRow], of_unpaired: dict[Bundle, float], of_rows: Sequence[str],
        rearranged: Sequence[bool], of_alone: Mapping[Bundle, str],
    ) -> tuple[list[RunRow], dict[Bundle, float]]:  # fmt: skip
        """Return both without the differences that later calls cancel, or that are another order of the same values,
        where outputs differ and others are left. rearranged: whether a row's difference is the latter.
        """
        absorbed = [effect == ABSORBED for effect in of_rows]
        both = [one or other for one, other in zip(absorbed, rearranged, strict=True)]
        for are_gone, none in ((both, UNDONE), (absorbed, (ABSORBED,))):
            gone = [_differs(row, False) and is_gone for row, is_gone in zip(rows, are_gone, strict=True)]
            alone = {b: one for b, one in of_unpaired.items() if of_alone[b] not in none}
            is_left = any(_differs(row, False) and not is_gone for row, is_gone in zip(rows, gone, strict=True))
            if not self.are_alike and self._are_others and (is_left or alone):
                return [other_way(row) if is_gone else row for row, is_gone in zip(rows, gone, strict=True)], alone
        return rows, of_unpaired

    @staticmethod
    def backward(
        rows: Sequence[RunRow], of_unpaired: dict[Bundle, float], of_inputs: Collection[object], band: float
    ) -> tuple[list[RunRow], dict[Bundle, float]]:
        """Return both for a backward whose gradients are alike. of_inputs: rows, and calls, that compute an input's
        gradient, whose effect is unknown. band: the difference of gradients, at most the widest rounding bound.
        """
        least = _PLAIN * band
        kept = {b: d for b, d in of_unpaired.items() if b.id.direction != BACKWARD or b in of_inputs or d <= least}
        steps = (
            _differs(row, True) and row.a not in of_inputs and (row.difference > least or row.why == OF_OTHERS)
            for row in rows
        )
        return [other_way(row) if is_step else row for row, is_step in zip(rows, steps, strict=True)], kept


def nearest(values: Values, a: Sequence[Bundle], b: Sequence[Bundle]) -> list[tuple[Bundle, Bundle]]:
    """Pair in order; or if one run has more, each of the other with the nearest: some may be read by no call."""
    if len(a) == len(b):
        return list(zip(a, b, strict=True))

    def distance(x: Bundle, y: Bundle) -> float:
        result = values.results(Aligned((x,), (y,), ""))
        return result.relative if result.is_known and x.elements == y.elements else math.inf

    if len(a) < len(b):
        return [(x, min(reversed(b), key=lambda y: distance(x, y))) for x in a]
    return [(min(reversed(a), key=lambda x: distance(x, y)), y) for y in b]


def is_in_another_order(values: Values, rows: Sequence[RunRow], widest: float) -> bool:
    """Return whether both models returned as much, in the same range and of the same root mean square, in other parts
    or in another order: one by one these are unlike, as are the inputs. widest: the widest rounding bound of a call.
    """
    returned = [side.runs[0].returned for side in values.sides]
    both = zip(values.sides, returned, strict=True)
    shapes = [[side.runs[0].tensors[n].shape for n in numbers] for side, numbers in both]
    if shapes[0] == shapes[1]:
        apart = max((values.between(a, b).relative for a, b in zip(*returned, strict=True)), default=0.0)
        read = next((row.inputs for row in rows if row.a[0].direction == FORWARD), 0.0)
        if not (apart > UNLIKE and read > UNLIKE):  # a program that reverses its output has other results
            return False
    a, b = (together([side.piece(0, number) for number in side.runs[0].returned]) for side in values.sides)
    return a.size > 0 and a.is_like(b, band_of_all(widest, OUTPUTS) if widest < BAND_OF_LOW else widest / _OF_ONE_SIZE)


def are_written_otherwise(
    pairs: Sequence[Aligned], rows: Sequence[RunRow], unpaired: Sequence[int], is_low: bool
) -> bool:
    """Return whether the forwards of two programs are written differently: either has calls that the other lacks, or
    a pair is not the same call. In low formats one with all of the other's calls, and more, is the same program with an
    added step, unless their arguments differ. unpaired: how many calls of each have no partner.
    """
    if any(unpaired) and (not is_low or any(row.given for row in rows)):
        return True
    return all(unpaired) or any(_is_otherwise(pair, row) for pair, row in zip(pairs, rows, strict=True))


def _is_otherwise(pair: Aligned, row: RunRow) -> bool:
    sides, is_backward = (pair.a, pair.b), row.a[0].direction == BACKWARD
    ops = {tuple(bundle.id.op.split(".")[1] for bundle in bundles) for bundles in sides}
    module_calls = {tuple(len(bundle.module_calls) for bundle in bundles) for bundles in sides}
    sizes = {sum(bundle.elements for bundle in bundles) for bundles in sides}  # a part: rows in chunks
    return not is_backward and (len(ops) > 1 or len(module_calls) > 1 or len(sizes) > 1 or row.why == OF_OTHERS)


def _is_crossed(row: RunRow, rows: Sequence[RunRow]) -> bool:
    """Return whether a call is paired with another one of its op, whose partner is a later or earlier call: each has
    the inputs of the other.
    """
    if row.why != OF_OTHERS:
        return False
    (a, b), others = (row.a[0], row.b[0]), [other for other in rows if other.why == OF_OTHERS and other is not row]
    alike = [(x, y) for o in others if (x := o.a[0]).op == a.op and (y := o.b[0]).op == b.op]
    return any((x.number - a.number) * (y.number - b.number) < 0 for x, y in alike)


def _differs(row: RunRow, is_backward: bool) -> bool:
    return row.verdict == DIFFERS and (row.a[0].direction == BACKWARD) is is_backward


def are_rearranged(rows: Sequence[RunRow], effects: Sequence[str]) -> list[bool]:
    """Return of each row whether its results are the same values in another order; or would be, if its inputs did not
    differ already, as those of the same call in another layer of the stack are.
    """
    known = list(zip(rows, effects, strict=True))
    places = {_in_any_layer(row) for row, effect in known if effect == REARRANGED}
    return [
        effect == REARRANGED or (bool(effect) and row.inputs > row.round_off_bound and _in_any_layer(row) in places)
        for row, effect in known
    ]


def _in_any_layer(row: RunRow) -> tuple[str, str, int]:
    return row.a[0].op, alike_module(row.a[0].module_path), row.a[0].number


def other_way(row: RunRow) -> RunRow:
    """Return the row as one of programs that reach the same in another way."""
    return replace(row, verdict=NOT_COMPARED, why=_OTHER_WAY)
