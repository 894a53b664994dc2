"""Words in sentences: counts with their nouns, numbers in a few digits, the nearest name to a misspelt one."""

from __future__ import annotations

import math
from collections.abc import Iterable

_OF_ONE = {"are": "is", "were": "was", "have": "has", "do": "does"}


def counted(count: int, one: str, verb: str = "") -> str:
    """Return a count with its noun, and a verb in its number: `1 call`, `2 calls`, `1 call differs`."""
    if count == 1:
        return f"1 {one} {_OF_ONE.get(verb) or f'{verb}s'}" if verb else f"1 {one}"
    return f"{count} {one}s {verb}".rstrip()


def and_more(count: int, one: str) -> str:
    """Return ` and 2 more calls`, for what stands after the first of them; nothing for none."""
    return f" and {counted(count, f'more {one}')}" if count > 0 else ""


def did_you_mean(word: str, known: list[str] | tuple[str, ...], cutoff: float = 0.6) -> str:
    """Return a phrase that names the nearest known word, or nothing."""
    import difflib

    near = difflib.get_close_matches(word, known, n=1, cutoff=cutoff)
    return f" (did you mean {near[0]!r}?)" if near else ""


def number_text(value: float) -> str:
    """Return a number in two digits: `1.2e-03`, `0`."""
    return "0" if value == 0 else f"{value:.1e}"


def or_infinity(error: float) -> float:
    """Return an error by which rows are put in order: NaN is the largest."""
    return error if math.isfinite(error) else math.inf


def sizes(shape: Iterable[object] | None) -> str:
    """Return a shape as PyTorch prints it, `[2, 16]`; nothing for what is no tensor."""
    return "" if shape is None else f"[{', '.join(map(str, shape))}]"
