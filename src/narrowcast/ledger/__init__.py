"""The ledger: cast records, refusals, tallies of calls, and their JSON form."""

from narrowcast.ledger.blocks import TO_RULE_INSIDE, HidingBlock
from narrowcast.ledger.ledger import SCHEMA, CastChange, Ledger
from narrowcast.ledger.records import Advice, CallKind, Cast, EditRecord, Refusal, Tally, Totals

__all__ = [
    "SCHEMA",
    "TO_RULE_INSIDE",
    "Advice",
    "CallKind",
    "Cast",
    "CastChange",
    "EditRecord",
    "HidingBlock",
    "Ledger",
    "Refusal",
    "Tally",
    "Totals",
]
