"""Where two programs compute in other ways: all calls between what they have alike and the first call that is surely of
both and reads something else. Calls without a weight that their order alone has paired may be no pair there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from narrowcast.analysis.diff.alignment import BY_HAND, Aligned
from narrowcast.analysis.diff.makers import Makers
from narrowcast.analysis.diff.outcomes import WIDEST
from narrowcast.analysis.diff.rows import Judging
from narrowcast.analysis.diff.sides import Bundle
from narrowcast.core.ledger.identity import FORWARD
from narrowcast.reports.results.run_differences import EQUAL, RunRow, Unaligned
from narrowcast.reports.results.verdicts import ROUND_OFF

_ADDED = 2
"""Up to this many additional calls, a program is the other one with a step added."""


def unsure_calls(judging: Judging, pairs: Sequence[Aligned], rows: Sequence[RunRow]) -> list[Unaligned]:
    """Return the calls with an unsure partner in the first stretch of the forward that has a call without a partner
    that makes a difference. Note all others there that have none, and the first pair after it as what reads them.
    """
    alone_of = judging.counts_of_unpaired(())
    if min(alone_of) == 0 and max(alone_of) <= _ADDED:
        return []  # the other calls are those of one program
    known = zip(pairs, rows, strict=True)  # a bound above WIDEST shows no agreement
    differing = {p: row for p, row in known if row.verdict not in (EQUAL, ROUND_OFF) or row.difference > WIDEST}
    unsure = {pair for pair, row in differing.items() if _is_unsure(judging, pair, row)}
    sides = [_Side(judging.makers[n], judging.paired[n], unsure) for n in range(2)]
    made = [side.made_by(judging.unpaired) for side in sides]
    later = (pair for pair in differing if pair not in unsure and pair.a[0].id.direction == FORWARD)
    reads = lambda pair, n: any(maker in made[n] for maker in sides[n].read(*(pair.a, pair.b)[n]))  # noqa: E731
    reader = next((pair for pair in later if reads(pair, 0) or reads(pair, 1)), None)
    ends = [side.makers.ends if reader is None else (reader.a, reader.b)[n] for n, side in enumerate(sides)]
    seen = [side.upstream(end, reader is None) for side, end in zip(sides, ends, strict=True)]
    paired = [sorted(seen[n] & judging.paired[n].keys(), key=lambda x: x.position) for n in range(2)]
    if not any(paired) or judging.unpaired.keys().isdisjoint(seen[0] | seen[1]):
        return []
    apart = max(judging.unpaired.values())
    alone = (seen[0] - judging.paired[0].keys()) | (seen[1] - judging.paired[1].keys())
    judging.unpaired |= {x: judging.unpaired.get(x, apart) for x in alone}
    judging.read_by |= dict.fromkeys(judging.unpaired, [] if reader is None else [reader])
    places = judging.places
    return [Unaligned("ab"[n], x.id, places.of(n, [x]), views=places.beside(n, [x]))
            for n, calls in enumerate(paired) for x in calls]  # fmt: skip


def _is_unsure(judging: Judging, pair: Aligned, row: RunRow) -> bool:
    """Return whether a pair whose results differ may be none: these are of other sizes; or neither call reads a weight,
    and its module has others; or they read other weights, in which something else may be folded.
    """
    if pair.by == BY_HAND:
        return False
    both = zip(judging.values.sides, (pair.a, pair.b), strict=True)
    is_only = all(len(bundles) == 1 == len(side.by_path[bundles[0].path]) for side, bundles in both)
    has_weight = any(bundle.weight is not None for bundle in (*pair.a, *pair.b))
    sizes = {sum(x.elements for x in bundles) for bundles in (pair.a, pair.b)}
    has_others = any(name in dict(pair.a[0].call.inputs) for name, *_ in row.given)
    return len(sizes) > 1 or has_others or not (is_only or has_weight)


class _Side:
    """The calls of one program. paired: those with a partner; unsure: pairs that may be none."""

    def __init__(self, makers: Makers, paired: Mapping[Bundle, Aligned], unsure: Collection[Aligned]) -> None:
        self.makers, self._paired, self._unsure = makers, paired, unsure

    def read(self, *bundles: Bundle) -> list[Bundle | None]:
        """Return the calls that made what these read."""
        return [self.makers.of(number) for bundle in bundles for number in self.makers.read(bundle)]

    def _is_sure(self, bundle: Bundle) -> bool:
        return bundle in self._paired and self._paired[bundle] not in self._unsure

    def made_by(self, bundles: Collection[Bundle]) -> set[Bundle | None]:
        """Return these calls, and all that compute with their results, up to what surely has a partner."""
        made = set[Bundle | None]()
        for bundle in self.makers.bundles:
            if bundle in bundles or (not self._is_sure(bundle) and not made.isdisjoint(self.read(bundle))):
                made.add(bundle)
        return made

    def upstream(self, ends: Sequence[Bundle], with_ends: bool) -> set[Bundle]:
        """Return the calls that made what these read, back to what surely has a partner; with_ends: and themselves."""
        seen, waiting = set[Bundle](), list(ends) if with_ends else self.read(*ends)
        while waiting:
            bundle = waiting.pop()
            if bundle is not None and bundle not in seen and not self._is_sure(bundle):
                seen.add(bundle)
                waiting += self.read(bundle)
        return seen
