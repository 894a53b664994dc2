"""Lint: what is legal in a policy but probably a mistake; and rules about modules that match none of those that were
seen, with the nearest name that would.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from narrowcast.core.policy.known_ops import known_ops, unknown_op
from narrowcast.core.policy.policy import Policy
from narrowcast.core.policy.rules import MODULE_CALL, Kind, Rule, Site
from narrowcast.core.policy.settings import DEVICE_TYPES
from narrowcast.core.policy.table import LintLine, RuleTable
from narrowcast.output.words import did_you_mean


def lint_policy(policy: Policy) -> tuple[LintLine, ...]:
    """Return findings: rules that can never match or change nothing, unknown ops, overlaps decided by mere order.

    Contradictions between rows about exactly the same calls are no lint: a policy that has them does not load.
    """
    ops = known_ops()
    findings: list[LintLine] = []
    for number, layer in enumerate(policy.layers):
        for rule in layer:
            found = unknown_op(rule)
            if found is not None:
                findings.append(LintLine("unknown op", rule, f"{rule.op}: {found}", rule.origin))
                continue
            is_name = rule.is_pattern and not rule.is_glob  # of a module's call, or of an op that is not listed
            named = [op for op in ops if rule.matches_op(op)] if rule.is_pattern else [rule.target]
            covered = named or [rule.target + ".default" * is_name]
            shadow = _shadow(policy, number, rule, covered)
            if shadow is not None:
                message = f"{rule} can never apply: {shadow} ({shadow.origin or 'no file'}) always comes first"
                findings.append(LintLine("never matches", rule, message, rule.origin))
            elif rule.is_unconditional and _changes_nothing(rule, covered, _bases(policy.extends)):
                message = f"{rule} is what {', '.join(policy.extends)} says anyway, on every device"
                findings.append(LintLine("changes nothing", rule, message, rule.origin))
        findings += _overlaps(layer)
    return tuple(findings)


@lru_cache(maxsize=16)
def _bases(extends: tuple[str, ...]) -> tuple[RuleTable, ...]:
    return tuple(Policy("base", extends=extends).resolve(device).table for device in DEVICE_TYPES)


def _shadow(policy: Policy, number: int, rule: Rule, ops: list[str]) -> Rule | None:
    """Return the rule that always wins over this one, for every op it names: unconditional and stronger."""
    if rule.argument is not None:
        return None
    table = RuleTable(policy.layers[number:])
    winners = [table.candidates(op, direction=rule.direction).whole for op in ops]
    return None if any(rule in whole for whole in winners) else winners[0][-1]


def _changes_nothing(rule: Rule, ops: list[str], bases: tuple[RuleTable, ...]) -> bool:
    if rule.argument is not None or rule.action.kind is Kind.REFUSE:
        return False
    winners = (table.candidates(op, direction=rule.direction).whole for table in bases for op in ops)
    return all(whole and whole[0].action == rule.action for whole in winners)


def _overlaps(layer: tuple[Rule, ...]) -> list[LintLine]:
    """Return pairs about the same op, equally specific, with different places that may both hold: order decides."""
    findings = []
    by_key: dict[tuple[object, ...], Rule] = {}
    for rule in layer:
        key = (rule.op, rule.argument, rule.specificity)
        earlier = by_key.get(key)
        if earlier is not None and earlier.action != rule.action and not rule.override and _may_meet(earlier, rule):
            other = f"{earlier} ({earlier.origin or 'no file'})"
            message = f"{rule} and {other} are equally specific; where both hold, the later wins"
            findings.append(LintLine("overlap", rule, message, rule.origin))
        by_key[key] = rule
    return findings


def _may_meet(a: Rule, b: Rule) -> bool:
    """Return whether two rules may hold at one place: not with different paths without wildcards, or call numbers."""
    if None not in (a.call, b.call) and a.call != b.call:
        return False
    fixed = all(p is not None and not set(p) & set("*?[") for p in (a.module, b.module))
    return not fixed or a.module == b.module


def nearest_name(rule: Rule, sites: Iterable[Site]) -> str:
    """Return where no call was made, and `(did you mean ...?)`; empty if module, class and function fit the rule's."""
    sites = list(sites)
    if rule.module is not None and not any(_fits(Rule(rule.op, rule.action, module=rule.module), p) for p in sites):
        names = sorted({name for p in sites for path in p.paths for name in _patterns(path)} - {""})
        return f'no call was made in module "{rule.module}"{did_you_mean(rule.module, names)}'
    of_class = Rule(rule.op, rule.action, module_class=rule.module_class)
    if rule.module_class is not None and not any(_fits(of_class, p) for p in sites):
        names = sorted({tail for p in sites for name in p.classes for tail in (name, name.rpartition(".")[2])})
        near = did_you_mean(rule.module_class, names)
        return f'no call was made in a module of class "{rule.module_class}"{near}'
    of_function = Rule("aten.*", rule.action, function=rule.function)
    if rule.function is not None and not any(of_function.matches_site(p) for p in sites):
        names = sorted({name for p in sites for name in p.functions})
        return f'no call was made in function "{rule.function}"{did_you_mean(rule.function, names)}'
    return ""


def _fits(rule: Rule, site: Site) -> bool:
    """Return whether a module on the way to the place is one that the rule is about."""
    if rule.op != MODULE_CALL or rule.module is None:
        return rule.matches_site(site)
    inside = Rule("aten.*", rule.action, module=rule.module)  # a call inside a module tells that the module is there
    return inside.matches_site(site)


def _patterns(path: str) -> list[str]:
    """Return a path, those around it, and each with its numbers as stars, as people write them."""
    parts = path.split(".")
    patterns = []
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        starred = ".".join("*" if part.isdigit() else part for part in parts[:end])
        patterns += [name, starred]
    return patterns
