"""The ledger: cast records, refusals, tallies of calls, and their JSON form."""

from narrowcast.ledger.ledger import SCHEMA, CastChange, Ledger, Totals
from narrowcast.ledger.records import Advice, CallKind, Cast, EditRecord, Refusal, Tally

__all__ = ["SCHEMA", "Advice", "CallKind", "Cast", "CastChange", "EditRecord", "Ledger", "Refusal", "Tally", "Totals"]
