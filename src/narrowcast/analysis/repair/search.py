"""How few rules suffice: chosen by what each is worth, and dropped again where the model does without.

Nothing here runs a model; what does is given as a function, and counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

R = TypeVar("R", bound=Hashable)

RUNS_PER_RULE, RUNS_BESIDE = 2, 5
"""A repair runs the model at most so often: twice for each rule that it ends with, and five times beside."""
MARGIN = 0.9
"""Rules are chosen for a little less error than is allowed, since what they are worth is estimated."""


def may_run(runs: int, rules: int) -> bool:
    """Whether the model may run once more, if the repair then ends with this many rules."""
    return runs + 1 <= RUNS_PER_RULE * rules + RUNS_BESIDE


def choose(worth: Mapping[R, float], wanted: float) -> list[R]:
    """The fewest rules after which the error is at most `wanted` times what it is now, the most worthy first.

    worth: by rule, what part it has in the square of the error. Parts without a value (NaN, infinity) come first.
    """
    sizes = {rule: part if math.isfinite(part) else math.inf for rule, part in worth.items()}
    ordered = sorted(sizes, key=lambda rule: -sizes[rule])
    whole = left = sum(part for part in sizes.values() if math.isfinite(part))
    chosen: list[R] = []
    for rule in ordered:
        if sizes[rule] < math.inf and left <= whole * (MARGIN * wanted) ** 2:
            break
        if sizes[rule] > 0:
            chosen.append(rule)
            left -= sizes[rule] if sizes[rule] < math.inf else 0.0
    return chosen


@dataclass(slots=True)
class Dropping(Generic[R]):
    """Leaves rules out, as long as the run stays clean.

    clean: runs the model with these rules; whether nothing is wrong, and a sentence that says what is. runs: how often
    the model has run. wrong: sets of rules with which a run was not clean, and what was wrong then: fewer rules of the
    same are not tried. ranked: rules of which, where a lighter one is needed, the heavier ones are, too.
    """

    clean: Callable[[tuple[R, ...]], tuple[bool, str]]
    runs: Callable[[], int]
    wrong: list[tuple[frozenset[R], str]] = field(default_factory=list)
    ranked: frozenset[R] = frozenset()
    needed: dict[R, str] = field(default_factory=dict)
    untried: list[R] = field(default_factory=list)
    dropped: list[R] = field(default_factory=list)

    def run(self, rules: Sequence[R], worth: Mapping[R, float]) -> tuple[R, ...]:
        """The rules that are left. The lightest are tried first, and in groups that grow while nothing is missed."""
        kept = list(rules)
        waiting = sorted(rules, key=lambda rule: worth.get(rule, math.inf))
        size = 1
        while waiting:
            group = waiting[:size]
            rest = tuple(rule for rule in kept if rule not in group)
            outcome, said = self._without(rest)
            if outcome is None:
                self.untried += waiting
                break
            if outcome:
                kept, waiting = list(rest), waiting[size:]
                self.dropped += group
                size *= 2
            elif len(group) > 1:
                size = len(group) // 2
            else:
                self.needed[group[0]] = said
                waiting = self._heavier(group[0], waiting[1:])
                size = 1
        return tuple(kept)

    def _without(self, rest: tuple[R, ...]) -> tuple[bool | None, str]:
        """Whether the rest suffices; None if the model may not run for it."""
        for rules, said in self.wrong:
            if set(rest) <= rules:
                return False, said if set(rest) == rules else ""
        if not may_run(self.runs(), len(rest)):
            return None, ""
        outcome, said = self.clean(rest)
        if not outcome:
            self.wrong.append((frozenset(rest), said))
        return outcome, said

    def _heavier(self, needed: R, waiting: list[R]) -> list[R]:
        """Those that are still to be tried, once one is known to be needed."""
        if needed not in self.ranked:
            return waiting
        for rule in waiting:
            if rule in self.ranked:
                self.needed.setdefault(rule, "")
        return [rule for rule in waiting if rule not in self.ranked]
