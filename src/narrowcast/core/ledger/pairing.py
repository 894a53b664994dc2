"""Which calls of one run are which of another, where both have one program: by identity. Runs of different programs are
aligned by values (`analysis.diff.alignment`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class Pairs(Generic[Key, A, B]):
    """What has a partner, and what has none, in the order of each run."""

    both: dict[Key, tuple[A, B]]
    only_a: dict[Key, A]
    only_b: dict[Key, B]


def pairs_of(a: Mapping[Key, A], b: Mapping[Key, B]) -> Pairs[Key, A, B]:
    """Return the pairs of equal keys, in the order of b, and what is left."""
    return Pairs(
        {key: (a[key], value) for key, value in b.items() if key in a},
        {key: value for key, value in a.items() if key not in b},
        {key: value for key, value in b.items() if key not in a},
    )


def grouped(calls: Iterable[A], key: Callable[[A], Key]) -> dict[Key, list[A]]:
    """Return calls by what is alike about them, in the order in which each kind comes first."""
    groups: dict[Key, list[A]] = {}
    for call in calls:
        groups.setdefault(key(call), []).append(call)
    return groups


def other_counts(a: Counter[Key], b: Counter[Key]) -> dict[Key, tuple[int, int]]:
    """Return of which kinds two runs have other numbers of calls, with both numbers; those of a first."""
    return {key: (a[key], b[key]) for key in [*a, *(key for key in b if key not in a)] if a[key] != b[key]}
