"""Lines of reports for people: numbers in a few digits, things that are counted; and the order of errors."""

from __future__ import annotations

import math


def number_text(value: float) -> str:
    """Return a number in two digits: `1.2e-03`, `0`."""
    return "0" if value == 0 else f"{value:.1e}"


def counted(count: int, one: str) -> str:
    """Return a count with its noun: `1 call`, `2 calls`."""
    return f"{count} {one}" if count == 1 else f"{count} {one}s"


def or_infinity(error: float) -> float:
    """Return an error by which rows are put in order: NaN is the largest."""
    return error if math.isfinite(error) else math.inf
