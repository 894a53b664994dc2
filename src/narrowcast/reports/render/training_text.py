"""What `nc.check_training` found, as text."""

from __future__ import annotations

from narrowcast.core.ledger import Advice
from narrowcast.output.screen import COLUMNS, LINES, Part, first_screen, shortened, wrapped
from narrowcast.reports.documents.training import training_verdict
from narrowcast.reports.results.training import TrainingCheck


def training_text(found: TrainingCheck, every: bool = False, width: int = COLUMNS, room: int = LINES) -> str:
    """The first screen, at most so many lines and columns; or, with every, each finding."""
    parts = [Part(wrapped(f"{training_verdict(found)}. {_ran(found)}.", width=width))]
    parts += [Part(_lines_of(finding, found.times.get(finding, 1), width), rank=1) for finding in found.findings]
    parts += [Part(wrapped(f"note: {note}", width=width)) for note in found.notes]
    if every:
        return "\n".join(line for part in parts for line in part.lines)
    return first_screen(parts, lambda: training_text(found, True, width), width, room)


def _ran(found: TrainingCheck) -> str:
    inside, outside = found.calls.get("inside", 0), found.calls.get("outside", 0)
    return f"{found.steps} steps: {inside} calls in a region, {outside} outside that one would lower"


def _lines_of(finding: Advice, times: int, width: int) -> list[str]:
    where = f"{finding.file}:{finding.line}" if finding.file else "(no line)"
    often = f", {times} times" if times > 1 else ""
    room = max(width, COLUMNS) - len(finding.kind) - len(often) - 2
    lines = [f"{finding.kind}  {shortened(where, room)}{often}"]
    return lines + [f"  {line}" for text in (finding.what, finding.todo) for line in wrapped(text, "", width - 2)]
