"""The op names of the installed PyTorch, for errors and lint, never for deciding. torch itself is not imported.

Its wheel has them in a text file of torchgen. Where no torch is installed, `builtin/aten_ops.txt` has the names of all
supported versions (`tools/generate_policies.py` writes it). For other namespaces (custom ops) this file knows none: the
torch half asks the dispatcher when a region opens.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

from narrowcast.core.policy.rules import Rule
from narrowcast.output.words import did_you_mean

_DECLARED = re.compile(r"^- func: ([\w.]+)\(", re.MULTILINE)
_GENERATED = re.compile(r"^\s+autogen: (.*)$", re.MULTILINE)


@lru_cache(maxsize=1)
def known_ops() -> tuple[str, ...]:
    """Return the op ids (`aten.mm.default`), sorted, of the installed torch and the few that only its registry has."""
    return tuple(sorted({*declared_ops(), *listed_ops(installed_torch())}))


@lru_cache(maxsize=1)
def declared_ops() -> frozenset[str]:
    """Return the ops that the installed torch declares; nothing if none is installed."""
    spec = importlib.util.find_spec("torchgen")  # a folder of its own beside torch: this imports neither
    file = Path(spec.origin or "").parent / "packaged/ATen/native/native_functions.yaml" if spec else Path()
    if not file.is_file():
        return frozenset()
    text = file.read_text(encoding="utf-8")
    names = set(_DECLARED.findall(text))
    for line in _GENERATED.findall(text):
        names |= {name.strip() for name in line.split(",")}
    return frozenset(f"aten.{name}" if "." in name else f"aten.{name}.default" for name in names)


@lru_cache(maxsize=8)
def listed_ops(version: str) -> frozenset[str]:
    """Return the ops of this torch in the list that comes with Narrowcast."""
    file = Path(__file__).parent / "builtin" / "aten_ops.txt"
    lines = (line.partition(" ") for line in file.read_text(encoding="utf-8").splitlines()[1:])
    return frozenset(op for op, _, versions in lines if not versions or in_range(versions, version))


@lru_cache(maxsize=1)
def _packets() -> frozenset[str]:
    return frozenset(op.rpartition(".")[0] for op in known_ops())


def unknown_op(rule: Rule) -> str | None:
    """Return None where the rule's op exists or cannot be judged; else what is wrong, with the nearest op if any is."""
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
    if rule.is_glob:
        longer = f"{rule.target}*"  # names end with that of an overload: aten.softmax.int
        is_near = any(fnmatchcase(op, longer) for op in known_ops())
        return "PyTorch has no op that it matches" + (f" (did you mean {longer!r}?)" if is_near else "")
    names = known_ops() if rule.target.count(".") > 1 else tuple(sorted(_packets()))
    return f"PyTorch has no such op{did_you_mean(rule.target, names)}"


_READ_OFF = re.compile(r"torch (?P<first>2\.\d+) to (?P<last>2\.\d+)")
_ASSUMED_TORCH = "2.13.0"  # where none is installed


@lru_cache(maxsize=1)
def installed_torch() -> str:
    """Return the version of the installed torch, read from its metadata: this half never imports it."""
    from importlib import metadata

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return _ASSUMED_TORCH


def existing(layers: tuple[tuple[Rule, ...], ...]) -> tuple[tuple[Rule, ...], ...]:
    """Return the rules whose `torch` range holds the installed version, without that range."""
    version = installed_torch()
    rules = ([r for r in layer if in_range(r.torch or "", version)] for layer in layers)
    return tuple(tuple(replace(r, torch=None) if r.torch else r for r in layer) for layer in rules)


def cited(source: str, torch_version: str) -> str:
    """Return the source of a rule that was read off several versions, this one among them, as this one's: `torch
    2.13.0, kernels registered at AutocastCPU`.
    """
    match = _READ_OFF.match(source)
    if match is None or not in_range(f">={match['first']},<={match['last']}.999", torch_version):
        return source
    return f"torch {torch_version}{source[match.end() :]}"


@lru_cache(maxsize=256)
def in_range(versions: str, torch_version: str) -> bool:
    """Return whether a range (`>=2.12,<2.15`; empty for all) holds a version, whatever its build (`2.13.0+cpu`)."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(versions).contains(torch_version.partition("+")[0], prereleases=True)
