"""Reports: ledgers and explanations as text and JSON."""

from narrowcast.report.differences import NotFinite, OutputError
from narrowcast.report.explain_text import Explanation
from narrowcast.report.explanation import Attempt, Comparison, Failure
from narrowcast.report.graphs import (
    CandidateTime,
    CompiledGraph,
    DecisionDifference,
    decision_differences,
    graph_ledger,
)

__all__ = [
    "Attempt", "CandidateTime", "Comparison", "CompiledGraph", "DecisionDifference", "Explanation", "Failure",
    "NotFinite", "OutputError", "decision_differences", "graph_ledger",
]  # fmt: skip
