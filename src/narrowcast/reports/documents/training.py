"""The page of a checked training loop: what is wrong, where, and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from narrowcast.reports.documents.model import Figure, Page, Todo
from narrowcast.reports.documents.tables import advice_table
from narrowcast.reports.documents.words import place


def training_page(data: Mapping[str, Any]) -> Page:
    """The page of a check of a training loop; it has no graph."""
    findings, calls = data["findings"], data["calls"]
    number = len(findings)
    verdict = f"{number} findings: {findings[0]['kind']}" if number else "Nothing is wrong with this loop's precision"
    page = Page("training-check", "A training loop", verdict, "bad" if number else "good")
    page.facts = [("steps", str(data["steps"]))]
    page.figures = [
        Figure("findings", number, "", "bad" if number else "good"),
        Figure("calls in a region", calls.get("inside", 0), "of the forward"),
        Figure("calls outside", calls.get("outside", 0), "that a region would lower"),
    ]
    page.todos = [
        Todo(row["todo"], f"{row['kind']}, {place(row['file'], row['line'])}: {row['what']}", {}, row["module_path"])
        for row in findings[:3]
    ]
    page.notes = list(data["notes"])
    page.tables = advice_table(findings)
    return page
