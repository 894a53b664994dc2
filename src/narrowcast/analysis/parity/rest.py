"""What the calls of two runs say of a distance: other numbers or weights, calls of one alone, kernels, other shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from narrowcast.core.ledger.identity import CallId
from narrowcast.output.words import and_more, counted, number_text
from narrowcast.reports.results.parity import Cause
from narrowcast.reports.results.run import Run
from narrowcast.reports.results.run_differences import RunDifferences, RunRow
from narrowcast.reports.results.verdicts import (
    ALIKE,
    ATTRIBUTE,
    CACHE,
    CALLS,
    FORMAT,
    FORMATS_DIFFER,
    KERNEL,
    ROUND_OFF,
    SHAPE,
    WEIGHTS,
)

_APART = " apart"
_OF_CACHES = "compare positions, masks, and what the cache holds there"
_MOST = 3
"""So many calls are tried at most."""
Without = Callable[[CallId], tuple[float, float] | None]
"""The distance with everything before a call of b made equal, and with what its module returns made equal, too; None
where that cannot be tried.
"""


def causes_of(found: RunDifferences, without: Without, is_moved: bool) -> list[Cause]:
    """Return the causes that two runs show, those that are confirmed first. is_moved: whether their numbers differ."""
    if not is_moved:
        return [Cause(ALIKE, "the same numbers", "")]
    causes = [_tried(cause, call, without) for cause, call in _of_calls(found)]
    causes.sort(key=lambda cause: (not cause.is_confirmed, -cause.removes))
    if causes:
        return causes
    return [_formats(found) if found.verdict == FORMATS_DIFFER else of_rounding(found)]


def of_rounding(found: RunDifferences) -> Cause:
    """Return the cause of two runs whose calls are all within their bounds: rounding, or that of other batches."""
    first = next((row for row in found.rows if row.difference > 0), None)
    what, kind = "every call is within its round-off bound", ROUND_OFF
    if len(set(map(_pieces, found.compared_runs))) > 1:
        what, kind = f"{what}, in other batches or pieces", SHAPE
    if first is None:
        return Cause(kind, what, "")
    what += f"; the first that differs is {_names(first.b)}, by {number_text(first.difference)}"
    return Cause(kind, what, "", module=_module(first.b), place=first.place_b)


def _pieces(run: Run) -> int:
    """Return how often modules are called: once for each token, with a cache."""
    return max((call.id.module_call for call in run.calls), default=1)


def _of_calls(found: RunDifferences) -> Iterator[tuple[Cause, CallId | None]]:
    """Yield a cause for each of the first calls that make a difference, with the call of b; what follows from them is
    none.
    """
    weights = [row for row in found.rows if any(b.endswith(_APART) for *_, b in row.given)]
    given = [row for row in found.producers if row.is_given_numbers and row not in weights]
    if weights:
        first = weights[0]
        what = f"{counted(len(weights), 'call', 'read')} other weights: {_names(first.b)} first"
        cause = Cause(WEIGHTS, what, "load the same weights into both", module=_module(first.b), place=first.place_b)
        yield cause, first.b[0]
    for row in given[:_MOST]:
        yield _of_row(row, False), row.b[0]
    if weights or given:
        return
    is_in_pieces = len(set(map(_pieces, found.compared_runs))) > 1
    for row in found.producers[:_MOST]:
        yield _of_row(row, is_in_pieces), row.b[0]
    for run in "ba":
        alone = [one for one in found.alone if one.run == run]
        if alone:
            first_alone = alone[0]
            of_line = [one for one in alone if one.place == first_alone.place]
            calls = ", ".join(dict.fromkeys(one.id.op for one in of_line))
            what = f"only {run} calls {calls}{and_more(len(alone) - len(of_line), 'call')}: "
            what += f"{number_text(first_alone.apart)} apart"
            kind, todo = (CACHE, _OF_CACHES) if is_in_pieces else (CALLS, "make these calls in both, or in neither")
            module, call = (first_alone.id.module_path, first_alone.id) if run == "b" else ("", None)
            yield Cause(kind, what, todo, module=module, place=first_alone.place), call


def _of_row(row: RunRow, is_in_pieces: bool) -> Cause:
    module, place, names = _module(row.b), row.place_b, _names(row.b)
    if row.is_given_numbers:
        numbers = [(name, a, b) for name, a, b in row.given if not b.endswith(_APART)]
        what = f"{names}: {'; '.join(f'{name} {a} in a, {b} in b' for name, a, b in numbers)}"
        return Cause(ATTRIBUTE, what, f"give b {numbers[0][0]} {numbers[0][1]}", module=module, place=place)
    if is_in_pieces:
        what = f"{names} is {number_text(row.difference)} off what {_names(row.a)} gives, beyond round-off"
        return Cause(CACHE, what, _OF_CACHES, module=module, place=place)
    if [one.op for one in row.a] != [one.op for one in row.b]:
        what = f"{_names(row.a)} in a, {names} in b: {number_text(row.difference)} apart"
        return Cause(CALLS, what, "compare both lines", module=module, place=place)
    what = f"{names} is {number_text(row.difference)} apart, {_times(row)} its round-off bound"
    return Cause(KERNEL, what, "compare both lines; nc.compare judges the kernel by itself", module=module, place=place)


def _times(row: RunRow) -> str:
    return f"{row.difference / row.round_off_bound:.3g} times" if row.round_off_bound else "beyond"


def _formats(found: RunDifferences) -> Cause:
    first = found.first_format
    assert first is not None
    what = f"{counted(len(found.formats), 'pair')} of calls in other formats: {_names(first.b)} "
    what += f"in {first.format_a} in a, {first.format_b} in b{and_more(len(found.formats) - 1, 'pair')}"
    return Cause(FORMAT, what, "run both in one format", module=_module(first.b), place=first.place_b)


def _tried(cause: Cause, call: CallId | None, without: Without) -> Cause:
    ends = None if call is None else without(call)
    if ends is None:
        return cause
    return replace(cause, before=ends[0], after=ends[1], is_confirmed=ends[1] <= ends[0] / 10)


def _module(calls: Iterable[CallId]) -> str:
    return next(iter(calls)).module_path


def _names(calls: tuple[CallId, ...]) -> str:
    return f"{calls[0]}{and_more(len(calls) - 1, 'call')}"
