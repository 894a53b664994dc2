"""What `nc.repair` found, as text."""

from __future__ import annotations

import math

from narrowcast.output.screen import COLUMNS, LINES, Part, first_screen, wrapped
from narrowcast.reports.documents.repairs import repair_verdict
from narrowcast.reports.documents.words import shouted
from narrowcast.reports.results.lines import number_text
from narrowcast.reports.results.repair import Repair, RepairRule, RepairStep, counted, share_text
from narrowcast.reports.results.verdicts import BEYOND, CLEAN, OUT_OF_IDEAS

SHOWN, SHOWN_NOTES = 4, 2
INDENT = 9


def repair_text(found: Repair, every_row: bool = False, width: int = COLUMNS, room: int = LINES) -> str:
    """The first screen, at most `room` lines; or every rule, step and note."""
    if every_row:
        return "\n".join(_lines(found, len(found.rules), True))
    texts = (_lines(found, shown, False) for shown in range(SHOWN, 0, -1))
    shown = next((lines for lines in texts if len(lines) < room), _lines(found, 0, False))
    return first_screen([Part(shown)], lambda: repair_text(found, True), width, room)


def _lines(found: Repair, shown: int, whole: bool) -> list[str]:
    head = f"{found.subject}: {found.base} in {found.low} on {found.device_type}, {counted(found.runs, 'run')}"
    lines = [*wrapped(head), *_cut(wrapped(f"asked: {found.asked}"), 2, whole)]
    lines += _cut(wrapped(shouted(repair_verdict(found))), 4, whole)
    if found.rules:
        lines += [*wrapped(_kept_low(found)), "", f"{'share':>6} {'calls':>5} {'time':>8}  rule"]
        lines += [line for rule in found.rules[:shown] for line in _rule(rule, whole)]
        if shown < len(found.rules):
            lines.append(f"{'':{INDENT}}... {len(found.rules) - shown} more: result.rules, --all")
        lines.append("")
    if whole:
        lines += [line for n, step in enumerate(found.steps, 1) for line in wrapped(f"{n}. {_step_text(step)}")]
    if found.dropped:
        lines.append(_count(found.dropped, "was tried, and is not needed"))
    if found.untried:
        lines.append(_count(found.untried, "may not be needed: the model ran as often as it may"))
    for note in found.notes if whole else found.notes[:SHOWN_NOTES]:
        lines += _cut(wrapped(f"note: {note}"), 2, whole)
    return [*lines, *_advice(found)]


def _cut(lines: list[str], most: int, whole: bool) -> list[str]:
    """So many lines; an ellipsis where there were more."""
    if whole or len(lines) <= most:
        return lines
    return [*lines[: most - 1], f"{lines[most - 1][: COLUMNS - 4]} ..."]


def _kept_low(found: Repair) -> str:
    products, cost = found.products_after, sum(rule.cost_ns for rule in found.rules)
    said = f"{products.low} of {products.all} products still compute in {found.low}"
    went_through = found.products_before.all == products.all
    said += f" (before: {found.products_before.low})" if went_through else ""
    if math.isnan(cost):
        return said
    return f"{said}; by the device's profile the rules {'cost' if cost >= 0 else 'save'} {_time(abs(cost))} a run"


def _rule(found: RepairRule, whole: bool) -> list[str]:
    figures = f"{share_text(found.share):>6} {found.calls or '-':>5} {_signed(found.cost_ns):>8}  "
    lines = wrapped(figures + str(found.rule), " " * INDENT)
    said = [found.rule.reason, f"without it: {found.needed}" if found.needed and whole else ""]
    for each in filter(None, said):
        lines += _cut(wrapped(" " * INDENT + each, " " * INDENT), 2, whole)
    return lines


def _step_text(step: RepairStep) -> str:
    error = "" if math.isnan(step.error) else f", output error {number_text(step.error)}"
    metric = "".join(f", {name} {value:.6g}" for name, value in step.metric.items())
    changes = [f"adds {rule}" for rule in step.added] + [f"without {rule}" for rule in step.left_out]
    return f"{step.what}: {step.found}{error}{metric}" + "".join(f"; {change}" for change in changes)


def _count(rules: list[str], said: str) -> str:
    if len(rules) == 1:
        return f"1 rule more {said}"
    return f"{len(rules)} rules more {said.replace('was tried, and is', 'were tried, and are')}"


def _advice(found: Repair) -> list[str]:
    if found.verdict == CLEAN:
        return ["Nothing to do."]
    if found.verdict == BEYOND:
        return wrapped("No rule mends that. nc.watch() around the run in fp32 shows the calls.")
    rules = 'nc.autocast(..., policy=result.policy); result.policy.save("fixed.toml") keeps it.'
    if found.verdict == OUT_OF_IDEAS:
        return wrapped("What is left no rule of an op or a module mends: see the notes and `result.steps`.")
    return wrapped(f"To use it: {rules}")


def _time(ns: float) -> str:
    size, unit = (ns / 1e6, "ms") if ns >= 1e6 else (ns / 1e3, "us")
    return f"{size:.0f} {unit}" if size >= 10 else f"{size:.1f} {unit}"


def _signed(ns: float) -> str:
    return "-" if math.isnan(ns) else f"{'-' if ns < 0 else '+'}{_time(abs(ns))}"
