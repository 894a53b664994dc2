"""The op names of the PyTorch versions that this release knows: for errors and lint, never for deciding.

`builtin/aten_ops.txt` is written by `tools/generate_policies.py` from the installed torch. Under a newer torch, or for
other namespaces (custom ops), a name that is not listed may well exist, so nothing is said about it here; the torch
half asks the dispatcher when a region opens.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

from packaging.version import Version

from narrowcast.policy.policy import installed_torch
from narrowcast.policy.rules import Rule, did_you_mean


@lru_cache(maxsize=1)
def known_ops() -> tuple[str, ...]:
    """Op ids (`aten.mm.default`), sorted."""
    return tuple(line for line in _lines() if not line.startswith("#"))


@lru_cache(maxsize=1)
def _lines() -> tuple[str, ...]:
    file = Path(__file__).parent / "builtin" / "aten_ops.txt"
    return tuple(file.read_text(encoding="utf-8").splitlines())


@lru_cache(maxsize=1)
def listed_torch() -> str:
    """The newest torch version whose ops are listed."""
    return _lines()[0].removeprefix("# torch ").strip()


@lru_cache(maxsize=1)
def _packets() -> frozenset[str]:
    return frozenset(op.rpartition(".")[0] for op in known_ops())


def unknown_op(rule: Rule) -> str | None:
    """None where the rule's op exists or cannot be judged; else a phrase naming the nearest op (maybe empty)."""
    namespace = rule.target.partition(".")[0]
    if namespace != "aten" or rule.torch is not None:
        return None
    if Version(installed_torch()).release > Version(listed_torch()).release:
        return None
    if "*" in rule.target or "?" in rule.target or "[" in rule.target:
        known = any(fnmatchcase(op, rule.target) for op in known_ops())
    elif rule.is_pattern:
        known = rule.target in _packets()
    else:
        known = rule.target in known_ops()
    if known:
        return None
    return did_you_mean(rule.target, known_ops() if rule.target.count(".") > 1 else tuple(sorted(_packets())))
