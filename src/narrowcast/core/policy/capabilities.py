"""What a device can do, as data: which ops it runs in which formats, which it refuses, and which it only emulates.

A device is asked once, by the smallest call of each op that a policy may lower (`profiles/abilities.py`); the answers
are kept in its profile. For a device that is not here, `builtin/devices.toml` has what is known of it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from narrowcast.core.policy import Lack, in_range, installed_torch, known_ops
from narrowcast.formats import Format, parse_format

RUNS, RAISES, EMULATED = "runs", "raises", "emulated"
STATES = (RUNS, RAISES, EMULATED)
EMULATED_RATIO = 3.0
"""A format that takes more than this many times fp32's time, where fp32 takes a millisecond or more, is emulated."""

WHOLE = {"aten.mkldnn_rnn_layer.default": "aten.lstm.input"}
"""Ops that a device lacks, and the ops that call them step by step: those are repaired as a whole, so that no step's
result is rounded, and all front ends repair the same call.
"""
_SHORT = {"mkldnn_rnn_layer": "lstm", "_cudnn_rnn": "rnn"}


@dataclass(frozen=True, slots=True)
class Ability:
    """How a device runs one op (or a family of them) in one format.

    direction: `forward`, or `backward` for both together. ratio: its time over fp32's, if that was measured, and 0 if
    not. error: what the device says where it raises, first line.
    """

    op: str
    format: str
    direction: str
    state: str
    ratio: float = 0.0
    error: str = ""

    def __post_init__(self) -> None:
        if self.state not in STATES:
            raise ValueError(f"{self.state!r} is none of {', '.join(STATES)}")
        parse_format(self.format)

    @property
    def key(self) -> str:
        """`aten.mm.default|bf16|forward`: what it says something about."""
        return f"{self.op}|{self.format}|{self.direction}"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """All that is known of one device. device: for a reader, `cpu (avx2)`."""

    device: str
    abilities: tuple[Ability, ...] = ()

    @property
    def lacks(self) -> tuple[Lack, ...]:
        """What it refuses to run, in whichever direction."""
        raising = {(a.op, a.format): a for a in self.abilities if a.state == RAISES}
        lacks = [Lack(op, parse_format(f), f"{self.device} has no {f} {short_name(op)}") for op, f in raising]
        whole = [replace(lack, op=WHOLE[lack.op], inside=lack.op) for lack in lacks if lack.op in WHOLE]
        return (*lacks, *whole)

    def emulated(self, format: Format) -> dict[str, float]:
        """Return the families that the format is slow in, with the ratio of its time to that of fp32."""
        return {a.op: a.ratio for a in self.abilities if a.format == format.name and a.state == EMULATED}


def short_name(op: str) -> str:
    """Return the name that people use: `lstm` of aten.mkldnn_rnn_layer.default."""
    name = op.split(".")[1] if op.count(".") else op
    return _SHORT.get(name, name)


@cache
def shipped_capabilities(device_type: str, units: tuple[str, ...]) -> Capabilities:
    """Return what is known of a device of this type with these units, without asking it."""
    label = device_label(device_type, units)
    for row in _rows("devices", "device"):
        if row["type"] == device_type and not set(row.get("without", ())) & set(units_in_use(units)):
            return Capabilities(label, tuple(_abilities(row)))
    return Capabilities(label)


@cache
def missing_kernels(device_type: str) -> tuple[Lack, ...]:
    """Return the ops that the installed torch has no kernel for in a low format, on any device of this type."""
    version = installed_torch()
    return tuple(
        Lack(op, parse_format(row["format"]), f"{device_type} has no {row['format']} kernel for {short_name(op)}")
        for row in _rows(f"lacks_{device_type}", "lack")
        if in_range(row.get("torch", ""), version)
        for op in row["op"]
        if op in known_ops()
    )


@cache
def one_format() -> tuple[Lack, ...]:
    """Return the ops that torch runs, on every device, with tensors of one format alone."""
    return tuple(
        Lack(op, None, row["reason"], low_first=row.get("low_first", False))
        for row in _rows("one_format", "one_format")
        for op in row["op"]
        if op in known_ops()
    )


def _abilities(row: Mapping[str, Any]) -> Iterable[Ability]:
    for entry in row["ability"]:
        for format in entry["format"]:
            for op in entry["op"]:
                yield Ability(op, format, "forward", entry["state"], entry.get("ratio", 0.0), entry.get("error", ""))


def _rows(name: str, table: str) -> list[dict[str, Any]]:
    """Return the rows of a table of a file of `builtin/`; none where there is no such file."""
    file = Path(__file__).parent / "builtin" / f"{name}.toml"
    return list(tomllib.loads(file.read_text(encoding="utf-8"))[table]) if file.is_file() else []


_LABELS = ("amx_fp16", "amx_bf16", "avx512_fp16", "avx512_bf16", "avx512f", "avx2", "sve", "bf16", "asimd")
_LIMITED = {
    "avx512_core_amx": "amx_bf16", "avx512_core_fp16": "avx512_fp16", "avx512_core_bf16": "avx512_bf16",
    "avx512_core_vnni": "avx512f", "avx512_core": "avx512f", "avx2_vnni_2": "avx2", "avx2_vnni": "avx2",
    "avx2": "avx2", "avx": "avx", "sse41": "sse4.1", "default": "no vector units",
}  # fmt: skip


def units_in_use(units: Iterable[str]) -> tuple[str, ...]:
    """Return the units that libraries use: those of the processor, without those that a variable keeps them from."""
    plain = [unit for unit in units if "=" not in unit]
    for unit in units:
        name, _, value = unit.partition("=")
        limit = _LIMITED.get(value.lower())
        if name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA") and limit is not None:
            most = _LABELS.index(limit) if limit in _LABELS else len(_LABELS)
            plain = [unit for unit in plain if unit not in _LABELS or _LABELS.index(unit) >= most]
    return tuple(plain)


def device_label(device_type: str, units: Iterable[str]) -> str:
    """Return the type and the best of its units that are in use: `cpu (avx2)`."""
    used = units_in_use(units)
    best = next((label for label in _LABELS if label in used), next(iter(used), ""))
    return f"{device_type} ({best})" if best else device_type
