"""Two formats: the minimum of the energy is a minimum s-t cut (Kolmogorov and Zabih 2004), found by scipy's Dinic.

A choice on the source's side is low. Each cast, and each format that is needed in memory, is one auxiliary node: it is
cut once, however many readers need it. What is cut and what flows are equal, which proves the optimum.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from narrowcast.errors import EnergyError
from narrowcast.formats import Format
from narrowcast.programs.placement.energy import Energy, Flow, Optimum, Reader
from narrowcast.programs.placement.integer_program import minimise_by_integer_program

_LARGEST = 2**30  # scipy's capacities are 32-bit


def minimise(energy: Energy) -> Optimum:
    """Return the placement of least energy: by minimum cut if there are at most two formats, else by integer program.

    The same energy gives the same placement. Raises EnergyError if every placement is forbidden.
    """
    if not energy.choices:
        cost = energy.evaluate(()) or 0
        return Optimum((), cost, cost, "nothing to choose")
    return minimise_by_cut(energy) if len(energy.formats) <= 2 else minimise_by_integer_program(energy)


def minimise_by_cut(energy: Energy) -> Optimum:
    """Return the optimum. Of several it is the one in which the fewest calls are low.

    Raises EnergyError if costs are negative or too large for 32 bits, if a reader needs the higher format while it is
    lower itself, or if every placement is forbidden.
    """
    network = _Network(energy)
    chosen, flow = network.solve()
    cost = energy.evaluate(chosen)
    if cost is None or cost != flow + network.constant:
        found = "every placement is forbidden" if cost is None else f"cut {cost} and flow {flow} differ"
        advice = "This is a fault of the cost model: please report it with the program's text."
        raise EnergyError("a placement of least cost", found, advice=advice)
    return Optimum(chosen, cost, flow + network.constant, "minimum cut")


def _by_bits(format: Format) -> tuple[int, str]:
    return format.bits, format.name


class _Network:
    """The graph of the cut: the choices, then source and sink, then auxiliary nodes."""

    def __init__(self, energy: Energy) -> None:
        self.energy = energy
        self.formats = sorted(energy.formats, key=_by_bits)
        self.low, self.high = self.formats[0], self.formats[-1]  # one, if that is all there is
        self.source = len(energy.choices)
        self.sink = self.source + 1
        self.nodes = self.source + 2
        self.constant = 0
        self.edges: list[tuple[int, int, int]] = []
        self.never: list[tuple[int, int]] = []  # edges that no cut may take
        for number, choice in enumerate(energy.choices):
            costs = dict(zip(choice.formats, choice.costs, strict=True))
            if len(costs) == 1:  # no edge: its readers and values are fixed
                self.constant += choice.costs[0]
            else:
                self._unary(number, costs[self.low], costs[self.high])
        for flow in energy.flows:
            self._flow(flow)

    def _edge(self, start: int, end: int, cost: int) -> None:
        """Pay if `start` is on the source's side and `end` on the sink's."""
        if cost < 0:
            raise EnergyError("a placement of least cost", f"a cost of {cost}", advice="Costs are 0 or more.")
        if start == self.source and end == self.sink:
            self.constant += cost
        elif cost:
            self.edges.append((start, end, cost))

    def _unary(self, node: int, if_low: int, if_high: int) -> None:
        least = min(if_low, if_high)
        self.constant += least
        self._edge(node, self.sink, if_low - least)
        self._edge(self.source, node, if_high - least)

    def _flow(self, flow: Flow) -> None:
        maker = self._maker(flow)
        if maker in (self.source, self.sink):
            self.constant += flow.reads.get(flow.formats[0], 0)
        else:
            low, high = sorted(set(flow.formats), key=_by_bits)
            self._unary(maker, flow.reads.get(low, 0), flow.reads.get(high, 0))
        for format in self.formats:
            needing = [r for r in flow.readers if format in r.needs]
            self._cast(flow, maker, format, needing)
            self._once([r for r in needing if r.stores], format, flow.stores.get(format, 0), None)

    def _maker(self, flow: Flow) -> int:
        if len(set(flow.formats)) == 1:
            return self.source if flow.formats[0] is self.low else self.sink
        formats = self.energy.choices[flow.maker].formats
        if any(f is not own for f, own in zip(flow.formats, formats, strict=True)):
            raise EnergyError("a minimum cut", "a call whose result has the other format than it has itself")
        return flow.maker

    def _cast(self, flow: Flow, maker: int, format: Format, needing: list[Reader]) -> None:
        other = self.high if format is self.low else self.low
        for reader in needing:
            if reader.keeps and other in flow.rounded:
                node = self._node(reader, format)
                self.never.append((node, maker) if format is self.low else (maker, node))
        if (other, format) in flow.casts:
            self._once(needing, format, flow.casts[other, format], maker)

    def _once(self, needing: list[Reader], format: Format, cost: int, maker: int | None) -> None:
        """Pay once if any of the readers needs the format, and `maker` (if it matters) has the other."""
        if not needing or not cost:
            return
        is_low = format is self.low
        against = maker if maker is not None else (self.sink if is_low else self.source)
        nodes = sorted({self._node(reader, format) for reader in needing})
        if len(nodes) == 1:
            node = nodes[0]
        else:
            node, self.nodes = self.nodes, self.nodes + 1
            self.never += [(n, node) if is_low else (node, n) for n in nodes]
        self._edge(*((node, against) if is_low else (against, node)), cost)

    def _node(self, reader: Reader, format: Format) -> int:
        """Return the node that is on the format's side when the reader needs it."""
        fixed = self.source if format is self.low else self.sink
        if set(reader.needs) == {format}:
            return fixed
        needs = dict(zip(self.energy.choices[reader.choice].formats, reader.needs, strict=True))
        if needs[format] is not format:
            raise EnergyError("a minimum cut", "a reader that needs the other format than it has itself")
        return reader.choice

    def solve(self) -> tuple[tuple[Format, ...], int]:
        from scipy.sparse import csr_matrix  # scipy takes long to import, so only where it is used
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        total = sum(cost for _, _, cost in self.edges)
        if total > _LARGEST:
            raise EnergyError("a minimum cut", f"costs of {total} together", advice=f"Keep them below {_LARGEST}.")
        most = total + 1  # more than any cut that is allowed
        rows = [*self.edges, *((start, end, most) for start, end in self.never)]
        edges = np.array(rows, dtype=np.int64).reshape(len(rows), 3)
        capacities = csr_matrix((edges[:, 2], (edges[:, 0], edges[:, 1])), shape=(self.nodes, self.nodes))
        capacities.data = np.minimum(capacities.data, most)
        capacities = capacities.astype(np.int32)
        result: Any = maximum_flow(capacities, self.source, self.sink, method="dinic")
        residual = capacities - result.flow
        residual.eliminate_zeros()
        lows = set(breadth_first_order(residual, self.source, return_predecessors=False).tolist())
        chosen = tuple((min if n in lows else max)(c.formats, key=_by_bits) for n, c in enumerate(self.energy.choices))
        return chosen, int(result.flow_value)
