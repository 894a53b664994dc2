"""Log-probabilities of the same tokens in two runs."""

from __future__ import annotations

import math
from collections.abc import Sequence

from narrowcast.analysis.diff.aligned_values import GAIN
from narrowcast.analysis.diff.alignment import Aligned
from narrowcast.core.ledger.identity import BACKWARD
from narrowcast.reports.results.parity import distance_in_nats
from narrowcast.reports.results.run import Run
from narrowcast.reports.results.run_differences import RunRow, TokenDifference


def band_of_tokens(pairs: Sequence[Aligned], rows: Sequence[RunRow]) -> float:
    """Return how much log-probabilities may differ: as much as the logits, which are the last results compared."""
    forward = [row for row in rows if row.measured_by and row.a[0].direction != BACKWARD]
    if not forward:
        return math.inf
    last = max((x for pair in pairs for x in pair.a if x.id == forward[-1].a[0]), key=lambda x: x.position)
    largest = max(1.0, abs(last.low), abs(last.high))
    return largest * (forward[-1].round_off_bound + GAIN * max(row.difference for row in forward))


def tokens(a: Run, b: Run, band: float) -> TokenDifference | None:
    """Compare log-probabilities of the same tokens; None of runs that kept none. band: the rms that the differences of
    calls explain.
    """
    pairs = list(zip(a.tokens, b.tokens, strict=False))
    if not pairs:
        return None
    first_other = next((n for n, (one, other) in enumerate(pairs) if one != other), -1)
    count = len(pairs) if first_other < 0 else first_other
    if not count:
        return TokenDifference(0, math.nan, math.nan, math.nan, math.nan, -1, first_other)
    far = distance_in_nats(a.log_probabilities[:count], b.log_probabilities[:count])
    return TokenDifference(count, far.rms, far.p99, far.largest, far.mean, far.at, first_other, band)
