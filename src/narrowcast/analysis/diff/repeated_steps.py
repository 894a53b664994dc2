"""Steps that a run repeats, as a loop that generates tokens does: the place of each call in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

from narrowcast.core.ledger.identity import FORWARD, CallId
from narrowcast.reports.results.run_records import CallRecord

Place = tuple[int, int, int]
"""Of a call: its step, from 1; the weight that was read last in it, from 1; and which call of its op it is since."""


def steps_of(calls: Sequence[CallRecord], weights: Sequence[tuple[int, ...]]) -> dict[int, Place]:
    """Return the place of each call, by its index; empty where no step repeats, or there is a backward.

    weights: by call the numbers of the weights that it reads.
    """
    if not weights:
        return {}
    read = [n for n, numbers in enumerate(weights) if numbers]
    keys = [(calls[n].id.module_path, calls[n].id.op, weights[n]) for n in read]
    period = next((p for p in range(1, len(keys) // 2 + 1) if keys[p:] == keys[:-p]), 0)
    has_more_calls = any(call.id.module_call > 1 for call in calls if not call.id.module_path)
    if not period or len(keys) % period or has_more_calls or any(call.id.direction != FORWARD for call in calls):
        return {}
    before = [[call.id.op for call in calls[last + 1 : n][::-1]]
              for last, n in zip([-1, *read[period - 1 :: period]], read[::period], strict=False)]  # fmt: skip
    lead = len(list(takewhile(lambda ops: len(set(ops)) == 1, zip(*before, strict=False))))
    starts, weight_at = {n - lead for n in read[::period]}, set(read)
    places: dict[int, Place] = {}
    step = weight = 0
    seen: Counter[str] = Counter()
    for n, call in enumerate(calls):
        if n in starts:
            step, weight, seen = step + 1, 0, Counter()
        if n in weight_at:
            weight, seen = weight + 1, Counter()
        seen[call.id.op] += 1
        places[n] = (step, weight, seen[call.id.op])
    return places


Key = tuple[str, str, tuple[int, ...], str, str]
"""What calls at all module call indices have in common: module, op, which one of them, direction, and the line in code
outside of modules that runs several times.
"""


def keys_of(calls: Sequence[CallRecord], steps: dict[int, Place]) -> list[tuple[Key, int]]:
    """Return of each call what it has in common with those at other module call indices, and its own index.

    A loop and the model that it calls are both outside of modules: their lines tell their calls apart.
    """
    is_loop = any(call.id.module_call > 1 for call in calls if not call.id.module_path)
    at_line, alike, keys = Counter[tuple[str, int, str]](), Counter[CallId](), list[tuple[Key, int]]()
    for n, call in enumerate(calls):
        module_call, number, line = call.id.module_call, [call.id.number], ""
        if steps and not call.id.module_path:
            module_call, *number = steps[n]
        elif is_loop and not call.id.module_path and call.id.direction == FORWARD:
            line = f"{call.file}:{call.line}"
            at_line[call.id.op, module_call, line] += 1
            number = [at_line[call.id.op, module_call, line]]
        alike[call.id] += 1  # modules that nothing distinguishes
        key = (call.id.module_path, call.id.op, (*number, alike[call.id]), call.id.direction, line)
        keys.append((key, module_call))
    return keys
