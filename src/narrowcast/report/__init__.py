"""Reports: ledgers and explanations as text and JSON."""

from narrowcast.report.explanation import Comparison, Explanation, ModuleRow, OpRow, OutputError, RepeatRow
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
    "CandidateTime", "Comparison", "CompiledGraph", "DecisionDifference", "Explanation", "GraphRow", "ModuleRow",
    "OpRow", "OutputError", "RepeatRow", "decision_differences", "graph_ledger", "graph_row",
]  # fmt: skip
