"""A layer of rules, checked: no two of them may be about exactly the same calls."""

from __future__ import annotations

from narrowcast.core.policy.rules import Rule
from narrowcast.errors import Origin, PolicyConflictError, PolicyError


def check_layer(layer: tuple[Rule, ...]) -> None:
    """Refuse duplicates and contradictions: two rules of one layer about exactly the same calls."""
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
        raise PolicyConflictError(
            asked=f"rows of equal specificity disagree about {subject}",
            where=where,
            advice="Delete one, or set override = true on the later row.",
        )
