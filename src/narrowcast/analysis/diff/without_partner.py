"""Calls without a partner: which pairs are none, and which calls do nothing that their readers do not undo."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from narrowcast.analysis.diff.alignment import BY_HAND, Aligned, are_of_one_weight, is_by_values
from narrowcast.analysis.diff.effects import CANCELS
from narrowcast.analysis.diff.outcomes import BAND_OF_LOW, OF_OTHERS, UNEXPLAINED, other_way
from narrowcast.analysis.diff.pieces import UNLIKE
from narrowcast.analysis.diff.rows import Judging
from narrowcast.analysis.diff.sides import Bundle
from narrowcast.core.ledger.identity import BACKWARD, FORWARD
from narrowcast.reports.results.run_differences import DIFFERS, EQUAL, INHERITED, RunDifferences, RunRow
from narrowcast.reports.results.verdicts import ROUND_OFF

_MOST_GROWTH = 100.0
"""A difference is due to one that is this many times smaller at most."""


def no_pairs(
    judging: Judging, pairs: Sequence[Aligned], rows: Sequence[RunRow], left_out: Collection[Bundle], by_results: bool
) -> set[Aligned]:
    """Return the pairs that are none: that ranges alone paired, and differ; of a backward, those with unrelated inputs
    and results; and, where each program has calls that the other lacks, those of unrelated results that only the order
    of ops has paired. left_out: by hand. by_results: whether the latter are wanted.
    """
    differing = {pair: row for pair, row in zip(pairs, rows, strict=True) if row.verdict == DIFFERS}
    differ = differing.keys()
    by_ranges = {pair for pair, row in differing.items() if is_by_values(pair) or _is_of_other_gradients(pair, row)}
    if not by_results or not all(judging.counts_of_unpaired(left_out)):
        return by_ranges
    reading = {pair for read in judging.read_by.values() for pair in read}
    unlike = {pair for pair, row in zip(pairs, rows, strict=True) if _is_unlike(judging, pair, row)}
    return by_ranges | unlike & (differ | reading)


def _is_unlike(judging: Judging, pair: Aligned, row: RunRow) -> bool:
    """Return whether results are unrelated, or inputs where results are of other sizes, and neither a number nor a
    weight that is read once shows that it is a pair; or whether results differ, and what was read cannot be compared.
    """
    if pair.a[0].id.direction != FORWARD or pair.by == BY_HAND:
        return False
    if row.verdict == DIFFERS and row.why == UNEXPLAINED and (math.isnan(row.inputs) or _reads_more(pair)):
        return True
    numbers = {name for name, *_ in row.given} - {name for name, _ in pair.a[0].call.inputs}
    is_sure = (bool(numbers) and not row.inputs > UNLIKE) or (are_of_one_weight(pair) and _reads_once(judging, pair))
    unlike = row.inputs if row.is_part or math.isnan(row.difference) else row.difference
    return unlike > UNLIKE and not is_sure


def _is_of_other_gradients(pair: Aligned, row: RunRow) -> bool:
    """Return whether two calls of a backward compute gradients of other tensors: each product has two."""
    are_unlike = row.why == OF_OTHERS and row.difference > UNLIKE and not row.inputs <= UNLIKE  # or not known
    return pair.a[0].id.direction != FORWARD and pair.by != BY_HAND and are_unlike


def _reads_more(pair: Aligned) -> bool:
    """Return whether one of two calls reads a tensor more than the other: an operand where that has a number, a bias
    that is added elsewhere.
    """
    a, b = pair.a[0], pair.b[0]
    return len(a.call.inputs) != len(b.call.inputs) and len(pair.a) == len(pair.b) == 1


def _reads_once(judging: Judging, pair: Aligned) -> bool:
    """Return whether no other calls of these modules are of the same op, as those of the steps of a cell are."""
    both = zip(judging.values.sides, (pair.a[0], pair.b[0]), strict=True)
    return all(
        sum(x.id.op == of.id.op for x in side.by_path[of.path] if x.id.direction == FORWARD) == 1 for side, of in both
    )


def leave_out_compensated(judging: Judging, rows: Sequence[RunRow]) -> None:
    """Leave out the calls without a partner whose readers give the same again: one program scales before a call what
    the other scales in it. In the forward of a low format sums with larger values would give the same, too.
    """
    by_call = {row.a: row for row in rows}
    for bundle, difference in list(judging.unpaired.items()):
        readers = [by_call[tuple(x.id for x in pair.a)] for pair in judging.read_by.get(bundle, [])]
        is_backward = bundle.id.direction == BACKWARD
        is_cancelled = [
            row.verdict in (EQUAL, ROUND_OFF, *((INHERITED,) if is_backward else ()))
            and row.difference <= difference / CANCELS
            and (is_backward or row.round_off_bound < BAND_OF_LOW)
            for row in readers
        ]
        if readers and all(is_cancelled):
            del judging.unpaired[bundle]


def note_first_alone(
    judging: Judging, pairs: Sequence[Aligned], rows: Sequence[RunRow], direction: str, apart: float
) -> bool:
    """Note the calls without a partner before the first pair of a forward or backward whose results differ visibly:
    they make that together. Return whether there are any. apart: the difference that they are to explain.
    """
    least = apart / _MOST_GROWTH
    visible = [(p, r) for p, r in zip(pairs, rows, strict=True)
               if r.a[0].direction == direction and r.difference > max(r.round_off_bound, least)]  # fmt: skip
    for pair, row in visible:
        read = [makers.read(side[0]) for makers, side in zip(judging.makers, (pair.a, pair.b), strict=True)]
        if note_alone(judging, read, row.difference, pair):
            return True
    return False


def note_alone(judging: Judging, numbers: Sequence[Sequence[int]], difference: float, *reader: Aligned) -> bool:
    """Note the calls without a partner that made these tensors of either run; return whether there are any. What
    a forward has saved for its backward shows in the forward.
    """
    is_backward = any(pair.a[0].id.direction == BACKWARD for pair in reader)
    alone = [
        x for side in judging.upstream(numbers) for x in side.alone if x.id.direction == BACKWARD or not is_backward
    ]
    judging.unpaired |= dict.fromkeys(alone, difference)
    for bundle in alone:
        judging.read_by.setdefault(bundle, []).extend(reader)
    return bool(alone)


def leave_out_all(result: RunDifferences, judging: Judging) -> None:
    """Leave out every difference on the way: what both programs come to is the same."""
    result.rows = [other_way(row) if row.verdict == DIFFERS else row for row in result.rows]
    judging.unpaired = {}


def leave_out_before_steps(result: RunDifferences, judging: Judging, pairs: Sequence[Aligned]) -> None:
    """Leave out every difference but those of calls after the last step: both programs have trained the same."""

    def is_later(pair: Aligned) -> bool:
        return all(m.is_later(x[0]) for m, x in zip(judging.makers, (pair.a, pair.b), strict=True))

    result.rows = [other_way(row) if row.verdict == DIFFERS and not is_later(pair) else row
                   for pair, row in zip(pairs, result.rows, strict=True)]  # fmt: skip
    alone = judging.unpaired.items()
    judging.unpaired = {x: one for x, one in alone if any(m.is_later(x) for m in judging.makers)}


def leave_out_of_gradients(result: RunDifferences, judging: Judging, pairs: Sequence[Aligned]) -> None:
    """Leave out the calls of a forward that compute with what a backward made, one by one in the order of either's
    parameters.
    """
    found = judging.makers[0].of_gradients | judging.makers[1].of_gradients
    judging.unpaired = {bundle: one for bundle, one in judging.unpaired.items() if bundle not in found}
    result.rows = [other_way(row) if pair.a[0] in found and row.verdict == DIFFERS else row
                   for pair, row in zip(pairs, result.rows, strict=True)]  # fmt: skip
