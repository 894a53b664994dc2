"""Which torch is installed, and which rules exist in it. torch itself is not imported."""

from __future__ import annotations

import re
from dataclasses import replace

from narrowcast.core.policy.rules import Rule

_READ_OFF = re.compile(r"torch (?P<first>2\.\d+) to (?P<last>2\.\d+)")
_ASSUMED_TORCH = "2.13.0"  # where none is installed


def installed_torch() -> str:
    """The version of the installed torch, read from its metadata: this half never imports it."""
    from importlib import metadata

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return _ASSUMED_TORCH


def existing(layers: tuple[tuple[Rule, ...], ...]) -> tuple[tuple[Rule, ...], ...]:
    """The rules whose `torch` range holds the installed version, without that range."""
    version = installed_torch()
    rules = ([r for r in layer if in_range(r.torch or "", version)] for layer in layers)
    return tuple(tuple(replace(r, torch=None) if r.torch else r for r in layer) for layer in rules)


def cited(source: str, torch_version: str) -> str:
    """The source of a rule that was read off several versions, this one among them, as this one's: `torch 2.13.0,
    kernels registered at AutocastCPU`.
    """
    found = _READ_OFF.match(source)
    if found is None or not in_range(f">={found['first']},<={found['last']}.999", torch_version):
        return source
    return f"torch {torch_version}{source[found.end() :]}"


def in_range(versions: str, torch_version: str) -> bool:
    """Whether a range (`>=2.12,<2.15`; empty for all) holds a version, whatever its build (`2.13.0+cpu`)."""
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(versions).contains(torch_version.partition("+")[0], prereleases=True)
