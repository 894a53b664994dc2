"""A module's call, decided: it is a call whose arguments have the names that `forward` gives them.

Two carry it out: eager/bounded.py, also where Dynamo traces, and scripts/boundaries.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from narrowcast.core.decide import Argument, Call, Plan, Region, decide
from narrowcast.core.policy import MODULE_CALL_OP, Kind, Policy, Rule, Site
from narrowcast.formats import Format


@dataclass(frozen=True, slots=True)
class Inside:
    """What regions hold inside a module's call.

    goes_on: those around it. low: one in this format, under the policy in force. Neither: autocasting is off.
    """

    goes_on: bool
    low: Format | None


def policy_inside(policy: Policy) -> Policy:
    """Return the policy of a region in a format of its own inside of one under this policy: native for one without
    rules, under which no weight would follow an input to its format.
    """
    return policy if policy.rules else Policy.native()


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """The call of a module at a site, in a region, under a policy."""

    policy: Policy
    region: Region
    site: Site

    def plan(self, name: str = "") -> Plan:
        """Return the plan for the argument of that name; without a name, for the call as a whole."""
        argument = Argument(name, None, self.region.device_type, unknown=True)
        return decide(Call(MODULE_CALL_OP, (argument,), self.site), self.policy, self.region)

    def cast_of(self, name: str) -> tuple[Format | None, bool]:
        """Return what floating tensors of an argument are cast to, None for nothing; and whether fp64 ones are, too."""
        plan = self.plan(name)
        rules = {n: r for n, r in plan.argument_rules if not r.is_about_result}  # an argument may be named so, too
        rule = rules.get(name, plan.rule)
        (dst,) = plan.formats
        return dst, rule is not None and rule.is_exact

    def names(self, name: str) -> bool:
        """Return whether a rule is about the argument of that name."""
        return any(name == named for named, _ in self.plan(name).argument_rules)

    def rule_about(self, name: str) -> Rule | None:
        """Return the rule about an argument, or about `result`, or else about the whole."""
        return self.plan(name).rule_about(name)

    def inside(self, plan: Plan) -> Inside:
        """Return which regions hold inside the module."""
        rule = plan.rule
        if rule is None:
            return Inside(True, None)
        kind = rule.action.kind
        low = self.region.low if kind is Kind.LOWER else rule.action.format
        return Inside(False, low if low is not None and low.bits < 32 else None)
