"""Two sequences brought side by side: the pairs, in order on both sides, whose scores add up to most."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from difflib import SequenceMatcher

Pairs = list[tuple[int, int]]
Score = Callable[[int, int], float]
"""What a pair of positions is worth; not above zero where the two cannot be a pair."""

CELLS = 250_000
"""Longer ones (as products of their lengths) are cut at runs of equal keys first."""


def aligned_sequences(a: Sequence[Hashable], b: Sequence[Hashable], score: Score) -> Pairs:
    """The pairs of positions, in order. a, b: keys that are equal where two elements look alike."""
    if len(a) * len(b) <= CELLS:
        return _best_pairs(range(len(a)), range(len(b)), score)
    pairs: Pairs = []
    at_a = at_b = 0
    for block in SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks():
        gap = range(at_a, block.a), range(at_b, block.b)
        pairs += _best_pairs(*gap, score) if len(gap[0]) * len(gap[1]) <= CELLS else []
        pairs += [(block.a + n, block.b + n) for n in range(block.size) if score(block.a + n, block.b + n) > 0]
        at_a, at_b = block.a + block.size, block.b + block.size
    return pairs


def _best_pairs(a: range, b: range, score: Score) -> Pairs:
    """By dynamic programming over all prefixes; of equal totals the pairs that come first."""
    if not a or not b:
        return []
    scores = [[score(i, j) for j in b] for i in a]
    best = [[0.0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i in range(len(a) - 1, -1, -1):
        here, below, row = best[i], best[i + 1], scores[i]
        for j in range(len(b) - 1, -1, -1):
            skip = max(below[j], here[j + 1])
            here[j] = max(skip, row[j] + below[j + 1]) if row[j] > 0 else skip
    pairs: Pairs = []
    i = j = 0
    while i < len(a) and j < len(b):
        if scores[i][j] > 0 and best[i][j] == scores[i][j] + best[i + 1][j + 1]:
            pairs.append((a[i], b[j]))
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return pairs


def in_order_on_both(pairs: Pairs) -> Pairs:
    """The most of these pairs, sorted by the first, whose seconds rise as well."""
    ends: list[int] = []  # of the best chain of each length: the index of its last pair
    before: list[int] = []
    for n, (_, j) in enumerate(pairs):
        low, high = 0, len(ends)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if pairs[ends[middle]][1] < j else (low, middle)
        before.append(ends[low - 1] if low else -1)
        ends[low : low + 1] = [n]
    chain: Pairs = []
    at = ends[-1] if ends else -1
    while at >= 0:
        chain.append(pairs[at])
        at = before[at]
    return chain[::-1]
