"""Rules of a policy as pages and screens show them, to be copied. All of them are made here: each loads, names a call
that the model makes, and means only what it stands beside.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from narrowcast.core.ledger.identity import BACKWARD, CallId
from narrowcast.core.policy import RESULT, Kind, Rule
from narrowcast.formats import FORMATS
from narrowcast.reports.documents.model import Node, Shown, Todo

_NUMBER = re.compile(r"(?<=\.)\d+(?![^.])")  # layers of a stack; a number at the root is a module of its own
_NOT_ASKED = ("module.call.", "aten._to_copy.")
"""What is counted as a call, and that no policy is asked about: the call of a module, and a cast."""


def alike_module(path: str) -> str:
    """Return the path without the numbers of layers: modules that differ by these share a line."""
    return _NUMBER.sub("*", path)


def call_rule(op: str, path: str, action: str, reason: str = "") -> Shown:
    """Return the rule that gives an op in a module another action; none for what no policy is asked about."""
    if not action or op.count(".") < 2 or op.startswith(_NOT_ASKED):
        return {}
    rule = {"op": op, "module": glob.escape(path), "action": action, "reason": reason}
    return {key: value for key, value in rule.items() if value}


def glob_unescaped(pattern: str) -> str:
    """Return the path that a glob names, if it was made by escaping one."""
    return re.sub(r"\[([*?[])\]", r"\1", pattern)


def is_low(formats: str) -> bool:
    """Return whether one of these formats (`bf16,fp32`) is lower than fp32."""
    return any(name in FORMATS and FORMATS[name].bits < 32 for name in formats.split(","))


def rule_of_call(call: CallId, computes: str, reason: str = "") -> Shown:
    """Return the rule that keeps a call in fp32; none for one that is not lower, or that autograd makes."""
    action = "full" if is_low(computes) and call.direction != BACKWARD else ""
    return call_rule(call.op, call.module_path, action, reason)


def keeping(op: str, path: str) -> str:
    """Return what the rule that keeps a call in fp32 does, in words; one without a module holds in all."""
    return f"Keep {op}{_in(path)} in fp32"


def _in(path: str) -> str:
    return f" in {path}" if path else ""


def rule_todo(rule: Rule, why: str, together: int = 1) -> Todo:
    """Return what a rule that was tried does, in words, with the rule."""
    path = glob_unescaped(rule.module or "")
    if rule.argument == RESULT:
        what = f"Give what {rule.op}{_in(path)} makes in fp32, and so compute what reads it"
    else:
        op = f"call {rule.call} of {rule.op}" if rule.call else rule.op
        what = keeping(f"{op} for {rule.argument}" if rule.argument else op, path)
        what = what if rule.action.kind is Kind.FULL else f"{rule}"
    return Todo(what, why, rule.keys, path, together)


def high_rule(node: Node) -> Shown:
    """Return the rule that keeps a call in fp32; none for one that is not lower, or that autograd makes."""
    return rule_of_call(CallId(node.path, node.op, direction=node.direction), node.computes)


def changing_action(computes: str, direction: str) -> str:
    """Return the action that has a call compute in another format: high where it is low, and the other way round."""
    if direction != "forward":
        return ""
    return "full" if is_low(computes) else "lower" if computes == "fp32" else ""


def cast_changes(src: str, dst: str) -> str:
    """Return the action that does without a cast: full where it lowers, follow where it widens."""
    lowers = src in FORMATS and dst in FORMATS and FORMATS[dst].bits < FORMATS[src].bits
    return "full" if lowers else "follow"


def agreeing(rules: Iterable[Shown]) -> list[Shown]:
    """Return the rules without those that contradict one before them: about the same calls, `full` is first."""
    rules = list(rules)
    actions: dict[tuple[str, str], str] = {}
    for rule in sorted(filter(None, rules), key=lambda rule: rule["action"] != "full"):
        actions.setdefault(_about(rule), rule["action"])
    return [rule if rule and actions[_about(rule)] == rule["action"] else {} for rule in rules]


def shared_modules(rules: Sequence[Shown], nodes: Sequence[Node]) -> list[tuple[str, str]]:
    """Return ops and globs on modules, `encoder.layer.*.attention`, that represent these rules and no other call.

    Each is for rules of one op whose modules differ by the number of their layers. Of an op that has rules of several
    actions there are none: which of two globs decides where both hold is a matter of their order.
    """
    about = {_about(rule): rule["action"] for rule in rules if rule}
    actions: dict[str, set[str]] = {}
    groups: dict[tuple[str, str], set[str]] = {}
    for (op, module), action in about.items():
        actions.setdefault(op, set()).add(action)
        groups.setdefault((op, alike_module(module)), set()).add(module)
    paths: dict[str, set[str]] = {}
    for node in nodes:
        paths.setdefault(node.op, set()).add(node.path)
    return [
        (op, pattern)
        for (op, pattern), modules in groups.items()
        if len(modules) > 1 and len(actions[op]) == 1 and op in paths
        and all(glob.escape(path) in modules for path in paths[op] if _is_inside(path, pattern))
    ]  # fmt: skip


def _about(rule: Shown) -> tuple[str, str]:
    return rule["op"], rule.get("module", "")


def _is_inside(path: str, pattern: str) -> bool:
    """Return whether a glob names the module, or one around it."""
    return fnmatchcase(path, pattern) or (bool(path) and _is_inside(path.rpartition(".")[0], pattern))
