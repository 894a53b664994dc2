"""How the parts of a page put numbers, identities and places into words."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from narrowcast.output.console import in_bytes
from narrowcast.output.words import number_text


def number(value: Any) -> float | None:
    """Return a number of a saved result; NaN and infinities, which are texts there, are None."""
    if value is None or isinstance(value, str):
        return None
    return float(value) if math.isfinite(value) else None


def place(file: str, line: Any) -> str:
    """Return `file:line`, or nothing."""
    return f"{file}:{line}" if file else ""


_ROUNDS_UP = 0.9995
"""From which part of a unit on three digits are a whole one."""


def in_time(ns: float) -> str:
    """Return a time with its unit: `1.2 ms`, `35 us`, `3 s`."""
    for size, unit in ((1e9, "s"), (1e6, "ms"), (1e3, "us")):
        if abs(ns) >= _ROUNDS_UP * size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns:.0f} ns"


def in_count(count: float) -> str:
    """Return a count with its unit: `950`, `16.8 M`, `1.2 G`."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= _ROUNDS_UP * size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"


def in_unit(amount: float | str, unit: str) -> str:
    """Return a figure's amount in words; what is not finite, or is a word already, unchanged."""
    if isinstance(amount, str):
        return amount
    if isinstance(amount, int) and unit == "":
        return str(amount)
    to_text = _UNITS.get(unit)
    return f"{amount:.6g}" if to_text is None or not math.isfinite(amount) else to_text(amount)


_UNITS: dict[str, Callable[[float], str]] = {
    "bytes": in_bytes,
    "ns": in_time,
    "relative": number_text,
    "times fp32": lambda ratio: f"{ratio:.2f} x fp32",
}


def without_format(text: str, format: str) -> str:
    """Return the text of a sample in a profile, as it is in every format that it computes in."""
    return text.replace(f"{format}[", "[").replace(f"-> {format}", "").strip()
