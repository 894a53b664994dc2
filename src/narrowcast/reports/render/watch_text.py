"""What `nc.watch` found, as text."""

from __future__ import annotations

from narrowcast.output.screen import COLUMNS, LINES, Part, first_screen, wrapped
from narrowcast.reports.documents.watches import watch_verdict
from narrowcast.reports.documents.words import lowered
from narrowcast.reports.results.findings import Watching
from narrowcast.reports.results.verdicts import TREND


def watching_text(found: Watching, every: bool = False, width: int = COLUMNS, room: int = LINES) -> str:
    """What was looked at, the verdict, and the findings: the first that is no trend in full."""
    steps = f" in {found.steps} steps" if found.steps else ""
    head = f"{found.calls} calls{steps} were looked at: {lowered(watch_verdict(found)[0])}"
    ordered = sorted(found.findings, key=lambda finding: finding.made_by == TREND)
    meant = [f"meant: {times} infinities, {why}" for why, times in found.meant.items()]
    notes = [*meant, *(f"note: {note}" for note in found.notes)]
    if every:
        return "\n".join([head, *(f"\n{finding}" for finding in ordered), *notes])
    parts = [Part(wrapped(head, width=width))]
    for number, finding in enumerate(ordered[: LINES // 3]):
        said = str(finding) if not number else finding.in_short()
        lines = ["", *(line for one in said.split("\n") for line in _wrapped_finding(one, width))]
        parts.append(Part(lines, 3, step=len(lines)) if number else Part(lines, 1, least=len(lines)))
    parts.append(Part([line for note in notes for line in wrapped(note, width=width)], 2, least=2))
    return first_screen(parts, lambda: watching_text(found, True), width, room)


def _wrapped_finding(line: str, width: int) -> list[str]:
    """A line of a finding; one without spaces to break at, a place, is left to be shortened."""
    indent = " " * (len(line) - len(line.lstrip()))
    return wrapped(line, indent + "  ", width) if " " in line.strip() else [line]
