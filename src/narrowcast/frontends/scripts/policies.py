"""The policies that scripts name: a graph can hold a policy's digest, and nothing more."""

from __future__ import annotations

from narrowcast.core.policy import Policy, as_policy, known_policy

_in_scripts: dict[str, Policy] = {}  # by digest; torch never frees scripts either


def hold_policy(policy: Policy) -> str:
    """Hold a policy that a script is to name; its digest."""
    _in_scripts[policy.digest] = policy
    return policy.digest


def told_policy(name: str) -> Policy | None:
    """The policy that a script names, by digest, name or path; None for torch's own, which has no name in a script."""
    found = _in_scripts.get(name)
    if found is None and name:
        found = known_policy(name) or as_policy(name)
        _in_scripts[found.digest] = found
    return found
