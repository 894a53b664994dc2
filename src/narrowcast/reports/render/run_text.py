"""A captured run as text."""

from __future__ import annotations

from narrowcast.output.screen import COLUMNS, LINES, Part, first_screen, wrapped
from narrowcast.reports.documents.runs import run_verdict
from narrowcast.reports.documents.words import lowered, place
from narrowcast.reports.results.run import Run
from narrowcast.reports.results.run_records import CallRecord, short_file, tensor_text

LISTED = 8


def run_text(run: Run, every_call: bool = False, width: int = COLUMNS, room: int = LINES) -> str:
    """The run's first screen, at most `room` lines; or all of its calls."""
    formats: dict[str, int] = {}
    for call in run.calls:
        if not call.is_cast:
            formats[call.computes or "-"] = formats.get(call.computes or "-", 0) + 1
    counts = ", ".join(f"{name} {n}" for name, n in sorted(formats.items(), key=lambda p: -p[1]))
    head = [_head(run), lowered(run_verdict(run)[0]), f"computed in: {counts}"]
    notes = [f"note: {note}" for note in run.notes]
    if every_call:
        calls = ["", "call", *(call_line(run, call) for call in run.calls)] if run.calls else []
        return "\n".join([*head, *notes, *calls])
    rows = [line for call in _worth_a_look(run) for line in _call_lines(run, call)]
    parts = [
        Part([line for said in head for line in wrapped(said, width=width)]),
        Part([line for note in notes for line in wrapped(note, width=width)], rank=1, least=2),
        Part(["", "call, largest values first", *rows] if rows else [], 2, heading=2, step=2, least=4),
    ]
    return first_screen(parts, lambda: run_text(run, True), width, room)


def _head(run: Run) -> str:
    facts = run.environment
    policy = facts.get("policy") or {}
    under = f", policy {policy['name']} in {policy['low']}" if policy else ""
    backward = sum(call.id.direction == "backward" for call in run.calls)
    return f"{len(run.calls)} calls ({backward} backward) on {facts.get('device', '?')}{under}"


def _worth_a_look(run: Run) -> list[CallRecord]:
    def largest(call: CallRecord) -> float:
        return max((run.tensors[n].largest for _, n in call.outputs), default=0.0)

    return sorted(run.calls, key=largest, reverse=True)[:LISTED]


def call_line(run: Run, call: CallRecord) -> str:
    """One call: identity, formats, the ranges of what it gave, its place."""
    results = [run.tensors[n] for _, n in call.outputs]
    gave = ", ".join(tensor_text(t) for t in results if t.fits() and t.elements)
    formats = call.computes or call.came or "-"
    return f"  {call.id}  {formats}  {gave}  {place(short_file(call.file), call.line)}"


def _call_lines(run: Run, call: CallRecord) -> list[str]:
    """The same on two lines, of its first result alone."""
    gave = next((tensor_text(run.tensors[n]) for _, n in call.outputs if run.tensors[n].elements), "")
    file = short_file(call.file).rpartition("/")[2]
    return [f"  {call.id}", f"    {call.computes or call.came or '-'}  {gave}  {place(file, call.line)}"]
