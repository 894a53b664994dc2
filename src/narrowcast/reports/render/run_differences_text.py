"""What `nc.compare_runs` found, as text."""

from __future__ import annotations

import math

from narrowcast.output.screen import COLUMNS, LINES, Part, first_screen, wrapped
from narrowcast.reports.documents.run_differences import advice, run_differences_verdict
from narrowcast.reports.results.lines import cut, cut_end, number_text
from narrowcast.reports.results.run_differences import (
    GradientRow,
    RunDifferences,
    RunRow,
    TokenDifference,
    Unaligned,
)

LISTED, ALONE = 2, 5


def run_differences_text(
    found: RunDifferences, every_row: bool = False, width: int = COLUMNS, room: int = LINES
) -> str:
    """The first screen, at most `room` lines; or every row."""
    head = [cut_end(f"{found.a} against {found.b}: {_pairs(found)}", COLUMNS), run_differences_verdict(found)]
    head += _environment(found, every_row)
    todo = ["", *lines] if (lines := wrapped(advice(found))) else []
    tokens = _tokens(found.tokens) if found.tokens is not None else []
    notes = [f"note: {note}" for note in found.notes]
    if every_row:
        rows = [line for row in found.rows for line in _row(row, 1000)]
        others = [*map(_unaligned, found.unaligned), *map(_gradient, found.gradients)]
        return "\n".join([*head, *rows, *others, *tokens, *notes, *todo])
    parts = [Part(head)]
    if found.first_format is not None:
        said = ["", f"first in format ({len(found.formats)} in all)", *_row(found.first_format)[:3]]
        parts.append(Part(said, 2, 2, least=4))
    if found.alone:
        said = ["", f"without a partner, and they make a difference ({len(found.alone)} in all)"]
        parts.append(Part([*said, *map(_alone, found.alone[:ALONE])], 2, 2, least=3))
    if found.first_value is not None:
        said = ["", f"first in value ({len(found.producers)} in all)", *_row(found.first_value)[:5]]
        parts.append(Part(said, 2, 2, least=4))
    more = f" (and {len(notes) - 1} more: --all)" if len(notes) > 1 else ""
    parts += [Part([*tokens, *_left(found)], 1), Part([cut_end(n, COLUMNS - len(more)) + more for n in notes[:1]], 3)]
    return first_screen([*parts, Part(todo)], lambda: run_differences_text(found, True), width, room)


def _pairs(found: RunDifferences) -> str:
    lacks = f", {found.compared} compared" if found.compared < len(found.rows) else ""
    return f"{len(found.rows)} pairs of calls{lacks}"


def _environment(found: RunDifferences, every: bool) -> list[str]:
    shown = found.environment if every else found.environment[:LISTED]
    more = len(found.environment) - len(shown)
    if not shown:
        return ["environments: the same"]
    lines = [cut_end(f"{'environments: ' if not n else '  '}{name} {a} / {b}", COLUMNS)
             for n, (name, a, b) in enumerate(shown)]  # fmt: skip
    return [*lines, *([f"  and {more} more: --all"] if more else [])]


def _row(row: RunRow, width: int = COLUMNS) -> list[str]:
    figures = "not compared" if not row.measured_by else (
        f"{number_text(row.difference)} where round-off may make {number_text(row.band)}, by {row.measured_by}"
    )  # fmt: skip
    formats = f"{row.format_a or '-'} / {row.format_b or '-'}" if row.differs_in_format else row.format_a or "-"
    lines = [cut_end(f"  {row.verdict}, {formats}: {figures}{', of a part' if row.is_part else ''}", width)]
    for name, calls, place in (("a", row.a, row.place_a), ("b", row.b, row.place_b)):
        at = f"  {place.rpartition('/')[2]}"
        lines.append(f"    {name}: {cut(' + '.join(map(str, calls)), width - 7 - len(at))}{at}")
    said = "; ".join(f"{name} {a} / {b}" for name, a, b in row.given)
    return lines + [cut_end(f"    {text}", width) for text in (row.why, said) if text]


def _alone(one: Unaligned) -> str:
    at = f"  {one.place.rpartition('/')[2]}: {number_text(one.apart)}"
    return f"  only in {one.run}: {cut(str(one.id), COLUMNS - 13 - len(at))}{at}"


def _unaligned(one: Unaligned) -> str:
    why = f": {one.why}" if one.why else f", after {one.after}" if one.after else ""
    return f"  only in {one.run}: {one.id}{why}  {one.place}"


def _gradient(row: GradientRow) -> str:
    return f"  gradient {' + '.join(row.a)} / {' + '.join(row.b)}: {number_text(row.difference)}, by {row.measured_by}"


def _tokens(found: TokenDifference) -> list[str]:
    other = f"; from token {found.first_other} on they are others" if found.first_other >= 0 else ""
    if not found.count:
        return [f"log-probabilities: no token is the same{other}"]
    figures = f"rms {number_text(found.rms)}, p99 {number_text(found.p99)}, largest {number_text(found.largest)}"
    mean = f"mean {found.mean:+.1e}"
    return [*wrapped(f"log-probabilities of {found.count} tokens: {figures} at {found.at}, {mean}{other}")][:3]


def _left(found: RunDifferences) -> list[str]:
    lines = []
    if found.gradients:
        worst = max(found.gradients, key=lambda row: -1.0 if math.isnan(row.difference) else row.difference)
        beyond = sum(row.is_beyond for row in found.gradients)
        said = f"{len(found.gradients)} gradients, {beyond} beyond round-off, furthest apart:{_gradient(worst)[1:]}"
        lines.append(cut_end(said, COLUMNS))
    counts = [f"{sum(one.run == run for one in found.unaligned)} calls of {run}" for run in "ab"]
    return [*lines, f"without a partner: {' and '.join(counts)}"] if found.unaligned else lines
