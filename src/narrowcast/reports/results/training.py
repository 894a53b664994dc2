"""What `nc.check_training` found in a training loop, as text and JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from narrowcast.core.ledger import Advice
from narrowcast.reports.results.result import Result
from narrowcast.reports.results.verdicts import COSTS_TIME, NOT_INSPECTED, SOUND, WRONG

COST_TIME = ("weights cast again", "no region")
"""Kinds of findings that leave the numbers as they are."""


@dataclass(slots=True, repr=False)
class TrainingCheck(Result):
    """What is wrong with the precision of a training loop.

    times: each finding, in the order in which they were met, with how often it was. steps: how often the step ran.
    calls: how many calls of the forward a region decided about, and how many that it would have lowered ran outside of
    any. not_inspected: how often inspecting failed, as notes say.
    """

    WHAT: ClassVar[str] = "the check of a training loop"
    SCHEMA: ClassVar[str] = "narrowcast.training-check/1"

    times: dict[Advice, int] = field(default_factory=dict, metadata={"name": "findings"})
    steps: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    not_inspected: int = 0

    @property
    def findings(self) -> tuple[Advice, ...]:
        """What is wrong, or costs time, in the order in which it was met."""
        return tuple(self.times)

    @property
    def verdict(self) -> str:
        """`sound`, `costs time` or `wrong`; `not inspected` where nothing is wrong, and looking failed somewhere."""
        if any(finding.kind not in COST_TIME for finding in self.findings):
            return WRONG
        return NOT_INSPECTED if self.not_inspected else COSTS_TIME if self.findings else SOUND

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of findings, each once."""
        return tuple(dict.fromkeys(finding.kind for finding in self.findings))

    def __repr__(self) -> str:
        """In a test, `assert nc.check_training(step)` shows no more than this."""
        first = next((f": {one.kind} ({Path(one.file).name}:{one.line})" for one in self.findings), "")
        more = f" and {len(self.times) - 1} more" if len(self.times) > 1 else ""
        return f"<TrainingCheck: {self.verdict}{first}{more}; print shows it>"

    def __bool__(self) -> bool:
        """Whether nothing is wrong: what costs time alone is shown, and is not."""
        return self.verdict in (SOUND, COSTS_TIME)
