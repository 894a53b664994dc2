"""Gradients of parameters in two runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from narrowcast.analysis.diff.aligned_values import GAIN, Values
from narrowcast.analysis.diff.alignment import Aligned
from narrowcast.analysis.diff.sides import Side
from narrowcast.core.ledger.identity import FORWARD
from narrowcast.reports.results.run_differences import GradientRow, RunRow

_STEPS, _WIDEST = 8.0, 0.05
"""Rounding explains of gradients this many times what it explains of one call; in low formats so much at most."""
_PARTS = 64
"""Of a fused weight at most: of the experts of a layer, two each."""
_Names = tuple[tuple[str, ...], tuple[str, ...]]
_MOST = 0.25
"""However far apart calls are, of runs in the same formats: a micro-batch that one run lacks is more."""


def band_along(rows: list[RunRow]) -> float:
    """They are made of all calls, one after the other."""
    differences = [row.difference for row in rows if not math.isnan(row.difference)]
    band = GAIN * (max((row.band for row in rows), default=0.0) + max(differences, default=0.0))
    return band if any(row.differs_in_format for row in rows) else min(band, _MOST)


def gradients(values: Values, pairs: list[Aligned], band: float) -> list[GradientRow]:
    """Of parameters with one name, of modules that are pairs, or of one value."""
    a, b = (side.runs[0].parameters for side in values.sides)
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
    found = [(row, *values.gradients(*row)) for row in rows]
    return [GradientRow(*row, apart.relative, apart.by, band * grown) for row, apart, grown in found if apart.is_known]


def _of_one_value(values: Values, a: list[str], b: list[str]) -> dict[_Names, None]:
    """Pair the parameters that have one value; then one of either side with several of the other, next to each other
    there, whose values it has: weights are fused, in whatever order.
    """
    left, rows = [a, b], dict[_Names, None]()
    for most in (1, _PARTS):
        for whole in (0, 1):
            for name in list(left[whole]):
                for parts in _next_to_each_other(
                    values.sides[1 - whole], left[1 - whole], values.sides[whole], name, most
                ):
                    names = ((name,), parts) if whole == 0 else (parts, (name,))
                    if values.are_parts(*names):
                        rows[names] = None
                        left = [[n for n in side if n not in found] for side, found in zip(left, names, strict=True)]
                        break
    return rows


def _next_to_each_other(side: Side, names: list[str], other: Side, whole: str, most: int) -> Iterator[tuple[str, ...]]:
    """Yield the parameters that have, together, as many elements as one of the other side; biases by themselves."""
    of = other.value(whole)
    pieces = [(name, side.value(name)) for name in names]
    pieces = [(name, piece) for name, piece in pieces if (piece.dimensions < 2) == (of.dimensions < 2)]
    for first in range(len(pieces)):
        total = 0
        for last, (_, piece) in enumerate(pieces[first : first + most], first):
            total += piece.elements
            if total == of.elements:
                yield tuple(name for name, _ in pieces[first : last + 1])


def in_one_alone(values: Values) -> list[GradientRow]:
    """Parameters, of modules that both runs call, of which one run alone has a gradient that is not zero: it is off by
    all of itself.
    """
    found: list[GradientRow] = []
    for side, other in (values.sides, values.sides[::-1]):
        there = other.runs[0].parameters
        for name, row in side.runs[0].parameters.items():
            path, _, leaf = name.rpartition(".")
            reads = any(leaf == argument for x in other.by_path.get(path, ()) for argument, _ in x.call.inputs)
            if "gradient" in row and "gradient" not in there.get(name, {}) and reads:
                if side.piece(0, row["gradient"]).rms > 0:
                    found.append(GradientRow((name,), (name,), 1.0, "", 0.0))
    return found


def band_of_alike(widest: float) -> float:
    """What rounding explains of gradients, which are made of all calls. widest: of the bands of these calls."""
    return min(_STEPS * widest, _WIDEST)


def gradients_are_alike(found: Sequence[GradientRow], parameters: Sequence[Iterable[str]]) -> bool:
    """Whether each parameter of either run that has a gradient is compared, and is alike. parameters: their names."""
    compared = ({n for row in found for n in row.a}, {n for row in found for n in row.b})
    are_all = all(set(names) <= those for names, those in zip(parameters, compared, strict=True))
    return bool(found) and are_all and all(row.difference <= row.band for row in found)
