"""The differences of two runs as data: what `nc.diff` finds, and its file."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from narrowcast.core.ledger.identity import BACKWARD, CallId
from narrowcast.core.ops import op_kind
from narrowcast.formats import FORMATS
from narrowcast.reports.results.mapping import RunMapping
from narrowcast.reports.results.result import Result
from narrowcast.reports.results.run import Run
from narrowcast.reports.results.verdicts import ALIKE, FORMATS_DIFFER, NOT_COMPARED, ROUND_OFF, VALUES_DIFFER

EQUAL, DIFFERS, INHERITED = "equal", "differs", "propagated"
"""Verdicts of a row: no difference was seen; within the round-off bound; the call makes a difference beyond it; beyond
it, but what it was given differed already; nothing that both runs kept can be compared.
"""


@dataclass(frozen=True, slots=True)
class RunRow:
    """Calls of a and b that are the same ones; several on one side where they are one call on the other.

    place_a, place_b: the user's lines. format_a, format_b: in which they compute. aligned_by: `mapping`, `path`,
    `weights`, `order` or `values`. difference: relative (L2), of what they give; inputs: the largest of what they were
    given, NaN where the earlier rows represent it; round_off_bound: what rounding explains of it, beside the inputs'
    (`GAIN` times `inputs`). measured_by: `tensors`, `sketches`, `statistics` or `ranges`. is_part: one side has more
    elements. given: numbers, or weights, that the calls were given and that differ: name, in a, in b. beside_a,
    beside_b: more lines, of the other calls, and at which what they read was viewed.
    """

    a: tuple[CallId, ...]
    b: tuple[CallId, ...]
    place_a: str
    place_b: str
    format_a: str
    format_b: str
    aligned_by: str
    verdict: str
    difference: float = math.nan
    inputs: float = math.nan
    round_off_bound: float = 0.0
    measured_by: str = ""
    is_part: bool = False
    given: tuple[tuple[str, str, str], ...] = ()
    why: str = ""
    beside_a: tuple[str, ...] = ()
    beside_b: tuple[str, ...] = ()

    @property
    def is_given_numbers(self) -> bool:
        """Whether the calls are given other numbers, flags or words, and not tensors alone."""
        return any(not b.endswith(" apart") for *_, b in self.given)

    @property
    def differs_in_format(self) -> bool:
        """Whether the two compute in other formats. A sum of gradients has those of what it adds, complex numbers have
        none, and calls that cannot be compared may be no pair, nor may ops of no one family in a backward; of
        different ops the coarsest format counts.
        """
        if self.verdict == NOT_COMPARED or self.a[0].is_sum_of_gradients or not (self.format_a and self.format_b):
            return False
        if [one.op for one in self.a] == [one.op for one in self.b]:
            return set(self.format_a.split(",")) != set(self.format_b.split(","))
        families = {op_kind(one.op).family for one in (*self.a, *self.b)}
        is_one = len(families) == 1 and "" not in families
        return (is_one or self.a[0].direction != BACKWARD) and _coarsest(self.format_a) != _coarsest(self.format_b)


def _coarsest(formats: str) -> float:
    return max((FORMATS[name].epsilon for name in formats.split(",") if name in FORMATS), default=0.0)


@dataclass(frozen=True, slots=True)
class Unaligned:
    """A call without a partner. run: `a` or `b`. after: the last call before it that has one; why: if that is known.

    format: in which it computes. apart: how far apart is what comes of it, where nothing else explains that; else 0.
    read_by: the first call that has a partner and whose inputs show that, in a. views: the lines at which what it reads
    was viewed.
    """

    run: str
    id: CallId
    place: str
    after: str = ""
    why: str = ""
    format: str = ""
    apart: float = 0.0
    read_by: CallId | None = None
    views: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NewCall:
    """A call whose result the other run has nowhere. run: `a` or `b`. views: the lines at which what it reads was
    viewed. after: of the first of a run, the lines of the calls that made what it reads.
    """

    run: str
    id: CallId
    place: str
    views: tuple[str, ...] = ()
    after: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OtherSetting:
    """A number or a flag of an optimizer's parameter groups that is another in b: as text, of several groups each value
    with the number of elements of parameters for which it is set.
    """

    name: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class OtherStep:
    """A step of an optimizer that is set otherwise in b. optimizer: its class. number: of the run's steps, from 1.
    place_a, place_b: the lines that call it.
    """

    optimizer: str
    number: int
    place_a: str
    place_b: str
    settings: tuple[OtherSetting, ...]

    @property
    def text(self) -> str:
        """From which step on, and what is set to what in either run."""
        of = "; ".join(f"{one.name} {one.a} in a, {one.b} in b" for one in self.settings)
        return f"from step {self.number} on: {of}"


@dataclass(frozen=True, slots=True)
class Untrained:
    """A parameter that one run trains alone. run: the other, which leaves it as it is. name: there; empty if it is the
    parameter of no module. of: its name in the run that trains it. place: the first line that reads it.
    """

    run: str
    name: str
    of: str
    place: str


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """How far apart the log-probabilities of the same tokens are: b minus a, in nats.

    count: of tokens compared. rms, p99, largest: of absolute differences. mean: signed. at: where the largest is.
    first_other: where the first token is another one, from which on nothing is compared; -1 if none is.
    round_off_bound: what the differences of the calls explain of the rms.
    """

    count: int
    rms: float
    p99: float
    largest: float
    mean: float
    at: int
    first_other: int = -1
    round_off_bound: float = math.inf

    @property
    def is_beyond(self) -> bool:
        """Whether they differ by more than that."""
        return self.count > 0 and self.rms > self.round_off_bound


@dataclass(frozen=True, slots=True)
class GradientRow:
    """The gradient of a parameter in both runs; several where one run has them in one. difference: relative (L2).

    round_off_bound: what the bounds and the differences of the calls explain of it.
    """

    a: tuple[str, ...]
    b: tuple[str, ...]
    difference: float
    measured_by: str = ""
    round_off_bound: float = math.inf

    @property
    def is_beyond(self) -> bool:
        """Whether it differs by more than that."""
        return self.difference > self.round_off_bound


_UNEXPLAINED = 0.1
"""A difference that calls only pass on is large beyond this."""


@dataclass(slots=True, repr=False)
class RunDifferences(Result):
    """What `nc.diff` found.

    a, b: the names of the runs. environment: what differs between them: name, in a, in b. rows: in the order of a.
    unaligned: calls of either run without a partner. front: where values differ, the first calls of either run that
    give values which the other has nowhere, and lead to what differs; as many as
    lie on a few lines. tokens: of language models that kept log-probabilities.
    mapping: the pairs as a file to edit; by_hand: the one that was given. notes: what could not be compared, and why.
    outputs_apart: the relative difference of outputs that are further apart than rounding explains; else 0.
    output_difference: that of outputs, whatever explains it; NaN where these could not be compared.
    outputs_unexplained: the same of outputs that are very far apart, and rounding or choices may explain that, or not.
    weights_apart: the same of weights after the steps, in parts of the way that they went, if nothing before shows it.
    untrained: parameters that one run trains and the other leaves as they are. other_step: the first
    step of an optimizer that is set otherwise, if it may make a difference that there is.
    compared_runs: the two themselves, of several ranks the first; only the page shows them, and no file has them.
    """

    WHAT: ClassVar[str] = "a comparison of runs"
    SCHEMA: ClassVar[str] = "narrowcast.run-differences/3"

    a: str
    b: str
    environment: list[tuple[str, str, str]] = field(default_factory=list)
    rows: list[RunRow] = field(default_factory=list)
    unaligned: list[Unaligned] = field(default_factory=list)
    front: list[NewCall] = field(default_factory=list)
    gradients: list[GradientRow] = field(default_factory=list)
    tokens: TokenDifference | None = None
    notes: list[str] = field(default_factory=list)
    mapping: RunMapping = field(default_factory=RunMapping)
    by_hand: RunMapping = field(default_factory=RunMapping)
    outputs_apart: float = 0.0
    output_difference: float = math.nan
    outputs_unexplained: float = 0.0
    weights_apart: float = 0.0
    untrained: list[Untrained] = field(default_factory=list)
    other_step: OtherStep | None = None
    compared_runs: tuple[Run, ...] = field(default=(), repr=False, compare=False)

    @property
    def formats(self) -> list[RunRow]:
        """The calls that compute in other formats, in order."""
        return [row for row in self.rows if row.differs_in_format]

    @property
    def first_format(self) -> RunRow | None:
        """The first call that computes in another format: one of the forward, if any does, which a rule can name."""
        of_forward = (row for row in self.formats if row.a[0].direction != BACKWARD)
        return next(of_forward, next(iter(self.formats), None))

    @property
    def producers(self) -> list[RunRow]:
        """The calls that make a difference beyond their bound, of inputs that explain none; in order."""
        return [row for row in self.rows if row.verdict == DIFFERS]

    @property
    def largest(self) -> float:
        """The largest difference of a call's result, those left out that only propagate one; 0 where there is none."""
        own = (row.difference for row in self.rows if row.verdict in (EQUAL, ROUND_OFF, DIFFERS))
        return max((difference for difference in own if not math.isnan(difference)), default=0.0)

    @property
    def alone(self) -> list[Unaligned]:
        """The calls without a partner that make a difference, in order."""
        return [one for one in self.unaligned if one.apart]

    @property
    def first_value(self) -> RunRow | None:
        """The first call that makes a difference beyond its bound."""
        return next(iter(self.producers), None)

    @property
    def compared(self) -> int:
        """How many pairs have values that could be compared."""
        return sum(bool(row.measured_by) for row in self.rows)

    @property
    def verdict(self) -> str:
        """`alike`, `round-off`, `formats differ`, `values differ`; `not compared` where no value could be, or what
        calls pass on, or outputs, are far apart, and what made that is not known.
        """
        is_told = self.tokens is not None and self.tokens.is_beyond
        if (
            self.producers
            or self.alone
            or is_told
            or any(row.is_beyond for row in self.gradients)
            or self.outputs_apart
            or self.weights_apart
            or self.untrained
        ):
            return VALUES_DIFFER
        passed_on = (row.difference for row in self.rows if row.verdict == INHERITED)
        is_passed_on = math.isnan(self.output_difference) and any(one > _UNEXPLAINED for one in passed_on)
        if is_passed_on or self.outputs_unexplained:
            return NOT_COMPARED
        if self.formats:
            return FORMATS_DIFFER
        if not self.compared and math.isnan(self.output_difference):
            return NOT_COMPARED
        moved = any(row.verdict in (ROUND_OFF, INHERITED) for row in self.rows)
        is_moved = moved or self.output_difference > 0 or any(row.difference for row in self.gradients)
        return ROUND_OFF if is_moved else ALIKE

    def data(self) -> dict[str, Any]:
        """Return what is written as JSON, the verdict with it."""
        return {**Result.data(self), "verdict": self.verdict}
