"""More than two formats: the energy as an integer program, solved by HiGHS through scipy, its gap reported."""

from __future__ import annotations

import math

import numpy as np

from narrowcast.errors import EnergyError
from narrowcast.formats import Format
from narrowcast.programs.placement.energy import FIXED, Energy, Flow, Optimum, Reader

SECONDS = 60.0
"""How long the solver may search; what it has by then is given, with its gap."""


def minimise_by_integer_program(energy: Energy, seconds: float = SECONDS) -> Optimum:
    """Return the optimum, or the best placement found in that time. EnergyError if every placement is forbidden."""
    chosen, bound = _Model(energy).solve(seconds)
    cost = energy.evaluate(chosen)
    if cost is None:
        raise EnergyError("a placement of least cost", "every placement is forbidden")
    return Optimum(chosen, cost, min(cost, bound), "integer program")


class _Model:
    """Columns: one per choice and format, then one per value, source and target of a cast, or format in memory."""

    def __init__(self, energy: Energy) -> None:
        self.costs: list[float] = []
        self.rows: list[tuple[dict[int, float], float, float]] = []  # coefficients, least, most
        self.constant = 0
        self.columns: list[dict[Format, int]] = []
        for choice in energy.choices:
            columns = {f: self._column(cost) for f, cost in zip(choice.formats, choice.costs, strict=True)}
            self.columns.append(columns)
            self.rows.append((dict.fromkeys(columns.values(), 1.0), 1.0, 1.0))
        self.whole = len(self.costs)  # the rest follows from these
        for flow in energy.flows:
            self._flow(flow)

    def _column(self, cost: float) -> int:
        self.costs.append(float(cost))
        return len(self.costs) - 1

    def _owns(self, flow: Flow) -> dict[Format, list[int] | None]:
        """Return for each format of a value the columns that choose it; None: it has it in any case."""
        if flow.maker == FIXED:
            return {flow.formats[0]: None}
        columns_of: dict[Format, list[int] | None] = {}
        for own, column in zip(flow.formats, self.columns[flow.maker].values(), strict=True):
            columns_of.setdefault(own, []).append(column)  # type: ignore[union-attr]
        return columns_of

    def _needing(self, reader: Reader, format: Format) -> list[int] | None:
        """Return the columns under which the reader needs the format; None: in any case; empty: never."""
        if reader.choice == FIXED:
            return None if reader.needs[0] is format else []
        columns = list(self.columns[reader.choice].values())
        return [c for c, need in zip(columns, reader.needs, strict=True) if need is format]

    def _flow(self, flow: Flow) -> None:
        owns = self._owns(flow)
        for own, makers in owns.items():
            read = flow.reads.get(own, 0)
            if makers is None:
                self.constant += read
            for column in makers or ():
                self.costs[column] += read
        for need in dict.fromkeys(n for r in flow.readers for n in r.needs if n is not None):
            needing = [(r, columns) for r in flow.readers if (columns := self._needing(r, need)) != []]
            for own, makers in owns.items():
                if own is not need:
                    self._pay([c for _, c in needing], makers, flow.casts[own, need])
                    if own in flow.rounded:
                        self._pay([c for r, c in needing if r.keeps], makers, None)
            if flow.stores.get(need, 0):
                self._pay([c for r, c in needing if r.stores], None, flow.stores[need])

    def _pay(self, needing: list[list[int] | None], makers: list[int] | None, cost: int | None) -> None:
        """Add a cost that is due once if any reader needs and the maker makes; None forbids that."""
        if not needing or cost == 0:
            return
        due = self._column(cost) if cost is not None else None
        for columns in needing:
            row: dict[int, float] = {}
            most = 0.0
            for group in (columns, makers):
                if group is None:
                    most -= 1.0
                for column in group or ():
                    row[column] = row.get(column, 0.0) + 1.0
            if due is not None:
                row[due] = -1.0
            self.rows.append((row, -math.inf, most + 1.0))

    def solve(self, seconds: float) -> tuple[tuple[Format, ...], int]:
        from scipy.optimize import Bounds, LinearConstraint, milp  # half a second, so only where it is used
        from scipy.sparse import csr_matrix

        cells = [(value, n, column) for n, (row, _, _) in enumerate(self.rows) for column, value in row.items()]
        data, row_of, column_of = zip(*cells, strict=True)
        matrix = csr_matrix((data, (row_of, column_of)), shape=(len(self.rows), len(self.costs)))
        kinds = np.zeros(len(self.costs))
        kinds[: self.whole] = 1
        limits = LinearConstraint(matrix, [r[1] for r in self.rows], [r[2] for r in self.rows])
        options = {"time_limit": seconds, "mip_rel_gap": 0}
        solution = milp(
            np.array(self.costs), integrality=kinds, bounds=Bounds(0, 1), constraints=limits, options=options
        )
        if solution.x is None:
            raise EnergyError("a placement of least cost", str(solution.message))
        chosen = tuple(max(columns, key=lambda f: solution.x[columns[f]]) for columns in self.columns)
        bound = solution.mip_dual_bound if solution.mip_dual_bound is not None else solution.fun
        return chosen, math.ceil(bound - 1e-6) + self.constant
