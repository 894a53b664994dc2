"""Time and memory of a device: by its own events where it has them, side by side in alternating rounds."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch

ROUND_MS, MOST_CALLS = 30.0, 200
"""A side runs for about so long in a round."""


@dataclass(slots=True)
class Side:
    """One way to run something.

    call: runs it once. around: what is open while it runs (switches that hold for the process, tf32 for one).
    """

    name: str
    call: Callable[[], object]
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    forward: Callable[[], object] | None = None
    times_ms: list[float] = field(default_factory=list)
    first_s: float = 0.0
    held_mib: float = 0.0
    peak_mib: float = 0.0


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def milliseconds(call: Callable[[], object], calls: int, device: str) -> float:
    """Of one call, when this many follow each other: between two events on the device, with no waiting in between."""
    if device != "cuda":
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) * 1e3 / calls
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    first.record()
    for _ in range(calls):
        call()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / calls


def alternate(sides: list[Side], rounds: int, device: str, seconds: float) -> None:
    """Every round runs every side, in another order; its times are added to those that it has."""
    calls = {}
    for side in sides:
        with side.around():
            milliseconds(side.call, 1, device)
            once = min(milliseconds(side.call, 1, device) for _ in range(2))
        calls[side.name] = max(1, min(MOST_CALLS, int(ROUND_MS / max(once, 1e-3))))
    shuffled = random.Random(0)
    began = time.monotonic()
    for number in range(rounds):
        if number >= 3 and time.monotonic() - began > seconds:
            break
        for side in shuffled.sample(sides, len(sides)):
            with side.around():
                if calls[side.name] > 1:
                    side.call()  # caches as this side leaves them itself
                side.times_ms.append(milliseconds(side.call, calls[side.name], device))


def told(side: Side) -> dict[str, float]:
    """A side's figures."""
    ordered = sorted(side.times_ms)
    found = {
        "first_s": round(side.first_s, 2),
        "held_mib": round(side.held_mib, 1),
        "peak_mib": round(side.peak_mib, 1),
    }
    if not ordered:
        return found
    return found | {
        "ms": round(statistics.median(ordered), 4), "lower": round(ordered[len(ordered) // 4], 4),
        "upper": round(ordered[-1 - len(ordered) // 4], 4), "fastest": round(ordered[0], 4), "rounds": len(ordered),
    }  # fmt: skip


def ratio(a: Side, b: Side) -> float:
    """Median over rounds of the time of `a` over that of `b`."""
    return round(statistics.median(x / y for x, y in zip(a.times_ms, b.times_ms, strict=False)), 4)


def allocated_mib(device: str) -> float:
    """What tensors take on the device now; 0 where it does not say."""
    gc.collect()
    return torch.cuda.memory_allocated() / 2**20 if device == "cuda" else 0.0


def measure_peak(side: Side, device: str) -> None:
    """The most that tensors take during one call, above what was there before it."""
    if device != "cuda":
        return
    with side.around():
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        side.call()
        torch.cuda.synchronize()
        side.peak_mib = (torch.cuda.max_memory_allocated() - before) / 2**20
