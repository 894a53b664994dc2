"""Pairs that order has crossed: one program turns queries before keys, the other keys before queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from narrowcast.analysis.diff.alignment import Aligned
from narrowcast.analysis.diff.outcomes import OF_OTHERS
from narrowcast.analysis.diff.rows import Judging
from narrowcast.analysis.diff.sides import Bundle, read_by
from narrowcast.core.ledger.identity import FORWARD
from narrowcast.reports.results.run_differences import RunRow

_BY_ORDER = ("order", "path")


def exchanged(judging: Judging, pairs: Sequence[Aligned], rows: Sequence[RunRow]) -> list[Aligned]:
    """Return the pairs, and of those whose calls read what unlike calls made, each with the partner that reads what its
    own makes; empty if none change.
    """
    crossed = [pair for pair, row in zip(pairs, rows, strict=True) if row.why == OF_OTHERS and _is_by_order(pair)]
    readers: list[dict[tuple[str, Aligned], list[Aligned]]] = [{}, {}]
    for pair in crossed:
        for n, bundle in enumerate((pair.a[0], pair.b[0])):
            for made_by in _made_by(judging, n, bundle):
                readers[n].setdefault((bundle.id.op, made_by), []).append(pair)
    both = ((of_a, readers[1].get(key, [])) for key, of_a in readers[0].items())
    others = {pair: other for a, b in both if len(a) == len(b) for pair, other in zip(a, b, strict=True)}
    while others.keys() != set(others.values()):
        others = {pair: other for pair, other in others.items() if pair in others.values() and other in others}
    return [replace(pair, b=others[pair].b) if pair in others else pair for pair in pairs] if others else []


def _is_by_order(pair: Aligned) -> bool:
    return pair.by in _BY_ORDER and len(pair.a) == len(pair.b) == 1 and pair.a[0].id.direction == FORWARD


def _made_by(judging: Judging, side: int, bundle: Bundle) -> list[Aligned]:
    """Return the pair of calls that made what a call reads first, if it was one."""
    number = read_by(bundle.call)
    maker = None if number is None else judging.makers[side].of(number)
    pair = None if maker is None else judging.paired[side].get(maker)
    return [] if pair is None else [pair]
