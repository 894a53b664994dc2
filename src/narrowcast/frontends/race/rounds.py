"""The rounds of a race: all sides in turn, until it is known which is fastest. Random state is left as it was."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

from narrowcast.frontends.race.remembered import RememberedTimes
from narrowcast.frontends.race.sides import CandidateSide, Runner
from narrowcast.output.progress import long_work
from narrowcast.runtime.devices.device import own_saved_tensors, random_state_kept

ROUNDS, SECONDS = 60, 2.0
LEAST_ROUNDS, LEAST_SECONDS = 5, 0.2
BEHIND = 1.5
NOISE = 0.985
"""A side takes the place of one that was predicted to be faster if it takes at most so much of that one's time, in the
median of rounds, pair by pair, and is the faster one in more rounds than chance gives.
"""
ROUND_NS, MOST_CALLS = 2e6, 10
"""How long a side runs in a round, and how often at most."""

Times = dict[str, list[float]]


def time_sides(
    sides: Sequence[CandidateSide], args: Sequence[Any], written: frozenset[int], seconds: float = SECONDS
) -> RememberedTimes:
    """Times of all sides in alternating rounds, and which to keep: the fastest, the first of them if in doubt.

    args: the inputs of a call. written: positions of those that calls write to. seconds: how long the rounds may take.
    """
    start = time.perf_counter()
    runners = [Runner(side, args, written) for side in sides]
    # whatever saves tensors in ways of their own (a checkpoint around the call) is not to save those of a race
    with random_state_kept(), own_saved_tensors(), long_work(f"timing {len(sides)} candidates", ROUNDS) as step:
        usable, dropped = _warm(runners)
        left, times = _alternate(usable, seconds, step)
    chosen = left[0]
    for name in left[1:]:
        if is_faster(times[name], times[chosen]):
            chosen = name
    medians = {name: statistics.median(found) for name, found in times.items()}
    spreads = {name: _spread(found) for name, found in times.items()}
    return RememberedTimes(
        chosen, medians, spreads, len(times[chosen]), time.perf_counter() - start, dropped=dropped,
    )  # fmt: skip


def _warm(runners: Sequence[Runner]) -> tuple[list[tuple[Runner, int]], dict[str, str]]:
    """Those that run, warm and with their backward compiled, with how often they do in a round; and why others do not.

    What all of them raise is the model's error.
    """
    found: list[tuple[Runner, int]] = []
    dropped: dict[str, str] = {}
    failed: Exception | None = None
    for runner in runners:
        try:
            runner.once()
            ns = min(runner.once() for _ in range(2))
            found.append((runner, max(1, min(MOST_CALLS, round(ROUND_NS / ns)))))
        except Exception as error:
            failed = error
            dropped[runner.side.name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:120]}"
    if not found and failed is not None:
        raise failed
    return found, dropped


def _alternate(runners: list[tuple[Runner, int]], seconds: float, step: Any) -> tuple[list[str], Times]:
    """The names of those that ran in all rounds, and the times of all: who is far behind after a few runs no more."""
    times: Times = {runner.side.name: [] for runner, _ in runners}
    shuffled = random.Random(0)
    began = time.perf_counter()
    for number in range(ROUNDS):
        if number >= LEAST_ROUNDS:
            if time.perf_counter() - began > seconds:
                break
            best = min(statistics.median(times[runner.side.name]) for runner, _ in runners)
            runners = [r for r in runners if statistics.median(times[r[0].side.name]) <= BEHIND * best]
        for runner, calls in shuffled.sample(runners, len(runners)):
            times[runner.side.name].append(runner.often(calls))
        step()
    return [runner.side.name for runner, _ in runners], times


def is_faster(times: Sequence[float], than: Sequence[float]) -> bool:
    """Whether one side's rounds are faster than another's, beyond noise: by the median of pairs, and by a sign test.

    Wins of one of two equal sides in n rounds have a standard deviation of sqrt(n) / 2; 1.64 of these are passed by
    chance once in twenty times.
    """
    ratios = [a / b for a, b in zip(times, than, strict=True)]
    wins = sum(ratio < 1 for ratio in ratios)
    return statistics.median(ratios) < NOISE and wins > len(ratios) / 2 + 1.64 * math.sqrt(len(ratios)) / 2


def _spread(times: Sequence[float]) -> float:
    ordered = sorted(times)
    middle = statistics.median(ordered)
    return (ordered[-1 - len(ordered) // 4] - ordered[len(ordered) // 4]) / 2 / middle if middle else 0.0
