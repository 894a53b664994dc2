"""The records of a ledger: casts, refusals, tallies of calls; who a call is; blocks in which a policy is not asked."""

from narrowcast.core.ledger.blocks import TO_RULE_INSIDE, HidingBlock
from narrowcast.core.ledger.records import Advice, CallKind, Cast, EditRecord, Refusal, Tally

__all__ = [
    "TO_RULE_INSIDE",
    "Advice",
    "CallKind",
    "Cast",
    "EditRecord",
    "HidingBlock",
    "Refusal",
    "Tally",
]
