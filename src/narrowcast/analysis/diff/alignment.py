"""Which calls of two runs are pairs: by hand, by module path, weights, order and op, and by values."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from narrowcast.analysis.diff.pieces import stacked
from narrowcast.analysis.diff.same_weights import by_lowest, near_to, range_difference, same_weight, weight_distance
from narrowcast.analysis.diff.sides import Bundle, Side
from narrowcast.core.ledger.identity import BACKWARD, CallId
from narrowcast.core.ops.facts import ATTENTION, CONV, GEMM, NORM, SOFTMAX
from narrowcast.reports.results.mapping import MappingLine, RunMapping

BY_HAND, BY_PATH, BY_WEIGHTS, BY_ORDER, BY_VALUES = "mapping", "path", "weights", "order", "values"
INTERCHANGEABLE = frozenset([GEMM, CONV, ATTENTION, NORM, SOFTMAX])
"""Families whose members may be the same call under different names; pointwise ops are not."""
_CLOSE = 0.05
"""By how much of the largest magnitude the ranges of equal values may differ, faults upstream included."""


@dataclass(frozen=True, slots=True)
class Aligned:
    """Calls of a that are calls of b: one of each, or several on one side. by: what identifies them."""

    a: tuple[Bundle, ...]
    b: tuple[Bundle, ...]
    by: str


def align(a: Side, b: Side, mapping: RunMapping | None = None) -> tuple[list[Aligned], dict[Bundle, str]]:
    """Return the pairs, in the order of a; and the calls that a line of the mapping leaves unpaired, with that line.

    RunError where the mapping names a module or call that does not exist.
    """
    aligner = _Aligner(a, b)
    if mapping is not None:
        aligner.by_hand(mapping)
    backward = aligner.without_backward()
    aligner.one_by_one()
    aligner.with_backward(backward)
    aligner.one_by_one()
    return sorted(aligner.pairs, key=lambda pair: pair.a[0].position), aligner.left_out


class _Aligner:
    def __init__(self, a: Side, b: Side) -> None:
        self._a, self._b = a, b
        self._free_a = dict.fromkeys(a.bundles)
        self._free_b = dict.fromkeys(b.bundles)
        self.pairs: list[Aligned] = []
        self.left_out: dict[Bundle, str] = {}

    def one_by_one(self) -> None:
        """Pair the calls that are left, by the strongest evidence first."""
        self.by_equal_modules()
        self.by_weights()
        self.by_modules()
        self.in_gaps()

    def without_backward(self) -> tuple[list[Bundle], list[Bundle]]:
        """Take the calls of backwards out, and return them for later."""
        a, b = ([x for x in free if x.id.direction == BACKWARD] for free in (self._free_a, self._free_b))
        for free, bundles in ((self._free_a, a), (self._free_b, b)):
            for bundle in bundles:
                del free[bundle]
        return a, b

    def with_backward(self, kept: tuple[list[Bundle], list[Bundle]]) -> None:
        """Pair the calls of backwards by the pairs of the forward: each engine has an order of its own. What is left of
        the forward has no partner: any other would be out of order.
        """
        self._free_a, self._free_b = dict.fromkeys(kept[0]), dict.fromkeys(kept[1])
        partner = {p.a[0].id: p.b[0].id for p in self.pairs if len(p.a) == len(p.b) == 1}
        waiting: dict[tuple[CallId | None, str, int, int], list[Bundle]] = {}
        for x in kept[1]:
            waiting.setdefault((x.call.forward, x.id.op, x.elements, x.columns), []).append(x)
        for bundle in kept[0]:
            forward = partner.get(bundle.call.forward) if bundle.call.forward else None
            candidates = waiting.get((forward, bundle.id.op, bundle.elements, bundle.columns)) if forward else None
            if candidates:  # the first; or, with two losses of one call, the first with a close range
                best = min(candidates, key=lambda b: range_difference(bundle, b) > _CLOSE)
                candidates.remove(best)
                self._pair([bundle], [best], BY_ORDER)

    def _pair(self, a: Iterable[Bundle], b: Iterable[Bundle], by: str) -> None:
        pair = Aligned(tuple(a), tuple(b), by)
        self.pairs.append(pair)
        for bundle in pair.a:
            del self._free_a[bundle]
        for bundle in pair.b:
            del self._free_b[bundle]

    # -- by hand -------------------------------------------------------------------------------------------------------

    def by_hand(self, mapping: RunMapping) -> None:
        for names_a, names_b, line in mapping.calls():
            a = [self._named(self._free_a, name, "a", mapping, line) for name in names_a]
            b = [self._named(self._free_b, name, "b", mapping, line) for name in names_b]
            if a and b:
                self._pair(a, b, BY_HAND)
            else:
                self._leave_out([*a, *b], mapping, line)
        for entry in mapping.modules(self._a.by_path, self._b.by_path):
            self._modules(entry, mapping)

    def _named(self, free: dict[Bundle, None], name: CallId, run: str, mapping: RunMapping, line: int) -> Bundle:
        for bundle in free:
            if any(placed.call.id == name for module_call in bundle.module_calls for placed in module_call):
                return bundle
        raise mapping.refused(line, f"run {run} has no call {name}, or a line above takes it", "List run.calls.")

    def _modules(self, entry: MappingLine, mapping: RunMapping) -> None:
        a = [[x for x in self._a.by_path[path] if x in self._free_a] for path in entry.a]
        b = [[x for x in self._b.by_path[path] if x in self._free_b] for path in entry.b]
        if not a or not b:
            self._leave_out([x for bundles in (*a, *b) for x in bundles], mapping, entry.line)
        elif len(a) == len(b) == 1:
            self._in_order(a[0], b[0], BY_HAND)
        else:
            for sides in zip(*a, *b, strict=False):  # the n-th call of each part belongs to that of the whole
                if len({bundle.family for bundle in sides}) == 1:
                    self._pair(sides[: len(a)], sides[len(a) :], BY_HAND)

    def _leave_out(self, bundles: list[Bundle], mapping: RunMapping, line: int) -> None:
        for bundle in bundles:
            self.left_out[bundle] = f"{mapping.file}:{line}"
            self._free_a.pop(bundle, None)
            self._free_b.pop(bundle, None)

    # -- by module -----------------------------------------------------------------------------------------------------

    def _shared_modules(self) -> Iterator[tuple[list[Bundle], list[Bundle]]]:
        for path, bundles in self._a.by_path.items():
            a = [x for x in bundles if x in self._free_a]
            b = [x for x in self._b.by_path.get(path, ()) if x in self._free_b]
            if a and b:
                yield a, b

    def by_equal_modules(self) -> None:
        """Pair the calls of modules with one path that make the same calls in the same order."""
        for a, b in self._shared_modules():
            if [(x.id.op, x.id.direction) for x in a] == [(x.id.op, x.id.direction) for x in b]:
                for pair in zip(a, b, strict=True):
                    self._pair(pair[:1], pair[1:], BY_PATH)

    def by_modules(self) -> None:
        for a, b in self._shared_modules():
            self._in_order(a, b, BY_PATH)

    def _in_order(self, a: list[Bundle], b: list[Bundle], by: str = "") -> None:
        for i, j in aligned_sequences(len(a), len(b), lambda i, j: likeness(a[i], b[j], bool(by))):
            self._pair([a[i]], [b[j]], by or (BY_ORDER if a[i].id.op == b[j].id.op else BY_VALUES))

    def in_gaps(self) -> None:
        """Pair the calls that lie between paired ones."""
        known = sorted((p.a[0].position, p.b[0].position) for p in self.pairs)
        at_a = at_b = -1
        for end_a, end_b in [*in_order_on_both(known), (len(self._a.bundles), len(self._b.bundles))]:
            a = [x for x in self._a.bundles[at_a + 1 : end_a] if x in self._free_a]
            b = [x for x in self._b.bundles[at_b + 1 : end_b] if x in self._free_b]
            for parts in _siblings(a):
                self._fused(parts, b, True, _same_size)
            for parts in _siblings(b):
                self._fused(parts, a, False, _same_size)
            self._in_order([x for x in a if x in self._free_a], [x for x in b if x in self._free_b])
            at_a, at_b = end_a, end_b

    # -- by weights ----------------------------------------------------------------------------------------------------

    def by_weights(self) -> None:
        """Pair products with the same weight, also where one run has several fused in one."""
        waiting = by_lowest(self._free_b)
        for a in [x for x in self._free_a if x.weight is not None]:
            near = [b for b in near_to(a, waiting) if b in self._free_b]
            candidates = [b for b in near if _same_direction(a, b) and same_weight(a.weight, b.weight)]
            if candidates:
                self._pair([a], [min(candidates, key=lambda b: weight_distance(a.weight, b.weight))], BY_WEIGHTS)
        for parts in _siblings(self._free_a):
            self._fused(parts, list(self._free_b), True, _same_weights)
        for parts in _siblings(self._free_b):
            self._fused(parts, list(self._free_a), False, _same_weights)

    def _fused(self, parts: list[Bundle], wholes: list[Bundle], is_a: bool, is_same: _IsFused) -> None:
        """Pair neighbours among parts with the product of the other run into which they are fused."""
        free, others = (self._free_a, self._free_b) if is_a else (self._free_b, self._free_a)
        for whole in wholes:
            left = [p for p in parts if p in free]
            ends = [(m, n) for m in range(len(left)) for n in range(m + 2, len(left) + 1)]
            can_be = whole.weight is not None and whole in others
            some = next((left[m:n] for m, n in ends if can_be and is_same(left[m:n], whole)), None)
            if some is not None:
                by = BY_WEIGHTS if is_same is _same_weights else BY_ORDER
                self._pair(*((some, [whole]) if is_a else ([whole], some)), by)


_IsFused = Callable[[Sequence[Bundle], Bundle], bool]


def _same_weights(parts: Sequence[Bundle], whole: Bundle) -> bool:
    """Return whether the weights of the parts, concatenated by rows, are that of the whole."""
    weight = stacked([p.weight for p in parts if p.weight is not None])
    return _same_direction(parts[0], whole) and same_weight(weight, whole.weight)


def _same_size(parts: Sequence[Bundle], whole: Bundle) -> bool:
    """Return whether the results of the parts together are as wide as that of the whole, whatever the weights are."""
    sizes = [(sum(p.columns for p in parts), sum(p.elements for p in parts)), (whole.columns, whole.elements)]
    return _same_direction(parts[0], whole) and sizes[0] == sizes[1]


def _same_direction(a: Bundle, b: Bundle) -> bool:
    return a.id.direction == b.id.direction and a.family == b.family


def _siblings(free: Iterable[Bundle]) -> list[list[Bundle]]:
    """Return the groups of products that read the same tensor, as those for q, k and v do."""
    groups: dict[tuple[int, str, str], list[Bundle]] = {}
    for bundle in free:
        if bundle.weight is not None:
            groups.setdefault((bundle.read, bundle.id.op, bundle.id.direction), []).append(bundle)
    return [group for group in groups.values() if len(group) > 1]


def likeness(a: Bundle, b: Bundle, same_module: bool = False) -> float:
    """Return how likely two calls are the same one, as points; 0 if they cannot be.

    Calls of one op may be; or of two, if they belong to one family, or have the same values.
    """
    if a.id.direction != b.id.direction:
        return 0.0
    same_op, same_elements, same_columns = a.id.op == b.id.op, a.elements == b.elements, a.columns == b.columns
    alike = same_elements and _has_range(a) and _has_range(b) and range_difference(a, b) < _CLOSE
    same_family = a.family == b.family and a.family in INTERCHANGEABLE
    if not (same_op or alike or (same_family and same_elements)):
        return 0.0
    if same_op and not (same_family or alike or same_module or (same_elements and same_columns)):
        return 0.0
    if same_op and not (same_elements or a.path) and a.id.op.rpartition(".")[0].endswith("_"):
        return 0.0  # steps of optimizers write to weights of several sizes
    same_name = a.path.rpartition(".")[2] == b.path.rpartition(".")[2] != ""
    points = 4.0 * same_op + same_family + same_elements + 0.5 * same_columns + 2 * alike
    points += 1.0 if a.path == b.path else 0.5 * same_name
    clash = same_elements and _has_range(a) and range_difference(a, b) > 0.5
    return points - clash


def _has_range(x: Bundle) -> bool:
    return x.low < x.high


def is_by_values(pair: Aligned) -> bool:
    """Return whether calls of two ops are a pair by their values alone: no module but the root has both."""
    a, b = pair.a[0], pair.b[0]
    is_known = pair.by == BY_HAND or a.path == b.path != "" or {a.family, b.family} <= INTERCHANGEABLE  # as attention
    return a.id.op != b.id.op and not is_known


def are_of_one_weight(pair: Aligned) -> bool:
    """Return whether calls read the same weights."""
    a, b = (
        stacked([x.weight for x in side]) if all(x.weight is not None for x in side) else None  # type: ignore[misc]
        for side in (pair.a, pair.b)
    )
    return same_weight(a, b)


def mapping_of(pairs: list[Aligned]) -> tuple[MappingLine, ...]:
    """Return entries that yield the same pairs: modules, and the calls that these do not pair."""
    votes = Counter((_paths(pair.a), _paths(pair.b)) for pair in pairs)
    taken_a: set[str] = set()
    taken_b: set[str] = set()
    modules: list[MappingLine] = []
    for a, b in sorted(votes, key=lambda key: -votes[key] - 1000 * (len(key[0]) + len(key[1]) - 2)):
        if taken_a.isdisjoint(a) and taken_b.isdisjoint(b):
            modules.append(MappingLine(a, b))
            taken_a.update(a)
            taken_b.update(b)
    covered = {(entry.a, entry.b) for entry in modules}
    order = {key: n for n, key in enumerate(votes)}
    modules.sort(key=lambda entry: order[entry.a, entry.b])
    calls = [MappingLine(_ids(p.a), _ids(p.b)) for p in pairs
             if (_paths(p.a), _paths(p.b)) not in covered or not _is_same_kind(p)]  # fmt: skip
    return (*modules, *calls)


def _is_same_kind(pair: Aligned) -> bool:
    families = {x.family for x in (*pair.a, *pair.b)}
    return len({x.id.op for x in (*pair.a, *pair.b)}) == 1 or (len(families) == 1 and families <= INTERCHANGEABLE)


def _paths(bundles: tuple[Bundle, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(bundle.path for bundle in bundles))


def _ids(bundles: tuple[Bundle, ...]) -> tuple[str, ...]:
    return tuple(str(bundle.id) for bundle in bundles)


Pairs = list[tuple[int, int]]
Score = Callable[[int, int], float]
"""Returns the score of a pair of positions; not above zero where the two cannot be a pair."""

CELLS = 1_000_000
"""Of sequences with more possible pairs (the product of their lengths) only those near the diagonal are tried."""
_NARROWEST = 64


def aligned_sequences(length_a: int, length_b: int, score: Score) -> Pairs:
    """Return the best pairs of positions, in order, by dynamic programming; of equal totals the first ones."""
    if not length_a or not length_b:
        return []
    is_whole = length_a * length_b <= CELLS
    reach = length_b if is_whole else max(_NARROWEST, abs(length_a - length_b), CELLS // (2 * length_a))
    rows: list[tuple[int, list[float]]] = [(0, [])] * (length_a + 1)  # first position tried, totals from there on

    def best(i: int, j: int) -> float:
        """Return the best total from a pair of positions on; 0 beyond those that are tried."""
        first, totals = rows[i]
        return totals[j - first] if 0 <= j - first < len(totals) else 0.0

    for i in range(length_a - 1, -1, -1):
        middle = i * length_b // length_a
        first, last = max(0, middle - reach), min(length_b, middle + reach + 1)
        rows[i] = first, (totals := [0.0] * (last - first))
        beside, diagonal = 0.0, best(i + 1, last)
        for j in range(last - 1, first - 1, -1):
            below, worth = best(i + 1, j), score(i, j)
            beside = max(below, beside, worth + diagonal if worth > 0 else 0.0)
            totals[j - first], diagonal = beside, below
    pairs: Pairs = []
    i = j = 0
    while i < length_a and j < length_b:
        worth = score(i, j)
        if worth > 0 and best(i, j) == worth + best(i + 1, j + 1):
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif best(i, j) == best(i + 1, j):
            i += 1
        else:
            j += 1
    return pairs


def in_order_on_both(pairs: Pairs) -> Pairs:
    """Return the longest chain of these pairs, sorted by the first, whose seconds increase as well."""
    ends: list[int] = []  # of the best chain of each length: the index of its last pair
    before: list[int] = []
    for n, (_, j) in enumerate(pairs):
        low = bisect_left(ends, j, key=lambda at: pairs[at][1])
        before.append(ends[low - 1] if low else -1)
        ends[low : low + 1] = [n]
    chain: Pairs = []
    at = ends[-1] if ends else -1
    while at >= 0:
        chain.append(pairs[at])
        at = before[at]
    return chain[::-1]


def formats_of(bundles: Sequence[Bundle]) -> str:
    """Return the formats in which calls compute."""
    return ",".join(dict.fromkeys(bundle.call.computes or bundle.call.input_formats for bundle in bundles))
