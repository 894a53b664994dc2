"""Parity as data: how far the numbers of two programs are apart, why, and which modules bring how much of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from narrowcast.reports.results.result import Result
from narrowcast.reports.results.verdicts import ALIKE, NOT_COMPARED, ROUND_OFF, SHAPE

NATS, RELATIVE = "nats", "relative"
"""Units of a distance: of log-probabilities of the same tokens; of outputs, relative (L2)."""
SOUND_CAUSES = (ALIKE, ROUND_OFF, SHAPE)
"""Causes that are no fault: nothing, and rounding, of the same shapes or of others."""


@dataclass(frozen=True, slots=True)
class Distance:
    """How far apart numbers are. unit: `nats`, of the log-probabilities of the same tokens, b minus a; or `relative`,
    of outputs, of which `rms` is the relative error (L2) and nothing else is known.

    count: of tokens. rms, p99, largest: of absolute differences. at: the token with the largest. mean: b minus a.
    k1, k3: estimates of the KL divergence of b from a on tokens that b drew, of r = exp(a - b): the means of -log r and
    of r - 1 - log r (Schulman, Approximating KL divergence, 2020). ratio: the largest of r and 1 / r. over: how many
    tokens are further apart than the limit.
    """

    unit: str
    rms: float
    count: int = 0
    p99: float = math.nan
    largest: float = math.nan
    at: int = -1
    mean: float = math.nan
    k1: float = math.nan
    k3: float = math.nan
    ratio: float = math.nan
    over: int = 0


def distance_in_nats(a: Sequence[float], b: Sequence[float], limit: float | None = None) -> Distance:
    """Return how far apart the log-probabilities of the same tokens are; NaN in either counts as infinitely far."""
    differences = [
        math.inf if math.isnan(y - x) and x != y else 0.0 if x == y else y - x for x, y in zip(a, b, strict=True)
    ]
    if not differences:
        return Distance(NATS, math.nan)
    count, sizes = len(differences), sorted(map(abs, differences))
    rms = math.sqrt(math.fsum(size * size for size in sizes) / count)
    at = max(range(count), key=lambda n: abs(differences[n]))
    mean = math.fsum(differences) / count if math.isfinite(sizes[-1]) else math.nan
    over = sum(size > limit for size in sizes) if limit is not None else 0
    k3 = math.fsum(_power(-d) - 1 + d for d in differences) / count if math.isfinite(sizes[-1]) else math.nan
    p99 = sizes[min(count - 1, math.ceil(0.99 * count) - 1)]
    return Distance(NATS, rms, count, p99, sizes[-1], at, mean, mean, k3, _power(sizes[-1]), over)


def _power(exponent: float) -> float:
    return math.exp(exponent) if exponent < 700 else math.inf


@dataclass(frozen=True, slots=True)
class Cause:
    """Why two programs differ. kind: one of `verdicts.CAUSES`. what: in a, and in b, in words.

    before, after: the distance before and after b was given a's (its weights, attributes, formats, choices, results);
    NaN where that was not tried. is_confirmed: it was, and that took away most of it. module, place: the first of them,
    in b. todo: what to write.
    """

    kind: str
    what: str
    todo: str
    before: float = math.nan
    after: float = math.nan
    is_confirmed: bool = False
    module: str = ""
    place: str = ""

    @property
    def removes(self) -> float:
        """The distance that goes with it; 0 where that was not tried."""
        removed = self.before - self.after
        return removed if math.isfinite(removed) else 0.0


@dataclass(frozen=True, slots=True)
class ModuleShare:
    """What the modules of b from one to the next bring of the distance.

    module: the last of them, whose result is made equal in `after`; since: the one before them, whose result is made
    equal in `before` already, with all results before it. a: the module's name in a. place: the module's first line.
    """

    module: str
    a: str
    since: str
    before: float
    after: float
    place: str = ""

    @property
    def amount(self) -> float:
        """The distance with everything before made equal, minus that with these made equal, too; shares add up to the
        whole. It may be below zero, where errors cancel.
        """
        return self.before - self.after


@dataclass(frozen=True, slots=True)
class Routed:
    """A call that chose otherwise in b: which, at which line, and for how many of its rows."""

    module: str
    op: str
    place: str
    rows: int
    of: int


@dataclass(slots=True, repr=False)
class Parity(Result):
    """What `nc.parity` found.

    a, b: names of the two. distance: between their numbers. causes: most of the distance first. shares: of modules, in
    the order in which they run, where both could be run with results exchanged. routed: calls whose choices differ.
    limit: the largest rms that is allowed, if one is given. runs: how often b ran with something exchanged.
    """

    WHAT: ClassVar[str] = "parity of two programs"
    SCHEMA: ClassVar[str] = "narrowcast.parity/1"

    a: str
    b: str
    distance: Distance
    causes: list[Cause] = field(default_factory=list)
    shares: list[ModuleShare] = field(default_factory=list)
    routed: list[Routed] = field(default_factory=list)
    environment: list[tuple[str, str, str]] = field(default_factory=list)
    limit: float | None = None
    runs: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """The cause that most of the distance goes with: `weights`, `sampler`, `tokens`, `format`, `attribute`,
        `calls`, `kernel`, `routing`, `batch shape`, `cache or position`; `round-off`, where each call is within its
        bound; `alike`, where nothing differs; `not compared`.
        """
        return self.causes[0].kind if self.causes else ALIKE if self.distance.rms == 0 else NOT_COMPARED

    @property
    def is_over(self) -> bool:
        """Whether they are further apart than the limit; without one, whether they differ by more than round-off."""
        if self.limit is not None:
            return not self.distance.rms <= self.limit
        return self.verdict not in SOUND_CAUSES

    def data(self) -> dict[str, Any]:
        """Return what is written as JSON, the verdict with it."""
        return {**Result.data(self), "verdict": self.verdict}
