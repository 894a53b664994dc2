"""Gradients of parameters in two runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from narrowcast.analysis.diff.aligned_values import GAIN, Values
from narrowcast.analysis.diff.alignment import Aligned
from narrowcast.analysis.diff.pieces import Piece
from narrowcast.core.ledger.identity import FORWARD
from narrowcast.reports.results.run_differences import GradientRow, RunRow

_PARTS = 64
"""The most parts of a fused weight: of the experts of a layer, two each."""
_Names = tuple[tuple[str, ...], tuple[str, ...]]
_MOST = 0.25
"""The largest bound for runs in the same formats, whatever their calls: a missing micro-batch makes more."""


def band_along(rows: list[RunRow]) -> float:
    """Return the bound of gradients, which are computed by all calls, one after the other."""
    differences = [row.difference for row in rows if not math.isnan(row.difference)]
    band = GAIN * (max((row.round_off_bound for row in rows), default=0.0) + max(differences, default=0.0))
    return band if any(row.differs_in_format for row in rows) else min(band, _MOST)


def gradients(values: Values, pairs: list[Aligned], band: float) -> list[GradientRow]:
    """Compare the gradients of parameters with one name, of paired modules, or of one value."""
    a, b = ([name for name, row in side.runs[0].parameters.items() if "gradient" in row] for side in values.sides)
    modules = {
        x.path: (tuple(y.path for y in pair.a), tuple(y.path for y in pair.b))
        for pair in pairs
        for x in pair.a
        if x.id.direction == FORWARD
    }
    rows: dict[_Names, None] = {}
    for name in a:
        path, _, leaf = name.rpartition(".")
        paths = ((path,), (path,)) if name in b else modules.get(path, ((), ()))
        names = tuple(tuple(f"{p}.{leaf}" if p else leaf for p in dict.fromkeys(side)) for side in paths)
        if names[0] and all(n in a for n in names[0]) and all(n in b for n in names[1]):
            rows[names[0], names[1]] = None
    rows |= _of_one_value(values, *([name for name in side if not any(name in names[n] for names in rows)]
                                    for n, side in enumerate((a, b))))  # fmt: skip
    compared = [(row, *values.gradients(*row)) for row in rows]
    return [GradientRow(*row, d.relative, d.by, band * grown) for row, d, grown in compared if d.is_known]


def _of_one_value(values: Values, a: list[str], b: list[str]) -> dict[_Names, None]:
    """Pair the parameters that have one value; then one of either side with several of the other, next to each other
    there, whose values it has: weights are fused, in whatever order.
    """
    left, rows = [a, b], dict[_Names, None]()
    for whole, least, most in ((0, 1, 1), (0, 2, _PARTS), (1, 2, _PARTS)):
        for name in list(left[whole]):
            of, others = values.sides[whole].value(name), values.sides[1 - whole]
            pieces = {part: others.value(part) for part in left[1 - whole]}
            for parts in _next_to_each_other(pieces, of, least, most):
                names = ((name,), parts) if whole == 0 else (parts, (name,))
                if values.are_parts(*names):
                    rows[names] = None
                    left = [[n for n in side if n not in paired] for side, paired in zip(left, names, strict=True)]
                    break
    return rows


def _next_to_each_other(pieces: Mapping[str, Piece], of: Piece, least: int, most: int) -> Iterator[tuple[str, ...]]:
    """Yield the names of `least` to `most` adjacent pieces with as many elements as another; biases by themselves."""
    names = [name for name, piece in pieces.items() if (piece.dimensions < 2) == (of.dimensions < 2)]
    for first in range(len(names)):
        total = 0
        for last, name in enumerate(names[first : first + most], first + 1):
            total += pieces[name].elements
            if total == of.elements and last - first >= least:
                yield tuple(names[first:last])


def in_one_alone(values: Values) -> list[GradientRow]:
    """Return rows of parameters, of modules that both runs call, of which one run alone has a gradient other than zero:
    a difference of 1.
    """
    rows: list[GradientRow] = []
    for side, other in (values.sides, values.sides[::-1]):
        there = other.runs[0].parameters
        for name, row in side.runs[0].parameters.items():
            path, _, leaf = name.rpartition(".")
            reads = any(leaf == argument for x in other.by_path.get(path, ()) for argument, _ in x.call.inputs)
            if "gradient" in row and "gradient" not in there.get(name, {}) and reads:
                if side.piece(0, row["gradient"]).rms > 0:
                    rows.append(GradientRow((name,), (name,), 1.0, "", 0.0))
    return rows


def gradients_are_alike(rows: Sequence[GradientRow], parameters: Sequence[Iterable[str]]) -> bool:
    """Return whether each parameter of either run with a gradient is compared, and alike. parameters: their names."""
    compared = ({n for row in rows for n in row.a}, {n for row in rows for n in row.b})
    are_all = all(set(names) <= those for names, those in zip(parameters, compared, strict=True))
    return bool(rows) and are_all and all(row.difference <= row.round_off_bound for row in rows)
