"""What lint finds."""

from __future__ import annotations

from dataclasses import dataclass

from narrowcast.core.policy.rules import Rule
from narrowcast.errors import Origin


@dataclass(frozen=True, slots=True)
class LintLine:
    """One line of lint: what kind, about which rule, and the sentence for a person."""

    kind: str
    rule: Rule
    message: str
    where: Origin | None

    def __str__(self) -> str:
        return f"{self.where or '(no file)'}: {self.kind}: {self.message}"
