"""Which argument of one call is which of another's: the operands of a symmetric op may be swapped."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from narrowcast.analysis.diff.alignment import Aligned
from narrowcast.analysis.diff.pieces import Distance
from narrowcast.core.ops import named, op_kind

_SWAPPED = {"self": "other", "other": "self"}
"""The names of two operands."""
_SAME, _CROSSED = ([(x, x) for x in _SWAPPED], list(_SWAPPED.items()))


class Operands:
    """Tells by values which operand is which. between: compares two tensors, by their numbers."""

    def __init__(self, between: Callable[[int, int], Distance]) -> None:
        self._between = between
        self._are_swapped = cache(self._are_nearer_swapped)

    def names(self, pair: Aligned, name: str) -> tuple[str, str]:
        """Return the names of an argument in both calls."""
        return name, _SWAPPED[name] if name in _SWAPPED and self._are_swapped(pair) else name

    def _are_nearer_swapped(self, pair: Aligned) -> bool:
        """Return whether the operands of a symmetric op stand in the other order in b: one of them is much nearer to
        the other's than either is to that of its name.
        """
        a, b = pair.a[0], pair.b[0]
        sides, factors = ([dict(getattr(x.call, part)) for x in (a, b)] for part in ("inputs", "given"))
        is_symmetric = a.id.op == b.id.op and op_kind(a.id.op).name in named("operands.symmetric")
        is_plain = all(of.get("alpha", "1") in ("1", "1.0") for of in factors)
        if not (is_symmetric and is_plain and all(_SWAPPED.keys() <= side.keys() for side in sides)):
            return False
        same, crossed = ([self._between(sides[0][x], sides[1][y]) for x, y in pairs] for pairs in (_SAME, _CROSSED))
        nearest = [min((one.relative for one in two if one.is_known and not one.is_part), default=math.inf)
                   for two in (same, crossed)]  # fmt: skip
        return nearest[1] < nearest[0] / 2
