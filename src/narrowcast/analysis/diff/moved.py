"""Which parameters the steps of two runs move, and to where."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from narrowcast.analysis.diff.aligned_values import NEAR, Values
from narrowcast.analysis.diff.alignment import Aligned
from narrowcast.analysis.diff.gradients import are_equal, norm
from narrowcast.analysis.diff.pieces import Piece, distance
from narrowcast.analysis.diff.places import Places
from narrowcast.analysis.diff.sides import Side
from narrowcast.output.words import and_more
from narrowcast.reports.results.run import UNNAMED
from narrowcast.reports.results.run_differences import Untrained


def moved_apart(values: Values) -> float:
    """Return how far apart the weights are to which the steps of both runs have led, whatever gradients these kept, in
    parts of the way that all of them went together; NaN if not all that either run moved are those of the other.
    """
    off, way = 0.0, 0.0
    for start, end, other in _moved(values) or ():
        off = math.hypot(off, _apart(end, other))
        way = math.hypot(way, _apart(start, end))
    return off / way if way > 0 else math.nan


def _moved(values: Values) -> list[tuple[Piece, Piece, Piece]] | None:
    """Return the weights that steps have moved: where they began, and to which either run has led them. One that a run
    leaves where it is, frozen or in no optimizer, ends there. None if not all that either moved are in the other.
    """
    sides = values.sides
    moved = [{name: row for name, row in side.runs[0].parameters.items() if "before" in row} for side in sides]
    left, found = dict(moved[1]), []
    for name, row in moved[0].items():
        start, end = sides[0].value(name), sides[0].piece(0, row["value"])
        same = [n for n in left if are_equal(start, sides[1].value(n))]
        if name in same and not name.startswith(UNNAMED):
            same = [name]
        if same:
            ends = {n: sides[1].piece(0, left[n]["value"]) for n in same}
            nearest = min(ends, key=lambda n: _apart(end, ends[n]))
            del left[nearest]
            found.append((start, end, ends[nearest]))
        elif name not in left and _has(sides[1], name, start):
            found.append((start, end, start))
        else:
            return None
    starts = {name: sides[1].value(name) for name in left}
    if not all(_has(sides[0], name, start) for name, start in starts.items()):
        return None
    return found + [(start, start, sides[1].piece(0, left[name]["value"])) for name, start in starts.items()]


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
        if trained[other] and sum(values.sides[other].value(name).elements for name in others) <= fused:
            found += left.values()
    return found


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
    values: Values, readers: Mapping[int, Sequence[tuple[Aligned, str]]], places: Places, own: int, name: str,
    trained: Sequence[str],
) -> Untrained | None:  # fmt: skip
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
    apart = max((distance(end, other).relative for _, end, other in _moved(values) or ()), default=0.0)
    return apart if apart <= NEAR else 0.0


def _apart(a: Piece, b: Piece) -> float:
    """Return the distance of two tensors, in their own unit; infinity if that is not known."""
    apart = distance(a, b)
    return apart.relative * max(norm(a), norm(b)) if apart.is_known else math.inf
