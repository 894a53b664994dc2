"""Differences of a model under a policy from a reference: by call, by module, in outputs and gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from narrowcast.core.ledger.identity import CallId
from narrowcast.core.policy import Rule
from narrowcast.reports.results.findings import Finding
from narrowcast.reports.results.result import Result
from narrowcast.reports.results.verdicts import (
    AT_FAULT,
    EXACT,
    FAULT,
    KERNEL,
    NONDETERMINISTIC,
    NOT_COMPARED,
    NOT_FINITE,
    PASSED_ON,
    ROUND_OFF,
)

SHOWN = 5
"""How many calls are listed as most to blame."""
SKIPPED_STEP = (
    "A scaler skips this step, since gradients overflow at its scale: that is intended, and nothing is compared. "
    "Compare a step at a scale that it keeps (init_scale), or after some steps."
)
"""A note."""
ANOTHER_MODEL = "another model"
"""The reference, if it is neither fp32 nor fp64."""
NO_GRADIENT = "no gradient"
"""The format of a gradient that the reference alone has."""
OUTPUT_FACTOR = 4.0
"""Propagated errors, and those of outputs, are beyond round-off from this many times the rounding bound on."""


@dataclass(frozen=True, slots=True)
class OutputError:
    """How far one output tensor is from the fp32 reference.

    sqnr_db: 10 log10(sum ref^2 / sum (ref - x)^2), infinity if equal. relative_error: ||x - ref|| / ||ref||; of a
    reference of zeros the root mean square of x.
    """

    name: str
    reference: str
    found: str
    sqnr_db: float
    relative_error: float
    largest_error: float


@dataclass(frozen=True, slots=True)
class CallError:
    """The error of one call, from samples of its results.

    computes, reference: the formats it reads under the policy and in the reference. local: the local relative error
    (L2) of the call alone in its low formats, on the reference's inputs. propagated: the propagated error, of the same
    call in low formats, on the inputs that it really had, against that. total: of its real output, against the
    reference. kernel: of its output against the same op in fp64 on the same inputs, those that it really had; bound:
    the largest of these errors, of any element, over what its formats and the length of its sums allow; 0 where nothing
    bounds it. round_off_bound: how far the call was off where everything before it moved by one unit in the last place.
    sqnr_db: of the total. largest_ulps, mean_ulps: of kernel errors, in units in the last place of the result's format;
    bias_ulps: the mean of roundings against rounding to nearest, towards +infinity or away from zero, where that is no
    accident. overflow, underflow, saturated: shares of elements that became infinite, zero, or the largest value.
    alone: relative error of the model's output when only this call's op in its module is low; NaN where it was not
    tried. why: of the verdict.
    """

    id: CallId
    file: str
    line: int
    computes: str
    reference: str
    verdict: str
    why: str = ""
    local: float = 0.0
    propagated: float = 0.0
    total: float = 0.0
    kernel: float = 0.0
    round_off_bound: float = 0.0
    sqnr_db: float = math.inf
    largest_ulps: float = 0.0
    mean_ulps: float = 0.0
    bias_ulps: float = 0.0
    overflow: float = 0.0
    underflow: float = 0.0
    saturated: float = 0.0
    alone: float = math.nan
    bound: float = 0.0
    forward: CallId | None = None

    @property
    def is_low(self) -> bool:
        """Whether it computes in other formats than in the reference."""
        return self.computes != self.reference


@dataclass(frozen=True, slots=True)
class GradientError:
    """The error of a parameter's gradient. cosine: of the angle between the two; 1 is the same direction.
    round_off_bound: the largest error when every call's result moves by one unit in the last place. share: the
    reference's root mean square over the largest of all parameters' gradients.
    """

    parameter: str
    format: str
    relative_error: float
    cosine: float
    underflow: float
    verdict: str
    round_off_bound: float = 0.0
    share: float = 1.0

    @property
    def is_round_off_alone(self) -> bool:
        """Whether it is zero up to round-off: what is there is that of the terms of a sum that cancel, as in the
        bias before a batch norm. Of such a gradient neither error nor direction says anything. Where no bound is known
        (0), it is small with its error, too.
        """
        is_unbounded = not self.round_off_bound and self.relative_error > 1 > 2.0**6 * self.share * self.relative_error
        return self.share < 2.0**-10 and (self.round_off_bound >= 0.5 or is_unbounded)


@dataclass(frozen=True, slots=True)
class AskedFormat:
    """A line whose code asks for a low format itself. rounds_whole: that does not hold the whole numbers asked for."""

    file: str
    line: int
    format: str
    rounds_whole: bool = False

    @property
    def at(self) -> tuple[str, int]:
        """The file and the line."""
        return self.file, self.line


@dataclass(frozen=True, slots=True)
class Growth:
    """The call of the forward where an error grows the most: from that of what it reads to that of what it gives."""

    id: CallId
    file: str
    line: int
    before: float
    after: float


@dataclass(frozen=True, slots=True)
class Remedy:
    """What the model was run with, and what helped: rules, lines that ask for a low format in fp32, or a region alone.

    error: what it left of the relative error of the output, or of the gradient of a parameter; before: that without it.
    lines: of the calls that are no longer low by it, the nearest to where the error shows first.
    """

    error: float
    before: float
    rules: tuple[Rule, ...] = ()
    asked: tuple[AskedFormat, ...] = ()
    parameter: str = ""
    lines: tuple[tuple[str, int], ...] = ()


@dataclass(slots=True, repr=False)
class Differences(Result):
    """What `nc.compare` found.

    subject, device_type, policy, low, reference: what was compared; policy and low are empty where no region was asked
    for around a model that brings its own casts, or none. rows: by call, in order. outputs, gradients: of the model;
    round_off_bound: how far its output moves by one unit in the last place of each call's formats. unmatched: calls
    that only one side made. runs: how often the model ran. by: what the first screen lists, `op` or `module`.
    not_finite: where an output or a gradient is not finite and the reference's is, the finding to blame;
    reference_not_finite: the first of the reference itself, if its output or gradients are not. compiled: how far a
    compiled program gives is from what its calls give one by one, where that is beyond round-off; else 0. remedy: what
    helps, found by runs; tried: how often the model ran for it; growth: where the error grows, if that was looked for.
    """

    WHAT: ClassVar[str] = "a comparison"
    SCHEMA: ClassVar[str] = "narrowcast.compare/3"

    subject: str
    device_type: str
    policy: str
    low: str
    reference: str
    rows: list[CallError] = field(default_factory=list)
    outputs: tuple[OutputError, ...] = ()
    gradients: list[GradientError] = field(default_factory=list)
    round_off_bound: float = 0.0
    verdict: str = EXACT
    unmatched: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    runs: int = 0
    by: str = "op"
    not_finite: Finding | None = None
    reference_not_finite: Finding | None = None
    compiled: float = 0.0
    remedy: Remedy | None = None
    tried: int = 0
    growth: Growth | None = None

    @property
    def worst(self) -> list[CallError]:
        """The calls most to blame, worst first: faults, then what alone moves the output most, then local error."""
        order = {NOT_FINITE: 0, FAULT: 1, KERNEL: 1}
        blamed = [row for row in self.rows if (row.local and row.verdict != PASSED_ON) or row.verdict in order]

        def key(row: CallError) -> tuple[float, ...]:
            alone = -1.0 if math.isnan(row.alone) else row.alone
            return order.get(row.verdict, 2), -alone, -(row.local if math.isfinite(row.local) else 0.0)

        return sorted(blamed, key=key)

    @property
    def faults(self) -> list[CallError]:
        """The calls to report: kernels beyond their bounds, what makes a NaN or an infinity, other arguments."""
        return [row for row in self.rows if row.verdict in AT_FAULT]

    @property
    def own_fault(self) -> Finding | None:
        """What is not finite in the reference, where that alone is wrong."""
        is_alone = self.verdict in (EXACT, ROUND_OFF, NOT_COMPARED)
        return self.reference_not_finite if is_alone else None

    @property
    def differing(self) -> list[CallError]:
        """The calls whose output differs from the reference's, but for nondeterminism."""
        return [row for row in self.rows if row.total and row.verdict != NONDETERMINISTIC]
