"""The page of a scaler's history: its scale over the steps, and which of them were skipped, and why."""

from __future__ import annotations

from dataclasses import replace

from narrowcast.reports.documents.model import Document, Figure, Series
from narrowcast.reports.documents.tables import table
from narrowcast.reports.results.scaler_history import History

LATEST = 5


def scaler_document(found: History) -> Document:
    """The page of `scaler.history`; it has no graph."""
    rows, skipped = found.rows, found.skipped
    verdict = f"{skipped} of {found.steps} steps were skipped" if skipped else f"None of {found.steps} steps skipped"
    page = Document("scaler", "A loss scale", verdict, "" if skipped else "good")
    page.facts = [("steps", str(found.steps))]
    last = rows[-1].scale if rows else 0.0
    page.figures = [Figure("skipped", skipped, "steps"), Figure("scale", last, "of the last step")]
    for loss in dict.fromkeys(row.loss for row in rows):
        own = [row for row in rows if row.loss == loss]
        title = f"Scale by step: {loss}" if loss else "Scale by step"
        lines: list[tuple[str, list[float | None]]] = [("scale", [row.scale for row in own])]
        page.series.append(Series(title, "step", "scale", [row.step for row in own], lines, "whole", log=True))
    lost = [[row.step, row.loss, row.scale, ", ".join(row.parameters), row.why] for row in rows if row.skipped]
    made = table("skipped", "Skipped steps", "step:number, loss, scale:number, parameters, why", lost)
    page.tables = [replace(one, first=list(range(len(lost)))[-LATEST:]) for one in made]
    return page
