"""Which document a result has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from narrowcast.reports.documents.comparisons import comparison_document
from narrowcast.reports.documents.explanations import explanation_document
from narrowcast.reports.documents.headrooms import headroom_document
from narrowcast.reports.documents.ledgers import ledger_document
from narrowcast.reports.documents.model import Document
from narrowcast.reports.documents.parities import invariance_document, parity_document
from narrowcast.reports.documents.profiles import profile_document
from narrowcast.reports.documents.repairs import repair_document
from narrowcast.reports.documents.run_differences import run_differences_document
from narrowcast.reports.documents.runs import run_document
from narrowcast.reports.documents.training import scaler_document, storage_document, training_document
from narrowcast.reports.documents.watches import watch_document
from narrowcast.reports.results.result import Result

_DOCUMENTS: dict[str, Callable[[Any], Document]] = {
    "Differences": comparison_document, "Explanation": explanation_document, "Headroom": headroom_document,
    "History": scaler_document, "Invariance": invariance_document, "Ledger": ledger_document,
    "Parity": parity_document, "Profile": profile_document, "Repair": repair_document, "Run": run_document,
    "RunDifferences": run_differences_document, "StorageCheck": storage_document, "TrainingCheck": training_document,
    "Watching": watch_document,
}  # fmt: skip


def document_of(result: Result) -> Document:
    """Return the document of a result: its verdict, figures, tables and graphs, and what to do."""
    for kind in type(result).__mro__:
        if kind.__name__ in _DOCUMENTS:
            return _DOCUMENTS[kind.__name__](result)
    raise TypeError(f"{type(result).__name__} has no document")
