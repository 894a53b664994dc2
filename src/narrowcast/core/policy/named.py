"""Policies by name."""

from __future__ import annotations

from pathlib import Path

from narrowcast.core.policy.policy import Policy, known_policy
from narrowcast.core.policy.settings import check_builtin_name


def as_policy(wanted: Policy | str | Path | None) -> Policy:
    """A policy given as itself, as the name of a built-in one (native, safe, ipex, native:cuda), as a file's path, or
    as the digest of one that is in use, which is how compiled code names them.

    None is native. Raises PolicyError for a name that is neither.
    """
    if isinstance(wanted, Policy):
        return wanted
    if wanted is None or wanted == "native":
        return Policy.native()
    in_use = known_policy(str(wanted))
    if in_use is not None:
        return in_use
    if str(wanted).endswith(".toml"):
        return Policy.load(Path(wanted))
    check_builtin_name(str(wanted))
    return Policy.load(str(wanted))
