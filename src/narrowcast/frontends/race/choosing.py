"""Choosing: the candidates of a graph are timed on the real inputs of its first call, and the best one is kept.

Choices are kept on disk, too, per program, inputs and device, as autotuning keeps its own.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from narrowcast.errors import first_line
from narrowcast.output.files import cache_folder, is_there, replace_text, set_aside
from narrowcast.output.progress import long_work
from narrowcast.reports.results.profile import Device
from narrowcast.runtime.devices.device import elapsed_ns, is_capturing, own_saved_tensors, random_state_kept
from narrowcast.runtime.torch_bridge import PLAIN, tensors_in
from narrowcast.runtime.torch_surface.dispatch import count_dispatch_modes

SCHEMA = "narrowcast.choice/1"


@dataclass(frozen=True, slots=True)
class RememberedTimes:
    """What was found when candidates were timed: medians in nanoseconds by name, the spread of each, what it cost.

    seconds: that timing took, compiling the candidates apart. from_disk: it was found earlier. dropped: candidates that
    do not run here, with the first line of what they raise. formats: of the chosen one's choices; they name its
    placement, whatever the profile has learnt since.
    """

    chosen: str
    times_ns: dict[str, float]
    spreads: dict[str, float]
    rounds: int
    seconds: float
    from_disk: bool = False
    dropped: dict[str, str] = field(default_factory=dict)
    formats: tuple[str, ...] = ()


def choice_key(device: Device, *facts: str) -> str:
    """Return a name for what a choice is about: the device, and texts of the rest."""
    text = json.dumps([asdict(device), *facts])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def load_choice(key: str, names: Sequence[str] | None = None) -> RememberedTimes | None:
    """Return the choice that was made earlier; None if there is none, or none among candidates of these names.

    A file that cannot be read is set aside, with a warning.
    """
    path = _path(key)
    if not is_there(path):
        return None
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.pop("schema") != SCHEMA:
            raise ValueError("another schema")
        choice = RememberedTimes(**{**data, "from_disk": True, "formats": tuple(data.get("formats", ()))})
        return choice if names is None or choice.chosen in names else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        warnings.warn(f"narrowcast: a kept choice could not be read ({error}); it {set_aside(path)}", stacklevel=2)
        return None


def save_choice(key: str, choice: RememberedTimes) -> bool:
    """Keep a choice; whether that was possible. Nothing depends on it but the next process's time."""
    data = {"schema": SCHEMA, **asdict(choice)}
    del data["from_disk"]
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(data, indent=1) + "\n")
    except OSError:
        return False
    return True


def _path(key: str) -> Path:
    return cache_folder() / "choices" / f"{key}.json"


# -- sides, and the rounds of a race, in turn, until it is known which is fastest --------------------------------------


Compiled = Callable[..., Any]


Sides = Mapping[str, Compiled]
"""Compiled candidates by name: what runs each. The one that is predicted best comes first."""


class Runner:
    """Runs a side. given: the inputs of the call. written: positions of those that calls write to.

    Each run begins with what was given and leaves no trace: what a candidate writes to is a copy, and gradients are
    computed without reaching anybody's `.grad`. Where they are taken, inputs are without anybody's hooks.
    """

    def __init__(self, name: str, run: Compiled, given: Sequence[Any], written: frozenset[int]) -> None:
        self.name, self.run = name, run
        self.trains = torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in given)
        self._written = {n: given[n] for n in written}
        self._own = [_own(value, n in written, self.trains) for n, value in enumerate(given)]
        self._homes = {n: _stretch(self._own[n]) for n in written}  # where in memory the copies were made

    def once(self) -> float:
        """Return nanoseconds of one call, with its backward if there is one."""
        with torch.no_grad():
            for n, value in self._written.items():
                if isinstance(value, torch.Tensor):
                    self._restore(n, value)
        return time_call(self.run, self._own, self.trains)

    def often(self, calls: int) -> float:
        """Return the median of several calls; after one more, untimed, that leaves the caches as this side does."""
        if calls > 1:
            self.once()
        return statistics.median(self.once() for _ in range(calls))

    def _restore(self, n: int, given: torch.Tensor) -> None:
        """Restore a copy's value; or make another, if a call made it part of autograd's graph, or assigned it the
        memory of something else (`x.data = y`).
        """
        own = self._own[n]
        if _stretch(own) == self._homes[n] and own.shape == given.shape and own.grad_fn is None:
            own.copy_(given)
        else:
            self._own[n] = _own(given, True, self.trains)
            self._homes[n] = _stretch(self._own[n])


def time_call(run: Compiled, args: Sequence[Any], trains: bool) -> float:
    """Return nanoseconds of one call, with its backward if there is one."""

    def call() -> None:
        results = run(*args)
        if trains:
            outs = [r for r in tensors_in(results) if r.requires_grad]
            wanted = [a for a in tensors_in(args) if a.requires_grad]
            if outs and wanted:
                torch.autograd.grad(outs, wanted, [torch.ones_like(r) for r in outs], allow_unused=True)

    return elapsed_ns(call)


def is_entangled(args: Sequence[Any], written: frozenset[int]) -> bool:
    """Return whether an input that is written to shares elements with another: copies of them would not."""
    return any(_shares(args[n], t) for n in written for k, t in enumerate(args) if k != n)


def _own(value: Any, copied: bool, trains: bool) -> Any:
    """Return a tensor without hooks, where gradients are taken; a copy if it is written to."""
    if not isinstance(value, torch.Tensor) or not (copied or (trains and value.requires_grad)):
        return value
    with torch.no_grad():
        plain = value.detach().clone() if copied else value.detach()
    return plain.requires_grad_(value.requires_grad and trains)


def _shares(a: Any, b: Any) -> bool:
    """Return whether two tensors may have elements in common: the stretches of memory that they span overlap."""
    first, second = _stretch(a), _stretch(b)
    return first is not None and second is not None and first[0] < second[1] and second[0] < first[1]


def _stretch(value: Any) -> tuple[int, int] | None:
    if type(value) not in PLAIN or value.layout is not torch.strided or not value.numel():
        return None
    spanned = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.data_ptr(), value.data_ptr() + spanned * value.itemsize


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


def time_sides(sides: Sides, args: Sequence[Any], written: frozenset[int], seconds: float = SECONDS) -> RememberedTimes:
    """Return times of all sides in alternating rounds, and which to keep: the fastest, the first of them if in doubt.

    args: the inputs of a call. written: positions of those that calls write to. seconds: how long the rounds may take.
    """
    start = time.perf_counter()
    runners = [Runner(name, run, args, written) for name, run in sides.items()]
    # whatever saves tensors in ways of their own (a checkpoint around the call) is not to save those of a race
    with random_state_kept(), own_saved_tensors(), long_work(f"timing {len(sides)} candidates", ROUNDS) as step:
        usable, dropped = _warm(runners)
        left, times = _alternate(usable, seconds, step)
    chosen = left[0]
    for name in left[1:]:
        if is_faster(times[name], times[chosen]):
            chosen = name
    medians = {name: statistics.median(rounds) for name, rounds in times.items()}
    spreads = {name: _spread(rounds) for name, rounds in times.items()}
    return RememberedTimes(
        chosen, medians, spreads, len(times[chosen]), time.perf_counter() - start, dropped=dropped,
    )  # fmt: skip


def _warm(runners: Sequence[Runner]) -> tuple[list[tuple[Runner, int]], dict[str, str]]:
    """Return the sides that run, warm and with their backward compiled, with calls per round; and why others do not.

    What all of them raise is the model's error.
    """
    usable: list[tuple[Runner, int]] = []
    dropped: dict[str, str] = {}
    failed: Exception | None = None
    for runner in runners:
        try:
            runner.once()
            ns = min(runner.once() for _ in range(2))
            usable.append((runner, max(1, min(MOST_CALLS, round(ROUND_NS / ns)))))
        except Exception as error:
            failed = error
            dropped[runner.name] = first_line(error)
    if not usable and failed is not None:
        raise failed
    return usable, dropped


def _alternate(runners: list[tuple[Runner, int]], seconds: float, step: Any) -> tuple[list[str], Times]:
    """Return the names of those that ran in all rounds, and the times of all: one that is far behind is dropped."""
    times: Times = {runner.name: [] for runner, _ in runners}
    shuffled = random.Random(0)
    began = time.perf_counter()
    for number in range(ROUNDS):
        if number >= LEAST_ROUNDS:
            if time.perf_counter() - began > seconds:
                break
            best = min(statistics.median(times[runner.name]) for runner, _ in runners)
            runners = [r for r in runners if statistics.median(times[r[0].name]) <= BEHIND * best]
        for runner, calls in shuffled.sample(runners, len(runners)):
            times[runner.name].append(runner.often(calls))
        step()
    return [runner.name for runner, _ in runners], times


def is_faster(times: Sequence[float], than: Sequence[float]) -> bool:
    """Return whether one side's rounds are faster than another's, beyond noise: by the median of pairs and a sign test.

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


class Choosing:
    """Runs the best of several compiled candidates; times them when it is first called.

    written: positions of inputs that calls write to. found: called with the choice. seconds: the most for the rounds.
    """

    def __init__(
        self, sides: Sides, written: frozenset[int], found: Callable[[RememberedTimes], None], seconds: float
    ) -> None:
        self.sides = sides
        self.seconds = min(max(seconds, LEAST_SECONDS), SECONDS)
        self.written = written
        self.found = found
        self.chosen: Compiled | None = next(iter(sides.values())) if len(sides) == 1 else None
        self.lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        """The graph's results."""
        if self.chosen is None:
            if count_dispatch_modes() or getattr(_timing, "on", False) or is_capturing():
                predicted = next(iter(self.sides.values()))
                return predicted(*args)  # recorded, on fake tensors, recomputed, captured: no time says much
            with self.lock:
                if self.chosen is None:
                    self._choose(args)
        return self.chosen(*args)  # type: ignore[misc]

    def _choose(self, args: Sequence[Any]) -> None:
        _timing.on = True
        try:
            if is_entangled(args, self.written):  # no copies behave as these do: the prediction is taken
                choice = RememberedTimes(next(iter(self.sides)), {}, {}, 0, 0.0)
            else:
                choice = time_sides(self.sides, args, self.written, self.seconds)
        finally:
            _timing.on = False
        self.chosen = self.sides[choice.chosen]
        self.found(choice)
        self.sides = {}


_timing = threading.local()
