"""Choosing: the candidates of a graph are timed on the real inputs of its first call, and the best one is kept.

Timing leaves no trace: what a candidate writes to is a copy, random state is restored, gradients are computed without
reaching anybody's `.grad`.
"""

from __future__ import annotations

import math
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from narrowcast.output.progress import long_work
from narrowcast.profiles.device import is_capturing, own_saved_tensors, random_state_kept, synchronize
from narrowcast.race.remembered import Choice
from narrowcast.torch_bridge import tensors_in
from narrowcast.torch_surface.dispatch import count_dispatch_modes

Compiled = Callable[..., Any]
ROUNDS, SECONDS = 60, 2.0
LEAST_ROUNDS, LEAST_SECONDS = 5, 0.2
BEHIND = 1.5
NOISE = 0.985
"""A side takes the place of one that was predicted to be faster if it takes at most so much of that one's time, in the
median of rounds, pair by pair, and is the faster one in more rounds than chance gives.
"""
ROUND_NS, MOST_CALLS = 2e6, 10
"""How long a side runs in a round, and how often at most; what is short runs once more before, untimed: a side is to
find the caches as it leaves them itself.
"""


@dataclass(slots=True)
class Side:
    """A compiled candidate: its name, and what runs it."""

    name: str
    run: Compiled


class Choosing:
    """Runs the best of several compiled candidates; times them when it is first called.

    sides: the one that is predicted best first. written: positions of inputs that calls write to. found: told what was
    chosen. seconds: how long the rounds may take.
    """

    def __init__(
        self, sides: Sequence[Side], written: frozenset[int], found: Callable[[Choice], None], seconds: float = SECONDS
    ) -> None:
        self.sides = list(sides)
        self.seconds = min(max(seconds, LEAST_SECONDS), SECONDS)
        self.written = written
        self.found = found
        self.chosen: Compiled | None = self.sides[0].run if len(self.sides) == 1 else None
        self.lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        """The graph's results."""
        if self.chosen is None:
            if count_dispatch_modes() or _timing.on or is_capturing():
                return self.sides[0].run(*args)  # recorded, on fake tensors, recomputed, captured: no time says much
            with self.lock:
                if self.chosen is None:
                    self._choose(args)
        return self.chosen(*args)  # type: ignore[misc]

    def _choose(self, args: Sequence[Any]) -> None:
        _timing.on = True
        try:
            if is_entangled(args, self.written):  # no copies behave as these do: the prediction is taken
                choice = Choice(self.sides[0].name, {}, {}, 0, 0.0)
            else:
                choice = time_sides(self.sides, args, self.written, self.seconds)
        finally:
            _timing.on = False
        self.chosen = next(side.run for side in self.sides if side.name == choice.chosen)
        self.found(choice)
        self.sides = []


class _Timing(threading.local):
    on = False


_timing = _Timing()


def time_sides(sides: Sequence[Side], args: Sequence[Any], written: frozenset[int], seconds: float = SECONDS) -> Choice:
    """Times of all sides in alternating rounds, and which to keep: the fastest, the first of them if in doubt.

    A side that is far behind after a few rounds runs in no more of them.
    """
    start = time.perf_counter()
    trains = torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in args)
    own = {side.name: [_own(a, n in written, trains) for n, a in enumerate(args)] for side in sides}
    homes = {name: {n: _stretch(copies[n]) for n in written} for name, copies in own.items()}

    def run(side: Side) -> float:
        with torch.no_grad():  # each run begins with what the call was given
            for n in written:
                if isinstance(args[n], torch.Tensor):
                    _restore(own[side.name], homes[side.name], n, args[n], trains)
        return _run(side.run, own[side.name], trains)

    def run_often(side: Side, calls: int) -> float:
        if calls > 1:
            run(side)
        return statistics.median(run(side) for _ in range(calls))

    # whoever saves tensors in ways of their own (a checkpoint around the call) is not to save those of a race
    with random_state_kept(), own_saved_tensors(), long_work(f"timing {len(sides)} candidates", ROUNDS) as step:
        once, dropped = _usable(sides, run)
        sides = [side for side in sides if side.name in once]
        calls = {name: max(1, min(MOST_CALLS, round(ROUND_NS / ns))) for name, ns in once.items()}
        times: dict[str, list[float]] = {side.name: [] for side in sides}
        began = time.perf_counter()
        shuffled = random.Random(0)
        for number in range(ROUNDS):
            if number >= LEAST_ROUNDS:
                if time.perf_counter() - began > seconds:
                    break
                sides = _close(sides, times)
            for side in shuffled.sample(list(sides), len(sides)):
                times[side.name].append(run_often(side, calls[side.name]))
            step()
    medians = {name: statistics.median(found) for name, found in times.items()}
    chosen = sides[0].name  # of those that ran in all rounds
    for side in sides[1:]:
        if is_faster(times[side.name], times[chosen]):
            chosen = side.name
    return Choice(
        chosen, medians, {name: _spread(found) for name, found in times.items()},
        len(times[chosen]), time.perf_counter() - start, dropped=dropped,
    )  # fmt: skip


def _close(sides: Sequence[Side], times: dict[str, list[float]]) -> list[Side]:
    """The sides that are not far behind the fastest."""
    best = min(statistics.median(times[side.name]) for side in sides)
    return [side for side in sides if statistics.median(times[side.name]) <= BEHIND * best]


def is_faster(times: Sequence[float], than: Sequence[float]) -> bool:
    """Whether one side's rounds are faster than another's, beyond noise: by the median of pairs, and by a sign test.

    Wins of one of two equal sides in n rounds have a standard deviation of sqrt(n) / 2; 1.64 of these are passed by
    chance once in twenty times.
    """
    ratios = [a / b for a, b in zip(times, than, strict=True)]
    wins = sum(ratio < 1 for ratio in ratios)
    return statistics.median(ratios) < NOISE and wins > len(ratios) / 2 + 1.64 * math.sqrt(len(ratios)) / 2


def _usable(sides: Sequence[Side], run: Callable[[Side], float]) -> tuple[dict[str, float], dict[str, str]]:
    """The sides that run, with the nanoseconds of a call that is warm and whose backward is compiled; and why others
    do not.

    What all of them raise is the model's error.
    """
    found: dict[str, float] = {}
    dropped: dict[str, str] = {}
    failed: Exception | None = None
    for side in sides:
        try:
            run(side)
            found[side.name] = min(run(side) for _ in range(2))
        except Exception as error:
            failed = error
            dropped[side.name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:120]}"
    if not found and failed is not None:
        raise failed
    return found, dropped


def _run(run: Compiled, args: Sequence[Any], trains: bool) -> float:
    """Nanoseconds of one call, with its backward if there is one."""
    synchronize()
    start = time.perf_counter_ns()
    results = run(*args)
    if trains:
        outs = [r for r in tensors_in(results) if r.requires_grad]
        wanted = [a for a in tensors_in(args) if a.requires_grad]
        if outs and wanted:
            torch.autograd.grad(outs, wanted, [torch.ones_like(r) for r in outs], allow_unused=True)
    synchronize()
    return float(time.perf_counter_ns() - start)


def _own(value: Any, copied: bool, trains: bool) -> Any:
    """A tensor without anybody's hooks, where gradients are taken; a copy if it is written to."""
    if not isinstance(value, torch.Tensor) or not (copied or (trains and value.requires_grad)):
        return value
    with torch.no_grad():
        made = value.detach().clone() if copied else value.detach()
    return made.requires_grad_(value.requires_grad and trains)


def _restore(own: list[Any], homes: dict[int, Any], n: int, given: torch.Tensor, trains: bool) -> None:
    """Give a copy its value again; or make another, if a call made it part of autograd's graph, or gave it the memory
    of something else (`x.data = y`). homes: where in memory the copies were made.
    """
    if _stretch(own[n]) == homes[n] and own[n].shape == given.shape and own[n].grad_fn is None:
        own[n].copy_(given)
    else:
        own[n] = _own(given, True, trains)
        homes[n] = _stretch(own[n])


def is_entangled(args: Sequence[Any], written: frozenset[int]) -> bool:
    """Whether an input that is written to shares elements with another: copies of them would not."""
    return any(_shares(args[n], t) for n in written for k, t in enumerate(args) if k != n)


def _shares(a: Any, b: Any) -> bool:
    """Whether two tensors may have elements in common: the stretches of memory that they span overlap."""
    first, second = _stretch(a), _stretch(b)
    return first is not None and second is not None and first[0] < second[1] and second[0] < first[1]


def _stretch(value: Any) -> tuple[int, int] | None:
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided or not value.numel():
        return None
    spanned = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.data_ptr(), value.data_ptr() + spanned * value.itemsize


def _spread(times: Sequence[float]) -> float:
    ordered = sorted(times)
    middle = statistics.median(ordered)
    return (ordered[-1 - len(ordered) // 4] - ordered[len(ordered) // 4]) / 2 / middle if middle else 0.0
