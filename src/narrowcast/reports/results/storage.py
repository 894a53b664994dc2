"""What `nc.check_storage` found: in which formats training keeps what it trains, in bytes, and what is lost by that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from narrowcast.core.ledger import Advice
from narrowcast.reports.results.result import Result
from narrowcast.reports.results.verdicts import NOT_JUDGED, SOUND, WRONG

KEPT, LOST = "kept", "lost"


@dataclass(slots=True)
class StoredGroup:
    """What is kept of the parameters of one group and format.

    count: of parameters; elements: of theirs on this rank. weight_bytes, gradient_bytes, master_bytes, state_bytes: in
    memory, masters in the optimizer's state apart from its other states (moments), which are there once it has stepped.
    updates: what becomes of updates below half a unit in the last place: `kept`, `lost`, or `not judged`. rate: the
    learning rate that was judged; update: the median size of an update with it. lost: the share of the elements whose
    updates are lost then; lost_at_least: also with the largest that its betas allow; lost_from: the learning rate below
    which half of them are.
    """

    group: int
    format: str
    count: int
    elements: int
    weight_bytes: int = 0
    gradient_bytes: int = 0
    master_bytes: int = 0
    state_bytes: int = 0
    updates: str = NOT_JUDGED
    rate: float | None = None
    update: float | None = None
    lost: float | None = None
    lost_at_least: float | None = None
    lost_from: float | None = None

    @property
    def bytes_per_element(self) -> float:
        """Bytes that an element takes, all together."""
        total = self.weight_bytes + self.gradient_bytes + self.master_bytes + self.state_bytes
        return total / self.elements if self.elements else 0.0


@dataclass(slots=True, repr=False)
class StorageCheck(Result):
    """What is lost by how training keeps its weights. model, optimizer: names of their classes. bytes_before: of all
    together on this rank, before `nc.store` kept them in other formats; 0 where it did not.
    """

    WHAT: ClassVar[str] = "the check of a training's storage"
    SCHEMA: ClassVar[str] = "narrowcast.storage-check/1"

    model: str
    optimizer: str
    groups: list[StoredGroup] = field(default_factory=list)
    findings: list[Advice] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bytes_before: int = 0

    @property
    def verdict(self) -> str:
        """`sound` or `wrong`; `not judged` where no loss is found, and what becomes of some updates is not known."""
        if self.findings:
            return WRONG
        return NOT_JUDGED if any(group.updates == NOT_JUDGED for group in self.groups) else SOUND

    def __bool__(self) -> bool:
        """Whether no loss is found."""
        return not self.findings
