"""Records out of the rows of a saved result. KeyError, TypeError or ValueError for rows that are none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from narrowcast.core.ledger.identity import CallId
from narrowcast.reports.results.differences import CallError, NotFinite, OutputError

Row = Mapping[str, Any]


def record_of(kind: Any, row: Row, **changed: Any) -> Any:
    """The record of that kind; numbers that JSON lacks come as text."""
    known = {f.name: row[f.name] for f in fields(kind) if f.name in row}
    numbers = {k: float(v) for k, v in known.items() if v in ("nan", "inf", "-inf")}
    return kind(**{**known, **numbers, **changed})


def call_id_of(text: str) -> CallId | None:
    """The identity of that text; None of an empty one."""
    return CallId.parse(text) if text else None


def call_errors(rows: Iterable[Row]) -> list[CallError]:
    """The errors of calls."""
    return [record_of(CallError, row, id=CallId.parse(row["id"]), forward=call_id_of(row["forward"])) for row in rows]


def output_errors(data: Row) -> tuple[OutputError, ...]:
    """The errors of the outputs of a comparison."""
    return tuple(record_of(OutputError, row) for row in data["outputs"])


def first_not_finite(data: Row) -> NotFinite | None:
    """The first call of a comparison that is not finite."""
    first = data.get("not_finite")
    found: NotFinite | None = None if first is None else record_of(NotFinite, first, value=first["value"])
    return found
