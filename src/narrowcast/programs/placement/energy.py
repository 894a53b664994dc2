"""The energy as data: choices, values that flow between them, and what a choice of formats costs.

    E(x) = sum over choices c of cost_c(x_c)
         + sum over values v of read_v(own format) + sum over the formats f in which v is needed of
               cast_v(own, f) if f is not v's own            (once per format, however many readers)
               store_v(f)     if one of those readers needs it in memory

Costs are whole numbers, so that two ways to the same optimum agree exactly. A placement that is forbidden costs None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from narrowcast.formats import Format

FIXED = -1
"""The number of a choice that is none: a value or a reader whose format is given."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The formats that a call may have, and what it costs in each. The first one is the policy's."""

    formats: tuple[Format, ...]
    costs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reader:
    """Who reads a value: a choice with the format that it needs for each of its own, or one need that is fixed.

    needs: aligned with the choice's formats; None takes what comes. stores: it needs the value in memory.
    keeps: it needs every bit that the policy keeps; what was rounded on the way must not be cast up for it.
    """

    choice: int
    needs: tuple[Format | None, ...]
    stores: bool = False
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class Flow:
    """A value: who makes it, who reads it, and what its casts cost.

    maker:     number of the choice whose format it has; FIXED if `formats` has its one format.
    formats:   its format for each of the maker's.
    reads:     what reading it in its own format costs. casts: by source and target. stores: of having it in memory.
    rounded:   the formats that have fewer bits than the policy gives the value.
    """

    maker: int
    formats: tuple[Format, ...]
    readers: tuple[Reader, ...]
    casts: Mapping[tuple[Format, Format], int] = field(default_factory=dict)
    reads: Mapping[Format, int] = field(default_factory=dict)
    stores: Mapping[Format, int] = field(default_factory=dict)
    rounded: frozenset[Format] = frozenset()


@dataclass(frozen=True, slots=True)
class Energy:
    """Choices and the values between them. unit: what a cost of 1 represents (nanoseconds, bytes)."""

    choices: tuple[Choice, ...]
    flows: tuple[Flow, ...]
    unit: float = 1.0

    @property
    def formats(self) -> set[Format]:
        """Every format that a call or a value may have, or is needed in."""
        formats = {f for c in self.choices for f in c.formats}
        formats |= {f for flow in self.flows for f in flow.formats}
        return formats | {n for flow in self.flows for r in flow.readers for n in r.needs if n is not None}

    def evaluate(self, chosen: Sequence[Format]) -> int | None:
        """Return the energy of a placement, one format per choice; None if it is forbidden."""
        total = sum(c.costs[c.formats.index(f)] for c, f in zip(self.choices, chosen, strict=True))
        for flow in self.flows:
            own = flow.formats[self.position(flow.maker, chosen)]
            needed: dict[Format, bool] = {}
            for reader in flow.readers:
                need = reader.needs[self.position(reader.choice, chosen)]
                if need is not None:
                    if reader.keeps and need is not own and own in flow.rounded:
                        return None
                    needed[need] = needed.get(need, False) or reader.stores
            total += flow.reads.get(own, 0)
            for need, stores in needed.items():
                total += flow.casts[own, need] if need is not own else 0
                total += flow.stores.get(need, 0) if stores else 0
        return total

    def given(self, chosen: tuple[Format, ...], method: str) -> Optimum:
        """Return a placement that is no proven optimum, with the trivial lower bound 0."""
        return Optimum(chosen, self.evaluate(chosen) or 0, 0, method)

    def position(self, choice: int, chosen: Sequence[Format]) -> int:
        """Return the index of a choice's format under a placement; 0 where the format is fixed."""
        return 0 if choice == FIXED else self.choices[choice].formats.index(chosen[choice])


@dataclass(frozen=True, slots=True)
class Optimum:
    """A placement and the proof that there is none better.

    cost:  its energy. bound: what no placement can be below; equal for a minimum cut (the flow's value).
    method: `minimum cut`, `integer program`, or `nothing to choose`.
    """

    chosen: tuple[Format, ...]
    cost: int
    bound: int
    method: str
