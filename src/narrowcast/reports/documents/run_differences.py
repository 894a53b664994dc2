"""The page of two runs side by side: what `nc.diff` found."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from narrowcast.output.words import counted, number_text, or_infinity
from narrowcast.reports.documents.model import Bar, Document, Figure, Pair, PairRow, Series, Table
from narrowcast.reports.documents.run_flow import SideGraph
from narrowcast.reports.documents.tables import table
from narrowcast.reports.documents.where_runs_part import given_text, names_text, todos_of
from narrowcast.reports.documents.words import number
from narrowcast.reports.results.run_differences import (
    DIFFERS,
    EQUAL,
    INHERITED,
    RunDifferences,
    RunRow,
    Unaligned,
)
from narrowcast.reports.results.verdicts import NOT_COMPARED, ROUND_OFF, VALUES_DIFFER

ENVIRONMENT = 6
"""How many differences of the environments are on the first screen; the table has all."""
NO_FLOATS = "no floats"
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
    page.todos = todos_of(result)
    page.tables = _tables(result)
    page.series = _series(rows)
    page.notes = list(result.notes)
    return page


def _pair_row(row: RunRow, sides: tuple[SideGraph, SideGraph]) -> PairRow:
    return PairRow(
        sides[0].numbers(row.a), sides[1].numbers(row.b), row.verdict, _difference(row), number(row.inputs),
        number(row.round_off_bound) if row.measured_by else None, row.measured_by, row.aligned_by,
        row.format_a, row.format_b, given_text(row), row.why,
    )  # fmt: skip


def _difference(row: RunRow) -> float | None:
    return number(row.difference) if row.measured_by else None


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


def _tables(result: RunDifferences) -> list[Table]:
    columns = "call of a:call, call of b:call_b, in a:format, in b:format, verdict, difference:error, "
    columns += "round-off bound:error, inputs differ by:error, measured by, paired by, given, why, "
    columns += "line of a:line, line of b:line"

    def cells(row: RunRow) -> list[Any]:
        band = number(row.round_off_bound) if row.measured_by else None
        return [
            names_text(row.a), names_text(row.b), row.format_a, row.format_b, row.verdict, _difference(row), band,
            number(row.inputs), row.measured_by, row.aligned_by, given_text(row), row.why, row.place_a, row.place_b,
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
    same = f"{all_of} in the same formats" if result.compared else "no pair of calls can be compared"
    texts = [f"{formats} in other formats" if formats else same]
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
    elif result.compared:
        texts.append(f"no call beyond round-off, largest {number_text(result.largest)}")
    elif math.isfinite(result.output_difference):
        texts.append(f"outputs are {number_text(result.output_difference)} apart")
    return f"{result.verdict.capitalize()}: {'; '.join(texts)}"
