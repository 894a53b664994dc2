"""What a user asks of the formats: the goal, with what belongs to it, and what is done about weights.

`goal="fast"` and `goal=Goal.fast()` are the same; the method takes the settings of the goal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from narrowcast.errors import GoalError
from narrowcast.output.words import did_you_mean

EXACT, FAST, MEMORY = "exact", "fast", "memory"
GOALS = (EXACT, FAST, MEMORY)
CAST, FOLDED, WORKING = "cast", "folded", "working_copies"
WEIGHTS = (CAST, FOLDED, WORKING)
GoalName = Literal["exact", "fast", "memory"]
WeightsName = Literal["cast", "folded", "working_copies"]


@dataclass(frozen=True, slots=True)
class Goal:
    """What is wanted: `Goal.fast(...)`, `Goal.memory(...)`, or by the name of its kind.

    kind:    `exact`: every bit as in eager code; `fast`: least time, never less precise per op than the policy;
             `memory`: fewest bytes at once, forward and backward.
    verify:  time the candidates on real inputs and keep the best.
    weights: `cast` at every call; `folded`: where no gradient flows, once, and kept; `working_copies`: folded, and in
             training a low copy that is made again after the weight has changed.
    profile: path of a profile to plan with; empty for this device's own.
    memory_limit_bytes: for `fast`: what is kept for the backward, and in cast copies, may take at most this.
    slowdown_limit: for `memory`: it may be predicted to take at most this many times the fastest formats' time.

    Raises GoalError for a value that a setting cannot have.
    """

    kind: str = EXACT
    verify: bool = True
    weights: str = FOLDED
    profile: str = ""
    memory_limit_bytes: int | None = None
    slowdown_limit: float = 2.0

    def __post_init__(self) -> None:
        profile, limit, times = self.profile, self.memory_limit_bytes, self.slowdown_limit
        is_limit = limit is None or (type(limit) is int and limit > 0)
        is_times = isinstance(times, int | float) and not isinstance(times, bool) and times >= 1
        for name, is_right, wanted in (
            ("kind", self.kind in GOALS, f"one of {', '.join(map(repr, GOALS))}"),
            ("verify", isinstance(self.verify, bool), "True or False"),
            ("weights", self.weights in WEIGHTS, f"one of {', '.join(map(repr, WEIGHTS))}"),
            ("profile", isinstance(profile, str), "the path of a file"),
            ("memory_limit_bytes", is_limit, "a positive number of bytes; Goal.memory() takes as little as it can"),
            ("slowdown_limit", is_times, "a number that is at least 1: 4 allows up to four times the time"),
        ):
            if not is_right:
                maker = f"Goal.{self.kind}" if self.kind in (FAST, MEMORY) else "Goal"
                raise GoalError(
                    f"{maker}({name}={getattr(self, name)!r})", "not a value of it", advice=f"Give {wanted}."
                )

    @property
    def places(self) -> bool:
        """Whether calls may have other formats than the policy's."""
        return self.kind != EXACT

    @property
    def races(self) -> bool:
        """Whether candidates are timed; where memory counts, the prediction decides."""
        return self.verify and self.kind == FAST and self.memory_limit_bytes is None

    @staticmethod
    def fast(*, profile: str | Path = "", memory_limit_bytes: int | None = None, verify: bool = True) -> Goal:
        """Return the goal of the fastest formats on this device, never less precise per op than the policy.

        profile: file of a profile to plan with, instead of this device's own (another device's only with
            verify=False).
        memory_limit_bytes: what may be kept for the backward and in cast copies, per graph; the prediction then
            decides.
        verify: compile and time the candidates on the first call's inputs and keep the best, which is remembered on
            disk.

        Raises GoalError.
        """
        return Goal(FAST, verify, profile=_path(profile), memory_limit_bytes=memory_limit_bytes)

    @staticmethod
    def memory(*, profile: str | Path = "", slowdown_limit: float = 2.0) -> Goal:
        """Return the goal of the fewest bytes held at once, in formats never less precise per op than the policy.

        profile: as for `fast`. slowdown_limit: they may be predicted to take at most this many times as long as the
            fastest formats; where fewer bytes take longer, a warning says so.

        Raises GoalError.
        """
        return Goal(MEMORY, profile=_path(profile), slowdown_limit=slowdown_limit)


def _path(profile: str | Path) -> str:
    return str(profile) if isinstance(profile, Path) else profile


def as_goal(goal: str | Goal, weights: str | None = None) -> Goal:
    """Return the goal that a user wrote. Raise GoalError for an unknown one, or for two choices about weights."""
    if not isinstance(goal, Goal):
        if goal not in GOALS:
            advice = f"Give one of {', '.join(map(repr, GOALS))}, Goal.fast(...) or Goal.memory(...)."
            raise GoalError(f"goal={goal!r}", f"not a goal{did_you_mean(str(goal), GOALS)}", advice=advice)
        goal = Goal(goal)
    if weights is None:
        weights = goal.weights
    if goal.weights not in (FOLDED, weights):
        found = f"the goal has weights={goal.weights!r}"
        raise GoalError(f"weights={weights!r} with {goal!r}", found, advice="Give it in one place.")
    return replace(goal, weights=weights)
