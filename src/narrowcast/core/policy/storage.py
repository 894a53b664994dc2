"""The `[storage]` section of a policy: what weights, masters, gradients and moments of training are kept in.

[storage]
weight = "bf16"             # what the model holds: fp32, bf16, fp16; left out, as it is
master = "remainder"        # or "fp32", "none": what is kept besides, so that no update is lost
moments = "fp32"            # or "bf16", "8bit": states of the optimizer that have the weight's shape
gradient = "fp32"           # what gradients are added up in; left out, the weight's format
rounding = "nearest"        # or "stochastic", "kahan": of a weight without a master
seed = 0                    # of stochastic rounding

[[storage.rule]]            # a later one wins
parameter = "*norm*"        # a glob on the parameter's name; or class, of the module that holds it; or group
weight = "fp32"
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from typing import Any

from narrowcast.errors import PolicyError
from narrowcast.output.words import did_you_mean

NONE, FP32, REMAINDER = "none", "fp32", "remainder"
NEAREST, STOCHASTIC, KAHAN = "nearest", "stochastic", "kahan"
BF16, EIGHT_BITS = "bf16", "8bit"
_CHOICES: dict[str, tuple[str, ...]] = {
    "weight": (FP32, BF16, "fp16"),
    "master": (NONE, FP32, REMAINDER),
    "gradient": (FP32, BF16, "fp16"),
    "moments": (FP32, BF16, EIGHT_BITS),
    "rounding": (NEAREST, STOCHASTIC, KAHAN),
}
_ASKED: dict[str, type] = {"parameter": str, "class": str, "group": int}
"""What a rule asks of a parameter, and the types of that."""


@dataclass(frozen=True, slots=True)
class KeptFormats:
    """What is kept of one parameter. weight: a format's name; None as it is. gradient: None as the weight."""

    weight: str | None = None
    master: str = NONE
    gradient: str | None = None
    moments: str = FP32
    rounding: str = NEAREST

    def checked(self, weight: str, name: str) -> KeptFormats:
        """Return this for a weight that is kept in a format, by name; PolicyError where it cannot be."""
        if weight == FP32:  # holds all digits itself
            return replace(self, weight=weight, master=NONE, rounding=NEAREST)
        found, advice = "", ""
        if self.master != NONE and self.rounding != NEAREST:
            found = f'a master ("{self.master}") keeps all digits, and its weight is rounded to nearest'
            advice = 'Write rounding = "nearest", or master = "none".'
        elif self.master == REMAINDER and weight != BF16:
            found, advice = f"a remainder completes bf16, not {weight}", 'Write master = "fp32".'
        elif self.rounding == STOCHASTIC and weight != BF16:
            found = f"stochastic rounding is to bf16, not to {weight}"
            advice = 'Write rounding = "kahan", or master = "fp32".'
        if found:
            raise PolicyError(f"storage of {name}", found, advice=advice)
        return replace(self, weight=weight)


@dataclass(frozen=True, slots=True)
class StorageRule:
    """What some parameters keep otherwise. asked: what it asks of a parameter, by key. kept: what it says."""

    asked: tuple[tuple[str, str | int], ...]
    kept: tuple[tuple[str, str], ...]

    def is_about(self, name: str, classes: tuple[str, ...], group: int) -> bool:
        """Return whether it is about a parameter of that name, in a module of these names of classes, in a group."""
        asks = dict(self.asked)
        return (
            fnmatchcase(name, str(asks.get("parameter", "*")))
            and any(fnmatchcase(one, str(asks.get("class", "*"))) for one in classes)
            and asks.get("group", group) == group
        )


@dataclass(frozen=True, slots=True)
class Storage:
    """The section as data: what holds for all parameters, rules for some, and the seed of stochastic rounding."""

    kept: KeptFormats = KeptFormats()
    rules: tuple[StorageRule, ...] = ()
    seed: int = 0

    @staticmethod
    def of(table: Mapping[str, Any]) -> Storage:
        """Return what a table says, as TOML has it. PolicyError for a key or a value that there is not."""
        rows = table.get("rule", [])
        if not isinstance(rows, list | tuple) or not all(isinstance(row, Mapping) for row in rows):
            raise PolicyError("rule of [storage]", f"a {type(rows).__name__}", advice="Write [[storage.rule]] tables.")
        own = _said({key: value for key, value in table.items() if key not in ("rule", "seed")}, "[storage]")
        seed = table.get("seed", 0)
        if type(seed) is not int:
            raise PolicyError(f"seed {seed!r} of [storage]", "it is no whole number", advice="Write seed = 0.")
        return Storage(KeptFormats(**own), tuple(_rule(row) for row in rows), seed)

    def of_parameter(self, name: str, classes: tuple[str, ...], group: int) -> KeptFormats:
        """Return what is kept of a parameter: what all keep, and what the rules about it say, the last one first."""
        said = [dict(rule.kept) for rule in self.rules if rule.is_about(name, classes, group)]
        return replace(self.kept, **{key: value for one in said for key, value in one.items()})

    def table(self) -> dict[str, Any]:
        """Return the section as a table of TOML; `Storage.of` makes an equal one of it."""
        said = {f.name: getattr(self.kept, f.name) for f in fields(KeptFormats)}
        table: dict[str, Any] = {k: v for k, v in said.items() if v is not None and v != getattr(KeptFormats(), k)}
        if self.seed:
            table["seed"] = self.seed
        if self.rules:
            table["rule"] = [dict(rule.asked) | dict(rule.kept) for rule in self.rules]
        return table

    @property
    def digest(self) -> str:
        """64 hexadecimal digits that change when the section does; a policy's own digest does not."""
        return hashlib.sha256(repr((self.kept, self.rules, self.seed)).encode()).hexdigest()


def _rule(row: Mapping[str, Any]) -> StorageRule:
    asked = {key: row[key] for key in _ASKED if key in row}
    for key, value in asked.items():
        if type(value) is not _ASKED[key]:
            found = f"a value of type {type(value).__name__}"
            raise PolicyError(f"key {key!r} of a storage rule", found, advice=f"Give a {_ASKED[key].__name__}.")
    kept = _said({key: value for key, value in row.items() if key not in _ASKED}, "a storage rule")
    if not asked or not kept:
        found = "it is about all parameters" if not asked else "it says nothing"
        advice = f"Write one of {', '.join(_ASKED)}, and one of {', '.join(_CHOICES)}."
        raise PolicyError("a storage rule", found, advice=advice)
    return StorageRule(tuple(sorted(asked.items())), tuple(sorted(kept.items())))


def _said(table: Mapping[str, Any], where: str) -> dict[str, str]:
    """Return what a table says of what is kept; PolicyError for a key or a value that there is not."""
    for key, value in table.items():
        if key not in _CHOICES:
            known = [*_CHOICES, "seed"] if where == "[storage]" else [*_ASKED, *_CHOICES]
            found, advice = f"no such key{did_you_mean(str(key), known)}", f"Write one of: {', '.join(known)}."
            raise PolicyError(f"key {key!r} of {where}", found, advice=advice)
        if value not in _CHOICES[key]:
            advice = f"Write one of: {', '.join(_CHOICES[key])}."
            raise PolicyError(f"{key} = {value!r} of {where}", "not a choice", advice=advice)
    return dict(table)
