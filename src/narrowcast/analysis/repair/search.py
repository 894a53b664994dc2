"""How few rules suffice: chosen by their worth, and dropped again where the model does without them.

Nothing here runs a model itself: the caller passes functions that run it, and that count its runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

R = TypeVar("R", bound=Hashable)

RUNS_PER_RULE, RUNS_BESIDE = 2, 5
"""A repair runs the model at most twice for each rule that it ends with, and five times more."""
MARGIN = 0.9
"""Rules are chosen for a little less error than is allowed, since their worth is an estimate."""


def may_run(runs: int, rules: int) -> bool:
    """Return whether the model may run once more, if the repair then ends with this many rules."""
    return runs + 1 <= RUNS_PER_RULE * rules + RUNS_BESIDE


def choose(worth: Mapping[R, float], wanted: float) -> list[R]:
    """Return the fewest rules after which the error is at most `wanted` times what it is now, by descending worth.

    worth: by rule, its part in the square of the error. Parts without a value (NaN, infinity) come first.
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

    clean: runs the model with these rules; returns whether nothing is wrong, and a sentence about what is. runs:
    returns how often the model has run. wrong: sets of rules with which a run was not clean, and what was wrong then:
    their subsets are not tried. ranked: rules whose worth is known: if one is needed, so are those worth more.
    """

    clean: Callable[[tuple[R, ...]], tuple[bool, str]]
    runs: Callable[[], int]
    wrong: list[tuple[frozenset[R], str]] = field(default_factory=list)
    ranked: frozenset[R] = frozenset()
    needed: dict[R, str] = field(default_factory=dict)
    untried: list[R] = field(default_factory=list)
    dropped: list[R] = field(default_factory=list)

    def run(self, rules: Sequence[R], worth: Mapping[R, float]) -> tuple[R, ...]:
        """Return the rules that are left. Those worth least are tried first, in groups that grow while all is clean."""
        kept = list(rules)
        waiting = sorted(rules, key=lambda rule: worth.get(rule, math.inf))
        size = 1
        while waiting:
            group = waiting[:size]
            rest = tuple(rule for rule in kept if rule not in group)
            outcome, problem = self._without(rest)
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
                self.needed[group[0]] = problem
                waiting = self._heavier(group[0], waiting[1:])
                size = 1
        return tuple(kept)

    def _without(self, rest: tuple[R, ...]) -> tuple[bool | None, str]:
        """Return whether the rest suffices, None if the model may not run for it; and what is wrong."""
        for rules, problem in self.wrong:
            if set(rest) <= rules:
                return False, problem if set(rest) == rules else ""
        if not may_run(self.runs(), len(rest)):
            return None, ""
        outcome, problem = self.clean(rest)
        if not outcome:
            self.wrong.append((frozenset(rest), problem))
        return outcome, problem

    def _heavier(self, needed: R, waiting: list[R]) -> list[R]:
        """Return the rules that are still to be tried, once one is known to be needed."""
        if needed not in self.ranked:
            return waiting
        for rule in waiting:
            if rule in self.ranked:
                self.needed.setdefault(rule, "")
        return [rule for rule in waiting if rule not in self.ranked]
