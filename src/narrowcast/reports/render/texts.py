"""Results as text: the first screen, or all that was found. Loaded when a result is printed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from narrowcast.output.screen import COLUMNS, PIPED
from narrowcast.reports.render.comparison_text import differences_text
from narrowcast.reports.render.explain_text import explanation_text
from narrowcast.reports.render.fit_text import fit_text
from narrowcast.reports.render.ledger_text import ledger_screen, ledger_text
from narrowcast.reports.render.repair_text import repair_text
from narrowcast.reports.render.run_differences_text import run_differences_text
from narrowcast.reports.render.run_text import run_text
from narrowcast.reports.render.scaler_text import history_text
from narrowcast.reports.render.training_text import training_text
from narrowcast.reports.render.watch_text import watching_text
from narrowcast.reports.results.differences import Differences
from narrowcast.reports.results.explanation import Explanation
from narrowcast.reports.results.findings import Watching
from narrowcast.reports.results.fit import Fit
from narrowcast.reports.results.ledger import Ledger
from narrowcast.reports.results.repair import Repair
from narrowcast.reports.results.result import Result, by_kind
from narrowcast.reports.results.run import Run
from narrowcast.reports.results.run_differences import RunDifferences
from narrowcast.reports.results.scaler_history import History
from narrowcast.reports.results.training import TrainingCheck


def text_of(found: Result, every: bool, width: int | None, lines: int) -> str:
    """At most so many lines and columns; or, with every, all of it. width: None for 80 columns, of tables 120."""
    if isinstance(found, Explanation):
        return explanation_text(found, every, width, lines)
    if isinstance(found, Ledger):
        return ledger_text(found, width or PIPED) if every else ledger_screen(found, width or COLUMNS, lines)
    render = by_kind(_TEXTS, found)
    if render is None:
        raise TypeError(f"no text is known of a {type(found).__name__}")
    return render(found, every, width or COLUMNS, lines)


_TEXTS: dict[type[Result], Callable[[Any, bool, int, int], str]] = {
    Differences: differences_text, Fit: fit_text, History: history_text, Repair: repair_text, Run: run_text,
    RunDifferences: run_differences_text, TrainingCheck: training_text, Watching: watching_text,
}  # fmt: skip
