"""What became of the steps under a scale, as text."""

from __future__ import annotations

from narrowcast.output.screen import COLUMNS, LINES
from narrowcast.reports.results.scaler_history import History

SHOWN = 5


def history_text(found: History, every: bool = False, width: int = COLUMNS, room: int = LINES) -> str:
    """How many steps there were, and the latest that were skipped; or, with every, all of these."""
    lines = [f"{found.steps} steps, {found.skipped} skipped"]
    lost = [row for row in found.rows if row.skipped][0 if every else -SHOWN :]
    lines += [f"  step {r.step}{f' {r.loss}' if r.loss else ''}, scale {r.scale:g}: {r.why}" for r in lost]
    return "\n".join(lines)
