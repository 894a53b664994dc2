"""Which regions are open on this thread, and what belongs to each: the one piece of mutable state."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch

from narrowcast.core.decide import Plan, Region
from narrowcast.core.policy import Policy
from narrowcast.runtime.regions.native_state import Identity, NativeState
from narrowcast.runtime.sites.sightings import Sightings
from narrowcast.runtime.torch_bridge.calls import Place
from narrowcast.runtime.torch_surface.dispatch import OpOverload
from narrowcast.runtime.torch_surface.patches import held
from narrowcast.runtime.torch_surface.state import autocast_nesting
from narrowcast.runtime.weights.cache import WeightCache


@dataclass(frozen=True, slots=True)
class Decided:
    """A plan ready to be carried out. places: of its casts. is_native: torch's own kernel does just this."""

    plan: Plan
    is_native: bool
    changes_nothing: bool
    places: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What alike regions share, made once: facts, resolved policy, the ops that it changes, and the plans made so far.

    ops, changed: the overloads for which the policy differs from native, and their ids.
    plans: what was decided for calls whose plan does not depend on the place. boundaries: for the calls of modules.
    grade: `native`, `checked`, `checksum` or `off`: the weight cache. cache_limit_bytes: what our own may hold.
    graphs: what holds for graphs that are captured inside, if that is another policy than eager code's.
    trains: whether the policy's low format is one to train in. sightings: of the modules that rules ask about.
    """

    facts: Region
    policy: Policy
    ops: tuple[OpOverload, ...] = ()
    changed: frozenset[str] = frozenset()
    plans: dict[object, Decided] = field(default_factory=dict)
    boundaries: dict[Any, Any] = field(default_factory=dict)
    grade: str = "native"
    cache_limit_bytes: int | None = None
    graphs: Prepared | None = None
    trains: bool = True
    sightings: Sightings | None = None

    def with_facts(self, facts: Region) -> Prepared:
        """Return the same policy in a region with other facts."""
        if self.graphs is not None:
            return replace(self, facts=facts, plans={}, boundaries={}, graphs=self.graphs.with_facts(facts))
        key = ("with facts", facts, self.changed, self.grade, self.cache_limit_bytes, self.trains)
        return self.policy.remembered(key, lambda: replace(self, facts=facts, plans={}, boundaries={}))

    @property
    def differs(self) -> bool:
        """Whether the policy may decide anything else than native does."""
        return bool(self.changed) or self.policy.has_module_rules

    @property
    def holds_inside(self) -> bool:
        """Whether the policy holds in torch's own blocks inside the region, too."""
        return self.policy.effective_inner == "policy"

    @property
    def for_graphs(self) -> Prepared:
        """What holds for graphs that are captured inside."""
        return self.graphs or self


@dataclass(slots=True, eq=False)
class OpenRegion:
    """A region between its enter and its exit.

    depth:   torch's nesting count inside it.
    outer:   the next region of ours around it.
    owner:   the object that was entered.
    before:  torch's own state, to be restored; None for what is no region of ours.
    identity: what tells Dynamo that another policy is in force; None under native.
    mixes: an outer region has another low format, and torch's cache does not tell them apart.
    kept: the weight cache, once it is used. inside: this region in torch's blocks inside it, by their facts.
    has_warned: of training in a format that its policy does not train in.
    """

    prepared: Prepared
    depth: int
    outer: OpenRegion | None
    owner: object
    before: NativeState | None
    identity: Identity | None = None
    mixes: bool = False
    kept: WeightCache | None = None
    has_warned: bool = False
    inside: dict[Region, OpenRegion] | None = None

    @property
    def is_innermost(self) -> bool:
        """Whether no region, native or ours, was entered inside this one: torch counts nesting."""
        return self.depth == autocast_nesting()

    @property
    def casts(self) -> WeightCache:
        """The weight cache of our own kernels, shared with `outer`."""
        if self.kept is None:
            outer = self.outer if self.outer is not None and self.outer.depth < self.depth else None
            self.kept = WeightCache(self.prepared.cache_limit_bytes) if outer is None else outer.casts
        return self.kept

    def in_native(self, facts: Region) -> OpenRegion:
        """Return this region in a `torch.autocast` block inside it with these facts, where its policy is to hold."""
        if facts == self.prepared.facts:
            return self
        self.inside = {} if self.inside is None else self.inside
        inner = self.inside.get(facts)
        if inner is None:
            kept = self.casts
            inner = self.inside[facts] = replace(self, prepared=self.prepared.with_facts(facts), kept=kept)
        return inner


class _Stack(threading.local):
    """The innermost region of each thread: torch's autocast state is per thread, so ours is."""

    innermost: OpenRegion | None = None


stack = _Stack()
"""Its `innermost` is the region entered last on this thread, whatever its device type. Only `autocast` changes it."""
open_anywhere: list[None] = []
"""As long as there are regions of ours open, on all threads; appending and popping is atomic."""

CHECKED = ("checked", "checksum")
"""The grades of the weight cache that our kernels keep."""


# -- who is told of regions that are entered and left: recordings, and traces ------------------------------------------


class RegionWatcher(Protocol):
    """A watcher that is notified of every region, native or ours, that is entered and left on any thread."""

    def entered(self, region: Any) -> None:
        """Note that a region is entered."""

    def left(self, region: Any, raised: bool) -> None:
        """Note that the region is left; raised: by an exception."""


region_watchers: list[RegionWatcher] = []
"""Mostly empty: this is read each time that a region of ours is entered."""


@contextmanager
def told_of_regions(watcher: RegionWatcher, why: str) -> Iterator[None]:
    """Notify a watcher of every region, ours and torch's. why: the reason for which torch's class is patched."""

    def enter(inner: Any, region: Any) -> Any:
        entered = inner(region)
        watcher.entered(region)
        return entered

    def leave(inner: Any, region: Any, *raised: Any) -> Any:
        watcher.left(region, bool(raised and raised[0]))
        return inner(region, *raised)

    with held(torch.autocast, why, __enter__=lambda e: partial(enter, e), __exit__=lambda e: partial(leave, e)):
        region_watchers.append(watcher)
        try:
            yield
        finally:
            region_watchers.remove(watcher)
