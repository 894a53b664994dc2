"""What a user asks of the formats: the goal, what is done about weights, whether candidates are timed."""

from __future__ import annotations

from dataclasses import dataclass

from narrowcast.errors import GoalError

EXACT, FAST, MEMORY = "exact", "fast", "memory"
GOALS = (EXACT, FAST, MEMORY)
CAST, FOLDED, WORKING = "cast", "folded", "working_copies"
WEIGHTS = (CAST, FOLDED, WORKING)


@dataclass(frozen=True, slots=True)
class Goal:
    """What is wanted.

    kind:    `exact`: every bit as in eager code; `fast`: least time, never less precise per op than the policy;
             `memory`: fewest bytes for the backward, and in cast copies.
    verify:  time the candidates on real inputs and keep the best.
    weights: `cast` at every call; `folded`: where no gradient flows, once, and kept; `working_copies`: folded, and in
             training a low copy that is made again after the weight has changed.
    profile: path of a profile to plan with; empty for this device's own.
    memory_limit_bytes: for `fast`: what is kept for the backward, and in cast copies, may take at most this.
    slowdown_limit: for `memory`: it may be predicted to take at most so many times the fastest formats' time.
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


def as_goal(
    kind: str,
    verify: bool = True,
    weights: str = FOLDED,
    profile: str = "",
    memory_limit_bytes: int | None = None,
    slowdown_limit: float = 2.0,
) -> Goal:
    """The goal that a user wrote. GoalError for what does not exist, or does not go together."""
    if kind not in GOALS:
        raise GoalError(f"goal={kind!r}", "no such goal", advice=f"Give one of: {', '.join(map(repr, GOALS))}.")
    if weights not in WEIGHTS:
        raise GoalError(
            f"weights={weights!r}", "no such choice", advice=f"Give one of: {', '.join(map(repr, WEIGHTS))}."
        )
    for name, value, wanted in (("verify", verify, bool), ("profile", profile, str)):
        if not isinstance(value, wanted):
            raise GoalError(f"{name}={value!r}", f"a {type(value).__name__}", advice=f"Give a {wanted.__name__}.")
    is_count = isinstance(memory_limit_bytes, int) and not isinstance(memory_limit_bytes, bool)
    if memory_limit_bytes is not None and (kind != FAST or not is_count or memory_limit_bytes <= 0):
        raise GoalError(
            asked=f"memory_limit_bytes={memory_limit_bytes} with goal={kind!r}",
            found="a limit is a positive number of bytes, and goes with goal='fast'",
            advice="Write goal='fast', memory_limit_bytes=2**30; goal='memory' takes as little as it can.",
        )
    is_number = isinstance(slowdown_limit, (int, float)) and not isinstance(slowdown_limit, bool)
    if not is_number or not slowdown_limit >= 1:
        raise GoalError(
            asked=f"slowdown_limit={slowdown_limit!r}", found="a limit is a number, and at least 1",
            advice="Write slowdown_limit=4 to let goal='memory' take up to four times the time.",
        )  # fmt: skip
    if profile and kind == EXACT:
        raise GoalError(
            asked=f"profile={profile!r} with goal='exact'", found="it decides without times",
            advice="Write goal='fast', or leave the profile away.",
        )  # fmt: skip
    return Goal(kind, verify, weights, profile, memory_limit_bytes, slowdown_limit)
