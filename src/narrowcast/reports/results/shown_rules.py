"""A rule as results print it: by the keys of a policy file, as its text."""

from __future__ import annotations

from collections.abc import Mapping

from narrowcast.core.policy import Rule

Shown = dict[str, str]
"""A rule by the keys of a policy file; empty where there is none."""


def shown_rule(rule: Rule) -> Shown:
    """Return a rule that was tried as a table of its keys."""
    said = {"op": rule.op, "module": rule.module, "argument": rule.argument, "action": str(rule.action),
            "reason": rule.reason}  # fmt: skip
    return {key: value or "" for key, value in said.items() if value or (key == "module" and value is not None)}


def rule_text(rule: Mapping[str, str]) -> str:
    """Return the rule in the form of a policy file."""
    return "\n".join(["[[rule]]", *(f"{key} = {_quoted(value)}" for key, value in rule.items())])


def rule_in_line(rule: Rule) -> str:
    """Return the rule on one line: `[[rule]] with op = "aten.mm.default", action = "full"`."""
    first, *lines = rule_text(shown_rule(rule)).split("\n")
    return f"{first} with {', '.join(lines)}"


def _quoted(value: str) -> str:
    """Return a basic string of TOML."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    plain = "".join(c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in escaped)
    return f'"{plain}"'
