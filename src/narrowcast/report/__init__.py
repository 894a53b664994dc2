"""Reports: ledgers and explanations as text and JSON."""

from narrowcast.report.explain_text import Explanation
from narrowcast.report.explanation import (
    Attempt,
    Comparison,
    Failure,
    ModuleRow,
    NotFinite,
    OpRow,
    OutputError,
    RepeatRow,
)
from narrowcast.report.graphs import (
    CandidateTime,
    CompiledGraph,
    DecisionDifference,
    GraphRow,
    decision_differences,
    graph_ledger,
    graph_row,
)

__all__ = [
    "Attempt", "CandidateTime", "Comparison", "CompiledGraph", "DecisionDifference", "Explanation", "Failure",
    "GraphRow", "ModuleRow", "NotFinite", "OpRow", "OutputError", "RepeatRow", "decision_differences", "graph_ledger",
    "graph_row",
]  # fmt: skip
