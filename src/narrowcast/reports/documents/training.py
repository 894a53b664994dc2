"""The page of a checked training loop: what is wrong, where, and what to write instead."""

from __future__ import annotations

from narrowcast.reports.documents.model import Document, Figure, Todo
from narrowcast.reports.documents.tables import advice_table
from narrowcast.reports.documents.words import place
from narrowcast.reports.results.lines import counted
from narrowcast.reports.results.training import COST_TIME, TrainingCheck


def training_document(found: TrainingCheck) -> Document:
    """The page of a check of a training loop; it has no graph."""
    findings, calls = found.findings, found.calls
    number = len(findings)
    page = Document("training-check", "A training loop", training_verdict(found), "good" if found else "bad")
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


def training_verdict(found: TrainingCheck) -> str:
    """In a sentence. What costs time alone is not wrong."""
    slow = sum(finding.kind in COST_TIME for finding in found.findings)
    number = len(found.findings) - slow
    if number:
        return f"{counted(number, 'thing')} wrong with the precision of this loop"
    costs = f", and {counted(slow, 'thing')} {'cost' if slow > 1 else 'costs'} time" if slow else ""
    return f"Nothing is wrong with the precision of this loop{costs}"
