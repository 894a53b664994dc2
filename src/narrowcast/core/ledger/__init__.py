"""The records of a ledger: casts, refusals, tallies of calls; who a call is; blocks in which a policy is not asked."""

from narrowcast.core.ledger.records import (
    TO_RULE_INSIDE as TO_RULE_INSIDE,
    Advice as Advice,
    CallKind as CallKind,
    Cast as Cast,
    EditRecord as EditRecord,
    HidingBlock as HidingBlock,
    Refusal as Refusal,
    Tally as Tally,
)
