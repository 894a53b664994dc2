"""What to do about two runs that differ: where to look, and what to change."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from narrowcast.core.ledger.identity import BACKWARD, CallId
from narrowcast.output.words import and_more, number_text
from narrowcast.reports.documents.model import Todo
from narrowcast.reports.results.run_differences import EQUAL, NewCall, RunDifferences, RunRow, Unaligned
from narrowcast.reports.results.verdicts import ALIKE, ROUND_OFF

_AGREE = 0.1
"""Gradients that are further apart are not said to agree."""
LINES, _LAST = 10, 2
"""Of how many lines of a file calls without a partner are named in advice, and of how many files; how many are last."""
_NOWHERE = "the first with values that the other run has nowhere"


def given_text(row: RunRow) -> str:
    """Return the arguments of a pair that differ, in either run."""
    return "; ".join(f"{name} {a} / {b}" for name, a, b in row.given)


def todos_of(result: RunDifferences) -> list[Todo]:
    """Return advice on where to look, and what to change: at calls of one run alone, at the first call in another
    value, and at the first in another format; else at what is left that differs.
    """
    format, untrained = result.first_format, _untrained(result)
    todos = [*untrained, *_other_step(result), *_kept_gradients(result), *_differing(result)]
    if not todos and result.tokens is not None and result.tokens.is_beyond:
        what = "Inspect what is done with the last results before tokens are sampled"
        todos.append(Todo(what, "a temperature, say"))
    elif not todos and result.outputs_apart:
        todos.append(_about_outputs(result))
    elif not todos and any(row.is_beyond for row in result.gradients):
        beyond = [row for row in result.gradients if row.is_beyond]
        worst = max(beyond, key=lambda row: (not row.a[0].endswith("bias"), row.difference))  # these may be rounding
        why = f"that of {worst.a[0]} is {number_text(worst.difference)} apart, and no call was found to make that: "
        why += "look at the loss's scale, clipping, a backward of your own, and averages over steps or ranks"
        why += "".join(f"; the forward ends at {_both_places(row)}" for row in _forward(result)[-1:])
        todos.append(Todo("Inspect how gradients are made", why))
    if result.weights_apart and not (result.alone or untrained or result.other_step):
        largest = max((row.difference for row in result.gradients if math.isfinite(row.difference)), default=0.0)
        agree = (
            "gradients agree" if largest < _AGREE else f"gradients, up to {number_text(largest)} apart, may be rounded"
        )
        why = f"after them weights are apart by {number_text(result.weights_apart)} of the distance they moved, though "
        why += f"{agree}: look at the learning rate, weight decay, moments, and what is done to gradients"
        todos.append(Todo("Inspect the steps of the optimizer", why))
    if format is not None:
        reason = f"it computes in {format.format_a} in a, in {format.format_b} in b"
        what = f"If the formats are not intended, name {names_text(format.a)} in a rule, or pin its module"
        if format.a[0].direction == BACKWARD:  # its formats follow from those of the forward
            what = f"If the formats are not intended, compare the casts in the forward of {names_text(format.a)}"
            reason += f" ({_both_places(format)})"
        todos.append(Todo(what, reason, path=format.a[0].module_path))
    has_modules = any(one.id.module_path for one in result.unaligned)
    is_open = result.verdict not in (ALIKE, ROUND_OFF)
    if not todos and is_open and len(result.unaligned) > len(result.rows) and has_modules:
        todos.append(Todo("Pair their modules by hand, --mapping FILE", "most calls have no partner"))
    return todos


def _differing(result: RunDifferences) -> list[Todo]:
    """Return advice on where values begin to differ: at calls of one run alone, or new in either, and at the first pair
    that is given something else, or makes a difference by itself.
    """
    value, todos = result.first_value, list[Todo]()
    is_certain = value is not None and (value.aligned_by != "order" or value.is_given_numbers)
    is_later = value is not None and not is_certain and _begins_before(result, value)
    is_new = value is not None and {one.id for one in result.front}.issuperset((*value.a, *value.b))
    is_first = is_new and not is_later
    is_known = is_first or (value is not None and bool(value.given) and not is_later)
    if result.alone or (result.front and not is_known):
        apart = max((one.apart for one in result.alone), default=math.inf)
        effect = f", by up to {number_text(apart)}" if math.isfinite(apart) else ""
        known = {(one.run, one.id) for one in result.unaligned}
        is_alone = known.issuperset((one.run, one.id) for one in result.front)
        what = "Inspect what only one program calls" if is_alone else "Inspect what the programs compute differently"
        parts = _lines_new(result.front) or [*_lines_alone(result, result.alone), *_readers(result)]
        effect += f"; {_NOWHERE}" if result.front else ""
        todos.append(Todo(what, f"what comes of it differs{effect}: {'; '.join(parts)}"))
    if value is not None and result.other_step is None and (value.given or not (result.front and todos)):
        at = names_text(value.a)
        what = f"Give both runs the same {value.given[0][0]} in {at}" if value.given else f"Inspect both lines of {at}"
        why = f"the first that makes a difference: {value.why}"
        why = f"{why}; {given_text(value)}" if value.given else why
        why = f"{why} ({_both_places(value)}{_beside(value)})"
        todos.append(Todo(what, why, path=value.a[0].module_path))
        calls = [(one.run, one.id) for one in result.front] or [(one.run, one.id) for one in result.alone]
        begins = dict(reversed(calls)).values()  # the first of either run
        is_backward = all(one.direction == BACKWARD for one in begins) and value.a[0].direction != BACKWARD
        if is_backward or is_first:
            todos.reverse()  # the forward comes first, and what is known exactly
    return todos


def _begins_before(result: RunDifferences, value: RunRow) -> bool:
    """Return whether the first new call of a run comes before the one of a pair."""
    for run, ids in (("a", value.a), ("b", value.b)):
        at = {str(one): n for n, row in enumerate(result.rows) for one in (row.a if run == "a" else row.b)}
        after = {one.id: one.after for one in result.unaligned if one.run == run}
        first = next((one.id for one in result.front if one.run == run), None)
        if first is not None:
            return at.get(str(first), at.get(after.get(first, ""), -1)) < at[str(ids[0])]
    return False


def _other_step(result: RunDifferences) -> list[Todo]:
    """Return advice about a step of an optimizer that is set otherwise."""
    step = result.other_step
    if step is None:
        return []
    names = " and ".join(one.name for one in step.settings)
    where = _both_lines(step.place_a, step.place_b)
    return [Todo(f"Give both runs the same {names} in {step.optimizer}", f"{step.text} ({where})")]


def _kept_gradients(result: RunDifferences) -> list[Todo]:
    """Return advice about gradients that one run alone adds to, before anything else is new."""
    first = {one.run: one for one in reversed(result.front)}
    adding = [one for one in first.values() if one.id.adds_to_gradient]
    if len(adding) != 1:
        return []
    one, other = adding[0], "ba"["ab".index(adding[0].run)]
    why = f"the backward of {one.run} adds to those that are there already ({Path(one.place).name}), that of {other} "
    why += "does not: they are of an earlier step, and nobody cleared them, or of another part of the batch"
    return [Todo("Inspect which gradients are added up, and where they are cleared", why)]


def _untrained(result: RunDifferences) -> list[Todo]:
    """Return advice about parameters that one run alone trains."""
    todos = []
    for run, trainer in ("ab", "ba"):
        left = [one for one in result.untrained if one.run == run]
        if left:
            first, more = left[0], and_more(len(left) - 1, "parameter")
            of = f"{first.of} of {trainer}"
            name = of if first.name in ("", first.of) else f"{first.name} ({of})"
            why = f"{trainer} moves what {run} leaves as it is: frozen, detached, in no optimizer, or not stepped"
            why += f" (read first at {Path(first.place).name})" if first.place else ""
            todos.append(Todo(f"Inspect how {run} trains {name}{more}", why))
    return todos


def _about_outputs(result: RunDifferences) -> Todo:
    """Return advice where outputs differ and no call is known to make that: at the first that cannot be compared after
    the last ones that agree.
    """
    apart = f"outputs are {number_text(result.outputs_apart)} apart"
    forward = _forward(result)
    agree = [n for n, row in enumerate(forward) if row.verdict in (EQUAL, ROUND_OFF)]
    after = forward[agree[-1] + 1 :] if agree else forward
    unknown = next((row for row in after if not row.measured_by), None)
    if unknown is None:
        what = "Inspect what is computed between the last calls that agree and the outputs"
        ends = dict.fromkeys(_both_places(forward[n]) for n in (*agree[-1:], -1)) if forward else ()
        places = ", to ".join(ends) or "; ".join(_lines_alone(result, result.unaligned))
        return Todo(what, f"{apart}, and no call was found to make that{places and f': {places}'}")
    why = f"{apart}, and this is the first call after those that agree; its own results cannot be compared"
    why = f"{why} ({_both_places(unknown)})"
    return Todo(f"Inspect both lines of {names_text(unknown.a)}", why, path=unknown.a[0].module_path)


def _forward(result: RunDifferences) -> list[RunRow]:
    return [row for row in result.rows if row.a[0].direction != BACKWARD]


def _lines_alone(result: RunDifferences, alone: Sequence[Unaligned]) -> list[str]:
    """Return the calls of either run without a partner: the first, how many more, and their lines, by file; and where
    the last call before them is that has one, in both runs if only one has such calls: views, and what the other run
    lacks, lie after it.
    """
    texts = []
    by_run = {run: [one for one in alone if one.run == run] for run in "ab"}
    for run, calls in by_run.items():
        of_calls = dict.fromkeys(one.place for one in calls)
        places = _places(dict.fromkeys([*of_calls, *(line for one in calls for line in one.views)]), of_calls)
        before = _row_of(result, run, calls[0].after) if calls else None
        if before is not None:
            own = Path(before.place_a if run == "a" else before.place_b).name
            places.append(f"after {own if all(by_run.values()) else _both_places(before)}")
        more = and_more(len(calls) - 1, "call")
        texts += [f"{calls[0].id}{more} of {run} ({'; '.join(_shortened(places))})"] if calls else []
    return texts


def _lines_new(front: Sequence[NewCall]) -> list[str]:
    """Return the first calls of either run that give new values, and on which lines, by file; and those that made what
    the first of them read, after which lies what one run lacks.
    """
    texts = []
    for run in "ab":
        calls = [one for one in front if one.run == run]
        if calls:
            lines = dict.fromkeys(line for one in calls for line in (one.place, *one.views))
            places, after = _places(lines, lines), _places(calls[0].after, calls[0].after)
            places += [f"after {', '.join(after)}"] if after else []
            texts.append(f"{calls[0].id}{and_more(len(calls) - 1, 'call')} of {run} ({'; '.join(places)})")
    return texts


def _row_of(result: RunDifferences, run: str, call: str) -> RunRow | None:
    """Return the row of a call with a partner, by its identity in words."""
    return next((row for row in result.rows if call in map(str, row.a if run == "a" else row.b)), None)


def _shortened(texts: list[str]) -> list[str]:
    """Return the first of many, and the last, which are nearest to where the difference shows."""
    return texts if len(texts) <= LINES else [*texts[: LINES - _LAST], "...", *texts[-_LAST:]]


def _readers(result: RunDifferences) -> list[str]:
    """Return where the effect of calls without a partner arrives: the first call of both runs that reads it."""
    read_by = {one.read_by for one in result.alone}
    first = next((row for row in result.rows if read_by.intersection(row.a)), None)
    return [f"first read by {names_text(first.a)} ({_both_places(first)}{_beside(first)})"] if first else []


def _both_places(row: RunRow) -> str:
    """Return the lines of a pair."""
    return _both_lines(row.place_a, row.place_b)


def _both_lines(a: str, b: str) -> str:
    """Return a line of either run, files by their names: folders are in the tables."""
    return f"{Path(a).name} in a, {Path(b).name} in b" if a != b else Path(a).name


def _beside(row: RunRow) -> str:
    """Return the other lines of a pair: of more calls, and of views."""
    sides = [", ".join(_places(lines, lines)) for lines in (row.beside_a, row.beside_b)]
    texts = [f"{lines} in {run}" for lines, run in zip(sides, "ab", strict=True) if lines]
    return f"; see also {', '.join(texts)}" if texts else ""


def _places(lines: Iterable[str], own: Collection[str]) -> list[str]:
    """Return lines of code by file, as they run: `model.py:3, 4`; of many those of calls alone, which are `own`."""
    by_file: dict[str, dict[int, bool]] = {}
    for place in lines:
        file, _, line = Path(place).name.rpartition(":")
        if line.isdigit():
            by_file.setdefault(file, {})[int(line)] = place in own
    texts = []
    for file, known in by_file.items():
        kept = [*known] if len(known) <= LINES else [line for line, is_own in known.items() if is_own]
        texts += [f"{file}:{', '.join(_shortened([*map(str, kept)]))}"] if kept else []
    return texts


def names_text(calls: Iterable[CallId]) -> str:
    """Return several calls as one text."""
    return " + ".join(map(str, calls))
