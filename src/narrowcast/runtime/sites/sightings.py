"""Which modules the calls were made in about which a policy's rules ask: a rule about none of them says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch.nn import Module

from narrowcast.core.policy import Policy, Rule, Site, nearest_name
from narrowcast.runtime.sites.python_stack import called_modules, find_site, warn_at

if TYPE_CHECKING:
    from narrowcast.programs.program import Program  # graphs alone have one

_MOST = 4096


class Sightings:
    """The places of calls that rules about modules and classes were asked about, in all regions of a policy."""

    __slots__ = ("_before", "_numbers", "_roots", "_rules", "_sites", "policy")

    def __init__(self, policy: Policy, rules: list[Rule]) -> None:
        self.policy = policy.name
        self._rules = rules  # of which nothing was said, and which matched nothing yet
        self._sites: dict[tuple[object, ...], Site] = {}
        self._roots: WeakSet[Module] = WeakSet()  # the models
        self._before = 0
        self._numbers = {rule: 0 for rule in rules if rule.call is not None}  # the last call seen where it holds

    def see(self, site: Site, op: str, number: int) -> None:
        """Note that a call of this op was made there, the one of this number."""
        for rule in [rule for rule in self._numbers if rule.matches_op(op) and rule.matches_site(site)]:
            if rule.call == number:
                del self._numbers[rule]
            else:
                self._numbers[rule] = max(self._numbers[rule], number)
        if self._rules and len(self._sites) < _MOST and (site.module_path or site.classes or site.functions):
            before = len(self._sites)
            self._sites.setdefault((site.module_path, site.classes, site.around, site.functions), site)
            if len(self._sites) > before and (modules := called_modules()):
                self._roots.add(modules[-1])

    def tell(self, whole: Module | None = None) -> None:
        """Warn, once, of rules that name nothing that was seen: at once where the model has none such, or one with much
        the same name, else, and for functions, when a whole region has shown nothing new. whole: the model, if all its
        calls were seen.
        """
        self._roots.update([whole] if whole is not None else [])
        count, before = len(self._sites) + sum(self._numbers.values()), self._before
        if not count or not (self._rules or self._numbers):
            return
        self._before = count
        modules = (entry for root in self._roots for entry in root.named_modules(remove_duplicate=False))
        named = (Site(path, (f"{type(m).__module__}.{type(m).__qualname__}",)) for path, m in modules)
        sites = [*self._sites.values(), *named]
        unmatched = {rule: text for rule in self._rules if (text := nearest_name(rule, sites))}
        is_over = whole is not None or count == before
        reported = [
            rule for rule, text in unmatched.items()
            if is_over or ("in function" not in text and ("did you mean" in text or self._roots))
        ]  # fmt: skip
        self._rules = [rule for rule in unmatched if rule not in reported]
        for rule, last in list(self._numbers.items()) if is_over else []:
            del self._numbers[rule]
            if last:
                reported.append(rule)
                unmatched[rule] = f"at most {last} such calls are made in one call of a module"
        for rule in reported:
            at = f" ({rule.origin})" if rule.origin is not None else ""
            site = find_site(with_names=False)
            if not site.file and rule.origin is not None:  # the command line runs the model
                site = Site(file=rule.origin.file, line=rule.origin.line)
            warn_at(
                f"narrowcast: policy {self.policy}: the rule {rule}{at} matches nothing here: {unmatched[rule]}. "
                "narrowcast.explain lists what each rule matched",
                site,
            )


def see_all(program: Program, policies: Mapping[str, Policy]) -> None:
    """Note the calls of a graph, which are decided when it is compiled, and not when it runs."""
    for policy in policies.values():
        sightings = sightings_of(policy)
        if sightings is not None:
            for step in program.steps.values():
                if step.region is not None and policy.asks_where(step.op, step.computes):
                    sightings.see(step.site, step.op, step.number)


def tell_whole(policies: Iterable[Policy], model: Any) -> None:
    """Warn of rules that name nothing in a model whose calls were all seen."""
    for policy in policies:
        sightings = sightings_of(policy)
        if sightings is not None and isinstance(model, Module):
            sightings.tell(model)


def sightings_of(policy: Policy) -> Sightings | None:
    """Return the sightings of a resolved policy; None if no rule of the user's asks about modules."""

    def make() -> Sightings | None:
        asked = ("module", "module_class", "function", "call")
        rules = [r for r in policy.rules if not r.is_builtin and any(getattr(r, name) is not None for name in asked)]
        return Sightings(policy, rules) if rules else None

    return policy.remembered("sightings", make)
