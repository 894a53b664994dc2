"""What placement asks of a cost model, and the one model that needs no machine: the bytes that casts move."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from narrowcast.formats import Format
from narrowcast.programs.placement import Flow
from narrowcast.programs.program import Step, Value

Reads = Sequence[Step | None]
"""The steps that read a value; None is the program's end, where values are returned."""


@dataclass(frozen=True, slots=True)
class ValuePrice:
    """What a value costs: reading it in its own format, casting it, having it in memory in a format."""

    casts: Mapping[tuple[Format, Format], float]
    reads: Mapping[Format, float] = field(default_factory=dict)
    stores: Mapping[Format, float] = field(default_factory=dict)


def with_costs(flow: Flow, price: Flow | ValuePrice, whole: Callable[[float], int]) -> Flow:
    """Return the flow with these costs as whole numbers."""
    casts = {pair: whole(cost) for pair, cost in price.casts.items()}
    reads = {format: whole(cost) for format, cost in price.reads.items()}
    return replace(flow, casts=casts, reads=reads, stores={f: whole(cost) for f, cost in price.stores.items()})


class Prices(Protocol):
    """Costs in one unit, `ns` or `bytes`; all 0 or more."""

    unit: str

    def call(self, step: Step, operands: Sequence[Value], format: Format) -> float:
        """Return what a call costs if it runs in `format`; its operands are as the policy has them."""
        return 0.0

    def value(self, value: Value, maker: Step | None, readers: Reads, formats: Sequence[Format]) -> ValuePrice:
        """Return what a value costs in, and between, these formats; without a maker it is given to the program."""
        ...

    def stores(self, reader: Step | None) -> bool:
        """Return whether this reader needs what it reads in memory."""
        return False


class CastBytes(Prices):
    """Bytes that casts read and write; calls and memory cost nothing. What `goal="exact"` minimises."""

    unit = "bytes"

    def value(self, value: Value, maker: Step | None, readers: Reads, formats: Sequence[Format]) -> ValuePrice:
        """Return the bytes of source and target together."""
        size = max(value.elements, 1)
        return ValuePrice({(a, b): size * (a.bits + b.bits) / 8 for a in formats for b in formats if a is not b})
