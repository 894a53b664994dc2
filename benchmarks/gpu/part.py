"""A part of the run: what it is called, what it runs, and how long it may take. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

LIMIT_S = 480


@dataclass(frozen=True, slots=True)
class Part:
    """One part, which runs in a process of its own.

    name:       its results are in NAME.json. about: a line for --list.
    target:     `module:function`; the function takes a Context, and `arguments` by name.
    limit_s:    after this many seconds it is killed.
    exact:      bits are compared: kernels that give the same bits in every run are asked for. Not where time counts.
    timed:      time counts: nothing else runs beside it.
    attempts:   how often it is started in one run, as long as it keeps more with each: a sweep that ends early, or that
                a device error ends, goes on after what it kept.
    """

    name: str
    about: str
    target: str
    arguments: Mapping[str, object] = field(default_factory=dict)
    limit_s: float = LIMIT_S
    exact: bool = False
    timed: bool = False
    attempts: int = 1
