"""In what the environments of two runs differ."""

from __future__ import annotations

from typing import Any


def environments(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, str, str]]:
    """What differs, by name; versions first."""
    flat_a, flat_b = dict(_flat(a)), dict(_flat(b))
    names = sorted({*flat_a, *flat_b} - {"command", "tensors"}, key=lambda n: (_rank(n), n))
    found = [(n, flat_a.get(n, "-"), flat_b.get(n, "-")) for n in names if flat_a.get(n) != flat_b.get(n)]
    return [row for row in found if row[0] != "device" or len({_device(text) for text in row[1:]}) > 1]


def _device(text: str) -> str:
    """Without the version of torch, which its text ends with, and which is told as such."""
    return text.rpartition(", torch ")[0] or text


_FIRST = ("packages.torch", "device", "policy.name", "policy.low", "packages.", "flags.")


def _rank(name: str) -> int:
    """What is told first: that of which one expects most."""
    return next((n for n, start in enumerate(_FIRST) if name == start or (start[-1] == "." and name.startswith(start))),
                len(_FIRST))  # fmt: skip


def _flat(facts: dict[str, Any], before: str = "") -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for name, value in facts.items():
        found += _flat(value, f"{before}{name}.") if isinstance(value, dict) else [(f"{before}{name}", str(value))]
    return found
