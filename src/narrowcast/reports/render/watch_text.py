"""What `nc.watch` found, as text."""

from __future__ import annotations

from narrowcast.output.screen import COLUMNS, LINES, Part, first_screen, wrapped
from narrowcast.reports.results.findings import TREND, Watching


def watching_text(found: Watching, every: bool = False, width: int = COLUMNS, room: int = LINES) -> str:
    """What was looked at, the verdict, and the findings: the first that is no trend in full."""
    steps = f" in {found.steps} steps" if found.steps else ""
    head = f"{found.calls} calls{steps} were looked at: {_verdict(found)}"
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


def _verdict(watching: Watching) -> str:
    first = watching.first
    if first is None and watching.not_inspected:
        return f"no NaN or infinity was seen, but {watching.not_inspected} times looking failed: see the notes"
    if first is None:
        return "no NaN or infinity was made" + (", but see the trends" if watching.findings else "")
    made = sum(finding.made_by != TREND for finding in watching.findings)
    passed = f"; {watching.spread} later calls passed it on" if watching.spread else ""
    again = f", {watching.repeated} times more" if watching.repeated else ""
    return f"{made} made a NaN or an infinity{again}{passed}"
