"""Rules about modules that match none of the modules that were seen, with the nearest name that would."""

from __future__ import annotations

from collections.abc import Iterable

from narrowcast.core.policy.rules import MODULE_CALL, Rule, Site, did_you_mean


def nearest_name(rule: Rule, sites: Iterable[Site]) -> str:
    """` module "encoder.layers.*": did you mean 'encoder.layer.*'?`; empty if a module, or class, fits the rule's."""
    sites = list(sites)
    if rule.module is not None and not any(_fits(Rule(rule.op, rule.action, module=rule.module), p) for p in sites):
        names = sorted({name for p in sites for path in p.paths for name in _patterns(path)} - {""})
        return f'module "{rule.module}" names none of the modules{did_you_mean(rule.module, names)}'
    if rule.module_class is not None and not any(
        _fits(Rule(rule.op, rule.action, module_class=rule.module_class), p) for p in sites
    ):
        names = sorted({tail for p in sites for name in p.classes for tail in (name, name.rpartition(".")[2])})
        near = did_you_mean(rule.module_class, names)
        return f'class "{rule.module_class}" names none of the modules\' classes{near}'
    return ""


def _fits(rule: Rule, site: Site) -> bool:
    """Whether a module on the way to the place is one that the rule is about."""
    if rule.op != MODULE_CALL or rule.module is None:
        return rule.matches_site(site)
    inside = Rule("aten.*", rule.action, module=rule.module)  # a call inside a module tells that the module is there
    return inside.matches_site(site)


def _patterns(path: str) -> list[str]:
    """A path, those around it, and each with its numbers as stars, as people write them."""
    parts = path.split(".")
    found = []
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        starred = ".".join("*" if part.isdigit() else part for part in parts[:end])
        found += [name, starred]
    return found
