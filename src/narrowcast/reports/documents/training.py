"""The page of a checked training loop: what is wrong, where, and what to write instead."""

from __future__ import annotations

from narrowcast.reports.documents.model import Document, Figure, Todo
from narrowcast.reports.documents.tables import advice_table
from narrowcast.reports.documents.words import place
from narrowcast.reports.results.training import TrainingCheck


def training_document(found: TrainingCheck) -> Document:
    """The page of a check of a training loop; it has no graph."""
    findings, calls = found.findings, found.calls
    number = len(findings)
    verdict = f"{number} findings: {findings[0].kind}" if number else "Nothing is wrong with this loop's precision"
    page = Document("training-check", "A training loop", verdict, "bad" if number else "good")
    page.facts = [("steps", str(found.steps))]
    page.figures = [
        Figure("findings", number, "", "bad" if number else "good"),
        Figure("calls in a region", calls.get("inside", 0), "of the forward"),
        Figure("calls outside", calls.get("outside", 0), "that a region would lower"),
    ]
    page.todos = [
        Todo(row.todo, f"{row.kind}, {place(row.file, row.line)}: {row.what}", {}, row.module_path)
        for row in findings[:3]
    ]
    page.notes = list(found.notes)
    page.tables = advice_table({row: found.times.get(row, 1) for row in findings})
    return page
