"""What changes from one policy's rules to another's, and what lint finds in one, as data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from narrowcast.core.policy.rules import Rule
from narrowcast.errors import Origin


@dataclass(frozen=True, slots=True)
class RuleChange:
    """One line of a policy diff: the same calls, another action (None: no rule)."""

    conditions: tuple[str | int | None, ...]
    before: Rule | None
    after: Rule | None

    def __str__(self) -> str:
        rule = self.after or self.before
        where = str(rule).rpartition(":")[0]
        return f"{where}: {self.before.action if self.before else '-'} -> {self.after.action if self.after else '-'}"


def changed_rules(old: Iterable[Rule], new: Iterable[Rule]) -> tuple[RuleChange, ...]:
    """The calls about which the rules say something else. Of several about the same calls the last one counts."""
    before, after = {rule.conditions: rule for rule in old}, {rule.conditions: rule for rule in new}
    changes = [RuleChange(k, before.get(k), after.get(k)) for k in before | after]
    return tuple(c for c in changes if c.before is None or c.after is None or c.before.action != c.after.action)


@dataclass(frozen=True, slots=True)
class LintLine:
    """One line of lint: what kind, about which rule, and the sentence for a person."""

    kind: str
    rule: Rule
    message: str
    where: Origin | None

    def __str__(self) -> str:
        return f"{self.where or '(no file)'}: {self.kind}: {self.message}"
