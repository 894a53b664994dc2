"""Values that two runs kept of paired calls, compared: results, inputs, and what they were given."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import permutations, product

from narrowcast.analysis.diff.alignment import INTERCHANGEABLE, Aligned
from narrowcast.analysis.diff.conditions import flattening, growth, growth_in_rows, passes_on
from narrowcast.analysis.diff.given_numbers import other_numbers, scaled_before
from narrowcast.analysis.diff.kept_tensors import KeptTensors
from narrowcast.analysis.diff.pieces import (
    UNLIKE,
    Piece,
    PieceDistance,
    Whole,
    beside,
    distance,
    in_any_order,
    in_best_module_calls,
    stacked,
)
from narrowcast.analysis.diff.round_off import BAND_OF_FP32, LEAST_BAND, RoundOff, band_of_formats
from narrowcast.analysis.diff.same_weights import range_difference
from narrowcast.analysis.diff.sides import Bundle, RankCall, Side, has_bias, read_by
from narrowcast.core.ledger.identity import BACKWARD
from narrowcast.core.ops import named, op_kind
from narrowcast.core.ops.facts import NORM
from narrowcast.reports.results.run_records import CallRecord

GAIN, GAIN_OF_PASSING = 16.0, 4.0
"""How many times larger the relative difference of a sound call's results may be than that of its inputs, besides the
growth that sizes explain; what exceeds that and local rounding is a fault. The second: of ops that pass it on.
"""
NEAR = 0.25
"""So near are gradients of parameters of one constant value, which may be each other's."""
_ORDERED = 3
_SWAPPED = {"self": "other", "other": "self"}
"""The names of two operands, which may be swapped in a symmetric op."""

Pick = Callable[[Side, RankCall], int | None]
Join = Callable[[Sequence[Piece]], Piece | None]


class Values:
    """The values of two sides. as_read: the differences of results as the calls that read them show them."""

    def __init__(self, a: Side, b: Side, kept: KeptTensors, as_read: Mapping[Aligned, PieceDistance]) -> None:
        self.sides = (a, b)
        self.round_off = RoundOff(a, b)
        self._as_read, self._growths = as_read, dict[tuple[int, int, int], float]()
        self.results = cache(self._results)
        self._are_swapped = cache(self._are_nearer_swapped)
        self._scaled = cache(partial(scaled_before, self.sides))
        self._whole: Whole | None = kept.distance if len(a.runs) == len(b.runs) == 1 else None

    def _results(self, pair: Aligned, is_equal: bool = False) -> PieceDistance:
        """Compare the results of the calls: of one op all that not only a backward reads, of two ops the first.
        is_equal: they read the same bits in the same formats.
        """
        if self._is_of_its_rank(pair) or pair.a[0].id.is_sum_of_gradients:
            return PieceDistance()
        first = pair.a[0].call, pair.b[0].call
        is_same = len(pair.a) == len(pair.b) == 1 and first[0].id.op == first[1].id.op
        count = min(len(call.outputs) for call in first) if is_same else 1
        distances = []
        for n in range(count):
            if n == 0 or pair.a[0].id.direction == BACKWARD or self._is_read(pair, n):
                pick = Side.with_bias if not is_same and has_bias(first[0]) != has_bias(first[1]) else _output(n)
                for module_call in module_calls_of(pair):
                    difference = self._as_read.get(pair) or self._between(module_call, pick, beside)
                    distances.append(replace(difference, growth=self._growth(module_call, n, is_equal)))
        known = [one for one in distances if one.is_known]
        return max(known, key=lambda one: one.relative / one.growth, default=PieceDistance())

    def bound_shown(self, pair: Aligned) -> float:
        """Return the rounding bound of the results; in a low format the bound of fp32, unless they are further apart
        than that, and not much further than the low format explains: else both runs rounded alike, or what makes them
        differ is something else.
        """
        bound = self.round_off.of_pair(pair)
        if bound <= BAND_OF_FP32:
            return bound
        results = self.results(pair)
        is_shown = not results.is_known or BAND_OF_FP32 < results.relative <= GAIN_OF_PASSING * bound
        return bound if is_shown else BAND_OF_FP32

    @staticmethod
    def gain(*bundles: Bundle) -> float:
        """Return by how much differences may grow in calls."""
        return GAIN_OF_PASSING if all(passes_on(bundle.id.op) for bundle in bundles) else GAIN

    def growth_of(self, side: int, call: CallRecord, position: int = 0) -> float:
        """Return how many times errors grow in one call of the first rank, in the result at that position."""
        if position >= len(call.outputs):
            return 1.0
        key = side, id(call), position
        if key not in self._growths:
            inputs = {name: self.sides[side].piece(0, number) for name, number in call.inputs}
            result = self.sides[side].piece(0, call.outputs[position][1])
            is_backward = call.id.direction == BACKWARD
            self._growths[key] = growth(call.id.op, position, inputs, result, result.rms, is_backward)
        return self._growths[key]

    def growth_in_rows(self, pair: Aligned) -> float:
        """Return by how much errors of rows may grow relative to the largest element, in the first rank's run of a."""
        call, side = pair.a[0].call, self.sides[0]
        read = [side.piece(0, number) for _, number in call.inputs]
        return growth_in_rows(call.id.op, read, side.piece(0, call.outputs[0][1])) if call.outputs else 1.0

    def flattening(self, pair: Aligned) -> float:
        """Return by how much errors may grow where a call drops the largest of what it reads, in a."""
        call, side = pair.a[0].call, self.sides[0]
        read = {name: side.piece(0, number) for name, number in call.inputs}
        return flattening(call.id.op, read, side.piece(0, call.outputs[0][1])) if call.outputs else 1.0

    def _is_read(self, pair: Aligned, position: int) -> bool:
        """Return whether a call of a forward reads the result at that position."""
        return any(bundle.call.outputs[position][1] in side.read_forward
                   for side, bundles in self._both(pair) for bundle in bundles)  # fmt: skip

    def _growth(self, pair: Aligned, position: int, is_equal: bool) -> float:
        """Return the growth of errors in the result at that position, the larger of both sides'."""
        known = [(side, bundle) for side, bundles in self._both(pair) for bundle in bundles[:1]
                 if position < len(bundle.call.outputs)]  # fmt: skip
        results = [side.piece(bundle.first.rank, bundle.call.outputs[position][1]) for side, bundle in known]
        out = max((piece.rms for piece in results), default=0.0)
        factors = [1.0]
        for (side, bundle), piece in zip(known, results, strict=True):
            inputs = {name: side.piece(bundle.first.rank, number) for name, number in bundle.call.inputs}
            is_backward = bundle.id.direction == BACKWARD
            factors.append(growth(bundle.id.op, position, inputs, piece, out, is_backward, is_equal))
        return max(factors)

    def inputs(self, pair: Aligned) -> dict[str, PieceDistance]:
        """Compare inputs besides weights, by name; of two ops the main input, without a name."""
        a, b = pair.a[0], pair.b[0]
        if len(pair.a) == len(pair.b) == 1 and a.id.op == b.id.op:
            names = [name for name in self._names(pair) if not self._is_given(pair, name)]
            return {name: self._between(pair, self._argument(pair, name), _first) for name in names}
        if a.family == b.family and a.family in INTERCHANGEABLE:
            return {"": self._between(pair, _read, _first)}
        return {}

    def given(self, pair: Aligned, before: float) -> tuple[tuple[str, str, str], ...]:
        """Return numbers and weights that differ: name, in a, in b. before: the largest difference of earlier results,
        which values saved for the backward may have, too.
        """
        a, b = pair.a[0].call, pair.b[0].call
        is_same = pair.a[0].family == pair.b[0].family and pair.a[0].family in INTERCHANGEABLE
        rows = other_numbers(pair, self._scaled(pair)) if is_same or a.id.op == b.id.op else []
        if a.id.op == b.id.op and pair.a[0].family == NORM:  # its weight may be part of a later call
            names = [{n for n, _ in call.inputs if n in ("weight", "bias")} for call in (a, b)]
            there = ["there", "not there"]
            rows += [(n, there[n not in names[0]], there[n not in names[1]]) for n in sorted(names[0] ^ names[1])]
        if a.id.op != b.id.op:
            return (*rows, *self._other_weight(pair.a, pair.b))
        before = before if a.id.direction == BACKWARD else 0.0
        for name in self._names(pair):
            if self._is_given(pair, name):
                difference = _worst(self._between(pair, self._argument(pair, name), join) for join in (stacked, beside))
                rows_of = zip(self.sides, (a, b), self.names(pair, name), strict=True)
                formats = [side.runs[0].tensors[dict(call.inputs)[same]].format for side, call, same in rows_of]
                least = max(before, band_of_formats(formats))
                if not difference.is_part and difference.relative > least:  # NaN: not known
                    rows.append(_row_of(name, formats[0], formats[1], difference.relative))
        return tuple(rows)

    def _other_weight(self, a: Sequence[Bundle], b: Sequence[Bundle]) -> tuple[tuple[str, str, str], ...]:
        """Compare the weights of two ops, whatever their names: by ranges, since one may be transposed."""
        one, other = (_joined([bundle.weight for bundle in bundles]) for bundles in (a, b))
        if one is None or other is None or one.elements != other.elements:
            return ()
        far, band = range_difference(one, other), band_of_formats([one.format, other.format])
        return (_row_of("weight", one.format, other.format, far),) if far > band else ()

    def between(self, a: int, b: int) -> PieceDistance:
        """Compare two tensors, by their numbers in the first ranks' runs."""
        return distance(self.sides[0].piece(0, a), self.sides[1].piece(0, b), self._whole)

    def weights_apart(self, pair: Aligned) -> float:
        """Return how far apart the weights are that steps have made of those of two modules; 0 if that is not known."""
        names = [f"{bundles[0].path}.weight".strip(".") for bundles in (pair.a, pair.b)]
        rows = [side.runs[0].parameters.get(name, {}) for side, name in zip(self.sides, names, strict=True)]
        if not all("before" in row for row in rows) or self.between(*(row["before"] for row in rows)).relative:
            return 0.0
        apart = self.between(*(row["value"] for row in rows)).relative
        return apart if apart <= NEAR else 0.0

    def gradients(self, a: Sequence[str], b: Sequence[str]) -> tuple[PieceDistance, float]:
        """Compare gradients of parameters, several of one side in the order in which they are one of the other; also
        return by how much errors grow where they are computed: that of a bias before a norm is zero but for errors.
        """
        sides = list(zip(self.sides, (a, b), strict=True))
        numbers = [[n for name in names if (n := side.runs[0].parameters[name].get("gradient", -1)) >= 0]
                   for side, names in sides]  # fmt: skip
        grown = max([1.0, *(self._growth_where_made(n, number) for n, side in enumerate(numbers) for number in side)])
        if not all(numbers):
            return PieceDistance(), grown
        values = self._of_parameters(a, b)
        pieces = [[side.piece(0, n) for n in of_side] for (side, _), of_side in zip(sides, numbers, strict=True)]
        if list(map(len, values)) != list(map(len, pieces)):
            return self._in_order(*pieces), grown
        compared = pieces if _are_constant(values) else values
        orders = [(self._in_order(*_reordered(compared, one)).relative, one) for one in _orders(*values)]
        difference, order = min(orders, key=lambda one: math.inf if math.isnan(one[0]) else one[0])
        if not difference < UNLIKE and self._are_of_one_value(*values):  # transposed, by head, or in too many parts
            return self._in_any_order(*pieces), grown
        return self._in_order(*_reordered(pieces, order)), grown

    def _growth_where_made(self, side: int, number: int) -> float:
        placed = self.sides[side].place_in_maker(number)
        return 1.0 if placed is None else self.growth_of(side, *placed)

    def _in_order(self, a: Sequence[Piece], b: Sequence[Piece]) -> PieceDistance:
        join = beside if a[0].dimensions < 2 else stacked
        return distance(join(a), join(b), self._whole)

    def are_parts(self, a: Sequence[str], b: Sequence[str], near: float = NEAR) -> bool:
        """Return whether the parameters of one side are those of the other, fused or in parts, in any order: their
        values are equal. Constant values, as of a new bias, identify none: then their gradients must be near, too.
        """
        values = self._of_parameters(a, b)
        if not self._are_of_one_value(*values):
            return False
        return not _are_constant(values) or self.gradients(a, b)[0].relative < near

    def are_of_one_value(self, a: Sequence[str], b: Sequence[str]) -> bool:
        """Return whether the parameters of one side have the values of those of the other, in any order."""
        return self._are_of_one_value(*self._of_parameters(a, b))

    def _of_parameters(self, a: Sequence[str], b: Sequence[str]) -> list[list[Piece]]:
        return [[side.value(name) for name in names] for side, names in zip(self.sides, (a, b), strict=True)]

    def _are_of_one_value(self, a: Sequence[Piece], b: Sequence[Piece]) -> bool:
        if sum(piece.elements for piece in a) != sum(piece.elements for piece in b):
            return False
        return self._in_any_order(a, b).relative <= LEAST_BAND

    @staticmethod
    def _in_any_order(a: Sequence[Piece], b: Sequence[Piece]) -> PieceDistance:
        return distance(in_any_order(a), in_any_order(b))

    def _is_of_its_rank(self, pair: Aligned) -> bool:
        """Return whether results depend on the number of ranks: sums over each rank's part of a batch, and values
        computed from its own loss.
        """
        if len(self.sides[0].runs) == len(self.sides[1].runs):
            return False
        inputs, outputs = ([self._turns(side, bundles[:1], pick, _first) for side, bundles in self._both(pair)]
                      for pick in (_read, _output(0)))  # fmt: skip
        if pair.a[0].id.direction == BACKWARD or not all((*inputs, *outputs)):
            return True
        (a, b), (x, y) = ([_size(module_calls[0][0]) for module_calls in kind] for kind in (inputs, outputs))
        return a != b and x == y

    def _both(self, pair: Aligned) -> tuple[tuple[Side, tuple[Bundle, ...]], tuple[Side, tuple[Bundle, ...]]]:
        return (self.sides[0], pair.a), (self.sides[1], pair.b)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def names(self, pair: Aligned, name: str) -> tuple[str, str]:
        """Return the names of an argument in both calls."""
        return name, _SWAPPED[name] if name in _SWAPPED and self._are_swapped(pair) else name

    def _are_nearer_swapped(self, pair: Aligned) -> bool:
        """Return whether the operands of a symmetric op stand in the other order in b: one of them is much nearer to
        the other's than either is to that of its name.
        """
        a, b = pair.a[0], pair.b[0]
        sides, factors = ([dict(getattr(x.call, part)) for x in (a, b)] for part in ("inputs", "given"))
        is_symmetric = a.id.op == b.id.op and op_kind(a.id.op).name in named("operands.symmetric")
        is_plain = all(of.get("alpha", "1") in ("1", "1.0") for of in factors)
        if not (is_symmetric and is_plain and all(_SWAPPED.keys() <= side.keys() for side in sides)):
            return False
        same, crossed = ([self.between(sides[0][x], sides[1][of[x]]) for x in _SWAPPED]
                         for of in ({x: x for x in _SWAPPED}, _SWAPPED))  # fmt: skip
        nearest = [min((one.relative for one in two if one.is_known and not one.is_part), default=math.inf)
                   for two in (same, crossed)]  # fmt: skip
        return nearest[1] < nearest[0] / 2

    def _names(self, pair: Aligned) -> list[str]:
        there = {name for name, _ in pair.b[0].call.inputs} - self._scaled(pair)
        return [name for name, _ in pair.a[0].call.inputs if name in there]

    def _argument(self, pair: Aligned, name: str) -> Pick:
        names = self.names(pair, name)
        return lambda side, placed: dict(placed.call.inputs).get(names[side is self.sides[1]])

    def _is_given(self, pair: Aligned, name: str) -> bool:
        rows = zip(self._both(pair), self.names(pair, name), strict=True)
        read = [(side, ranks[0], same) for (side, bundles), same in rows for ranks in bundles[0].module_calls]
        return all(side.is_given(placed, same) for side, placed, same in read)  # later ones: by an inner step, perhaps

    def _between(self, pair: Aligned, pick: Pick, join: Join) -> PieceDistance:
        """Return the largest distance over module calls and ranks; where their numbers differ, that of all as one."""
        a, b = (self._turns(side, bundles, pick, join) for side, bundles in self._both(pair))
        if not a or not b:
            return PieceDistance()
        if len(a) == len(b):
            return _worst(self._ranks(x, y) for x, y in zip(a, b, strict=True))
        for at in (0, -1):  # the same in each module call; or a cache at its full length
            if 1 in (len(a), len(b)) and _size(a[at][0]) == _size(b[at][0]):
                return self._ranks(a[at], b[at])
        whole_a, whole_b = ([stacked(ranks) for ranks in module_calls] for module_calls in (a, b))
        one, other = ([p for p in whole if p is not None] for whole in (whole_a, whole_b))
        if len(one) < len(a) or len(other) < len(b):
            return PieceDistance()
        return in_best_module_calls(one, other, self._whole)

    def _ranks(self, a: list[Piece], b: list[Piece]) -> PieceDistance:
        if len(a) == len(b):
            return _worst(distance(x, y, self._whole) for x, y in zip(a, b, strict=True))
        if _size(a[0]) == _size(b[0]):  # the same on all ranks
            return _worst(distance(x, y) for x in a for y in b)
        return distance(stacked(a), stacked(b))

    def _turns(self, side: Side, bundles: Sequence[Bundle], pick: Pick, join: Join) -> list[list[Piece]]:
        """Return pieces by module call and rank; none if a part is missing anywhere."""
        by_turn = []
        for module_call in zip(*(bundle.module_calls for bundle in bundles), strict=False):
            ranks = []
            for placed in zip(*module_call, strict=False):
                numbers = [pick(side, one) for one in placed]
                known = [side.piece(one.rank, n) for one, n in zip(placed, numbers, strict=True) if n is not None]
                piece = join(known) if len(known) == len(numbers) else None
                if piece is None:
                    return []
                ranks.append(piece)
            by_turn.append(ranks)
        return by_turn


def _are_constant(sides: Sequence[Sequence[Piece]]) -> bool:
    return all(piece.low == piece.high for side in sides for piece in side)


def _orders(*sides: Sequence[Piece]) -> list[tuple[tuple[int, ...], ...]]:
    """Return the orders in which the pieces of each side are tried: all orders of a few."""
    numbers = [tuple(range(len(side))) for side in sides]
    return list(product(*(permutations(of) if len(of) <= _ORDERED else [of] for of in numbers)))


def _reordered(sides: Sequence[Sequence[Piece]], order: Sequence[Sequence[int]]) -> list[list[Piece]]:
    return [[side[n] for n in numbers] for side, numbers in zip(sides, order, strict=True)]


def module_calls_of(pair: Aligned) -> list[Aligned]:
    """Split a pair by module call index, if both sides have as many: a sum may cancel in one module call alone."""
    bundles = (*pair.a, *pair.b)
    count = len(bundles[0].module_calls)
    if any(len(bundle.module_calls) != count for bundle in bundles):
        return [pair]
    sides = ([tuple(replace(x, module_calls=x.module_calls[n : n + 1]) for x in side) for n in range(count)]
             for side in (pair.a, pair.b))  # fmt: skip
    return [Aligned(a, b, pair.by) for a, b in zip(*sides, strict=True)]


def _output(position: int) -> Pick:
    return lambda _, placed: placed.call.outputs[position][1] if position < len(placed.call.outputs) else None


def _read(_: Side, placed: RankCall) -> int | None:
    return read_by(placed.call)


def _first(pieces: Sequence[Piece]) -> Piece | None:
    """Return the first piece: parts of a fused projection read one tensor."""
    return pieces[0]


def _joined(pieces: Sequence[Piece | None]) -> Piece | None:
    known = [piece for piece in pieces if piece is not None]
    return stacked(known) if known and len(known) == len(pieces) else None


def _size(piece: Piece) -> tuple[int, int, int]:
    return piece.sequences, piece.tokens, piece.columns


def _worst(distances: Iterable[PieceDistance]) -> PieceDistance:
    known = [one for one in distances if one.is_known]
    return max(known, key=lambda one: one.relative) if known else PieceDistance()


def _row_of(name: str, a: str, b: str, difference: float) -> tuple[str, str, str]:
    return name, a, f"{b}, {difference:.1e} apart"
