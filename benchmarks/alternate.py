"""Side by side in one process: every round runs every side once, in another order; ratios are taken round by round."""

import random
import statistics
import time
from collections.abc import Callable


def alternate(sides: dict[str, Callable[[], object]], rounds: int, calls: int = 1) -> dict[str, list[float]]:
    """Milliseconds per call of each side, one figure per round."""
    order = random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side()
        side()
    for _ in range(rounds):
        for name in order.sample(list(sides), len(sides)):
            start = time.perf_counter()
            for _ in range(calls):
                sides[name]()
            times[name].append((time.perf_counter() - start) * 1e3 / calls)
    return times


def ratio(times: dict[str, list[float]], name: str, base: str) -> dict[str, float]:
    """Median of the rounds' ratios with quartiles, and the ratio of the fastest rounds."""
    pairs = sorted(a / b for a, b in zip(times[name], times[base], strict=True))
    return {
        "median": round(statistics.median(pairs), 4),
        "lower_quartile": round(pairs[len(pairs) // 4], 4),
        "upper_quartile": round(pairs[-1 - len(pairs) // 4], 4),
        "of_fastest": round(min(times[name]) / min(times[base]), 4),
        "of_medians": round(statistics.median(times[name]) / statistics.median(times[base]), 4),
    }
