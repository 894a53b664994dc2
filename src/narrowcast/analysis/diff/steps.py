"""Steps of functions outside of modules: calls that read the same weights again, as decoding does for each token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

from narrowcast.core.ledger.identity import FORWARD
from narrowcast.reports.results.run_records import CallRecord

Place = tuple[int, int, int]
"""Of a call: its step, from 1; the weight that was read last in it, from 1; and which call of its op it is since."""


def steps_of(calls: Sequence[CallRecord], weights: Sequence[tuple[int, ...]]) -> dict[int, Place]:
    """The place of each call, by its index; empty where no step comes again, or a backward goes between.

    weights: the tensors that each call reads and none made.
    """
    read = [n for n, numbers in enumerate(weights) if numbers]
    said = [(calls[n].id.module_path, calls[n].id.op, weights[n]) for n in read]
    period = next((p for p in range(1, len(said) // 2 + 1) if said[p:] == said[:-p]), 0)
    has_turns = any(call.id.turn > 1 for call in calls if not call.id.module_path)
    if not period or len(said) % period or has_turns or any(call.id.direction != FORWARD for call in calls):
        return {}
    before = [[call.id.op for call in calls[last + 1 : n][::-1]]
              for last, n in zip([-1, *read[period - 1 :: period]], read[::period], strict=False)]  # fmt: skip
    lead = len(list(takewhile(lambda ops: len(set(ops)) == 1, zip(*before, strict=False))))
    starts, weight_at = {n - lead for n in read[::period]}, set(read)
    found: dict[int, Place] = {}
    step = weight = 0
    seen: Counter[str] = Counter()
    for n, call in enumerate(calls):
        if n in starts:
            step, weight, seen = step + 1, 0, Counter()
        if n in weight_at:
            weight, seen = weight + 1, Counter()
        seen[call.id.op] += 1
        found[n] = (step, weight, seen[call.id.op])
    return found
