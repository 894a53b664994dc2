"""Which lines are named of a call: its own, or where both runs call one function, those that call it."""

from __future__ import annotations

from collections.abc import Sequence

from narrowcast.analysis.diff.sides import Bundle, Side
from narrowcast.core.ledger.identity import CallId
from narrowcast.reports.results.run_records import CallRecord, Lines


class Places:
    """The lines of the calls of two runs."""

    def __init__(self, sides: Sequence[Side]) -> None:
        calls = [[call for run in side.runs for call in run.calls] for side in sides]
        lines = [{line for call in of_side for line in _lines(call, call.callers)} for of_side in calls]
        self._of_both = lines[0] & lines[1]
        self._callers: list[dict[CallId, Lines]] = [
            {c.id: c.callers for c in of_side if c.callers} for of_side in calls
        ]

    def of(self, side: int, bundles: Sequence[Bundle]) -> str:
        """Return the line of the first of them, `file:number`: of those that lead to it, the first that the other run
        does not run, too, which says nothing about what differs; empty where none is known.
        """
        call = bundles[0].call
        lines = _lines(call, call.callers or self._callers[side].get(call.forward or call.id, ()))
        return _text(next((line for line in lines if line not in self._of_both), lines[0])) if call.file else ""

    def beside(self, side: int, bundles: Sequence[Bundle]) -> tuple[str, ...]:
        """Return the other lines of a pair: of the calls after the first, and where what they read was viewed."""
        lines = [self.of(side, [bundle]) for bundle in bundles]
        lines += [_text(line) for bundle in bundles for line in bundle.call.views]
        return tuple(line for line in dict.fromkeys(lines) if line and line != lines[0])


def _lines(call: CallRecord, callers: Lines) -> Lines:
    return ((call.file, call.line), *callers)


def _text(line: tuple[str, int]) -> str:
    return f"{line[0]}:{line[1]}"
