"""The rules that keep an op inside a module, or its result, in fp32. All rules about ops that are advised, or that a
repair adds, are made here.

A rule names a module and an op, and never a line: so it holds for other inputs, and while the file is edited.
"""

from __future__ import annotations

from narrowcast.core.policy import MODULE_CALL, RESULT, Action, Kind, Rule
from narrowcast.core.policy.rules import naming
from narrowcast.formats import fp32

SOURCE = "narrowcast repair"


def rule_about(
    op: str, module_path: str, kind: Kind = Kind.FULL, reason: str = "", call: int | None = None, source: str = SOURCE
) -> Rule:
    """Return the rule about calls of an op inside a module, or about one of them; at the root, about all calls."""
    return Rule(op, Action(kind), module=naming(module_path), call=call, reason=reason, source=source)


def rule_about_result(op: str, module_path: str, reason: str = "", source: str = SOURCE) -> Rule:
    """Return the rule that makes the result of an op inside a module fp32, and leaves its compute.

    op: MODULE_CALL for the result of the module itself.
    """
    module = naming(module_path) or ("" if op == MODULE_CALL else None)
    return Rule(op, Action(Kind.TO, fp32), module=module, argument=RESULT, reason=reason, source=source)
