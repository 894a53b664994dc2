"""Where two programs compute in other ways: all calls between what they have alike and the first call that is surely of
both and reads something else. Calls without a weight that their order alone has paired may be no pair there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

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
    sure = [{x for x, pair in paired.items() if pair not in unsure} for paired in judging.paired]
    both = list(zip(judging.makers, sure, strict=True))
    made = [_computed_of(judging.unpaired, *of) for of in both]
    later = (pair for pair in differing if pair not in unsure and pair.a[0].id.direction == FORWARD)
    reader = next((p for p in later if any(map(_reads, judging.makers, (p.a, p.b), made))), None)
    ends = [[x.call.outputs[0][1] for x in m.ends] for m in judging.makers]
    if reader is not None:
        ends = [_read(*of) for of in zip(judging.makers, (reader.a, reader.b), strict=True)]
    seen = [set(m.upstream(numbers, of).alone) for (m, of), numbers in zip(both, ends, strict=True)]
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


def _read(makers: Makers, bundles: Sequence[Bundle]) -> list[int]:
    """Return the tensors that these calls read."""
    return [number for bundle in bundles for number in makers.read(bundle)]


def _reads(makers: Makers, bundles: Sequence[Bundle], made: Collection[Bundle | None]) -> bool:
    """Return whether these read what others made."""
    return any(makers.of(number) in made for number in _read(makers, bundles))


def _computed_of(bundles: Collection[Bundle], makers: Makers, sure: Collection[Bundle]) -> set[Bundle | None]:
    """Return these calls, and all that compute with their results, up to what surely has a partner."""
    made = set[Bundle | None]()
    for bundle in makers.bundles:
        if bundle in bundles or (bundle not in sure and not made.isdisjoint(map(makers.of, makers.read(bundle)))):
            made.add(bundle)
    return made
