"""Memory as an objective of placement, or as a limit: what is kept for the backward, and copies that casts make.

A call that autograd follows keeps what it reads, in the format in which it reads it: once per value and format. Without
gradients nothing is kept, and what counts is the bytes that are made. Under a limit the least time is looked for with
a price per byte that is raised until the limit holds (Everett 1963): each price is one cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from narrowcast.core.ops import ATTENTION, CONV, GEMM, NORM, POINTWISE, SOFTMAX, named, op_kind
from narrowcast.errors import EnergyError
from narrowcast.formats import Format
from narrowcast.programs.placement import Choice, Energy, Flow, Optimum, minimise
from narrowcast.programs.placement.prices import Prices, Reads, ValuePrice, with_costs
from narrowcast.programs.placement.question import Question
from narrowcast.programs.program import Step, Value

_STEPS = 24
_FOR_MEMORY = "minimum cut for memory"
"""The method of a placement whose time is not what was minimised: it has no bound."""
_KEEPS = (GEMM, CONV, ATTENTION, NORM, SOFTMAX)


class KeptBytes(Prices):
    """Bytes that a placement keeps, or makes where no gradient flows. fused: a compiler makes pointwise calls again."""

    unit = "bytes"

    def __init__(self, fused: bool) -> None:
        self.fused = fused

    def value(self, value: Value, maker: Step | None, readers: Reads, formats: Sequence[Format]) -> ValuePrice:
        """Return the price of one copy per format that a reader keeps; the program's inputs are there anyway."""
        sizes = {f: value.elements * f.bits / 8 for f in formats}
        pairs = [(a, b) for a in formats for b in formats if a is not b]
        if any(r is not None and self._follows(r) for r in readers):
            kept = {f: 0.0 if maker is None and f is value.format else size for f, size in sizes.items()}
            return ValuePrice(dict.fromkeys(pairs, 0.0), {}, kept)
        return ValuePrice({(a, b): sizes[b] for a, b in pairs}, sizes if maker is not None else {})

    def _follows(self, step: Step) -> bool:
        return step.grad_mode and step.value.gradient

    def stores(self, reader: Step | None) -> bool:
        """Return whether a call keeps what it reads for its backward."""
        if reader is None or not self._follows(reader):
            return False
        kind = op_kind(reader.op)
        if kind.family == POINTWISE and not self.fused:
            by_a_number = kind.name in named("backward.linear_by_a_number") and len(reader.operands) == 1
            return kind.name not in named("backward.linear") and not by_a_number
        return kind.family in _KEEPS


class Smallest:
    """A chooser: fewest bytes kept, and among these the least time; but at most `slowdown` times the least time.

    Under that limit the bytes get a price in time, the highest at which the limit holds (Everett 1963).
    """

    def __init__(self, kept: Energy, slowdown: float = math.inf) -> None:
        self.kept, self.slowdown = kept, slowdown

    def __call__(self, question: Question) -> Optimum:
        """The placement that keeps fewest bytes, within the limit on time."""
        energy = question.energy
        fixed = question.fixed / energy.unit
        free = minimise(energy)
        most = self.slowdown * (free.cost + fixed) - fixed
        heavy = max(energy_total(energy), 1)
        fewest = energy.given(minimise(_in_range(combine(energy, self.kept, heavy))).chosen, _FOR_MEMORY)
        if math.isinf(self.slowdown) or fewest.cost <= most:
            return fewest
        low, high, best = 0.0, float(heavy), energy.given(free.chosen, _FOR_MEMORY)
        for _ in range(_STEPS):
            price = math.sqrt(max(low, 1e-9) * high)
            candidate = energy.given(minimise(_in_range(combine(energy, self.kept, price))).chosen, _FOR_MEMORY)
            if candidate.cost > most:
                high = price
            else:
                low, best = price, candidate
        return best


def place_within(kept: Energy, limit_bytes: int) -> Callable[[Question], Optimum]:
    """Return a chooser of the least time among placements that keep at most this many bytes.

    Raises EnergyError if even the smallest keeps more.
    """

    def choose(question: Question) -> Optimum:
        energy = question.energy

        def kept_bytes(chosen: Sequence[Format]) -> float:
            return (kept.evaluate(chosen) or 0) * kept.unit

        free = minimise(energy)
        if kept_bytes(free.chosen) <= limit_bytes:
            return free
        best = Smallest(kept)(question)
        if kept_bytes(best.chosen) > limit_bytes:
            found = f"the smallest placement keeps {kept_bytes(best.chosen):.0f}"
            advice = "Raise memory_limit_bytes, or recompute activations (torch.utils.checkpoint)."
            raise EnergyError(f"formats that keep at most {limit_bytes} bytes", found, advice=advice)
        low, high, reached = 0.0, 2.0, False  # prices of what is kept; whether the high one is high enough
        for _ in range(_STEPS):
            price = (low + high) / 2
            priced = minimise(_in_range(combine(energy, kept, price)))
            if kept_bytes(priced.chosen) > limit_bytes:
                low, high = price, high if reached else 8 * high
                continue
            high, reached = price, True
            timed = energy.given(priced.chosen, _FOR_MEMORY)  # not always less than the last: prices are rounded
            best = timed if timed.cost < best.cost else best
        return replace(best, bound=free.bound, method="minimum cuts under a price per byte")

    return choose


def energy_total(energy: Energy) -> int:
    """Return a number that is more than any placement can cost."""
    total = sum(max(c.costs, default=0) for c in energy.choices)
    for flow in energy.flows:
        total += sum((*flow.casts.values(), *flow.reads.values(), *flow.stores.values()))
    return total


def combine(time: Energy, kept: Energy, price: float) -> Energy:
    """Return E_time + price E_kept of two energies of one program: the values of both, side by side."""
    choices = tuple(
        Choice(a.formats, tuple(m + round(price * n) for m, n in zip(a.costs, b.costs, strict=True)))
        for a, b in zip(time.choices, kept.choices, strict=True)
    )
    return Energy(choices, (*time.flows, *(_scaled(flow, price) for flow in kept.flows)), time.unit)


def _scaled(flow: Flow, by: float) -> Flow:
    return with_costs(flow, flow, lambda cost: round(cost * by))


def _in_range(energy: Energy) -> Energy:
    """Return the energy scaled to the range of the solver's numbers."""
    scale = max(energy_total(energy) / 2**28, 1.0)
    if scale == 1.0:
        return energy
    choices = tuple(Choice(c.formats, tuple(round(n / scale) for n in c.costs)) for c in energy.choices)
    return Energy(choices, tuple(_scaled(f, 1 / scale) for f in energy.flows), energy.unit * scale)
