"""Which document a result has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from narrowcast.reports.documents.comparisons import comparison_document
from narrowcast.reports.documents.explanations import explanation_document
from narrowcast.reports.documents.headrooms import headroom_document
from narrowcast.reports.documents.ledgers import ledger_document
from narrowcast.reports.documents.model import Document
from narrowcast.reports.documents.profiles import profile_document
from narrowcast.reports.documents.repairs import repair_document
from narrowcast.reports.documents.run_differences import run_differences_document
from narrowcast.reports.documents.runs import run_document
from narrowcast.reports.documents.scales import scaler_document
from narrowcast.reports.documents.training import training_document
from narrowcast.reports.documents.watches import watch_document
from narrowcast.reports.results.differences import Differences
from narrowcast.reports.results.explanation import Explanation
from narrowcast.reports.results.findings import Watching
from narrowcast.reports.results.headroom import Headroom
from narrowcast.reports.results.ledger import Ledger
from narrowcast.reports.results.profile import Profile
from narrowcast.reports.results.repair import Repair
from narrowcast.reports.results.result import Result, by_kind
from narrowcast.reports.results.run import Run
from narrowcast.reports.results.run_differences import RunDifferences
from narrowcast.reports.results.scaler_history import History
from narrowcast.reports.results.training import TrainingCheck

_DOCUMENTS: dict[type[Result], Callable[[Any], Document]] = {
    Differences: comparison_document, Explanation: explanation_document, Headroom: headroom_document,
    History: scaler_document, Ledger: ledger_document, Profile: profile_document, Repair: repair_document,
    Run: run_document, RunDifferences: run_differences_document, TrainingCheck: training_document,
    Watching: watch_document,
}  # fmt: skip


def document_of(found: Result) -> Document:
    """What a result says: its verdict, figures, tables and graphs, and what to do."""
    make = by_kind(_DOCUMENTS, found)
    if make is None:
        raise TypeError(f"{type(found).__name__} has no document")
    return make(found)
