"""What is raised for a call that a policy refuses, in every front end."""

from __future__ import annotations

from narrowcast.decide import Plan
from narrowcast.errors import Origin, RefusedError
from narrowcast.policy import MODULE_CALL_OP, Rule, Site


def refusal(plan: Plan, op: str, site: Site) -> RefusedError:
    """The error for a call of this op id, or of a module, that must not run."""
    if op == MODULE_CALL_OP:
        asked = f"the call of {site.classes[0] if site.classes else 'a module'}"
        advice = "Do not call it here, or change the rule."
    else:
        asked = f"{op} under autocast"
        advice = 'Cast its inputs yourself, or give the op a rule: action = "align", "full" or "follow".'
    return RefusedError(asked, plan.refused or "", origins(site, plan.rule), advice)


def origins(site: Site, rule: Rule | None) -> tuple[Origin, ...]:
    """Where a call is made, as far as it is known, and where the rule about it was written."""
    module = f"in module {site.module_path}" if site.module_path else ""
    where = [Origin(site.file, site.line, module)] if site.file else []
    if rule is not None and rule.origin is not None:
        where.append(Origin(rule.origin.file, rule.origin.line, f"the rule: {rule}"))
    return tuple(where)
