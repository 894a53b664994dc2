"""What `nc.repair` found: the rules that fix a policy for a model, what each is worth, and the runs that it took."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from narrowcast.core.policy import Policy, Rule
from narrowcast.reports.results.result import Result
from narrowcast.reports.results.verdicts import CLEAN, REPAIRED

RAISED, NOT_FINITE, ERROR, METRIC = "raised", "not finite", "error", "metric"
"""What is wrong with a run: it raises; it makes NaN or infinity; its output is too far off; the metric is worse."""


@dataclass(frozen=True, slots=True)
class RepairRule:
    """A rule that a repair ends with.

    cause: what it fixes, RAISED, NOT_FINITE, ERROR or METRIC. share: its part of that repair, from 0 to 1: of the
    square of the output's error, or one of the places that raised or overflowed. calls: how many calls of a run it
    takes out of the low format. cost_ns: what that costs a run, without casts; NaN where no profile of the device says
    so. needed: what is wrong without it, if that was tried.
    """

    rule: Rule
    cause: str
    share: float
    calls: int = 0
    cost_ns: float = math.nan
    needed: str = ""


@dataclass(frozen=True, slots=True)
class Matmuls:
    """How many products (matrix products, convolutions, attention) of a run compute in a low format, of how many."""

    low: int = 0
    all: int = 0


@dataclass(frozen=True, slots=True)
class RepairStep:
    """One run of the model under a policy, or in fp32: what was found, and the rules that were added or left out.

    error: relative, of the output that is furthest off; NaN where it was not asked for. metric: by name.
    products: of this run; of a run in fp32, and in files from before they were kept, none.
    """

    what: str
    found: str
    added: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    error: float = math.nan
    metric: dict[str, float] = field(default_factory=dict)
    products: Matmuls = Matmuls()


@dataclass(slots=True, repr=False)
class Repair(Result):
    """The result of `nc.repair`. `policy` is the repaired one, as far as that went.

    asked: what had to hold, for a reader. before, after: the first run, and the last that counts. reference: the metric
    in fp32. runs: how often the model ran, its metric included. untried: rules that were not tried without, since the
    limit of runs was reached. dropped: rules that were found, and turned out not to be needed.
    """

    WHAT: ClassVar[str] = "a repair"
    SCHEMA: ClassVar[str] = "narrowcast.repair/2"

    subject: str
    device_type: str
    low: str
    base: str
    policy: Policy
    asked: str = ""
    verdict: str = CLEAN
    rules: list[RepairRule] = field(default_factory=list)
    steps: list[RepairStep] = field(default_factory=list)
    before: RepairStep = field(default_factory=lambda: RepairStep("", ""))
    after: RepairStep = field(default_factory=lambda: RepairStep("", ""))
    reference: dict[str, float] = field(default_factory=dict)
    matmuls_before: Matmuls = Matmuls()
    matmuls_after: Matmuls = Matmuls()
    runs: int = 0
    dropped: list[str] = field(default_factory=list)
    untried: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong under the policy that it ends with."""
        return self.verdict in (CLEAN, REPAIRED)


def share_text(share: float) -> str:
    """Return a share as text: `62%`; `<1%` if it is less."""
    return f"{share:.0%}" if share >= 0.005 or not share else "<1%"
