"""The ledger: cast records, refusals, tallies of calls, and their JSON form."""

from narrowcast.ledger.blocks import TO_RULE_INSIDE, HidingBlock
from narrowcast.ledger.ledger import Ledger
from narrowcast.ledger.records import Advice, CallKind, Cast, EditRecord, Refusal, Tally

__all__ = [
    "TO_RULE_INSIDE",
    "Advice",
    "CallKind",
    "Cast",
    "EditRecord",
    "HidingBlock",
    "Ledger",
    "Refusal",
    "Tally",
]
