"""Formats of a script's values, as far as they are known before it runs.

In a script `bf16` says: bf16, unless the value is one that no cast of the region would touch (fp64, integers, another
device). Casts look for that when they run, so it does no harm. Where nothing is known the type is `tensor`.
"""

from __future__ import annotations

from collections.abc import Iterable

from narrowcast.programs.program import TENSOR

OTHER = "other"
"""The type of a tensor without a floating format, and of what is no tensor."""


def join(types: Iterable[str]) -> str:
    """What is known of a value that may be any of these."""
    found = set(types)
    return found.pop() if len(found) == 1 else TENSOR


def promoted(types: Iterable[str]) -> str:
    """What an op gives that keeps the format of its floating operands.

    Formats that differ may be promoted or not: a tensor without dimensions does not count.
    """
    floats = {t for t in types if t != OTHER}
    return floats.pop() if len(floats) == 1 else TENSOR
