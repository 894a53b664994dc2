"""The clock: how long something takes on the device."""

from __future__ import annotations

import time
from collections.abc import Callable

from narrowcast.runtime.devices.device import synchronize


def elapsed_ns(run: Callable[[], object], repeats: int = 1) -> float:
    """Nanoseconds of all runs together, from an idle device until it is idle again."""
    synchronize()
    start = time.perf_counter_ns()
    for _ in range(repeats):
        run()
    synchronize()
    return float(time.perf_counter_ns() - start)
