"""What two runs kept of calls that are pairs, compared: results, inputs, and how much rounding explains."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from narrowcast.formats import FORMATS, Format, tf32
from narrowcast.ledger.identity import BACKWARD
from narrowcast.ops import op_kind
from narrowcast.ops.facts import CONV, GEMM, REDUCTION, SOFTMAX
from narrowcast.report.run import Run
from narrowcast.report.run_records import CallRecord
from narrowcast.two_runs.alignment import TOLD_APART, Aligned, ranges_apart
from narrowcast.two_runs.kept_tensors import KeptTensors
from narrowcast.two_runs.pieces import NOTHING, Distance, Piece, Whole, beside, distance, in_turn, over_ranks
from narrowcast.two_runs.sides import Bundle, Placed, Side, read_by

BAND = 8.0
"""A call's results may differ by this many units of rounding of both sides' formats: its inputs are rounded to them,
sums are taken in another order, and its results are rounded.
"""
LEAST_BAND = 2.0**-21
"""Sketches are kept in fp32, ranges in nine digits."""
_SUMS = frozenset(["add", "sub", "rsub", "addcmul", "lerp"])
_EXPONENTIALS = frozenset(["exp", "exp2", "expm1", "pow"])
_OF_BACKWARD = 8.0
"""Gradients of weights, biases and norms are sums in which much cancels; by how much cannot be told from sizes."""

Pick = Callable[[Placed], int | None]
Join = Callable[[Sequence[Piece]], Piece | None]


@dataclass(frozen=True, slots=True)
class Compared:
    """How far apart results are. gain: how many times relative errors grow, from the sizes of what came and went."""

    relative: float
    by: str
    is_part: bool
    gain: float = 1.0

    @property
    def is_known(self) -> bool:
        """Whether anything could be compared."""
        return self.by != NOTHING


class Values:
    """The values of two sides."""

    def __init__(self, a: Side, b: Side, kept: KeptTensors) -> None:
        self.sides = (a, b)
        self._whole: Whole | None = kept.distance if len(a.runs) == len(b.runs) == 1 else None

    def results(self, pair: Aligned) -> Compared:
        """Of what the calls gave: all results of one op, the first of two."""
        if self._is_of_its_rank(pair):
            return Compared(math.nan, NOTHING, False)
        first = pair.a[0].call, pair.b[0].call
        is_same = len(pair.a) == len(pair.b) == 1 and first[0].id.op == first[1].id.op
        count = min(len(call.outputs) for call in first) if is_same else 1
        found = _worst(self._between(pair, _output(n), beside) for n in range(count))
        return Compared(found.relative, found.by, found.is_part, max(self._gain(0, pair.a), self._gain(1, pair.b)))

    def inputs(self, pair: Aligned) -> float:
        """Of what the calls were given besides weights; NaN where that is not known."""
        a, b = pair.a[0], pair.b[0]
        if len(pair.a) == len(pair.b) == 1 and a.id.op == b.id.op:
            names = [name for name in self._names(pair) if not self._is_given(pair, name)]
            found = [self._between(pair, _input(name), _first) for name in names]
        elif a.family == b.family and a.family in TOLD_APART:
            found = [self._between(pair, _read, _first)]
        else:
            return math.nan
        known = [one.relative for one in found if one.is_known]
        return max(known) if known else math.nan

    def given(self, pair: Aligned) -> tuple[tuple[str, str, str], ...]:
        """Numbers and weights that differ: name, in a, in b."""
        a, b = pair.a[0].call, pair.b[0].call
        is_same = pair.a[0].family == pair.b[0].family and pair.a[0].family in TOLD_APART
        numbers_a, numbers_b = (dict(call.given) if is_same or a.id.op == b.id.op else {} for call in (a, b))
        found = [(n, x, y) for n, x in numbers_a.items()
                 if (y := numbers_b.get(n)) is not None and x != y and _is_number(x, y)]  # fmt: skip
        if a.id.op != b.id.op:
            return (*found, *self._other_weight(pair.a, pair.b))
        for name in self._names(pair):
            if self._is_given(pair, name):
                apart = _worst(self._between(pair, _input(name), join) for join in (in_turn, beside))
                formats = [side.runs[0].tensors[dict(call.inputs)[name]].format
                           for side, call in zip(self.sides, (a, b), strict=True)]  # fmt: skip
                if apart.is_known and apart.relative > _band(formats):
                    found.append(_apart(name, formats[0], formats[1], apart.relative))
        return tuple(found)

    def _other_weight(self, a: Sequence[Bundle], b: Sequence[Bundle]) -> tuple[tuple[str, str, str], ...]:
        """The weights of two ops, by whatever names they take them; one may be turned, so ranges are compared."""
        one, other = (_joined([bundle.weight for bundle in bundles]) for bundles in (a, b))
        if one is None or other is None or one.elements != other.elements:
            return ()
        apart = ranges_apart(one, other)
        return (_apart("weight", one.format, other.format, apart),) if apart > _band([one.format, other.format]) else ()

    def band(self, pair: Aligned) -> float:
        """What rounding explains of the results' difference."""
        formats: list[str] = []
        for side, bundles in self._both(pair):
            coarse = [_coarsest([*_formats_of(side.runs[0], x.call), *_tf32(side.runs[0], x)]) for x in bundles]
            formats.append(max(coarse, key=lambda name: FORMATS[name].epsilon))
        return _band(formats) * max(self._cancels(0, pair.a), self._cancels(1, pair.b))

    def gradients(self, a: Sequence[str], b: Sequence[str]) -> Distance:
        """Of parameters, several of one side as rows of one of the other."""
        pieces: list[list[Piece]] = []
        for side, names in zip(self.sides, (a, b), strict=True):
            rows = [side.runs[0].parameters[name] for name in names]
            pieces.append([side.piece(0, row["gradient"]) for row in rows if "gradient" in row])
        if not all(pieces):
            return Distance()
        join = beside if pieces[0][0].dimensions < 2 else in_turn
        return distance(join(pieces[0]), join(pieces[1]), self._whole)

    def _is_of_its_rank(self, pair: Aligned) -> bool:
        """Whether ranks in other numbers give something else: sums over their part of a batch, and what comes of the
        loss that each has of its own.
        """
        if len(self.sides[0].runs) == len(self.sides[1].runs):
            return False
        came, gave = ([self._turns(side, bundles[:1], pick, _first) for side, bundles in self._both(pair)]
                      for pick in (_read, _output(0)))  # fmt: skip
        if pair.a[0].id.direction == BACKWARD or not all((*came, *gave)):
            return True
        (a, b), (x, y) = ([_size(turns[0][0]) for turns in found] for found in (came, gave))
        return a != b and x == y

    def _both(self, pair: Aligned) -> tuple[tuple[Side, tuple[Bundle, ...]], tuple[Side, tuple[Bundle, ...]]]:
        return (self.sides[0], pair.a), (self.sides[1], pair.b)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _names(self, pair: Aligned) -> list[str]:
        there = {name for name, _ in pair.b[0].call.inputs}
        return [name for name, _ in pair.a[0].call.inputs if name in there]

    def _is_given(self, pair: Aligned, name: str) -> bool:
        return all(side.is_given(bundles[0].turns[0][0], name) for side, bundles in self._both(pair))

    def _between(self, pair: Aligned, pick: Pick, join: Join) -> Distance:
        """The largest distance over turns and ranks; of turns in other numbers, of all of them as one."""
        a, b = (self._turns(side, bundles, pick, join) for side, bundles in self._both(pair))
        if not a or not b:
            return Distance()
        if len(a) == len(b):
            return _worst(self._ranks(x, y) for x, y in zip(a, b, strict=True))
        if _size(a[0][0]) == _size(b[0][0]):
            return self._ranks(a[0], b[0])
        whole_a, whole_b = (_joined([over_ranks(ranks) for ranks in turns]) for turns in (a, b))
        return distance(whole_a, whole_b, self._whole)

    def _ranks(self, a: list[Piece], b: list[Piece]) -> Distance:
        if len(a) == len(b):
            return _worst(distance(x, y, self._whole) for x, y in zip(a, b, strict=True))
        if _size(a[0]) == _size(b[0]):  # the same on all ranks
            return _worst(distance(x, y) for x in a for y in b)
        return distance(over_ranks(a), over_ranks(b))

    def _turns(self, side: Side, bundles: Sequence[Bundle], pick: Pick, join: Join) -> list[list[Piece]]:
        """By turn and rank; none if a part lacks anywhere."""
        found = []
        for turn in zip(*(bundle.turns for bundle in bundles), strict=False):
            ranks = []
            for placed in zip(*turn, strict=False):
                numbers = [pick(one) for one in placed]
                known = [side.piece(one.rank, n) for one, n in zip(placed, numbers, strict=True) if n is not None]
                piece = join(known) if len(known) == len(numbers) else None
                if piece is None:
                    return []
                ranks.append(piece)
            found.append(ranks)
        return found

    # -- how errors grow ----------------------------------------------------------------------------------------------

    def _sizes(self, n: int, bundle: Bundle) -> tuple[float, float, float]:
        """Largest rms and largest magnitude of what came, and the rms of what the call gave."""
        first = bundle.turns[0][0]
        pieces = [self.sides[n].piece(first.rank, number) for _, number in first.call.inputs]
        gave = [self.sides[n].piece(first.rank, number) for _, number in first.call.outputs[:1]]
        return (
            max((p.rms for p in pieces), default=0.0), max((p.largest for p in pieces), default=0.0),
            gave[0].rms if gave else 0.0,
        )  # fmt: skip

    def _cancels(self, n: int, bundles: Sequence[Bundle]) -> float:
        """How much smaller a sum or a mean is than what it is of: so many times its relative error is larger."""
        kind = op_kind(bundles[0].id.op)
        if kind.name not in _SUMS and kind.family != REDUCTION:
            return 1.0
        came, _, gave = self._sizes(n, bundles[0])
        return max(1.0, came / gave) if gave else 1.0

    def _gain(self, n: int, bundles: Sequence[Bundle]) -> float:
        kind = op_kind(bundles[0].id.op)
        if "backward" in kind.name:
            return _OF_BACKWARD
        if kind.family == SOFTMAX or kind.name in _EXPONENTIALS:
            return max(1.0, self._sizes(n, bundles[0])[1])
        return self._cancels(n, bundles)


def _output(position: int) -> Pick:
    return lambda placed: placed.call.outputs[position][1] if position < len(placed.call.outputs) else None


def _input(name: str) -> Pick:
    return lambda placed: dict(placed.call.inputs).get(name)


def _read(placed: Placed) -> int | None:
    return read_by(placed.call)


def _first(pieces: Sequence[Piece]) -> Piece | None:
    """Parts of a fused projection read one tensor."""
    return pieces[0]


def _joined(pieces: Sequence[Piece | None]) -> Piece | None:
    known = [piece for piece in pieces if piece is not None]
    return in_turn(known) if known and len(known) == len(pieces) else None


def _size(piece: Piece) -> tuple[int, int, int]:
    return piece.sequences, piece.tokens, piece.columns


def _worst(found: Iterable[Distance]) -> Distance:
    known = [one for one in found if one.is_known]
    return max(known, key=lambda one: one.relative) if known else Distance()


def _apart(name: str, a: str, b: str, apart: float) -> tuple[str, str, str]:
    return name, a, f"{b}, {apart:.1e} apart"


def _is_number(a: str, b: str) -> bool:
    """Whether both say a float, a flag or a word; whole numbers are sizes and dimensions, which layouts change."""
    for text in (a, b):
        if text.startswith("'"):
            return True
        try:
            float(text)
        except ValueError:
            return {a, b} == {"True", "False"}
    return any(mark in text for text in (a, b) for mark in ".en")


def _formats_of(run: Run, call: CallRecord) -> list[str]:
    named = [*call.computes.split(","), *(run.tensors[n].format for _, n in call.outputs)]
    return [name for name in named if name in FORMATS] or ["fp32"]


def _tf32(run: Run, bundle: Bundle) -> list[str]:
    """`tf32`, where an accelerator may take products in it."""
    flags = run.environment.get("flags") or {}
    if run.environment.get("device_type") != "cuda" or bundle.family not in (GEMM, CONV):
        return []
    lowers = flags.get("get_float32_matmul_precision", "highest") != "highest"
    is_on = lowers or flags.get("backends.cuda.matmul.allow_tf32")
    if bundle.family == CONV:
        is_on = flags.get("backends.cudnn.allow_tf32")
    return [tf32.name] if is_on else []


def _coarsest(names: Sequence[str]) -> str:
    found: Format = max((FORMATS[name] for name in names), key=lambda format: format.epsilon)
    return found.name


def _band(formats: Sequence[str]) -> float:
    return max(LEAST_BAND, BAND * sum(FORMATS[name].epsilon / 2 for name in formats if name in FORMATS))
