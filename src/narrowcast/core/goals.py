"""What a user asks of the formats: the goal, with what belongs to it, and what is done about weights.

`goal="fast"` and `goal=Goal.fast()` are the same; the method takes the settings of the goal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from narrowcast.errors import GoalError

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
    """

    kind: str = EXACT
    verify: bool = True
    weights: str = FOLDED
    profile: str = ""
    memory_limit_bytes: int | None = None
    slowdown_limit: float = 2.0

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
        for name, value, wanted in (("verify", verify, bool), ("profile", profile, (str, Path))):
            if not isinstance(value, wanted):
                found = f"a {type(value).__name__}"
                raise GoalError(f"Goal.fast({name}={value!r})", found, advice=f"Give {_WANTED[name]}.")
        is_count = isinstance(memory_limit_bytes, int) and not isinstance(memory_limit_bytes, bool)
        if memory_limit_bytes is not None and (not is_count or memory_limit_bytes <= 0):
            advice = "Write Goal.fast(memory_limit_bytes=2**30); Goal.memory() takes as little as it can."
            asked = f"Goal.fast(memory_limit_bytes={memory_limit_bytes!r})"
            raise GoalError(asked, "a limit is a positive number of bytes", advice=advice)
        return Goal(FAST, verify, profile=str(profile), memory_limit_bytes=memory_limit_bytes)

    @staticmethod
    def memory(*, profile: str | Path = "", slowdown_limit: float = 2.0) -> Goal:
        """Return the goal of the fewest bytes held at once, in formats never less precise per op than the policy.

        profile: as for `fast`. slowdown_limit: they may be predicted to take at most this many times as long as the
            fastest formats; where fewer bytes take longer, a warning says so.

        Raises GoalError.
        """
        if not isinstance(profile, (str, Path)):
            asked, found = f"Goal.memory(profile={profile!r})", f"a {type(profile).__name__}"
            raise GoalError(asked, found, advice=f"Give {_WANTED['profile']}.")
        is_number = isinstance(slowdown_limit, (int, float)) and not isinstance(slowdown_limit, bool)
        if not is_number or not slowdown_limit >= 1:
            asked, found = f"Goal.memory(slowdown_limit={slowdown_limit!r})", "a limit is a number, and at least 1"
            advice = "Write Goal.memory(slowdown_limit=4) to allow up to four times the time."
            raise GoalError(asked, found, advice=advice)
        return Goal(MEMORY, profile=str(profile), slowdown_limit=slowdown_limit)


_WANTED = {"verify": "True or False", "profile": "the path of a file"}


def as_goal(goal: str | Goal, weights: str | None = None) -> Goal:
    """Return the goal that a user wrote. Raise GoalError for an unknown one, or for two choices about weights."""
    if not isinstance(goal, Goal):
        if goal not in GOALS:
            advice = f"Give one of {', '.join(map(repr, GOALS))}, Goal.fast(...) or Goal.memory(...)."
            raise GoalError(f"goal={goal!r}", "no such goal", advice=advice)
        goal = Goal(goal)
    if weights is None:
        weights = goal.weights
    if weights not in WEIGHTS:
        advice = f"Give one of: {', '.join(map(repr, WEIGHTS))}."
        raise GoalError(f"weights={weights!r}", "no such choice", advice=advice)
    if goal.weights not in (FOLDED, weights):
        found = "the goal says another thing of weights"
        raise GoalError(f"weights={weights!r} with {goal!r}", found, advice="Say it once.")
    return replace(goal, weights=weights)
