"""What comes of a difference: whether calls that both programs make alike pass it on, or another step cancels it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache

from narrowcast.analysis.diff.alignment import Aligned
from narrowcast.analysis.diff.makers import Makers
from narrowcast.analysis.diff.pieces import Together, together
from narrowcast.analysis.diff.sides import Bundle, Side
from narrowcast.core.ledger.identity import FORWARD
from narrowcast.reports.results.run_differences import RunRow

GOES_ON, ABSORBED, REARRANGED, UNKNOWN = "goes on", "absorbed", "rearranged", "unknown"
UNDONE = (ABSORBED, REARRANGED)
"""What comes of a difference that a later call undoes, or may."""
SHOWS = 2.0
"""A result that differs by its rounding bound over this, and is computed of one beyond its own, shows the same fault:
round-off alone is mostly smaller.
"""
CANCELS = 8.0
"""How many times smaller a difference has to be where another step cancels it."""


class Effects:
    """Follows differences from call to call. paired: by side, the pair of each call.

    widest: the widest rounding bound of a call. alike: pairs that make gradients of parameters which are alike, perhaps
    in other parts.
    """

    def __init__(
        self, sides: tuple[Side, Side], makers: tuple[Makers, Makers], paired: Sequence[Mapping[Bundle, Aligned]],
        rows: Mapping[Aligned, RunRow], widest: float, alike: Collection[Aligned],
    ) -> None:  # fmt: skip
        self._sides, self._rows, self._widest, self._alike = sides, rows, widest, alike
        self._readers: dict[Aligned, dict[tuple[Aligned, bool], None]] = {}
        for maker, pair_of in zip(makers, paired, strict=True):
            for bundle in maker.bundles:
                if bundle in pair_of:
                    for number in maker.read(bundle):
                        upstream = maker.upstream([number], pair_of)
                        for known in upstream.known:
                            self._readers.setdefault(pair_of[known], {})[pair_of[bundle], bool(upstream.alone)] = None
        for pair, readers in self._readers.items():  # those of a forward show what it saves for its backward, too
            forward = {one: None for one in readers if one[0].a[0].id.direction == FORWARD}
            self._readers[pair] = forward or readers
        self.of = cache(self._of)

    def of_alone(self, bundle: Bundle, readers: Sequence[Aligned]) -> str:
        """Return what comes of a call without a partner. readers: pairs whose inputs differ by it; those of a forward,
        which show what it has saved for its backward, too.
        """
        forward = [pair for pair in readers if pair.a[0].id.direction == FORWARD]
        if readers and not forward and bundle.id.direction == FORWARD:
            return ABSORBED
        effects = {self.of(pair) for pair in forward or readers}
        return effects.pop() if len(effects) == 1 else UNKNOWN

    def _together(self, side: int, bundles: Sequence[Bundle]) -> Together:
        """Return the results of calls of a side put together, at all module calls."""
        placed = [one for bundle in bundles for each in bundle.module_calls for one in each if one.call.outputs]
        return together([self._sides[side].piece(one.rank, one.call.outputs[0][1]) for one in placed])

    def _of(self, pair: Aligned) -> str:
        """Return what comes of the difference in a pair's results; REARRANGED where one may be the other in another
        order, as of rows or of heads, which a later call may undo.
        """
        if pair in self._alike:
            return ABSORBED
        results = [self._together(n, bundles) for n, bundles in enumerate((pair.a, pair.b))]
        if not all(one.elements for one in results):
            return UNKNOWN
        if results[0].is_like(results[1], self._rows[pair].round_off_bound):
            return REARRANGED
        waiting, seen = [pair], {pair}
        is_seen, is_cancelled, are_alike, is_known = False, True, True, False
        while waiting:
            now = waiting.pop()
            readers = self._readers.get(now, {})
            is_seen |= not readers  # it is an output
            for reader, is_beside in readers:
                row = self._rows.get(reader)
                if row is None:
                    return UNKNOWN
                if reader in self._alike:
                    is_known = True
                    continue
                bound = max(row.round_off_bound, self._widest)  # of the formats before it, as for a sum in fp32
                if row.measured_by and row.difference <= bound / SHOWS:
                    is_known = True
                    is_cancelled &= not row.difference > self._rows[now].difference / CANCELS
                    continue
                are_alike &= not is_beside and _are_alike(reader, row)
                if row.difference <= bound:
                    is_seen = True
                elif reader not in seen:
                    seen.add(reader)
                    waiting.append(reader)
        if is_seen:
            return GOES_ON if are_alike else UNKNOWN
        return ABSORBED if is_cancelled and is_known else UNKNOWN


def _are_alike(pair: Aligned, row: RunRow) -> bool:
    """Return whether both programs make a call alike."""
    ops = [[(bundle.id.op, len(bundle.module_calls)) for bundle in bundles] for bundles in (pair.a, pair.b)]
    return ops[0] == ops[1] and not row.given and bool(row.measured_by)
