"""The page of two runs side by side: what `nc.diff` found."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from narrowcast.core.ledger.identity import BACKWARD, CallId
from narrowcast.output.words import and_more, counted, number_text, or_infinity
from narrowcast.reports.documents.model import Bar, Document, Figure, Pair, PairRow, Series, Table, Todo
from narrowcast.reports.documents.run_flow import SideGraph
from narrowcast.reports.documents.tables import table
from narrowcast.reports.documents.words import number
from narrowcast.reports.results.run_differences import (
    DIFFERS,
    EQUAL,
    INHERITED,
    NewCall,
    RunDifferences,
    RunRow,
    Unaligned,
)
from narrowcast.reports.results.verdicts import ALIKE, NOT_COMPARED, ROUND_OFF, VALUES_DIFFER

ENVIRONMENT = 6
"""How many differences of the environments are on the first screen; the table has all."""
NO_FLOATS = "no floats"
_AGREE = 0.1
"""Gradients that are further apart are not said to agree."""
LINES, _LAST = 10, 2
"""Of how many lines of a file calls without a partner are named in advice, and of how many files; how many are last."""
_NOWHERE = "the first with values that the other run has nowhere"
VERDICTS = (EQUAL, ROUND_OFF, INHERITED, DIFFERS, NOT_COMPARED)


def run_differences_document(result: RunDifferences) -> Document:
    """Return the page of the result of `nc.diff`. With both runs, if they are there; a saved one has none."""
    sides = SideGraph(result, "a"), SideGraph(result, "b")
    rows = [_pair_row(row, sides) for row in result.rows]
    _mark(result.rows, rows, sides)
    _mark_alone(result.unaligned, sides)
    tone = "bad" if result.verdict == VALUES_DIFFER else "" if result.verdict == NOT_COMPARED else "good"
    title, verdict = f"{result.a} against {result.b}", run_differences_verdict(result)
    page = Document("comparison of runs", title, verdict, tone, graph=sides[0].graph)
    kept = [row for row in rows if row.a or row.b]
    page.pair = Pair((result.a, result.b), sides[1].graph, kept, str(result.by_hand))
    page.facts = _facts(result)
    page.figures = _figures(result)
    page.bars = _bars(result)
    page.todos = _todos(result)
    page.tables = _tables(result)
    page.series = _series(rows)
    page.notes = list(result.notes)
    return page


def _pair_row(row: RunRow, sides: tuple[SideGraph, SideGraph]) -> PairRow:
    return PairRow(
        sides[0].numbers(row.a), sides[1].numbers(row.b), row.verdict, _difference(row), number(row.inputs),
        number(row.round_off_bound) if row.measured_by else None, row.measured_by, row.aligned_by,
        row.format_a, row.format_b, _given(row), row.why,
    )  # fmt: skip


def _difference(row: RunRow) -> float | None:
    return number(row.difference) if row.measured_by else None


def _given(row: RunRow) -> str:
    return "; ".join(f"{name} {a} / {b}" for name, a, b in row.given)


def _mark(run_rows: Iterable[RunRow], rows: Iterable[PairRow], sides: tuple[SideGraph, SideGraph]) -> None:
    for row, pair in zip(run_rows, rows, strict=True):
        if row.verdict == DIFFERS:
            text = f"{row.why}: it differs by {number_text(row.difference)}, round-off bound "
            for numbers, side in ((pair.a, sides[0]), (pair.b, sides[1])):
                for n in numbers:
                    side.graph.nodes[n].finding = text + number_text(row.round_off_bound)


def _mark_alone(unaligned: Iterable[Unaligned], sides: tuple[SideGraph, SideGraph]) -> None:
    """Mark calls without a partner that make a difference."""
    for one in unaligned:
        side = sides["ab".index(one.run)]
        text = f"only this run makes it: its effect differs by {number_text(one.apart)} apart"
        for n in side.numbers([one.id]) if one.apart else ():
            side.graph.nodes[n].finding = text


def _facts(result: RunDifferences) -> list[tuple[str, str]]:
    facts = [("a", result.a), ("b", result.b)]
    differ = result.environment
    facts += [(name, f"{_short(a)} / {_short(b)}") for name, a, b in differ[:ENVIRONMENT]]
    if len(differ) > ENVIRONMENT:
        facts.append(("environment", f"{len(differ) - ENVIRONMENT} differences more, in the tables"))
    return facts if differ else [*facts, ("environment", "the same")]


def _short(text: str) -> str:
    """Return a digest by its first digits; the table has all of them."""
    return text[:8] if re.fullmatch("[0-9a-f]{16,}", text) else text


def _figures(result: RunDifferences) -> list[Figure]:
    producers = len(result.producers) + len(result.alone)
    alone = [sum(one.run == run for one in result.unaligned) for run in "ab"]
    figures = [
        Figure("pairs of calls", len(result.rows), f"{result.compared} compared"),
        Figure("make a difference", producers, _passed_on(result), "bad" if producers else "good"),
        Figure("in other formats", len(result.formats), "pairs"),
        Figure("without a partner", sum(alone), f"{alone[0]} of a, {alone[1]} of b"),
    ]
    if any(row.measured_by for row in result.rows):
        detail = "relative, of a call's result; propagated ones left out"
        figures.append(Figure("largest difference", result.largest, detail, unit="relative"))
    if result.gradients:
        far = [g for g in result.gradients if g.is_beyond or number(g.difference) is None]
        worst = max(result.gradients, key=lambda row: or_infinity(row.difference))
        largest = f"{' + '.join(worst.a)}, {number_text(worst.difference)}"
        largest += f" (bound {number_text(worst.round_off_bound)})" if worst.round_off_bound else ""
        detail = f"{len(far)} beyond round-off; largest difference: {largest}"
        figures.append(Figure("gradients", len(result.gradients), detail, "bad" if far else "good"))
    tokens = result.tokens
    if tokens and tokens.count:
        detail = f"rms, in nats, of {counted(tokens.count, 'token')}; p99 {number_text(tokens.p99)}, largest "
        detail += f"{number_text(tokens.largest)} at {tokens.at}, mean {tokens.mean:+.1e}"
        detail += f"; they differ from token {tokens.first_other} on" if tokens.first_other >= 0 else ""
        figures.append(Figure("log-probabilities", tokens.rms, detail, unit="relative"))
    elif tokens:
        figures.append(Figure("log-probabilities", "not compared", "no token is the same"))
    return figures


def _bars(result: RunDifferences) -> list[Bar]:
    """Return calls by format in either run, then what changed from one to the other, and its effect."""
    formats = ((run, Counter(_formats(result, run)).most_common()) for run in "ab")
    bars = [Bar(f"Calls by format, {run}", "calls", tuple(counts)) for run, counts in formats]
    changes = Counter(f"{row.format_a} → {row.format_b}" for row in result.formats)
    verdicts = Counter(row.verdict for row in result.rows)
    bars.append(Bar("What changed: pairs in other formats, a → b", "pairs", tuple(changes.most_common())))
    ordered = sorted(verdicts.items(), key=lambda part: VERDICTS.index(part[0]))
    bars.append(Bar("Pairs by verdict", "pairs", tuple(ordered)))
    return [bar for bar in bars if bar.parts]


def _formats(result: RunDifferences, run: str) -> Iterable[str]:
    for row in result.rows:
        calls, format = (row.a, row.format_a) if run == "a" else (row.b, row.format_b)
        yield from [format or NO_FLOATS] * len(calls)
    yield from (one.format or NO_FLOATS for one in result.unaligned if one.run == run)


def _todos(result: RunDifferences) -> list[Todo]:
    """Return advice on where to look, and what to change: at calls of one run alone, at the first call in another
    value, and at the first in another format; else at what is left that differs.
    """
    value, format, todos, untrained = result.first_value, result.first_format, list[Todo](), _untrained(result)
    is_first = value is not None and {one.id for one in result.front}.issuperset((*value.a, *value.b))
    is_known = value is not None and bool(value.given or is_first)
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
        at = _names(value.a)
        what = f"Give both runs the same {value.given[0][0]} in {at}" if value.given else f"Inspect both lines of {at}"
        why = f"the first that makes a difference: {value.why}"
        why = f"{why}; {_given(value)}" if value.given else why
        why = f"{why} ({_both_places(value)}{_beside(value)})"
        todos.append(Todo(what, why, path=value.a[0].module_path))
        calls = [(one.run, one.id) for one in result.front] or [(one.run, one.id) for one in result.alone]
        begins = dict(reversed(calls)).values()  # the first of either run
        is_backward = all(one.direction == BACKWARD for one in begins) and value.a[0].direction != BACKWARD
        if is_backward or is_first:
            todos.reverse()  # the forward comes first, and what is known exactly
    todos = [*untrained, *_other_step(result), *_kept_gradients(result), *todos]
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
    if result.weights_apart and not (result.alone or untrained):
        largest = max((row.difference for row in result.gradients if math.isfinite(row.difference)), default=0.0)
        agree = (
            "gradients agree" if largest < _AGREE else f"gradients, up to {number_text(largest)} apart, may be rounded"
        )
        why = f"after them weights are apart by {number_text(result.weights_apart)} of the distance they moved, though "
        why += f"{agree}: look at the learning rate, weight decay, moments, and what is done to gradients"
        todos.append(Todo("Inspect the steps of the optimizer", why))
    if format is not None:
        reason = f"it computes in {format.format_a} in a, in {format.format_b} in b"
        what = f"If the formats are not intended, name {_names(format.a)} in a rule, or pin its module"
        todos.append(Todo(what, reason, path=format.a[0].module_path))
    has_modules = any(one.id.module_path for one in result.unaligned)
    is_open = result.verdict not in (ALIKE, ROUND_OFF)
    if not todos and is_open and len(result.unaligned) > len(result.rows) and has_modules:
        todos.append(Todo("Pair their modules by hand, --mapping FILE", "most calls have no partner"))
    return todos


def _other_step(result: RunDifferences) -> list[Todo]:
    """Return advice about a step of an optimizer that is set otherwise."""
    step = result.other_step
    if step is None:
        return []
    of = "; ".join(f"{one.name} {one.a} in a, {one.b} in b" for one in step.settings)
    names = " and ".join(one.name for one in step.settings)
    where = _both_lines(step.place_a, step.place_b)
    return [Todo(f"Give both runs the same {names} in {step.optimizer}", f"from step {step.number} on: {of} ({where})")]


def _kept_gradients(result: RunDifferences) -> list[Todo]:
    """Return advice about gradients that one run alone adds to, before anything else is new."""
    first = {one.run: one for one in reversed(result.front)}
    adding = [one for one in first.values() if one.id.adds_to_gradient]
    if len(adding) != 1:
        return []
    one, other = adding[0], "ba"["ab".index(adding[0].run)]
    why = f"its backward adds to those that are there already ({Path(one.place).name}), as that of {other} does not"
    return [Todo(f"Clear gradients in {one.run}, if these are of an earlier step", why)]


def _untrained(result: RunDifferences) -> list[Todo]:
    """Return advice about parameters that one run alone trains."""
    todos = []
    for run, trainer in ("ab", "ba"):
        left = [one for one in result.untrained if one.run == run]
        if left:
            first, more = left[0], and_more(len(left) - 1, "parameter")
            of = f"{first.of} of {trainer}"
            name = of if first.name in ("", first.of) else f"{first.name} ({of})"
            why = f"{trainer} moves what {run} leaves as it is: frozen, detached, or in no optimizer"
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
    return Todo(f"Inspect both lines of {_names(unknown.a)}", why, path=unknown.a[0].module_path)


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
    return [f"first read by {_names(first.a)} ({_both_places(first)}{_beside(first)})"] if first else []


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


def _names(calls: Iterable[CallId]) -> str:
    return " + ".join(map(str, calls))


def _tables(result: RunDifferences) -> list[Table]:
    columns = "call of a:call, call of b:call_b, in a:format, in b:format, verdict, difference:error, "
    columns += "round-off bound:error, inputs differ by:error, measured by, paired by, given, why, "
    columns += "line of a:line, line of b:line"

    def cells(row: RunRow) -> list[Any]:
        band = number(row.round_off_bound) if row.measured_by else None
        return [
            _names(row.a), _names(row.b), row.format_a, row.format_b, row.verdict, _difference(row), band,
            number(row.inputs), row.measured_by, row.aligned_by, _given(row), row.why, row.place_a, row.place_b,
        ]  # fmt: skip

    marked = (row for row in result.rows if row.verdict == DIFFERS or row.differs_in_format)
    return [
        *table("differences", "Pairs that make a difference, or compute in other formats", columns, map(cells, marked)),
        *table("pairs", "Every pair of calls, in the order of a", columns, map(cells, result.rows)),
        *_alone(result, "a", "call"),
        *_alone(result, "b", "call_b"),
        *table("environment", "What differs between the environments", "name, in a, in b", result.environment),
        *table("gradients", "Gradients of parameters", "parameter of a, parameter of b, difference:error, "
               "round-off bound:error, measured by",
               [[" + ".join(g.a), " + ".join(g.b), number(g.difference), number(g.round_off_bound), g.measured_by]
                for g in result.gradients]),
    ]  # fmt: skip


def _alone(result: RunDifferences, run: str, kind: str) -> list[Table]:
    rows = [
        [str(one.id), one.after, one.why, number(one.apart or None), one.place]
        for one in result.unaligned
        if one.run == run
    ]
    columns = f"call:{kind}, after:{kind}, why, effect:error, line:line"
    if not any(row[3] for row in rows):
        columns = columns.replace(", effect:error", "")
        rows = [[*row[:3], row[4]] for row in rows]
    return table(f"only in {run}", f"Calls of {run} without a partner", columns, rows)


def _series(rows: list[PairRow]) -> list[Series]:
    forward = [row for row in rows if row.difference is not None and row.a]
    if len(forward) < 2:
        return []
    differences, bands = ([getattr(row, name) or None for row in forward] for name in ("difference", "round_off_bound"))
    lines = [("difference", differences), ("round-off", bands)]
    xs = [float(n) for n in range(1, len(forward) + 1)]
    return [Series("Difference by depth", "pair, in order of a", "relative difference", xs, lines, "whole", "relative",
                   log=True, nodes=[row.a[0] for row in forward])]  # fmt: skip


def _passed_on(result: RunDifferences) -> str:
    """Return how many pairs only pass a difference on, in words."""
    return f"{counted(sum(row.verdict == INHERITED for row in result.rows), 'pair', 'propagate')} one"


def run_differences_verdict(result: RunDifferences) -> str:
    """Return the verdict in a sentence."""
    all_of = "all pairs" if result.unaligned else "all"  # of others nobody knows what they would compute in
    formats = counted(len(result.formats), "pair") if result.formats else ""
    texts = [f"{formats} in other formats" if formats else f"{all_of} in the same formats"]
    producers = len(result.producers) + len(result.alone)
    if producers:
        texts.append(f"{counted(producers, 'call', 'make')} a difference, {_passed_on(result)}")
    elif result.outputs_apart:
        texts.append(f"outputs are {number_text(result.outputs_apart)} apart")
    elif result.untrained:
        texts.append(f"one run alone trains {counted(len(result.untrained), 'parameter')}")
    elif result.weights_apart:
        texts.append(f"weights are {number_text(result.weights_apart)} of their way apart after the steps")
    elif result.outputs_unexplained:
        texts.append(f"outputs are {number_text(result.outputs_unexplained)} apart, and no call shows why")
    else:
        texts.append(f"no call beyond round-off, largest {number_text(result.largest)}")
    return f"{result.verdict.capitalize()}: {'; '.join(texts)}"
