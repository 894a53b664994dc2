"""What `nc.check_training` found in a training loop, as text and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

from narrowcast.core.ledger import Advice
from narrowcast.reports.results.result import Result

SCHEMA = "narrowcast.training-check/1"
COST_TIME = ("weights cast again",)
"""Kinds of findings that leave the numbers as they are."""


@dataclass(slots=True)
class TrainingCheck(Result):
    """What is wrong with the precision of a training loop.

    findings: in the order in which they were met, each with how often. steps: how often the step ran. calls: how many
    calls of the forward a region decided about, and how many that it would have lowered ran outside of any.
    """

    WHAT: ClassVar[str] = "the check of a training loop"

    findings: tuple[Advice, ...] = ()
    times: dict[Advice, int] = field(default_factory=dict)
    steps: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of findings, each once."""
        return tuple(dict.fromkeys(finding.kind for finding in self.findings))

    def __bool__(self) -> bool:
        """Whether nothing is wrong: what costs time alone is shown, and is not."""
        return all(finding.kind in COST_TIME for finding in self.findings)

    def __repr__(self) -> str:
        return f"<TrainingCheck: {len(self.findings)} findings in {self.steps} steps; print shows them>"

    def data(self) -> dict[str, Any]:
        """What is written as JSON."""
        rows = [{**asdict(finding), "times": self.times.get(finding, 1)} for finding in self.findings]
        return {"schema": SCHEMA, "steps": self.steps, "calls": self.calls, "findings": rows, "notes": self.notes}

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> TrainingCheck:
        """The check that JSON of that schema holds."""
        times: dict[Advice, int] = {}
        for row in data["findings"]:
            names = ("kind", "what", "todo", "module_path", "file", "line")
            times[Advice(**{name: row[name] for name in names})] = int(row["times"])
        return TrainingCheck(tuple(times), times, int(data["steps"]), dict(data["calls"]), list(data["notes"]))
