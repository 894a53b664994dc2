"""What `nc.compare` found, as text."""

from __future__ import annotations

import math

from narrowcast.output.screen import COLUMNS, LINES, Part, first_screen, shortened, wrapped
from narrowcast.reports.documents.comparisons import comparison_verdict
from narrowcast.reports.documents.rules import rule_of_call, rule_text
from narrowcast.reports.documents.words import shouted
from narrowcast.reports.results.differences import SHOWN, CallError, Differences, GradientError, ModuleError
from narrowcast.reports.results.lines import cut, number_text, or_infinity
from narrowcast.reports.results.verdicts import AT_FAULT, NOT_FINITE

SHOWN_WITH_GRADIENTS = 3
HALF_OF_ITS_SQUARE = math.sqrt(0.5)
"""Errors that have nothing to do with each other add up as squares do."""


def differences_text(found: Differences, every_row: bool = False, width: int = COLUMNS, room: int = LINES) -> str:
    """The first screen, at most `room` lines; or every row."""
    shown = found.rows if every_row else found.worst[: SHOWN_WITH_GRADIENTS if found.gradients else SHOWN]
    head = [
        *wrapped(
            f"{found.subject}: {_under(found)} against {found.reference} on {found.device_type}, {found.runs} runs"
        ),
        *(line for said in _verdict(found) for line in wrapped(said)),
    ]
    table: list[list[str]] = []
    if found.by == "module":
        table = [["", f"{'module':40} {'calls':>5} {'own':>8} {'total':>8}"], *map(_module_row, found.modules())]
    elif shown:
        table = [["", _COLUMNS], *map(_row, shown)]
    notes = [wrapped(f"note: {note}") for note in found.notes]
    advice, rule = _advice(found)
    if every_row:
        table += [["", _COLUMNS], *map(_row, shown)] if found.by == "module" else []
        table += [[f"only on one side: {call}"] for call in found.unmatched]
        gradients = ["", "gradients", *map(_gradient, found.gradients)] if found.gradients else []
        return "\n".join(line for part in (head, *table, gradients, *notes, advice, rule) for line in part)
    first = [line for row in table[:2] for line in row]
    parts = [Part(head), Part(first), *(Part(row, 3, step=len(row)) for row in table[2:])]
    parts += [Part(_gradients(found.gradients) if found.gradients else [], 1)]
    parts += [Part(note, min(number, 1) * 2, step=len(note)) for number, note in enumerate(notes)]
    parts += [Part(advice), Part(rule, is_copied=True)]
    return first_screen(parts, lambda: differences_text(found, True), width, room)


_COLUMNS = f"{'own':>8} {'inherited':>9} {'total':>8} {'band':>8} {'alone':>8}  of the call below"


def _module_row(m: ModuleError) -> list[str]:
    return [f"{cut(m.module_path or '(root)', 40):40} {m.calls:5} {number_text(m.own):>8} {number_text(m.total):>8}"]


def _under(found: Differences) -> str:
    return f"{found.policy} in {found.low}" if found.policy else "with its own casts"


def _verdict(found: Differences) -> list[str]:
    faults, differing = len(found.faults), len(found.differing)
    said = {0: "no fault", 1: "1 fault"}.get(faults, f"{faults} faults")
    lines = [
        shouted(comparison_verdict(found)),
        f"{len(found.rows)} calls, {differing} differ, {said}"
        + (f", {len(found.unmatched)} without a partner" if found.unmatched else ""),
    ]
    if found.reference_not_finite:
        lines.append(f"{found.reference} itself: {found.reference_not_finite}")
    by = f"the compiler: its code is {number_text(found.compiled)} from what these calls give one by one"
    return [*lines, by] if found.compiled else lines


def _row(row: CallError) -> list[str]:
    alone = "" if math.isnan(row.alone) else number_text(row.alone)
    figures = [number_text(figure) for figure in (row.own, row.inherited, row.total, row.band)]
    numbers = f"{figures[0]:>8} {figures[1]:>9} {figures[2]:>8} {figures[3]:>8}"
    why = f"    {row.verdict.upper()}: {row.why}" if row.verdict in AT_FAULT else ""
    file = "/".join(row.file.split("/")[-2:])
    figures_first = f"{numbers} {alone:>8}  {row.computes or '-'}  "
    place = cut(f"{file}:{row.line}" if file else "", COLUMNS - len(figures_first))
    lines = [figures_first + place, *wrapped(f"    {row.id}", f"{'':6}")]
    return [*lines, *wrapped(why, "    ")] if why else lines


def _gradients(rows: list[GradientError]) -> list[str]:
    zero = [row for row in rows if row.is_round_off_alone and row.verdict != NOT_FINITE]
    others = [row for row in rows if row not in zero]
    worst = sorted(others, key=lambda row: -or_infinity(row.relative_error))[:3]
    lines = ["", "gradients furthest off:", *(_gradient(row, COLUMNS) for row in worst)]
    if zero:
        said = f"as good as zero, {len(zero)} more: what they hold is round-off alone ({zero[0].parameter}"
        lines += wrapped(f"{said}{', ...' if len(zero) > 1 else ''})")
    return lines


def _gradient(row: GradientError, width: int = 0) -> str:
    """On one line; the parameter's name is shortened, if there is a width."""
    under = f", {row.underflow:.0%} underflow" if row.underflow >= 0.005 else ""
    said = f" ({row.format}), cosine {row.cosine:.4f}{under}"
    name = shortened(row.parameter, width - len(said) - 10) if width else row.parameter
    return f"{number_text(row.relative_error):>8}  {name}{said}"


def _advice(found: Differences) -> tuple[list[str], list[str]]:
    """The rule that keeps the worst call in fp32, and before it why."""
    if found.compiled:
        compiler = (
            "What to do: compile with backend='aot_eager'. If that is right, the backend's code is not: report it."
        )
        return ["", *wrapped(compiler)], []
    low = [row for row in found.worst if row.is_low]
    if not low:
        return [], []
    row, before = low[0], _before_fault(found)
    row = before or row
    rule = rule_of_call(row.forward or row.id, row.computes)
    if not rule:
        return [], []
    why = "alone it moves the output most" if not math.isnan(row.alone) else "its own error is the largest"
    why = "it is at fault" if row.verdict in AT_FAULT else _spread(found, row) or why
    why = "it rounds what the call at fault reads" if before else why
    said = ["", *wrapped(f"To keep the worst in fp32 ({why}):")]
    return said, rule_text(rule).split("\n")


def _before_fault(found: Differences) -> CallError | None:
    """The last low call before the first one at fault, if that is not low itself: no rule about it helps."""
    first = next((n for n, row in enumerate(found.rows) if row.verdict in AT_FAULT), None)
    if first is None or found.rows[first].is_low:
        return None
    return next((row for row in reversed(found.rows[:first]) if row.is_low), None)


def _spread(found: Differences, worst: CallError) -> str:
    """What little it helps to keep the worst op high, where no single op makes the most of the output's error."""
    total = max((o.relative_error for o in found.outputs), default=0.0)
    if not worst.alone < HALF_OF_ITS_SQUARE * total < math.inf:
        return ""
    low = {(row.id.module_path, row.id.op) for row in found.rows if row.is_low and row.own and not row.forward}
    made = f"alone it makes {number_text(worst.alone)} of {number_text(total)}"
    return f"{made}: the error is spread over {len(low)} ops"
