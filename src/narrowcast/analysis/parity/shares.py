"""How much of a distance the modules of b bring: b runs with the results of its first modules made equal to a's, up to
one and up to the next; what the distance falls by is what lies between.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from narrowcast.analysis.parity.exchange import Kept, ModuleCall
from narrowcast.reports.results.parity import ModuleShare

_SMALL = 0.04
"""Parts of the whole below which a stretch of modules is not divided further."""
Measure = Callable[[Sequence[ModuleCall]], float]
"""The distance with the results of these calls of b exchanged."""


def paired_results(a: Kept, b: Kept, paths: Mapping[str, tuple[str, ...]]) -> dict[ModuleCall, ModuleCall]:
    """Return the calls of modules of b whose results are in the shapes of those of their partner in a, in order."""
    found = {}
    for path, number in b.order:
        partners = paths.get(path, ())
        key = (partners[0], number) if len(partners) == 1 else None
        if key in a.shapes and b.shapes[path, number] and a.shapes[key] == b.shapes[path, number]:
            found[path, number] = key
    return found


def within(pairs: Mapping[ModuleCall, ModuleCall], kept: Kept, limit_bytes: int) -> dict[ModuleCall, ModuleCall]:
    """Return the pairs whose results fit into this many bytes: of outer modules, if not all do."""
    chosen = dict(pairs)
    depths = sorted({path.count(".") for path, _ in pairs}, reverse=True)
    for depth in depths:
        if sum(4 * _elements(kept.shapes[key]) for key in chosen.values()) <= limit_bytes:
            break
        chosen = {key: partner for key, partner in chosen.items() if key[0].count(".") < depth}
    return chosen


def _elements(shapes: Sequence[Sequence[int]]) -> int:
    total = 0
    for shape in shapes:
        size = 1
        for n in shape:
            size *= n
        total += size
    return total


class Shares:
    """Divides the calls of modules into stretches, and asks for the distance at their ends, most of all first."""

    def __init__(self, calls: Sequence[ModuleCall], whole: float, measure: Measure, most_runs: int) -> None:
        self._calls, self._measure, self._left, self.runs = calls, measure, most_runs, 0
        self._at = {-1: whole}
        self._whole = whole

    def found(self) -> list[tuple[int, int, float, float]]:
        """Return the stretches that bring anything, in order: after which call, up to which, the distance with all
        before made equal, and with these made equal too.
        """
        last = len(self._calls) - 1
        waiting, done = [(-1, last)], []
        self._distance(last)
        while waiting:
            waiting.sort(key=lambda ends: abs(self._at[ends[0]] - self._at[ends[1]]))
            first, end = waiting.pop()
            is_small = abs(self._at[first] - self._at[end]) <= _SMALL * self._whole
            if end - first == 1 or is_small or self.runs >= self._left:
                done.append((first, end))
                continue
            middle = (first + end) // 2
            self._distance(middle)
            waiting += [(first, middle), (middle, end)]
        return [(first, end, self._at[first], self._at[end]) for first, end in sorted(done)]

    def _distance(self, n: int) -> float:
        if n not in self._at:
            self.runs += 1
            self._at[n] = self._measure(self._calls[: n + 1])
        return self._at[n]


def shares_of(
    pairs: Mapping[ModuleCall, ModuleCall], whole: float, measure: Measure, places: Mapping[str, str], most_runs: int
) -> tuple[list[ModuleShare], int]:
    """Return what each stretch of modules brings, and how often b ran for that."""
    calls = list(pairs)
    if not calls or not whole > 0:
        return [], 0
    stretches = Shares(calls, whole, measure, most_runs)
    found = []
    for first, end, before, after in stretches.found():
        if abs(before - after) > _SMALL / 4 * whole:
            since = _name(calls[first]) if first >= 0 else ""
            path = calls[end][0]
            found.append(
                ModuleShare(_name(calls[end]), _name(pairs[calls[end]]), since, before, after, _place(path, places))
            )
    return found, stretches.runs


def _name(call: ModuleCall) -> str:
    path, number = call
    return f"{path or '(root)'}{f' call {number}' if number > 1 else ''}"


def _place(path: str, places: Mapping[str, str]) -> str:
    """Return the first line of a module's own calls, or of those inside of it."""
    own = places.get(path)
    return own or next((place for other, place in places.items() if other.startswith(f"{path}.")), "")
