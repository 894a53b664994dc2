"""Which modules of one model are which of another: those of one name, or those whose calls are pairs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from narrowcast.reports.results.run_differences import RunRow

Partners = dict[str, tuple[str, ...]]


def partners_of(a: Iterable[str], b: Iterable[str], rows: Iterable[RunRow]) -> Partners:
    """Return for modules of b those of a that compute the same, by path. a, b: all paths; rows: pairs of calls.

    Models that share most of their names are paired by these. In others a module has the partners of its calls, and one
    that only holds others that of most of its parts.
    """
    of_a, of_b = set(a), list(b)
    shared = [path for path in of_b if path in of_a]
    found: Partners = {path: (path,) for path in shared} if 2 * len(shared) > len(of_b) else {"": ("",)}
    votes: dict[str, Counter[tuple[str, ...]]] = {}
    for row in rows:
        paths_a, paths_b = (tuple(dict.fromkeys(call.module_path for call in side)) for side in (row.a, row.b))
        for path in paths_b:
            if path and path not in found:
                votes.setdefault(path, Counter())[paths_a] += 1
    found |= {path: counts.most_common(1)[0][0] for path, counts in votes.items() if path in of_b}
    return found | _of_parents(found, of_a, of_b)


def _of_parents(found: Mapping[str, tuple[str, ...]], a: set[str], b: list[str]) -> Partners:
    """Return the partners of modules by those of their parts, from the innermost out."""
    known: Partners = dict(found)
    for path in sorted(b, key=lambda path: -path.count(".")):
        if path in known:
            continue
        inside = [(p, q[0]) for p, q in known.items() if p.rpartition(".")[0] == path and len(q) == 1]
        votes = Counter(partner.rpartition(".")[0] for _, partner in inside)
        if votes and (best := votes.most_common(1)[0])[1] > len(inside) / 2 and best[0] in a:
            known[path] = (best[0],)
    taken = Counter(partner for path, partner in known.items() if path not in found)
    return {path: partner for path, partner in known.items() if path not in found and taken[partner] == 1}
