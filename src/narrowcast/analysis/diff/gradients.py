"""Gradients of parameters in two runs."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from narrowcast.analysis.diff.aligned_values import GAIN, NEAR, Values
from narrowcast.analysis.diff.alignment import Aligned
from narrowcast.analysis.diff.pieces import Piece, distance, together
from narrowcast.core.ledger.identity import FORWARD
from narrowcast.reports.results.run_differences import GradientRow, RunRow

UPDATES = "updates"
_OF_SGD = {"value", "gradient", "before", "momentum_buffer"}
_SAME, SAME_STEP = 2e-6, 1e-3
"""So far apart are gradients whose sums are rounded in another order in fp32, and what steps by them change."""
_PARTS = 64
"""The most parts of a fused weight: of the experts of a layer, two each."""
_NEAREST = 0.02
"""So near are the gradients of parameters of one constant value that are paired first, before those within `NEAR`."""
_Names = tuple[tuple[str, ...], tuple[str, ...]]
_MOST = 0.25
"""The largest bound for runs in the same formats, whatever their calls: a missing micro-batch makes more."""
_OF_ONE_FACTOR, _OF_ONE_DIRECTION = 0.05, 0.15
"""By how much the factors of one scale may differ from each other; and the distance of a multiple, which is estimated,
from what the factor makes.
"""


def band_along(rows: list[RunRow]) -> float:
    """Return the bound of gradients, which are computed by all calls, one after the other."""
    differences = [row.difference for row in rows if not math.isnan(row.difference)]
    band = GAIN * (max((row.round_off_bound for row in rows), default=0.0) + max(differences, default=0.0))
    return band if any(row.differs_in_format for row in rows) else min(band, _MOST)


def gradients(values: Values, pairs: list[Aligned], band: float, of_call: float = 0.0) -> list[GradientRow]:
    """Compare the gradients of parameters with one name, of paired modules, or of one value. of_call: the widest bound
    of a call: a bias's gradient that is zero in theory has that of its module's largest one.
    """
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
    named, rows = rows, {names: None for names in rows if values.are_parts(*names)}
    rows |= _of_one_value(values, *([name for name in side if not any(name in names[n] for names in rows)]
                                    for n, side in enumerate((a, b))))  # fmt: skip
    taken = [{name for names in rows for name in names[n]} for n in range(2)]  # models of one class have any names
    rows |= {names: None for names in named if taken[0].isdisjoint(names[0]) and taken[1].isdisjoint(names[1])}
    compared = [(row, *values.gradients(*row)) for row in rows]
    known = [GradientRow(*row, d.relative, d.by, band * grown) for row, d, grown in compared if d.is_known]
    if not of_call:
        return known
    largest = _largest_of_modules(values)
    known = [
        replace(row, round_off_bound=max(row.round_off_bound, of_call * _larger_beside(values, largest, row.a)))
        for row in known
    ]
    return [_by_updates(values, row) if row.is_beyond else row for row in known]


def _by_updates(values: Values, row: GradientRow) -> GradientRow:
    """Return the row, by what the steps have changed of the weight where that is alike: a decay may be a part of the
    loss or the optimizer's, and gradients may be clipped in place. Not where an optimizer divides by their size.
    """
    apart = _moved_apart(values, row, _OF_SGD)
    return replace(row, difference=apart, measured_by=UPDATES) if apart <= row.round_off_bound else row


def named_in(rows: Sequence[GradientRow]) -> tuple[set[str], set[str]]:
    """Return the names of the parameters of either run whose gradients these rows compare."""
    return {name for row in rows for name in row.a}, {name for row in rows for name in row.b}


def trains_the_same(values: Values, rows: Sequence[GradientRow], parameters: Sequence[Iterable[str]]) -> bool:
    """Return whether steps have made the same of all weights, by gradients that are the same, but for the order of sums
    in fp32. parameters: names of those with a gradient; what one run alone has, such as a replica, does not count.
    """
    compared = named_in(rows)
    others = (side.runs[0].parameters for side in values.sides[::-1])
    are_all = all(
        name in known or name not in there
        for names, known, there in zip(parameters, compared, others, strict=True)
        for name in names
    )
    is_same = (row.difference <= _SAME and _moved_apart(values, row) <= SAME_STEP for row in rows)
    return bool(rows) and are_all and all(is_same)


def _moved_apart(values: Values, row: GradientRow, only: Container[str] | None = None) -> float:
    """Return the difference of a weight after the steps of both runs, in parts of what they changed of it; infinity
    where that is not known. only: the states that an optimizer may have.
    """
    both = zip(values.sides, (row.a, row.b), strict=True)
    rows = [side.runs[0].parameters[name] for side, names in both for name in names]
    if len(rows) != 2 or any("before" not in known for known in rows):
        return math.inf
    if only is not None and any(name not in only for known in rows for name in known):
        return math.inf
    after = values.between(*(known["value"] for known in rows))
    side, moved = values.sides[0], rows[0]
    change = distance(side.piece(0, moved["before"]), side.piece(0, moved["value"])).relative
    return after.relative / change if change > 0 and after.is_known else math.inf


def divides_by_sizes(values: Values) -> bool:
    """Return whether an optimizer divides gradients by their sizes, as Adam does: its first steps are signs of them,
    and those of small ones are rounding.
    """
    rows = [row for side in values.sides for row in side.runs[0].parameters.values()]
    return any(name not in _OF_SGD for row in rows for name in row)


def are_equal(a: Piece, b: Piece) -> bool:
    """Return whether two tensors are one, but for rounding in fp32."""
    return a.elements == b.elements and distance(a, b).relative <= _SAME


def norm(piece: Piece) -> float:
    """Return the size of a tensor (L2)."""
    return piece.rms * math.sqrt(piece.elements)


def _largest_of_modules(values: Values) -> dict[str, float]:
    """Return the root mean square of the largest gradient of each module of the first run, by its path."""
    largest: dict[str, float] = {}
    for name, row in values.sides[0].runs[0].parameters.items():
        if "gradient" in row:
            path = name.rpartition(".")[0]
            largest[path] = max(largest.get(path, 0.0), _gradient(values, name).rms)
    return largest


def _larger_beside(values: Values, largest: Mapping[str, float], names: tuple[str, ...]) -> float:
    """Return how many times larger the largest gradient of the same modules is, in the first run."""
    own = max(_gradient(values, name).rms for name in names)
    return max(largest[name.rpartition(".")[0]] for name in names) / own if own > 0 else 1.0


def _gradient(values: Values, name: str, run: int = 0) -> Piece:
    """Return the gradient of a parameter of a run."""
    side = values.sides[run]
    return side.piece(0, side.runs[0].parameters[name]["gradient"])


def apart_as_a_whole(values: Values, rows: Sequence[GradientRow]) -> float:
    """Return the difference of all gradients together, relative to their size in the first run: small ones, which may
    be rounding alone, weigh little in it.
    """
    return math.hypot(*(min(row.difference, 1.0) * share for row, share in shares(values, rows)))


def shares(values: Values, rows: Sequence[GradientRow]) -> list[tuple[GradientRow, float]]:
    """Return each row with its size (L2) in the first run, relative to that of all gradients together."""
    sizes = [math.hypot(*(norm(_gradient(values, name)) for name in row.a)) for row in rows]
    whole = math.hypot(*sizes)
    return [(row, size / whole if whole else 0.0) for row, size in zip(rows, sizes, strict=True)]


def common_factor(values: Values, rows: Sequence[GradientRow]) -> float:
    """Return the number by which all gradients of the second run are those of the first; 0 if there is none, or 1.

    Two vectors have one direction if their distance is the difference of their norms; sketches estimate it.
    """
    factors = []
    if not all(row.measured_by for row in rows):  # one run alone has a gradient
        return 0.0
    for row in rows:
        sizes = [math.hypot(*(norm(_gradient(values, x, n)) for x in names)) for n, names in enumerate((row.a, row.b))]
        factor = sizes[1] / sizes[0] if sizes[0] else 0.0
        if not abs(row.difference - abs(factor - 1) / max(1.0, factor)) <= _OF_ONE_DIRECTION:
            return 0.0
        factors.append(factor)
    least, most = min(factors, default=0.0), max(factors, default=0.0)
    is_one = len(factors) > 1 and most - least <= _OF_ONE_FACTOR * most and abs(most - 1) > _MOST
    return most if is_one else 0.0


def _of_one_value(values: Values, a: list[str], b: list[str]) -> dict[_Names, None]:
    """Pair the parameters that have one value; then one of either side with several of the other, next to each other
    there, whose values it has: weights are fused, in whatever order.
    """
    left, rows = [a, b], dict[_Names, None]()
    for near, (whole, least, most) in product((_NEAREST, NEAR), ((0, 1, 1), (0, 2, _PARTS), (1, 2, _PARTS))):
        for name in list(left[whole]):
            of, others = values.sides[whole].value(name), values.sides[1 - whole]
            pieces = {part: others.value(part) for part in left[1 - whole]}
            for parts in (*_of_alike_modules(pieces, of, least), *_next_to_each_other(pieces, of, least, most)):
                names = ((name,), parts) if whole == 0 else (parts, (name,))
                if values.are_parts(names[0], names[1], near):
                    rows[names] = None
                    left = [[n for n in side if n not in paired] for side, paired in zip(left, names, strict=True)]
                    break
    return rows


def _of_alike_modules(pieces: Mapping[str, Piece], of: Piece, least: int) -> Iterator[tuple[str, ...]]:
    """Yield the names of several pieces of one size, as many elements as another together, that differ by a number: the
    first weights of all experts of a layer.
    """
    alike: dict[tuple[str, int], list[str]] = {}
    for name, piece in pieces.items():
        parts = name.split(".")
        for at in (n for n, part in enumerate(parts) if part.isdigit()):
            alike.setdefault((".".join([*parts[:at], "*", *parts[at + 1 :]]), piece.elements), []).append(name)
    for (_, elements), names in alike.items():
        if len(names) >= max(2, least) and elements * len(names) == of.elements:
            yield tuple(names)


def _next_to_each_other(pieces: Mapping[str, Piece], of: Piece, least: int, most: int) -> Iterator[tuple[str, ...]]:
    """Yield the names of `least` to `most` adjacent pieces with as many elements as another; biases by themselves."""
    names = [name for name, piece in pieces.items() if (piece.dimensions < 2) == (of.dimensions < 2)]
    for first in range(len(names)):
        total, found = 0, list[Piece]()
        for last, name in enumerate(names[first : first + most], first + 1):
            found.append(pieces[name])
            total += pieces[name].elements
            if total == of.elements and last - first >= least and len({p.columns for p in found}) == 1:
                yield tuple(names[first:last])


def in_one_alone(values: Values, compared: Sequence[GradientRow]) -> list[GradientRow]:
    """Return rows of parameters of both runs, by name, by module or by value, of which one alone has a gradient other
    than zero: a difference of 1. compared: the rows of the others.
    """
    rows: list[GradientRow] = []
    both = list(zip(values.sides, named_in(compared), strict=True))
    alone = [
        [name for name, row in side.runs[0].parameters.items() if "gradient" in row and name not in known]
        for side, known in both
    ]
    elements = [sum(_gradient(values, name, n).elements for name in names) for n, names in enumerate(alone)]
    if elements[0] == elements[1]:
        return []  # one may be the others, flattened
    for side, other, names in zip(values.sides, values.sides[::-1], alone, strict=True):
        there = other.runs[0].parameters
        for name in names:
            row = side.runs[0].parameters[name]
            path, _, leaf = name.rpartition(".")
            reads = any(leaf == argument for x in other.by_path.get(path, ()) for argument, _ in x.call.inputs)
            if "gradient" in there.get(name, {}) or not side.piece(0, row["gradient"]).rms > 0:
                continue
            frozen = (are_equal(side.value(name), other.value(x)) for x in there if "gradient" not in there[x])
            if reads or name in there or any(frozen):
                rows.append(GradientRow((name,), (name,), 1.0, "", 0.0))
    return rows


def gradients_are_alike(
    values: Values, rows: Sequence[GradientRow], parameters: Sequence[Iterable[str]], band: float
) -> bool:
    """Return whether each parameter of either run with a gradient is compared, and alike, or a replica of one that is;
    or else what is left of both is one arranged otherwise: transposed, stacked. parameters: their names; band: the
    bound of all gradients.
    """
    if not rows or any(row.is_beyond for row in rows):
        return False
    compared = named_in(rows)
    left = [
        [name for name in names if name not in known and not any(_is_replica(values, n, name, of) for of in known)]
        for n, (names, known) in enumerate(zip(parameters, compared, strict=True))
    ]
    return not any(left) or (all(left) and _are_arranged_otherwise(values, left, band))


def _are_arranged_otherwise(values: Values, names: Sequence[Sequence[str]], band: float) -> bool:
    """Return whether these parameters of both runs have as many elements, and values and gradients of one range and
    one root mean square.
    """
    both = list(enumerate(names))
    weights = [together([values.sides[n].value(name) for name in own]) for n, own in both]
    gradients = [together([_gradient(values, name, n) for name in own]) for n, own in both]
    return weights[0].is_like(weights[1], _SAME) and gradients[0].is_like(gradients[1], band)


def _is_replica(values: Values, run: int, name: str, of: str) -> bool:
    """Return whether two parameters of a run have one value, and one gradient."""
    same_value = are_equal(values.sides[run].value(name), values.sides[run].value(of))
    return same_value and are_equal(_gradient(values, name, run), _gradient(values, of, run))
