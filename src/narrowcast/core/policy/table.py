"""Rules arranged for look-up: for one op id, the candidates in the order in which they win. What changes from one
policy's rules to another's, and what lint finds in one, as data.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from narrowcast.core.policy.rules import Rule
from narrowcast.errors import Origin, PolicyConflictError, PolicyError


@dataclass(frozen=True, slots=True)
class Candidates:
    """The rules that may apply to an op, strongest first.

    `whole` are the rules for the call; the last one is unconditional, or there is none that always holds.
    `per_argument` are those that name one argument. `depends_on_site` says whether any of them asks where the call is.
    """

    whole: tuple[Rule, ...]
    per_argument: tuple[Rule, ...]
    depends_on_site: bool


class RuleTable:
    """The look-up of a policy's rules by op id. Built once per policy; op ids are added as they are met.

    asks_for_names: whether any rule names a module, which may be part of a larger one, a class or a function.
    has_versions: whether one holds in some torch alone.
    """

    __slots__ = ("_globs", "_known", "_named", "_ranked", "asks_for_names", "has_versions")

    def __init__(self, layers: tuple[tuple[Rule, ...], ...]) -> None:
        places = [
            (number, rule.specificity, position)
            for number, layer in enumerate(layers)
            for position, rule in enumerate(layer)
        ]
        self._ranked = [layers[number][position] for number, _, position in sorted(places, reverse=True)]
        self.has_versions = any(rule.torch for rule in self._ranked)
        self.asks_for_names = any(rule.module or rule.module_class or rule.function for rule in self._ranked)
        # by where they stand in that order: rules that name an op or an overload by that name, and the others
        self._named: dict[str, list[int]] = {}
        self._globs = [rank for rank, rule in enumerate(self._ranked) if rule.is_glob]
        for rank, rule in enumerate(self._ranked):
            if not rule.is_glob:
                self._named.setdefault(rule.target, []).append(rank)
        self._known: dict[tuple[str, bool, str], Candidates] = {}

    def candidates(self, op: str, takes_patterns: bool = True, direction: str = "forward") -> Candidates:
        """Return the rules about `op`; patterns count only where `takes_patterns` (it computes and writes nothing)."""
        key = (op, takes_patterns, direction)
        candidates = self._known.get(key)
        if candidates is None:
            candidates = self._known[key] = self._find(*key)
        return candidates

    def _find(self, op: str, takes_patterns: bool, direction: str) -> Candidates:
        ranks = self._named.get(op, [])
        if takes_patterns:
            ranks = sorted([*ranks, *self._named.get(op.rpartition(".")[0], ()), *self._globs])
        possible = (self._ranked[rank] for rank in ranks)
        matching = [r for r in possible if r.matches_direction(direction) and r.matches_op(op)]
        whole: list[Rule] = []
        for rule in matching:
            if rule.argument is None:
                whole.append(rule)
                if rule.is_unconditional:
                    break
        per_argument = tuple(r for r in matching if r.argument is not None)
        depends = any(not r.is_unconditional for r in (*whole, *per_argument))
        return Candidates(tuple(whole), per_argument, depends)


def check_layer(layer: tuple[Rule, ...]) -> None:
    """Refuse duplicates and contradictions: two rules of one layer about exactly the same calls."""
    if isinstance(layer, Rule):
        asked, advice = f"a policy with the layer {layer}", "A layer is a tuple of rules: Policy(name, ((rule, ...),))."
        raise PolicyError(asked, "it is a rule", advice=advice)
    seen: dict[tuple[str | int | None, ...], Rule] = {}
    for rule in layer:
        earlier = seen.get(rule.conditions)
        seen[rule.conditions] = rule
        if earlier is None or (rule.override and rule.action != earlier.action):
            continue
        where = tuple(
            Origin(*((r.origin.file, r.origin.line) if r.origin else ("rule", 0)), note=f'action = "{r.action}"')
            for r in (rule, earlier)
        )
        subject = str(rule).rpartition(":")[0]
        if rule.action == earlier.action:
            raise PolicyError(f"duplicate rows about {subject}", where=where, advice="Delete one.")
        asked = f"rows of equal specificity disagree about {subject}"
        advice = "Delete one, or set override = true on the later row."
        raise PolicyConflictError(asked, where=where, advice=advice)


@dataclass(frozen=True, slots=True)
class RuleChange:
    """One line of a policy diff: the same calls, another action (None: no rule)."""

    conditions: tuple[str | int | None, ...]
    before: Rule | None
    after: Rule | None

    def __str__(self) -> str:
        rule = self.after or self.before
        where = str(rule).rpartition(":")[0]
        return f"{where}: {self.before.action if self.before else '-'} -> {self.after.action if self.after else '-'}"


def changed_rules(old: Iterable[Rule], new: Iterable[Rule]) -> tuple[RuleChange, ...]:
    """Return the calls about which the rules differ. Of several rules about the same calls the last one counts."""
    before, after = {rule.conditions: rule for rule in old}, {rule.conditions: rule for rule in new}
    changes = [RuleChange(k, before.get(k), after.get(k)) for k in before | after]
    return tuple(c for c in changes if c.before is None or c.after is None or c.before.action != c.after.action)


@dataclass(frozen=True, slots=True)
class LintLine:
    """One line of lint: what kind, about which rule, and the sentence for a person."""

    kind: str
    rule: Rule
    message: str
    where: Origin | None

    def __str__(self) -> str:
        return f"{self.where or '(no file)'}: {self.kind}: {self.message}"
