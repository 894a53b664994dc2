"""What a device cannot run, as a policy knows it."""

from __future__ import annotations

from dataclasses import dataclass

from narrowcast.formats import Format
from narrowcast.policy.rules import Action, Kind, Rule

RAISE, FULL = "raise", "full"
UNSUPPORTED = (RAISE, FULL)
"""What becomes of a call in a format that the device lacks: the device's error, or fp32 and the promised result."""


@dataclass(frozen=True, slots=True)
class Lack:
    """A device has no kernel for one op in one format.

    reason: for a reader, `cpu (avx2) has no bf16 lstm`. inside: the op that lacks the kernel, where `op` calls it and
    no rule is about `op` itself: then what the policy says of the one inside counts.
    """

    op: str
    format: Format
    reason: str
    inside: str = ""

    @property
    def rule(self) -> Rule:
        """The rule that stands for it in plans, ledgers and explanations."""
        return Rule(self.op, Action(Kind.FULL), reason=self.reason, source="capabilities of the device")
