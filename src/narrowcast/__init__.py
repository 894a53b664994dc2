"""Narrowcast: mixed precision for PyTorch that you can see, steer and trust."""

from narrowcast import errors, formats
from narrowcast.decide import Argument, Call, Plan, Region, decide
from narrowcast.eager import autocast, record
from narrowcast.explain import Subject, explain
from narrowcast.formats import Format, is_exact, widest
from narrowcast.ledger import Cast, Ledger, Refusal
from narrowcast.policy import Action, Place, Policy, Rule, lint_policy
from narrowcast.report import Explanation

__version__ = "0.1.0.dev0"

__all__ = [
    "Action",
    "Argument",
    "Call",
    "Cast",
    "Explanation",
    "Format",
    "Ledger",
    "Place",
    "Plan",
    "Policy",
    "Refusal",
    "Region",
    "Rule",
    "Subject",
    "__version__",
    "autocast",
    "decide",
    "errors",
    "explain",
    "formats",
    "is_exact",
    "lint_policy",
    "record",
    "widest",
]
