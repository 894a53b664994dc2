"""Policies: rules as data, their precedence, their TOML text form and their lint."""

from narrowcast.core.policy.known_ops import known_ops
from narrowcast.core.policy.lacks import Lack
from narrowcast.core.policy.named import as_policy
from narrowcast.core.policy.policy import Policy, known_policy
from narrowcast.core.policy.rules import (
    MODULE_CALL,
    MODULE_CALL_OP,
    NOWHERE,
    RESULT,
    Action,
    Kind,
    Rule,
    Site,
    did_you_mean,
    find_allowance,
    parse_action,
)
from narrowcast.core.policy.settings import BUILTIN, DEVICE_TYPES
from narrowcast.core.policy.unmatched import nearest_name
from narrowcast.core.policy.versions import in_range, installed_torch

__all__ = [
    "BUILTIN",
    "DEVICE_TYPES",
    "MODULE_CALL",
    "MODULE_CALL_OP",
    "NOWHERE",
    "RESULT",
    "Action",
    "Kind",
    "Lack",
    "Policy",
    "Rule",
    "Site",
    "as_policy",
    "did_you_mean",
    "find_allowance",
    "in_range",
    "installed_torch",
    "known_ops",
    "known_policy",
    "nearest_name",
    "parse_action",
]
