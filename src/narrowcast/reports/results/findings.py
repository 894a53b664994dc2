"""Findings of a watched run: where a NaN or an infinity was made, by what, and how that was proved."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from narrowcast.core.ledger.identity import CallId
from narrowcast.core.policy import Rule
from narrowcast.core.policy.text import rule_in_line
from narrowcast.errors import Origin, RunError
from narrowcast.reports.results.result import Result
from narrowcast.reports.results.run_records import TensorFacts, site_text, tensor_text
from narrowcast.reports.results.verdicts import FINITE, NOT_FINITE, NOT_INSPECTED, TREND

CAST, FORMAT, OP, GIVEN = "cast", "format", "op", "given"
"""What made it: the cast of an argument; the op in its low format, where fp32 stays finite; the op, in fp32, too; an
input or a weight, which has it; or nothing yet, but figures that grow towards it.
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """A call that made a NaN or an infinity out of finite values.

    what: `nan` or `infinity`, or of a trend `underflow` or `growth`. made_by: CAST, FORMAT, OP, GIVEN, TREND; empty
    where it was not looked into. sentence: what happened, with figures. rules: that fix it, of what made its inputs
    where the op itself makes it. advice: what else to do. inputs, outputs: facts by name. step: from 1, how many steps
    of an optimizer had been.
    """

    id: CallId
    file: str
    line: int
    what: str
    made_by: str
    formats: str
    sentence: str
    advice: str = ""
    inputs: tuple[tuple[str, TensorFacts], ...] = ()
    outputs: tuple[tuple[str, TensorFacts], ...] = ()
    step: int = 1
    forward: CallId | None = None
    rules: tuple[Rule, ...] = ()
    replay: Any = field(default=None, compare=False, repr=False)

    @property
    def todo(self) -> str:
        """What to do, with the rules on the line."""
        rules = ", ".join(map(rule_in_line, self.rules))
        if self.made_by == OP:
            return f"{self.advice} Keep what made them in fp32: {rules}." if rules else self.advice
        return " ".join(filter(None, (f"Keep it in fp32: {rules}." if rules else "", self.advice)))

    @property
    def text(self) -> str:
        """`infinity in the fp16 result of aten.mul.Tensor in encoder, model.py:12`."""
        results = [facts for _, facts in self.outputs]
        format = next((facts.format for facts in results if not facts.is_finite), self.formats)
        where = site_text(self.id.module_path, self.file, self.line)
        return f"{self.what} in the {format} result of {self.id.op.removesuffix('.default')}{where}"

    def save(self, folder: str | Path) -> Path:
        """Write the call as a script of its own with its inputs into a folder, which is made. RunError if they were not
        kept: the first few findings of a watch have them.
        """
        if self.replay is None:
            where, advice = (Origin(self.file, self.line),), "The first findings of nc.watch(at='op') keep them."
            raise RunError(f"saving {self.id}", "its tensors were not kept", where, advice)
        return Path(self.replay.save(Path(folder), self))

    def __str__(self) -> str:
        if self.made_by == TREND:
            return f"{self.what}, step {self.step}: {self.sentence}\n  {self.advice}"
        lines = [self.in_short()]
        lines += [f"  {name}: {tensor_text(facts)}" for name, facts in (*self.inputs, *self.outputs)]
        return "\n".join([*lines, f"  {self.todo}"] if self.todo else lines)

    def in_short(self) -> str:
        """Return what was made, where and how, without the ranges of its tensors."""
        if self.made_by == TREND:
            return str(self)
        at = f"\n  {self.file}:{self.line}" if self.file else ""
        return f"{self.what} made by {self.id}{at}\n  {self.sentence}"


@dataclass(frozen=True, slots=True)
class GradientFigures:
    """Of a parameter's gradient the largest magnitude, the root mean square, and the share of zeros."""

    largest: float
    rms: float
    zeros: float


@dataclass(slots=True)
class InspectedStep:
    """The gradients before a step of an optimizer, by parameter. step: from 1. scale: by which a scaler had multiplied
    them; None without one. largest: the largest finite magnitude that calls returned in fp16 since the last of these
    steps, by direction.
    """

    step: int
    gradients: dict[str, GradientFigures]
    scale: float | None = None
    largest: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest finite magnitude that was returned in fp16, and the call that did."""

    magnitude: float
    call: CallId


FOR_SCALER = "the scale is too high, the scaler skips this step"
"""Why a gradient's infinity is intentional: a scaler looks for the scale that fits."""


@dataclass(slots=True, repr=False)
class Watching(Result):
    """The result of `nc.watch`.

    findings: in the order in which they were made. intentional: how many infinities were intentional, by reason. calls:
    how many were inspected. spread: how many only passed on what was not finite. steps: of optimizers. history: those
    whose gradients were inspected. repeated: how often a call that is a finding made one again, in a later step or a
    recomputation. not_inspected: how often inspecting failed, as notes say. formats: calls by the format of their
    results. largest: the largest finite magnitude in fp16 by direction, `forward` or `backward`.
    """

    WHAT: ClassVar[str] = "what was watched"
    SCHEMA: ClassVar[str] = "narrowcast.watch/4"

    findings: list[Finding] = field(default_factory=list)
    intentional: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    history: list[InspectedStep] = field(default_factory=list)
    calls: int = 0
    spread: int = 0
    steps: int = 0
    repeated: int = 0
    not_inspected: int = 0
    formats: dict[str, int] = field(default_factory=dict)
    largest: dict[str, Largest] = field(default_factory=dict)

    def count_intentional(self, why: str, times: int = 1) -> None:
        """Count an infinity that was intentional; or, by a negative number, that it was not."""
        self.intentional[why] = self.intentional.get(why, 0) + times
        if not self.intentional[why]:
            del self.intentional[why]

    @property
    def first(self) -> Finding | None:
        """The first finding that is a NaN or an infinity; None where there is none."""
        return next((finding for finding in self.findings if finding.made_by != TREND), None)

    @property
    def verdict(self) -> str:
        """`finite`, `not finite`, `trend`; `not inspected` where nothing was found, and looking failed somewhere."""
        if self.first is not None:
            return NOT_FINITE
        return TREND if self.findings else NOT_INSPECTED if self.not_inspected else FINITE
