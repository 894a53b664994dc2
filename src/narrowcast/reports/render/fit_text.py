"""What `nc.fit` found, as text."""

from __future__ import annotations

import math

from narrowcast.core.ledger.identity import CallId
from narrowcast.formats import bf16, fp16
from narrowcast.output.screen import COLUMNS, LINES, Part, first_screen, wrapped
from narrowcast.reports.results.fit import FORMATS, SCALES, UNSCALED, Fit, TensorFit, evidence
from narrowcast.reports.results.run_records import short_file


def fit_text(found: Fit, every: bool = False, width: int = COLUMNS, room: int = LINES) -> str:
    """How many calls would lose something by format and scale, and those that must stay in fp32, worst first."""
    head = [f"{len(found.places)} calls; how many would lose something, by format and scale:"]
    head.append(f"  {'format':8}" + "".join(f"{scale:>12}" for scale in SCALES) + f"{'least headroom':>18}")
    for format in FORMATS:
        counts = "".join(f"{len(found.calls(format, scale)):12}" for scale in SCALES)
        rooms = [r.headroom_bits for r in found.rows if r.format == format.name and r.scale == UNSCALED]
        head.append(f"  {format.name:8}{counts}{f'{min(rooms, default=math.inf):+.1f} bits':>18}")
    parts = [Part(head)]
    for format in (fp16, bf16):
        worst: dict[CallId, TensorFit] = {}
        for row in found.unfit(format):
            worst.setdefault(row.id, row)
        lines = ["", f"must stay in fp32 beside {format.name}, {len(worst)} calls, those that lose most first:"]
        for row in worst.values():
            place = found.places[row.id]
            place = short_file(place) if every else place.rpartition("/")[2]
            lines += [f"  {row.id}", f"    {evidence(row)}  {place}"]
        parts.append(Part(lines if worst else [], 2 if format is fp16 else 3, heading=2, step=2, least=4))
    if found.unfit(fp16) or found.unfit(bf16):
        parts.append(Part(["", "fit.policy('fp16'), or narrowcast fit TARGET -o FILE.toml, keeps them there."]))
    notes = [f"note: {note}" for note in found.notes]
    if every:
        return "\n".join([line for part in parts for line in part.lines] + notes)
    parts.append(Part([line for note in notes for line in wrapped(note, width=width)], 1))
    return first_screen(parts, lambda: fit_text(found, True), width, room)
