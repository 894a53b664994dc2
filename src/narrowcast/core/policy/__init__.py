"""Policies: rules as data, their precedence, their TOML text form and their lint."""

from narrowcast.core.policy.known_ops import (
    in_range as in_range,
    installed_torch as installed_torch,
    known_ops as known_ops,
)
from narrowcast.core.policy.lint import nearest_name as nearest_name
from narrowcast.core.policy.policy import Policy as Policy, as_policy as as_policy, known_policy as known_policy
from narrowcast.core.policy.rules import (
    MODULE_CALL as MODULE_CALL,
    MODULE_CALL_OP as MODULE_CALL_OP,
    NOWHERE as NOWHERE,
    RESULT as RESULT,
    Action as Action,
    Kind as Kind,
    Rule as Rule,
    Site as Site,
    find_allowance as find_allowance,
    parse_action as parse_action,
)
from narrowcast.core.policy.settings import BUILTIN as BUILTIN, DEVICE_TYPES as DEVICE_TYPES, Lack as Lack
