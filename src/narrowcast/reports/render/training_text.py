"""What `nc.check_training` found, as text."""

from __future__ import annotations

from narrowcast.core.ledger import Advice
from narrowcast.output.screen import COLUMNS, LINES, Part, first_screen, shortened, wrapped
from narrowcast.reports.results.training import COST_TIME, TrainingCheck


def training_text(found: TrainingCheck, every: bool = False, width: int = COLUMNS, room: int = LINES) -> str:
    """The first screen, at most so many lines and columns; or, with every, each finding."""
    parts = [Part(wrapped(_verdict(found), width=width))]
    parts += [Part(_lines_of(finding, found.times.get(finding, 1), width), rank=1) for finding in found.findings]
    parts += [Part(wrapped(f"note: {note}", width=width)) for note in found.notes]
    if every:
        return "\n".join(line for part in parts for line in part.lines)
    return first_screen(parts, lambda: training_text(found, True, width), width, room)


def _verdict(found: TrainingCheck) -> str:
    inside, outside = found.calls.get("inside", 0), found.calls.get("outside", 0)
    ran = f"{found.steps} steps: {inside} calls in a region, {outside} outside that one would lower"
    slow = sum(finding.kind in COST_TIME for finding in found.findings)
    number = len(found.findings) - slow
    if not number:
        costs = f", and {slow} thing{'s cost' if slow > 1 else ' costs'} time" if slow else ""
        return f"Nothing is wrong with the precision of this loop{costs}. {ran}."
    return f"{number} thing{'s' if number > 1 else ''} wrong with the precision of this loop. {ran}."


def _lines_of(finding: Advice, times: int, width: int) -> list[str]:
    where = f"{finding.file}:{finding.line}" if finding.file else "(no line)"
    often = f", {times} times" if times > 1 else ""
    room = max(width, COLUMNS) - len(finding.kind) - len(often) - 2
    lines = [f"{finding.kind}  {shortened(where, room)}{often}"]
    return lines + [f"  {line}" for text in (finding.what, finding.todo) for line in wrapped(text, "", width - 2)]
