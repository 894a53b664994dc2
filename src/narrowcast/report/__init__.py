"""Reports: ledgers and explanations as text and JSON."""

from narrowcast.report.explanation import Comparison, Explanation, ModuleRow, OpRow, OutputError, RepeatRow

__all__ = ["Comparison", "Explanation", "ModuleRow", "OpRow", "OutputError", "RepeatRow"]
