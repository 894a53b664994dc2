"""The op names of the installed PyTorch, for errors and lint, never for deciding. torch itself is not imported.

Its wheel has them in a text file of torchgen. Where no torch is installed, `builtin/aten_ops.txt` has the names of all
supported versions (`tools/generate_policies.py` writes it). For other namespaces (custom ops) nothing is said here: the
torch half asks the dispatcher when a region opens.
"""

from __future__ import annotations

import importlib.util
import re
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

from narrowcast.core.policy.rules import Rule, did_you_mean
from narrowcast.core.policy.versions import in_range, installed_torch

_DECLARED = re.compile(r"^- func: ([\w.]+)\(", re.MULTILINE)
_GENERATED = re.compile(r"^\s+autogen: (.*)$", re.MULTILINE)


@lru_cache(maxsize=1)
def known_ops() -> tuple[str, ...]:
    """Op ids (`aten.mm.default`), sorted: those of the installed torch, with the few that only its registry has."""
    return tuple(sorted({*declared_ops(), *listed_ops(installed_torch())}))


@lru_cache(maxsize=1)
def declared_ops() -> frozenset[str]:
    """What the installed torch declares; nothing if none is installed."""
    found = importlib.util.find_spec("torchgen")  # a folder of its own beside torch: this imports neither
    file = Path(found.origin or "").parent / "packaged/ATen/native/native_functions.yaml" if found else Path()
    if not file.is_file():
        return frozenset()
    text = file.read_text(encoding="utf-8")
    names = set(_DECLARED.findall(text))
    for line in _GENERATED.findall(text):
        names |= {name.strip() for name in line.split(",")}
    return frozenset(f"aten.{name}" if "." in name else f"aten.{name}.default" for name in names)


@lru_cache(maxsize=8)
def listed_ops(version: str) -> frozenset[str]:
    """What the list that comes with Narrowcast says that this torch has."""
    file = Path(__file__).parent / "builtin" / "aten_ops.txt"
    found = set()
    for line in file.read_text(encoding="utf-8").splitlines()[1:]:
        op, _, versions = line.partition(" ")
        if not versions or in_range(versions, version):
            found.add(op)
    return frozenset(found)


@lru_cache(maxsize=1)
def _packets() -> frozenset[str]:
    return frozenset(op.rpartition(".")[0] for op in known_ops())


def unknown_op(rule: Rule) -> str | None:
    """None where the rule's op exists or cannot be judged; else a phrase naming the nearest op (maybe empty)."""
    if not rule.target.startswith("aten.") or rule.torch is not None:
        return None
    if rule.is_glob:
        known = any(fnmatchcase(op, rule.target) for op in known_ops())
    elif rule.is_pattern:
        known = rule.target in _packets()
    else:
        known = rule.target in known_ops()
    if known:
        return None
    return did_you_mean(rule.target, known_ops() if rule.target.count(".") > 1 else tuple(sorted(_packets())))
