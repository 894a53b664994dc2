"""Facts of ops, read from facts.toml: the one place that knows what an op is like."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

GEMM, CONV, ATTENTION = "gemm", "conv", "attention"
NORM, SOFTMAX, REDUCTION, POINTWISE = "norm", "softmax", "reduction", "pointwise"
MOVEMENT, VIEW, COPY = "movement", "view", "copy"
FAMILIES = (GEMM, CONV, ATTENTION, NORM, SOFTMAX, REDUCTION, POINTWISE, MOVEMENT, VIEW, COPY)
FUSED = frozenset([NORM, SOFTMAX, REDUCTION, POINTWISE, MOVEMENT, VIEW, COPY])
"""What a fusing compiler generates code for. The others are calls of a library, whose operands lie in memory."""


@dataclass(frozen=True, slots=True)
class OpKind:
    """What an op is like.

    name:     without namespace, overload and the underscore of an in-place form.
    family:   what its time depends on; empty for an op that nothing is known of.
    commutes: rounding what goes in and rounding what comes out give the same bits.
    in_place: it is the in-place form, whose result is its first operand.
    """

    name: str
    family: str
    commutes: bool = False
    in_place: bool = False

    @property
    def is_known(self) -> bool:
        """Whether it may run in another format than the policy gives it: an op of no family keeps that."""
        return bool(self.family)

    @property
    def is_fused(self) -> bool:
        """Whether a fusing compiler makes it part of its neighbours' loops."""
        return self.family in FUSED


@cache
def named(fact: str) -> frozenset[str]:
    """Return the names of the ops of which a fact of the table holds: `result.keeps`. Raise KeyError if none is."""
    table, _, key = fact.partition(".")
    return frozenset(_table()[table][key].split())


def is_named(op: str, fact: str) -> bool:
    """Return whether a fact of the table holds of the op with this id."""
    return op_kind(op).name in named(fact)


def called_by(op: str, device_type: str = "cpu") -> str | None:
    """Return the op id of the one op that the kernel of this one calls, where policies are asked about that."""
    return _table().get(f"calls_on_{device_type}", {}).get(op) or _table()["calls"].get(op)


def called_in_python(op: str) -> str:
    """Return the op id of what Python calls where a script calls this one: it makes a tensor of a number first."""
    return _table()["called_in_python"].get(op, op)


def written_as(op: str) -> str:
    """Return the op id of what programs call, of which this one is made where no region is open."""
    return _table()["written_as"].get(op, op)


@cache
def op_kind(op: str) -> OpKind:
    """Return the kind of the op with this id (`aten.mm.default`)."""
    namespace, _, rest = op.partition(".")
    name = rest.partition(".")[0]
    if namespace != "aten":
        return OpKind(name, "")
    in_place = name.endswith("_") and not name.startswith("__")
    base = name.removesuffix("_") if in_place else name
    family = next((family for family in _table()["family"] if base in named(f"family.{family}")), "")
    if not family:
        return OpKind(base, "")
    moves = family in (MOVEMENT, VIEW)
    holds = named("rounding.puts_in_a_constant") | named("rounding.chooses_an_index")
    return OpKind(base, family, base in named("rounding.commutes") or (moves and base not in holds), in_place)


@cache
def _table() -> dict[str, dict[str, str]]:
    return tomllib.loads((Path(__file__).parent / "facts.toml").read_text(encoding="utf-8"))
