"""Log-probabilities of the same tokens in two runs."""

from __future__ import annotations

import math

from narrowcast.reports.results.run import Run
from narrowcast.reports.results.run_differences import TokenDifference


def tokens(a: Run, b: Run, band: float) -> TokenDifference | None:
    """None of runs that kept none. band: what the differences of the calls explain of the rms."""
    pairs = list(zip(a.tokens, b.tokens, strict=False))
    if not pairs:
        return None
    first_other = next((n for n, (one, other) in enumerate(pairs) if one != other), -1)
    count = len(pairs) if first_other < 0 else first_other
    apart = [b.log_probabilities[n] - a.log_probabilities[n] for n in range(count)]
    apart = [math.inf if math.isnan(value) else value for value in apart]
    if not apart:
        return TokenDifference(0, math.nan, math.nan, math.nan, math.nan, -1, first_other)
    sizes = sorted(map(abs, apart))
    rms = math.sqrt(math.fsum(size * size for size in sizes) / count)
    p99 = sizes[min(count - 1, math.ceil(0.99 * count) - 1)]
    at = max(range(count), key=lambda n: abs(apart[n]))
    return TokenDifference(count, rms, p99, sizes[-1], sum(apart) / count, at, first_other, band)
