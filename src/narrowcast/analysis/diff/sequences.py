"""Two sequences brought side by side: the pairs, in order on both sides, whose scores add up to most."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

Pairs = list[tuple[int, int]]
Score = Callable[[int, int], float]
"""What a pair of positions is worth; not above zero where the two cannot be a pair."""

CELLS = 1_000_000
"""Of sequences with more possible pairs (the product of their lengths) those near the diagonal are looked at."""
_NARROWEST = 64


def aligned_sequences(length_a: int, length_b: int, score: Score) -> Pairs:
    """The pairs of positions, in order, by dynamic programming; of equal totals those that come first."""
    if not length_a or not length_b:
        return []
    is_whole = length_a * length_b <= CELLS
    reach = length_b if is_whole else max(_NARROWEST, abs(length_a - length_b), CELLS // (2 * length_a))
    rows = [_Row(0, [])] * (length_a + 1)
    for i in range(length_a - 1, -1, -1):
        middle = i * length_b // length_a
        first, last = max(0, middle - reach), min(length_b, middle + reach + 1)
        row, below = _Row(first, [0.0] * (last - first)), rows[i + 1]
        for j in range(last - 1, first - 1, -1):
            worth = score(i, j)
            skip = max(below.at(j), row.at(j + 1))
            row.best[j - first] = max(skip, worth + below.at(j + 1)) if worth > 0 else skip
        rows[i] = row
    pairs: Pairs = []
    i = j = 0
    while i < length_a and j < length_b:
        worth = score(i, j)
        if worth > 0 and rows[i].at(j) == worth + rows[i + 1].at(j + 1):
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif rows[i].at(j) == rows[i + 1].at(j):
            i += 1
        else:
            j += 1
    return pairs


class _Row:
    """The best totals from a position on, for positions of the other sequence that are looked at; 0 beyond them."""

    __slots__ = ("best", "first")

    def __init__(self, first: int, best: list[float]) -> None:
        self.first, self.best = first, best

    def at(self, j: int) -> float:
        """The best total from there on."""
        n = j - self.first
        return self.best[n] if 0 <= n < len(self.best) else 0.0


def in_order_on_both(pairs: Pairs) -> Pairs:
    """The most of these pairs, sorted by the first, whose seconds rise as well."""
    ends: list[int] = []  # of the best chain of each length: the index of its last pair
    before: list[int] = []
    for n, (_, j) in enumerate(pairs):
        low = bisect_left(ends, j, key=lambda at: pairs[at][1])
        before.append(ends[low - 1] if low else -1)
        ends[low : low + 1] = [n]
    chain: Pairs = []
    at = ends[-1] if ends else -1
    while at >= 0:
        chain.append(pairs[at])
        at = before[at]
    return chain[::-1]
