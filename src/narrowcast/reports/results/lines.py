"""Lines of reports for people: shortened, numbers in a few digits; and numbers that JSON lacks, as text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def number_text(value: float) -> str:
    """`1.2e-03`, `0`."""
    return "0" if value == 0 else f"{value:.1e}"


def counted(count: int, one: str) -> str:
    """`1 call`, `2 calls`."""
    return f"{count} {one}" if count == 1 else f"{count} {one}s"


def or_infinity(error: float) -> float:
    """An error by which rows are put in order: NaN is the largest."""
    return error if math.isfinite(error) else math.inf


def cut(text: str, width: int) -> str:
    """The text's end, where the whole of it is too long."""
    return text if len(text) <= width else "..." + text[3 - width :]


def cut_end(text: str, width: int) -> str:
    """The text's beginning, where the whole of it is too long."""
    return text if len(text) <= width else text[: width - 3] + "..."


def without_specials(value: Any) -> Any:
    """NaN and infinities are no JSON: they become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(k): without_specials(v) for k, v in value.items()}
    return [without_specials(v) for v in value] if isinstance(value, Sequence) and not isinstance(value, str) else value
