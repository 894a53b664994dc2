"""Which parameters the steps of two runs move, and to where."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from narrowcast.analysis.diff.aligned_values import NEAR, Values
from narrowcast.analysis.diff.alignment import Aligned
from narrowcast.analysis.diff.gradients import SAME_STEP, are_equal, named_in, norm
from narrowcast.analysis.diff.outcomes import BAND_OF_LOW
from narrowcast.analysis.diff.pieces import UNLIKE, Piece, distance, in_any_order
from narrowcast.analysis.diff.places import Places
from narrowcast.analysis.diff.sides import Side
from narrowcast.core.ledger.identity import BACKWARD
from narrowcast.output.words import and_more
from narrowcast.reports.results.run import UNNAMED
from narrowcast.reports.results.run_differences import GradientRow, Untrained

_OF_MEANS = ("exp_avg", "momentum_buffer")
"""The states in which optimizers of torch's keep a mean of gradients."""
_MEANS, _MEANS_OF_LOW, _WAY_OF_LOW, _WAY = 4, 0.025, 0.15, 3e-3
"""In low formats means of gradients of sound programs were 0.02 apart at most, and 3.3 widest rounding bounds of a call
in fp16; those of 60 programs with a fault that trains 0.055 and more. Adam's steps by them are further apart: 0.095; in
fp32 0.0012, where a part of a weight has no gradient but rounding, as the bias of keys.
"""
_NOISE, _NOISE_OF_LOW = 2.0**-20, 2.0**-8
"""A gradient that is smaller, in parts of the largest, is what is left of a sum that cancels: in fp32, in less."""


def moved_apart(values: Values) -> float:
    """Return how far apart the weights are to which the steps of both runs have led, whatever gradients these kept, in
    parts of the way that all of them went together; NaN if not all that either run moved are those of the other.
    """
    return _part_of_the_way(_moved(values) or ())


def have_trained_alike(values: Values, gradients: Sequence[GradientRow], widest: float) -> bool:
    """Return whether the steps of both runs have led to the same weights, by the same gradients, if the optimizers keep
    a mean of these; however the programs are written, and whatever is left in `grad` after the last step. gradients:
    rows of those that are left; what is rounding alone, as of a bias before a norm, leads anywhere. widest: the widest
    rounding bound of a call.
    """
    is_low = widest >= BAND_OF_LOW
    apart = max(SAME_STEP, min(_MEANS_OF_LOW, _MEANS * widest)) if is_low else SAME_STEP
    least = UNLIKE if is_low else SAME_STEP
    noise = named_in([row for row in gradients if least < row.difference <= row.round_off_bound])
    most = _WAY_OF_LOW if is_low else SAME_STEP
    known = _moved(values, noise, most) or ()
    moved = [one for one in known if noise[0].isdisjoint(one.a) and noise[1].isdisjoint(one.b)]
    means = [both for one in moved for state in _OF_MEANS if (both := _both(values, one, state, most))]
    off, size = (math.hypot(*sizes) for sizes in zip((0.0, 0.0), *map(_apart_in_any_order, means), strict=True))
    by_means = _WAY_OF_LOW if is_low else _WAY
    return off <= apart * size and _part_of_the_way(moved) <= (by_means if means else apart)


def _both(values: Values, one: _Moved, state: str, most: float) -> tuple[Piece, Piece] | None:
    """Return a state that both optimizers keep of a weight, where a run without parameters may keep it anywhere, so far
    apart in parts of its size; None if it is not that.
    """
    both = [(side, names) for side, names in zip(values.sides, (one.a, one.b), strict=True) if names]
    kept = [_pieces(side, names, state) for side, names in both if _keep(side, names, state)]
    if len(kept) == 2:
        a, b = kept
        return (a[0], b[0]) if len(a) == len(b) == 1 else (in_any_order(a), in_any_order(b))
    others = [side for side in values.sides if not side.runs[0].parameters]
    if not (kept and others):
        return None
    (pieces,) = kept
    piece = pieces[0] if len(pieces) == 1 else in_any_order(pieces)
    there = _anywhere(piece, others[0], most * norm(piece))
    return None if there is None else (piece, there)


def _keep(side: Side, names: Sequence[str], state: str) -> bool:
    return all(state in side.runs[0].parameters[name] for name in names)


def _pieces(side: Side, names: Sequence[str], state: str) -> list[Piece]:
    """Return a state of parameters: their values, those before the steps, or what an optimizer keeps of them."""
    return [side.piece(0, side.runs[0].parameters[name][state]) for name in names]


def _apart_in_any_order(both: tuple[Piece, Piece]) -> tuple[float, float]:
    """Return the distance of two tensors, of which one may be transposed, and the size of the first."""
    return min(_apart(*both), _apart(*(in_any_order([piece]) for piece in both))), norm(both[0])


def _part_of_the_way(moved: Iterable[_Moved]) -> float:
    off, way = 0.0, 0.0
    for one in moved:
        is_found = not (one.a and one.b)  # anywhere, so that it may be transposed
        apart = _apart_in_any_order((one.end, one.other))[0] if is_found else _apart(one.end, one.other)
        off = math.hypot(off, apart)
        way = math.hypot(way, _apart(one.start, one.end))
    return off / way if way > 0 else math.nan


class _Moved(NamedTuple):
    """A weight that steps have moved, or several that are fused in the other run: where it began, and to which either
    run has led it. a, b: its names; none in a run that leaves it where it is.
    """

    a: tuple[str, ...]
    b: tuple[str, ...]
    start: Piece
    end: Piece
    other: Piece


def _moved(
    values: Values, noise: tuple[Collection[str], Collection[str]] = ((), ()), most: float = SAME_STEP
) -> list[_Moved] | None:
    """Return the weights that steps have moved. One that a run leaves where it is, frozen or in no optimizer, ends
    there. None if not all that either moved are in the other. noise: those of either run which rounding alone moves,
    so that their copies may end anywhere, too. most: how far apart, in parts of its way, a weight may be in a run that
    has no parameters.
    """
    sides = values.sides
    moved = [{name: row for name, row in side.runs[0].parameters.items() if "before" in row} for side in sides]
    left, found, alone = dict(moved[1]), list[_Moved](), list[str]()
    for name, row in moved[0].items():
        start, end = sides[0].value(name), sides[0].piece(0, row["value"])
        same = [n for n in left if are_equal(start, sides[1].value(n))]
        if name in same and not name.startswith(UNNAMED):
            same = [name]
        if same:
            ends = {n: sides[1].piece(0, left[n]["value"]) for n in same}
            nearest = min(ends, key=lambda n: _apart(end, ends[n]))
            del left[nearest]
            found.append(_Moved((name,), (nearest,), start, end, ends[nearest]))
        elif name not in left and _has(sides[1], name, start):
            found.append(_Moved((name,), (), start, end, start))
        else:
            alone.append(name)
    others = [name for name in left if not _has(sides[0], name, sides[1].value(name))]
    for name in left:
        if name not in others:
            start = sides[1].value(name)
            found.append(_Moved((), (name,), start, start, sides[1].piece(0, left[name]["value"])))
    if all(side.runs[0].parameters for side in sides):
        known = _with_fused(values, found, (alone, others), noise)
        if known is not None or (alone and others):
            return known
    plain = _without_parameters(values, (alone, others), most)
    return None if plain is None else [*found, *plain]


def _with_fused(
    values: Values, found: list[_Moved], left: tuple[Sequence[str], ...], noise: tuple[Collection[str], ...]
) -> list[_Moved] | None:
    """Return these, and what is left of the weights that either run moved, as one: transposed, fused, or divided in the
    other run. None if it is not that. What no gradient moves, as an average, may be any tensor of the other run.
    """
    sides, trained = values.sides, list[tuple[str, ...]]()
    for n, names in enumerate(left):
        rows = sides[n].runs[0].parameters
        trained.append(tuple(name for name in names if "gradient" in rows[name]))
        rounded = [sides[n].value(name) for name in noise[n]]
        for name in names:
            start, end = sides[n].value(name), sides[n].piece(0, rows[name]["value"])
            is_copy = "gradient" not in rows[name] and not any(are_equal(start, one) for one in rounded)
            if is_copy and _anywhere(end, sides[1 - n], SAME_STEP * _apart(start, end)) is None:
                return None
    if all(trained):
        starts, ends = (
            [in_any_order(_pieces(side, names, state)) for side, names in zip(sides, trained, strict=True)]
            for state in ("before", "value")
        )
        if are_equal(*starts):
            return [*found, _Moved(trained[0], trained[1], starts[0], *ends)]
    return None if any(trained) else found


def _without_parameters(values: Values, left: tuple[Sequence[str], ...], most: float) -> list[_Moved] | None:
    """Return the weights that one run moved, where they are no parameters of the other: plain tensors, which it trains
    itself, each alone or some as one. None if it does not come to the same tensors. What rounding alone moves may be
    anywhere.
    """
    n = 0 if left[0] else 1
    side, other, rows = values.sides[n], values.sides[1 - n], values.sides[n].runs[0].parameters
    sizes = {name: side.piece(0, rows[name]["gradient"]).rms for name in left[n] if "gradient" in rows[name]}
    least = (_NOISE if most <= SAME_STEP else _NOISE_OF_LOW) * max(sizes.values(), default=0.0)
    found, together = list[_Moved](), list[str]()
    for name in left[n]:
        start, end = side.value(name), side.piece(0, rows[name]["value"])
        if (there := _anywhere(end, other, most * _apart(start, end))) is not None:
            found.append(_Moved(*_of_one(n, name), start, end, there))
        elif sizes.get(name, math.inf) > least:
            together.append(name)
    if together:
        start, end = (in_any_order(_pieces(side, together, state)) for state in ("before", "value"))
        if (there := _anywhere(end, other, most * _apart(start, end))) is None:
            return None
        found.append(_Moved(*_of_one(n, *together), start, end, there))
    return found


def _of_one(side: int, *names: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names in either run of what only one has as parameters."""
    return (names, ()) if side == 0 else ((), names)


def _anywhere(piece: Piece, other: Side, most: float) -> Piece | None:
    """Return the tensor of another run that is nearest to one of this; None if all are further from it."""
    size, tensors = math.sqrt(piece.elements), other.runs[0].tensors
    alike = (n for n, t in enumerate(tensors) if t.elements == piece.elements and abs(t.rms - piece.rms) * size <= most)
    apart = [(_apart_in_any_order((piece, there))[0], there) for there in (other.piece(0, n) for n in alike)]
    nearest = min(apart, key=itemgetter(0), default=(math.inf, piece))
    return nearest[1] if nearest[0] <= most else None


def trained_by_one_alone(values: Values, pairs: Sequence[Aligned], places: Places) -> list[Untrained]:
    """Return the parameters that one run trains and the other, which computes with the same values, leaves as they are.
    What is trained under other names, fused or flattened, is none.
    """
    trained = [_trained(side) for side in values.sides]
    found: list[Untrained] = []
    for own, other in ((0, 1), (1, 0)):
        alone, others = _without_equal(values.sides[own], trained[own], values.sides[other], trained[other])
        moved = [name for name in alone if not _is_zero(values.sides[own], name)]
        readers = _readers(values.sides[own], pairs, own) if moved else {}
        known = {name: _same_untrained(values, readers, places, own, name, trained[other]) for name in moved}
        left = {name: one for name, one in known.items() if one is not None}
        fused = sum(values.sides[own].value(name).elements for name in alone if name not in left)
        is_known = trained[other] or _is_never_stepped(values.sides[other])
        if is_known and sum(values.sides[other].value(name).elements for name in others) <= fused:
            found += left.values()
    return found


def _is_never_stepped(side: Side) -> bool:
    """Return whether a run has gradients of parameters, and nothing reads them."""
    run = side.runs[0]
    gradients = {row["gradient"] for row in run.parameters.values() if "gradient" in row}
    return bool(gradients) and not any(
        number in gradients for call in run.calls if call.id.direction != BACKWARD for _, number in call.inputs
    )


def _trained(side: Side) -> list[str]:
    """Return the parameters that have a gradient and are moved, or would be if it were not zero."""
    rows = [(name, row) for name, row in side.runs[0].parameters.items() if "gradient" in row]
    return [name for name, row in rows if _has_moved(row) or _is_zero(side, name)]


def _has_moved(row: Mapping[str, int]) -> bool:
    return "before" in row and row["before"] != row["value"]


def _is_zero(side: Side, name: str) -> bool:
    return not side.piece(0, side.runs[0].parameters[name]["gradient"]).rms > 0


def _without_equal(own: Side, names: Sequence[str], other: Side, others: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return what is left of both when each is taken out with one of the same value, of the same name if there is."""
    alone, left = list[str](), list(others)
    for name in names:
        value, first = own.value(name), [name] if name in left else []
        same = next((x for x in (*first, *left) if are_equal(value, other.value(x))), None)
        if same is None:
            alone.append(name)
        else:
            left.remove(same)
    return alone, left


def _readers(side: Side, pairs: Sequence[Aligned], own: int) -> dict[int, list[tuple[Aligned, str]]]:
    """Return the pairs whose call of this run reads what lies in a memory, and the argument's name, by that memory."""
    readers: dict[int, list[tuple[Aligned, str]]] = {}
    for pair in pairs:
        for argument, number in (pair.a[0], pair.b[0])[own].call.inputs:
            readers.setdefault(_memory(side, number), []).append((pair, argument))
    return readers


def _same_untrained(
    values: Values,
    readers: Mapping[int, Sequence[tuple[Aligned, str]]],
    places: Places,
    own: int,
    name: str,
    trained: Sequence[str],
) -> Untrained | None:
    """Return what the other run leaves of a parameter that one trains: a parameter of the same value; or what a call of
    it reads, made by no call and of that value, where its pair reads the parameter. None if it has neither.
    """
    side, other, run = values.sides[own], values.sides[1 - own], "ba"[own]
    value, rows = side.value(name), other.runs[0].parameters
    for x in sorted((x for x in rows if x not in trained and "value" in rows[x]), key=lambda x: x != name):
        if (x == name or value.low < value.high) and are_equal(value, other.value(x)):
            memory = _memory(other, rows[x]["value"])
            read = (y for y in other.bundles if any(_memory(other, n) == memory for _, n in y.call.inputs))
            return Untrained(run, x, name, next((places.of(1 - own, [y]) for y in read), ""))
    known = {_memory(other, rows[x]["value"]) for x in trained}
    for pair, argument in readers.get(_memory(side, side.runs[0].parameters[name]["before"]), ()):
        bundle = (pair.b[0], pair.a[0])[own]
        there = dict(bundle.call.inputs).get(values.names(pair, argument)[1 - own], -1)
        is_outside = there >= 0 and other.maker(0, there) is None and _memory(other, there) not in known
        if is_outside and are_equal(value, other.piece(0, other.origin(0, there))):
            return Untrained(run, "", name, places.of(1 - own, [bundle]))
    return None


def moved_by_one_alone(values: Values) -> str:
    """Return which parameters one run moves without a gradient, as a copy of others, and the other, that has them,
    leaves where they are; empty for none.
    """
    rows = [side.runs[0].parameters for side in values.sides]
    moved = [{name for name, row in of.items() if _has_moved(row)} for of in rows]
    for own, other in ((0, 1), (1, 0)):
        left = [x for x in rows[other] if x in moved[own] - moved[other] and "gradient" not in rows[own][x]]
        if moved[other] and left:
            more = and_more(len(left) - 1, "parameter")
            return f"{'ba'[own]} leaves {left[0]}{more} where they are, which no gradient moves."
    return ""


def _memory(side: Side, number: int) -> int:
    """Return where a tensor lies, before casts, by the first tensor there: a weight's is that of its transpose."""
    origin = side.origin(0, number)
    lies_in = side.runs[0].tensors[origin].lies_in
    return origin if lies_in < 0 else lies_in


def _has(side: Side, name: str, start: Piece) -> bool:
    """Return whether a run has a parameter of that name and value."""
    return "value" in side.runs[0].parameters.get(name, {}) and are_equal(start, side.value(name))


def weights_moved(values: Values) -> float:
    """Return how far apart the weights are to which the steps of both runs have led; 0 if that is not known, or far."""
    apart = max((distance(one.end, one.other).relative for one in _moved(values) or ()), default=0.0)
    return apart if apart <= NEAR else 0.0


def _apart(a: Piece, b: Piece) -> float:
    """Return the distance of two tensors, in their own unit; infinity if that is not known."""
    apart = distance(a, b)
    return apart.relative * max(norm(a), norm(b)) if apart.is_known else math.inf
