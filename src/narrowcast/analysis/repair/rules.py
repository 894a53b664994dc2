"""Rules that a repair adds about modules, one in the place of several; and the policy with them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from narrowcast.analysis.compare.rules import SOURCE
from narrowcast.core.policy import MODULE_CALL, Action, Kind, Policy, Rule
from narrowcast.core.policy.rules import modules_around, naming
from narrowcast.core.policy.settings import BUILTIN, SETTINGS


def rule_about_module(module_path: str, reason: str = "") -> Rule:
    """Return the rule that runs a module, and all inside it, in fp32."""
    return Rule(MODULE_CALL, Action(Kind.FULL), module=naming(module_path) or "", reason=reason, source=SOURCE)


def with_repairs(policy: Policy, rules: tuple[Rule, ...]) -> Policy:
    """Return the policy with one more layer. A built-in one is extended by name, with the settings that its region was
    given, and not written out.
    """
    if not rules:
        return policy
    name = f"{policy.name.replace(':', '-')}-repaired"
    if policy.name.partition(":")[0] in BUILTIN and (policy.is_native or all(rule.is_builtin for rule in policy.rules)):
        base = Policy.load(policy.name)
        own = {key: value for key in SETTINGS if (value := getattr(policy, key)) != getattr(base, key)}
        return Policy(name, (rules,), extends=(policy.name,), **own)
    return policy.with_rules(rules, name=name)


def folded(chosen: Collection[Rule], known: Collection[Rule]) -> dict[Rule, tuple[Rule, ...]]:
    """Replace rules about the modules inside a module by one about it, where all known ones of them are chosen.

    Returns by resulting rule those of the chosen that it represents.
    """
    covered_by: dict[Rule, tuple[Rule, ...]] = {}
    left = list(chosen)
    while left:
        first = left[0]
        best, covered = first, [first]
        for path in modules_around(first.module or ""):
            alike = [rule for rule in known if (rule.op, rule.call) == (first.op, first.call)]
            inside = [rule for rule in alike if not path or f"{rule.module or ''}.".startswith(f"{path}.")]
            if not set(inside) <= set(chosen):
                break
            if len(inside) > len(covered):
                best, covered = replace(first, module=path or None, reason=""), inside
        covered_by[best] = tuple(rule for rule in left if rule in covered)
        left = [rule for rule in left if rule not in covered]
    return covered_by
