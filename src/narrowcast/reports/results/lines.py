"""Lines of reports for people: numbers in a few digits, and the order of errors."""

from __future__ import annotations

import math


def number_text(value: float) -> str:
    """Return a number in two digits: `1.2e-03`, `0`."""
    return "0" if value == 0 else f"{value:.1e}"


def or_infinity(error: float) -> float:
    """Return an error by which rows are put in order: NaN is the largest."""
    return error if math.isfinite(error) else math.inf
