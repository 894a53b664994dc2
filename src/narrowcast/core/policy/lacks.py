"""What a device cannot run, as a policy knows it."""

from __future__ import annotations

from dataclasses import dataclass

from narrowcast.core.policy.rules import Action, Kind, Rule
from narrowcast.formats import Format

RAISE, FULL = "raise", "full"
UNSUPPORTED = (RAISE, FULL)
"""What becomes of a call that cannot run in the formats that come: the error; or fp32 and the promised result where
the device lacks the format, and one format where several come.
"""
ONE_FORMAT = "what torch raises for mixed formats"
"""The source of rules that align, and that no policy wrote."""


@dataclass(frozen=True, slots=True)
class Lack:
    """A device has no kernel for one op in one format; or, where the format is None, in several formats at once.

    reason: for a reader, `cpu (avx2) has no bf16 lstm`. inside: the op that lacks the kernel, where `op` calls it and
    no rule is about `op` itself: then what the policy says of the one inside counts. low_first: several formats run
    where the first tensor alone is low.
    """

    op: str
    format: Format | None
    reason: str
    inside: str = ""
    low_first: bool = False

    @property
    def rule(self) -> Rule:
        """The rule that represents it in plans, ledgers and explanations."""
        if self.format is None:
            return Rule(self.op, Action(Kind.ALIGN), reason=self.reason, source=ONE_FORMAT)
        return Rule(self.op, Action(Kind.FULL), reason=self.reason, source="capabilities of the device")
