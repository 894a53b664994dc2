"""Policies: rules as data, their precedence, their TOML text form and their lint."""

from narrowcast.policy.known_ops import known_ops
from narrowcast.policy.lacks import Lack
from narrowcast.policy.lint import Finding, lint_policy
from narrowcast.policy.policy import (
    Policy,
    RuleChange,
    as_policy,
    known_policy,
)
from narrowcast.policy.rules import (
    ACTIONS,
    MODULE_CALL,
    MODULE_CALL_OP,
    NOWHERE,
    RESULT,
    Action,
    Kind,
    Rule,
    Site,
    did_you_mean,
    parse_action,
)
from narrowcast.policy.settings import CACHES, DEVICE_TYPES, check_device_type
from narrowcast.policy.table import Candidates, Table
from narrowcast.policy.unmatched import nearest_name
from narrowcast.policy.versions import in_range, installed_torch

__all__ = [
    "ACTIONS",
    "CACHES",
    "DEVICE_TYPES",
    "MODULE_CALL",
    "MODULE_CALL_OP",
    "NOWHERE",
    "RESULT",
    "Action",
    "Candidates",
    "Finding",
    "Kind",
    "Lack",
    "Policy",
    "Rule",
    "RuleChange",
    "Site",
    "Table",
    "as_policy",
    "check_device_type",
    "did_you_mean",
    "in_range",
    "installed_torch",
    "known_ops",
    "known_policy",
    "lint_policy",
    "nearest_name",
    "parse_action",
]
