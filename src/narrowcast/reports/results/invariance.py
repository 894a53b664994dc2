"""Invariance as data: whether the numbers of one sample depend on who shares its batch, on padding and on caches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from narrowcast.core.ledger.identity import CallId
from narrowcast.reports.results.result import Result
from narrowcast.reports.results.verdicts import CACHE, INVARIANT, LEAK, NOT_JUDGED, SHAPE

WORST = (LEAK, CACHE, NOT_JUDGED, SHAPE, INVARIANT)
"""Verdicts, the worst first."""


@dataclass(frozen=True, slots=True)
class Variant:
    """The sample run in another way. name: `batch of 8, place 3`, `padded left by 5`, `in chunks of 4`.

    verdict: `invariant`, the same bits; `batch shape`, within what rounding may make of its results in other shapes;
    `cache or position`, beyond that; `shared`, where elements of the output depend on the sample and on others; `not
    judged`, where none was found to be the sample's. error: of the sample's output, relative (L2), against the sample
    run alone. bound: what rounding may make of it. call: the first whose bits change for the sample, at the line
    `place`; shapes: of what it gives, alone and here. shared: how many elements of the output depend on the sample and
    on others, of how many that depend on the sample; none of them where nothing of the batch is the sample's.
    """

    name: str
    verdict: str
    error: float = 0.0
    bound: float = 0.0
    call: CallId | None = None
    place: str = ""
    shapes: tuple[str, str] = ("", "")
    shared: tuple[int, int] = (0, 0)


@dataclass(slots=True, repr=False)
class Invariance(Result):
    """What `nc.check_invariance` found. model: its name. variants: in the order in which they ran. runs: how often the
    model ran.
    """

    WHAT: ClassVar[str] = "a check of invariance"
    SCHEMA: ClassVar[str] = "narrowcast.invariance/1"

    model: str
    variants: list[Variant] = field(default_factory=list)
    runs: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """The worst verdict of a variant: `shared`, `cache or position`, `batch shape`, `invariant`."""
        found = {variant.verdict for variant in self.variants}
        return next((verdict for verdict in WORST if verdict in found), INVARIANT)

    @property
    def varying(self) -> list[Variant]:
        """The variants whose bits are others, in order."""
        return [variant for variant in self.variants if variant.verdict != INVARIANT]

    def __bool__(self) -> bool:
        """Whether nothing is wrong: kernels may depend on shapes."""
        return self.verdict in (INVARIANT, SHAPE)

    def data(self) -> dict[str, Any]:
        """Return what is written as JSON, the verdict with it."""
        return {**Result.data(self), "verdict": self.verdict}
