"""Tensors of two runs compared that have different shapes: parts concatenated by columns or by rows, or on ranks.

A piece is a tensor, or several that are one in the other run. Its rows (along the last dimension) are named by two
numbers: the position in all leading dimensions but the last of them (sequence), and the position in that (token).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from narrowcast.formats import bf16, fp16
from narrowcast.reports.results import sketch
from narrowcast.reports.results.run_records import TensorFacts

TENSORS, SKETCHES, STATISTICS, RANGES, NOTHING = "tensors", "sketches", "statistics", "ranges", ""
"""How two pieces were compared: whole; by sketches of some rows; by range, mean and rms of all elements; by their
smallest and largest value; not at all.
"""
_Rows = Mapping[tuple[int, int], sketch.Row]
UNLIKE = 0.5
"""The distance of unrelated rows is 1.4."""
_LOWEST_OF_8 = -0.99 * bf16.max
NINE_DIGITS = 1e-8
"""A run in a file has nine digits of its statistics; one in memory has all of them."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor, or several as one. sequences, tokens: how many rows there are, by the two numbers that name one.

    rows: the sketches of those that were sampled. is_seen: values were inspected (of integers they are not).
    is_whole: mean and rms are of all elements. is_finite: without NaN and infinities. facts: of one tensor.
    """

    format: str
    sequences: int
    tokens: int
    columns: int
    low: float
    high: float
    mean: float
    rms: float
    is_seen: bool
    is_whole: bool
    is_finite: bool
    rows: _Rows = field(default_factory=dict)
    facts: TensorFacts | None = None
    dimensions: int = 2

    @property
    def count(self) -> int:
        """How many rows it has."""
        return self.sequences * self.tokens

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return self.count * self.columns

    @property
    def is_mask(self) -> bool:
        """Whether it holds about the lowest value of a format, with which masks are filled."""
        return self.low <= _LOWEST_OF_8 or -fp16.max <= self.low <= -0.99 * fp16.max

    @property
    def largest(self) -> float:
        """The largest finite magnitude."""
        return max(abs(self.low), abs(self.high))


def is_whole(format: str) -> bool:
    """Return whether a format is of whole numbers or flags: complex numbers are neither these nor floats."""
    return format.startswith(("i", "u", "bool"))


def piece_of(facts: TensorFacts) -> Piece:
    """Return one tensor as a piece."""
    rows, columns = sketch.rows_and_columns(facts.shape)
    tokens = facts.shape[-2] if len(facts.shape) > 1 else 1
    sketches = {divmod(number, tokens): row for number, row in sketch.sketch_rows(facts.sketch, facts.shape).items()}
    return Piece(
        facts.format, rows // tokens if tokens else 0, tokens, columns, facts.low, facts.high, facts.mean, facts.rms,
        facts.inspected > 0, facts.inspected == facts.elements, facts.is_finite, sketches, facts, len(facts.shape),
    )  # fmt: skip


def beside(pieces: Sequence[Piece]) -> Piece | None:
    """Concatenate by columns, as a fused projection returns them; None where the rows are not the same ones."""
    first = pieces[0]
    if len(pieces) == 1:
        return first
    if any((p.sequences, p.tokens) != (first.sequences, first.tokens) for p in pieces):
        return None
    columns = sum(p.columns for p in pieces)
    adds_up = all(p.columns % sketch.SUMS == 0 for p in pieces[:-1]) and sketch.sketched_step(columns) == 1
    known = set(first.rows).intersection(*(p.rows for p in pieces)) if adds_up else ()
    rows = {key: sketch.side_by_side([p.rows[key] for p in pieces]) for key in sorted(known)}
    return _joined(pieces, first.sequences, first.tokens, columns, rows)


def stacked(pieces: Sequence[Piece], outer: int = 1) -> Piece | None:
    """Concatenate by rows: after all rows, or within each of `outer` parts that all have, as with a cache and a batch;
    None where widths differ or a piece has no such parts.
    """
    first = pieces[0]
    if len(pieces) == 1:
        return first
    if any(p.columns != first.columns or p.count % outer for p in pieces):
        return None
    rows: dict[tuple[int, int], sketch.Row] = {}
    before = 0
    for piece in pieces:
        inner = piece.count // outer
        for (sequence, token), row in piece.rows.items():
            part, at = divmod(sequence * piece.tokens + token, inner)
            rows[part, before + at] = row
        before += inner
    return _joined(pieces, outer, before, first.columns, rows)


def in_best_order(a: Sequence[Piece], b: Sequence[Piece], whole: Whole | None = None) -> PieceDistance:
    """Return the distance of two sides with different numbers of module calls, in the closest order of rows:
    shapes do not show how flattened rows lie in a batch. Nothing where one side has rows that the other has not, unless
    it is the end of each sequence that is missing.
    """
    if sum(p.count for p in a) != sum(p.count for p in b) and len({p.sequences for p in (*a, *b)}) > 1:
        return PieceDistance()
    shared = math.gcd(*(piece.count for piece in (*a, *b)))
    distances: list[tuple[int, PieceDistance]] = []
    for outer in _divisors(shared):
        one, other = ((stacked(side, outer) if len(side) > 1 else _parted(side[0], outer)) for side in (a, b))
        if one is not None and other is not None:
            distances.append((len(one.rows.keys() & other.rows.keys()), distance(one, other, whole)))
    known = [(count, each) for count, each in distances if each.is_known]
    most = max((count for count, _ in known), default=0)
    return min((each for count, each in known if 2 * count >= most), key=lambda d: d.relative, default=PieceDistance())


def in_best_module_calls(a: Sequence[Piece], b: Sequence[Piece], whole: Whole | None = None) -> PieceDistance:
    """Return the same of sides that both have several module calls: all concatenated; or, where a module is called
    more than once in each step, each of its calls by itself. Nothing is known where they are unrelated in each order.
    """
    distances = [in_best_order(a, b, whole)]
    fewer = min(len(a), len(b))
    if fewer > 1 and not (len(a) % fewer or len(b) % fewer):
        each = [in_best_order(a[n::fewer], b[n::fewer], whole) for n in range(fewer)]
        if all(one.is_known for one in each):
            distances.append(max(each, key=lambda one: one.relative))
    best = min((one for one in distances if one.is_known), key=lambda one: one.relative, default=PieceDistance())
    return best if fewer == 1 or best.relative < UNLIKE else PieceDistance()


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if not number % n]
    return sorted({*small, *(number // n for n in small)})


def _parted(piece: Piece, outer: int) -> Piece:
    """Rename the rows of a piece, as those of this many parts."""
    inner = max(1, piece.count // outer)
    rows = {divmod(sequence * piece.tokens + token, inner): row for (sequence, token), row in piece.rows.items()}
    return replace(piece, sequences=outer, tokens=inner, rows=rows)


def in_any_order(pieces: Sequence[Piece]) -> Piece:
    """Return one piece of all elements, of which no row is known."""
    return _joined(pieces, 1, 1, sum(piece.elements for piece in pieces), {})


def _joined(pieces: Sequence[Piece], sequences: int, tokens: int, columns: int, rows: _Rows) -> Piece:
    elements = sum(p.elements for p in pieces) or 1
    mean = sum(p.mean * p.elements for p in pieces) / elements
    rms = math.sqrt(sum(p.rms**2 * p.elements for p in pieces) / elements)
    return Piece(
        pieces[0].format, sequences, tokens, columns, min(p.low for p in pieces), max(p.high for p in pieces), mean,
        rms, all(p.is_seen for p in pieces), all(p.is_whole for p in pieces), all(p.is_finite for p in pieces), rows,
        dimensions=pieces[0].dimensions,
    )  # fmt: skip


_ROWS = 8
"""The least number of rows of which most are evidence about all."""


@dataclass(frozen=True, slots=True)
class PieceDistance:
    """The relative distance of two pieces (L2; of ranges, to the largest magnitude): NaN where that is not known.

    by: what was compared, `TENSORS`, `SKETCHES`, `STATISTICS`, `RANGES` or nothing. is_part: one has elements that the
    other has not. row: the largest relative distance of a row, where rows are known, and of `rows`, in_most: what more
    than half of them exceed. growth: of results, by how much relative errors grow in their calls.
    """

    relative: float = math.nan
    by: str = NOTHING
    is_part: bool = False
    row: float = 0.0
    in_most: float = 0.0
    rows: int = 0
    growth: float = 1.0

    @property
    def is_known(self) -> bool:
        """Whether anything could be compared."""
        return bool(self.by)

    @property
    def is_in_most_rows(self) -> bool:
        """Whether most rows, of as many as say something about all, are about as far apart as the whole."""
        return self.rows >= _ROWS and 2 * self.in_most >= self.relative


Whole = Callable[[TensorFacts, TensorFacts], float | None]
"""Returns the relative distance of two tensors that the runs kept; None if one of them was not."""


def distance(a: Piece | None, b: Piece | None, whole: Whole | None = None) -> PieceDistance:
    """Return the distance of two pieces, from the best that both runs kept."""
    if a is None or b is None or not (a.is_seen and b.is_seen) or _are_masks(a, b):
        return PieceDistance()
    if whole is not None and a.facts is not None and b.facts is not None and a.facts.shape == b.facts.shape:
        relative = whole(a.facts, b.facts)
        if relative is not None:
            return PieceDistance(relative, TENSORS)
    is_part = a.elements != b.elements
    if a.is_finite != b.is_finite:
        return PieceDistance(math.inf, RANGES, is_part)
    orders = [sketch.sketch_distance(one, other) for one, other in _in_same_order(a, b)]
    most = max((len(each) for _, each in orders), default=0)
    by_rows, each = min((one for one in orders if most and 2 * len(one[1]) >= most), default=(math.nan, []))
    in_all = math.nan if is_part else _of_statistics(a, b)
    if each and a.largest and not any(row[sketch.SUMS] for rows in (a.rows, b.rows) for row in rows.values()):
        return PieceDistance()  # these rows are a margin of zeros, as images have one
    if each:
        relative = by_rows if math.isnan(in_all) else max(by_rows, in_all)
        return PieceDistance(relative, SKETCHES, is_part, each[-1], each[(len(each) - 1) // 2], len(each))
    return PieceDistance(in_all, NOTHING if is_part else STATISTICS if a.is_whole and b.is_whole else RANGES, is_part)


def _are_masks(a: Piece, b: Piece) -> bool:
    """Return whether both are filled as masks are, with a lowest value or infinity, but not both with infinity."""
    return (a.is_mask or b.is_mask) and all(piece.is_mask or not piece.is_finite for piece in (a, b))


def _in_same_order(a: Piece, b: Piece) -> list[tuple[_Rows, _Rows]]:
    """Return the rows of both under the same names, in each order in which they may be the same: shapes do not show
    which of sequence and token comes first in flattened rows. Empty where it is not known which are the same.
    """
    if a.columns != b.columns:
        return []
    if a.tokens == b.tokens or a.sequences == b.sequences:
        return [(a.rows, b.rows)]
    sizes = _leading(a), _leading(b)
    if a.count == b.count and 1 in (a.sequences, b.sequences):
        return [(_parted(a, 1).rows, _parted(b, 1).rows), (_parted(_turned(a), 1).rows, _parted(_turned(b), 1).rows)]
    if sizes[0] and sizes[0] == sizes[1]:
        return [(_parted(a, 1).rows, _parted(b, 1).rows)]
    if sizes[0] and sizes[1] and len(sizes[0]) == 2 and sizes[0] == sizes[1][::-1]:
        return [(a.rows, _turned(b).rows)]
    return []


def _turned(piece: Piece) -> Piece:
    """Return the same rows with sequence and token exchanged, where there are several sequences."""
    if piece.sequences == 1:
        return piece
    rows = {(token, sequence): row for (sequence, token), row in piece.rows.items()}
    return replace(piece, sequences=piece.tokens, tokens=piece.sequences, rows=rows)


def _leading(piece: Piece) -> list[int] | None:
    """Return the sizes of all dimensions but the last, without those of 1."""
    return None if piece.facts is None else [size for size in piece.facts.shape[:-1] if size != 1]


def _of_statistics(a: Piece, b: Piece) -> float:
    largest = max(a.largest, b.largest)
    if not largest:
        return 0.0
    difference = max(abs(a.low - b.low), abs(a.high - b.high)) / largest
    if a.is_whole and b.is_whole:
        difference = max(difference, max(abs(a.mean - b.mean), abs(a.rms - b.rms)) / max(a.rms, b.rms))
    return difference if difference > NINE_DIGITS else 0.0


@dataclass(frozen=True, slots=True)
class Together:
    """Several tensors put together, in whatever order: how many elements, their root mean square, and their range."""

    elements: int
    rms: float
    low: float
    high: float

    @property
    def size(self) -> float:
        """The largest of these."""
        return max(self.rms, abs(self.low), abs(self.high))

    def is_like(self, other: Together, most: float) -> bool:
        """Return whether another has as many, and is as far apart at most, in parts of this one's size."""
        apart = max(abs(self.rms - other.rms), abs(self.low - other.low), abs(self.high - other.high))
        return self.elements == other.elements and apart <= most * self.size


def together(pieces: Sequence[Piece]) -> Together:
    """Return these put together."""
    count = sum(piece.elements for piece in pieces)
    mean = math.fsum(piece.elements * piece.rms**2 for piece in pieces) / max(1, count)
    low, high = min((piece.low for piece in pieces), default=0.0), max((piece.high for piece in pieces), default=0.0)
    return Together(count, math.sqrt(mean), low, high)
