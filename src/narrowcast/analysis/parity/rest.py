"""What the calls of two runs say of a distance: other numbers or weights, calls of one alone, kernels, other shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from narrowcast.core.ledger.identity import CallId
from narrowcast.core.ops import op_kind
from narrowcast.core.ops.facts import ATTENTION, SOFTMAX
from narrowcast.output.words import and_more, counted, number_text
from narrowcast.reports.results.parity import Cause
from narrowcast.reports.results.run import Run
from narrowcast.reports.results.run_differences import EQUAL, RunDifferences, RunRow
from narrowcast.reports.results.verdicts import (
    ALIKE,
    ATTRIBUTE,
    CACHE,
    CALLS,
    FORMAT,
    FORMATS_DIFFER,
    KERNEL,
    ROUND_OFF,
    SAMPLER,
    SHAPE,
    WEIGHTS,
)

_APART = " apart"
_OF_CACHES, _MASKS = (
    "compare positions, masks, and what the cache holds there",
    "compare masks and windows at both lines",
)
_MOST, _CALLS = 3, 8
"""How many causes are tried at most, and calls of each."""
_CONFIRMS, _OF_MASKS, _OF_KERNELS = 0.9, 1e-2, 1e3
"""The part of the distance that goes away with a confirmed cause; by how much results of other masks differ; by how
many times their bound kernels are off that are wrong, and less than what computes something else.
"""
Without = Callable[[CallId], tuple[float, float, str] | None]
"""The distance with everything before a call made equal, and with what its module returns made equal, too; of one that
a alone makes, with its module's partner in b; and this module of b. None where that cannot be tried.
"""
Suspect = tuple[Cause, list[CallId]]
"""A cause with the calls that it is about, of b where that makes them."""


def causes_of(found: RunDifferences, without: Without, left: float, has_weights: bool = False) -> list[Cause]:
    """Return the causes that two runs show, those that are confirmed first. left: the distance that they have to
    explain; 0 of programs with the same numbers. has_weights: b has a's by now: where a call reads others, they are
    laid out in another way, and so is what it gives.
    """
    if left == 0:
        return [Cause(ALIKE, "the same numbers", "")]
    causes = [_tried(suspect, without, left) for suspect in _suspects(found, has_weights)]
    causes.sort(key=lambda cause: (not cause.is_confirmed, -round(cause.removes / left, 1)))  # of equals b's own first
    if not causes and found.tokens is not None and found.tokens.is_beyond:
        what = f"calls agree, and log-probabilities are {number_text(found.tokens.rms)} nats rms apart"
        return [Cause(SAMPLER, what, "compare what is done to logits before log-probabilities are taken")]
    return causes or [of_rounding(found)]


def of_rounding(found: RunDifferences) -> Cause:
    """Return the cause of two runs whose calls are all within their bounds: rounding, or that of other batches."""
    first = next((row for row in found.rows if row.verdict == ROUND_OFF), None)
    what, kind = "every call is within its round-off bound", ROUND_OFF
    if len(set(map(_pieces, found.compared_runs))) > 1:
        what, kind = f"{what}, in other batches or pieces", SHAPE
    if first is None:
        return Cause(kind, what, "")
    what += f"; the first that differs is {_names(first.b)}, by {number_text(first.difference)}"
    return Cause(kind, what, "", module=first.b[0].module_path, place=first.place_b)


def _pieces(run: Run) -> int:
    """Return how often the modules of the first call and of the last are called: once for each token, with a cache.
    Others may be called several times in one forward, as an activation that layers share.
    """
    called: dict[str, int] = {}
    for call in run.calls:
        called[call.id.module_path] = max(called.get(call.id.module_path, 1), call.id.module_call)
    ends = (run.calls[0], run.calls[-1]) if run.calls else ()
    return min((called[call.id.module_path] for call in ends), default=1)


def _suspects(found: RunDifferences, has_weights: bool) -> Iterator[Suspect]:
    """Yield a cause for each of the first calls that make a difference, and those on the same line; what follows from
    them is none.
    """
    weights = [row for row in found.rows if any(b.endswith(_APART) for *_, b in row.given)]
    if weights and not has_weights:
        what = f"{counted(len(weights), 'call', 'read')} other weights: {_names(weights[0].b)} first"
        yield _suspect(WEIGHTS, what, "load the same weights into both", weights)
    given: dict[object, list[RunRow]] = {}
    producers = [row for row in found.producers if row not in weights]
    for row in producers:
        if row.is_given_numbers:
            given.setdefault((row.b[0].op, row.given), []).append(row)
    for rows in [*given.values()][:_MOST]:
        numbers = [(name, a, b) for name, a, b in rows[0].given if not b.endswith(_APART)]
        what = f"{'; '.join(f'{name} {a} in a, {b} in b' for name, a, b in numbers)}: {_of_all(rows)}"
        name, wanted, _ = numbers[0]
        yield _suspect(ATTRIBUTE, f"argument {what}", f"give {rows[0].b[0].op} of b {wanted} as {name}", rows)
    if given or (weights and not has_weights):
        return
    is_in_pieces = len(set(map(_pieces, found.compared_runs))) > 1
    for place in [*dict.fromkeys(row.place_b for row in producers)][:_MOST]:
        yield _of_line([row for row in found.rows if row.place_b == place], producers, is_in_pieces)
    for run in "ba":
        first = next((one for one in found.alone if one.run == run), None)
        if first is not None:
            of_line = [one for one in found.unaligned if one.run == run and one.place == first.place]
            calls = ", ".join(dict.fromkeys(one.id.op for one in of_line))
            what = f"only {run} calls {calls}: {number_text(first.apart)} apart"
            is_of_positions = is_in_pieces or any(op_kind(one.id.op).name == "embedding" for one in of_line)
            kind, todo = (CACHE, _OF_CACHES) if is_of_positions else (CALLS, "make these calls in both, or in neither")
            module = first.id.module_path if run == "b" else ""
            yield Cause(kind, what, todo, module=module, place=first.place), [one.id for one in of_line]
    first_format = found.first_format
    if first_format is not None and not (producers or found.alone) and found.verdict == FORMATS_DIFFER:
        alike = [row for row in found.formats if row.place_b == first_format.place_b]
        what = f"{first_format.format_a} in a, {first_format.format_b} in b: {_of_all(alike)}"
        what += and_more(len(found.formats) - len(alike), "call")
        yield _suspect(FORMAT, what, "run both in one format", alike)


def _of_line(rows: list[RunRow], producers: Sequence[RunRow], is_in_pieces: bool) -> Suspect:
    """Return the cause of calls on one line, of which one makes a difference."""
    row = next(row for row in rows if row in producers)
    alike = [other for other in rows if other.b[0].op == row.b[0].op and other.verdict not in (EQUAL, ROUND_OFF)]
    rows = [row, *(other for other in alike if other is not row)]
    far, families = number_text(row.difference), {op_kind(one.op).family for one in row.b}
    if is_in_pieces:
        return _suspect(CACHE, f"{_of_all(rows)}: {far} off what {_names(row.a)} gives", _OF_CACHES, rows)
    if families & {SOFTMAX, ATTENTION} and row.difference > _OF_MASKS:
        return _suspect(ATTRIBUTE, f"{_of_all(rows)}: {far} apart, of inputs that agree", _MASKS, rows)
    if [one.op for one in row.a] != [one.op for one in row.b] or not row.difference < _OF_KERNELS * row.round_off_bound:
        return _suspect(CALLS, f"{_names(row.a)} in a, {_of_all(rows)} in b: {far} apart", "compare both lines", rows)
    times = row.difference / row.round_off_bound
    what = f"{_of_all(rows)}: {far} apart, {times:.3g} times its round-off bound"
    return _suspect(KERNEL, what, "compare both lines; nc.compare judges the kernel by itself", rows)


def _suspect(kind: str, what: str, todo: str, rows: Sequence[RunRow]) -> Suspect:
    first = rows[0]
    return Cause(kind, what, todo, module=first.b[0].module_path, place=first.place_b), [row.b[0] for row in rows]


def _tried(suspect: Suspect, without: Without, left: float) -> Cause:
    """Return the cause, with what goes away where the results of its calls are exchanged, one after the other: each
    with everything before it made equal.
    """
    cause, calls = suspect
    by_module = {(call.module_path, call.module_call): call for call in reversed(calls)}
    ends = {call: without(call) for call in [*by_module.values()][::-1][:_CALLS]}
    tried = {call: both[0] - both[1] for call, both in ends.items() if both is not None}
    if not tried:
        return cause
    modules = {call: both[2] for call, both in ends.items() if both is not None}
    after = abs(left - sum(tried.values()))
    if after >= left:
        return cause
    most = max(tried, key=lambda call: tried[call])
    if tried[most] > _CONFIRMS * left:
        cause = replace(cause, module=modules[most])
    return replace(cause, before=left, after=after, is_confirmed=after <= (1 - _CONFIRMS) * left)


def _of_all(rows: Sequence[RunRow]) -> str:
    return f"{rows[0].b[0]}{and_more(len(rows) - 1, 'call')}"


def _names(calls: tuple[CallId, ...]) -> str:
    return f"{calls[0]}{and_more(len(calls) - 1, 'call')}"
