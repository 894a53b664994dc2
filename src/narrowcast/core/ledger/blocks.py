"""Blocks inside a region in which the region's policy does not rule, and what is to be said of them."""

from __future__ import annotations

from dataclasses import dataclass

from narrowcast.core.ledger.records import Advice
from narrowcast.core.policy import NOWHERE, Site

TO_RULE_INSIDE = (
    'Give the region inner="policy" (in a policy file: inner = "policy") to have the policy hold in such blocks, too'
)

_TO_DECIDE = 'To decide about them, take the block away, and give its module a rule with action = "full".'


@dataclass(frozen=True, slots=True)
class HidingBlock:
    """A block that is opened inside a region, on its device type.

    policy: the one that it hides, being torch's own region; empty if it switches autocasting off. place: where it is
    opened; of a graph, which does not say that, the first call in it.
    """

    policy: str
    device_type: str
    site: Site = NOWHERE

    def advice(self, calls: int) -> Advice:
        """What is to be said if this many calls ran in it."""
        where = f"{self.site.file}:{self.site.line}"
        if self.policy:
            what = (
                f"torch.autocast on {self.device_type}, at {where} inside your region, hides policy "
                f"{self.policy} for {calls} calls"
            )
            kind, todo = "hidden policy", f"{TO_RULE_INSIDE}. Or leave it, if torch's own lists are intended there."
        else:
            what = f"the block at {where} switches autocasting on {self.device_type} off for {calls} calls"
            kind, todo = "switched off", f"Nothing, if it is intended: no policy reaches these calls. {_TO_DECIDE}"
        return Advice(kind, what, todo, *self.site.at)
