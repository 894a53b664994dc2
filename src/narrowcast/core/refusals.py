"""What is raised for a call that a policy refuses, in every front end."""

from __future__ import annotations

from narrowcast.core.decide import Plan
from narrowcast.core.policy import MODULE_CALL_OP, Policy, Rule, Site
from narrowcast.errors import Origin, RefusedError


def refusal(plan: Plan, op: str, site: Site) -> RefusedError:
    """Return the error for a call of this op id, or of a module, that must not run."""
    if op == MODULE_CALL_OP:
        asked = f"the call of {site.classes[0] if site.classes else 'a module'}"
        advice = "Do not call it here, or change the rule."
    else:
        asked = f"{op} under autocast"
        advice = 'Cast its inputs yourself, or give the op a rule: action = "align", "full" or "follow".'
    return RefusedError(asked, plan.refused or "", origins(site, plan.rule), advice)


def check_counted(policy: Policy, op: str, site: Site, computes: bool = True) -> None:
    """Raise RefusedError if a rule is about the n-th call of this op here, and nobody can say which call this is.

    So it is where the graph begins inside a module's call, and where an op may run more or less often: in a branch, in
    a loop, and behind them.
    """
    known = policy.table.candidates(op, computes)
    rule = next((r for r in (*known.per_argument, *known.whole) if r.call is not None and r.matches_site(site)), None)
    if rule is not None:
        asked, found = f"a rule about call {rule.call} of {op}", "which call this is, is not known before it runs"
        eager = "run it as eager code, where calls are counted as the model runs"
        advice = f"Name the module, class or function that contains it instead; or {eager}."
        raise RefusedError(asked, found, origins(site, rule), advice)


def origins(site: Site, rule: Rule | None) -> tuple[Origin, ...]:
    """Return where a call is made, as far as it is known, and where the rule about it was written."""
    module = f"in module {site.module_path}" if site.module_path else ""
    where = [Origin(site.file, site.line, module)] if site.file else []
    if rule is not None and rule.origin is not None:
        where.append(Origin(rule.origin.file, rule.origin.line, f"the rule: {rule}"))
    return tuple(where)
