"""What became of each step under a scale, as data: rows, and scalars for a writer of others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from narrowcast.reports.results.result import Result
from narrowcast.reports.results.verdicts import NONE_SKIPPED, SKIPPED

KEPT = 10_000
"""How many rows are kept, the latest: a few megabytes."""


@dataclass(frozen=True, slots=True)
class ScaledStep:
    """One update of one scale.

    step: from 1. scale: that the gradients of this step were scaled by. skipped: no optimizer may use them (of one loss
    among several: its own gradients were not finite). why: in words; empty where nothing was skipped. loss: its name,
    empty for the scale that all losses share. parameters: whose gradients were not finite, as far as is known.
    """

    step: int
    scale: float
    skipped: bool
    why: str = ""
    loss: str = ""
    parameters: tuple[str, ...] = ()


class ScalarWriter(Protocol):
    """What TensorBoard's SummaryWriter has, and others have, too."""

    def add_scalar(self, tag: str, value: float, step: int, /) -> object:
        """Note a number under a name, for a step."""


@dataclass(slots=True, repr=False)
class History(Result):
    """The latest steps, oldest first; how many there were in all, and how many of them were skipped."""

    restored_with_owner = True

    WHAT: ClassVar[str] = "the scaler's history"
    SCHEMA: ClassVar[str] = "narrowcast.scaler/1"

    rows: deque[ScaledStep] = field(default_factory=lambda: deque(maxlen=KEPT))
    steps: int = 0
    skipped: int = 0

    def add(self, row: ScaledStep) -> None:
        """Note one more."""
        self.rows.append(row)
        self.steps = max(self.steps, row.step)
        self.skipped += row.skipped

    def __iter__(self) -> Iterator[ScaledStep]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def verdict(self) -> str:
        """`skipped steps`, or `no step skipped`."""
        return SKIPPED if self.skipped else NONE_SKIPPED

    def to_tensorboard(self, writer: ScalarWriter, prefix: str = "scaler", since: int = 0) -> None:
        """Hand `scale` and `skipped` (0 or 1) of each step after `since` to a writer that has `add_scalar`."""
        for row in self.rows:
            if row.step > since:
                name = "/".join(filter(None, (prefix, row.loss)))
                writer.add_scalar(f"{name}/scale", row.scale, row.step)
                writer.add_scalar(f"{name}/skipped", float(row.skipped), row.step)
