"""The regions that hold while a graph is read: those around it, and those that it opens and leaves, level by level."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from narrowcast.core.decide import Region
from narrowcast.core.ledger import HidingBlock
from narrowcast.core.policy import Policy, Site
from narrowcast.programs.program import OpenedRegion
from narrowcast.runtime.regions.ruling import region_on
from narrowcast.runtime.regions.stack import CHECKED, Prepared
from narrowcast.runtime.sites.graph_nodes import NO_OUTSIDE, Outside
from narrowcast.runtime.torch_bridge import FORMATS


@dataclass(frozen=True, slots=True)
class Ambient:
    """The regions that a graph starts in, by device type, and where it is called."""

    regions: Mapping[str, Prepared] = field(default_factory=dict)
    outside: Outside = NO_OUTSIDE

    @staticmethod
    def now(device_types: tuple[str, ...]) -> Ambient:
        """Return what is open, and where we are, on this thread."""
        regions = {d: region_on(d) for d in device_types}
        return Ambient({d: r.prepared.for_graphs for d, r in regions.items() if r is not None}, Outside.now())


@dataclass(frozen=True, slots=True)
class Open:
    """A region that is open: its numbers, for ops that torch's own kernels cast and for those that its policy changes,
    whose weight cache is another.
    """

    prepared: Prepared
    torchs: int
    ours: int


@dataclass(frozen=True, slots=True)
class Level:
    """The regions that hold, by device type, and the outermost block that hides one. session: of the weight cache.
    is_ours: whether a region of ours is open, in the outermost of which checked casts are kept.
    """

    regions: Mapping[str, Open] = field(default_factory=dict)
    hiding: HidingBlock | None = None
    session: int = 0
    is_ours: bool = False


class Levels:
    """numbers: of the program's regions. policies: theirs, by digest. stack: what holds, the innermost level last."""

    def __init__(self, around: Mapping[str, Prepared]) -> None:
        self.numbers: dict[OpenedRegion, int] = {}
        self.policies: dict[str, Policy] = {}
        self.sessions = 0
        regions = {device: self._opened(prepared, 0) for device, prepared in around.items()}
        self.stack = [Level(regions, is_ours=bool(regions))]

    def _opened(self, prepared: Prepared, session: int) -> Open:
        digest = prepared.policy.digest[:16]
        self.policies.setdefault(digest, prepared.policy)
        sessions = [2 * session, 2 * session + 1] if prepared.changed else [2 * session]
        opened = [OpenedRegion(prepared.facts, digest, session) for session in sessions]
        numbers = [self.numbers.setdefault(one, len(self.numbers)) for one in opened]
        return Open(prepared, numbers[0], numbers[-1])

    def open(self, prepared: Prepared, find_site: Callable[[], Site], is_ours: bool = True) -> None:
        """Enter a region. find_site: where, asked if it may hide another."""
        around, device = self.stack[-1], prepared.facts.device_type
        is_outermost = len(self.stack) == 1 and not around.regions
        if is_outermost or (is_ours and not around.is_ours and prepared.grade in CHECKED):
            self.sessions += 1
            around = replace(around, session=self.sessions)
        hiding = around.hiding or _hiding(around.regions.get(device), prepared, find_site)
        regions = {**around.regions, device: self._opened(prepared, around.session)}
        self.stack.append(Level(regions, hiding, around.session, is_ours or around.is_ours))

    def open_native(self, device: str, dtype: Any, enabled: bool, cached: bool, find_site: Callable[[], Site]) -> None:
        """Enter a region of torch's."""
        low = FORMATS[dtype if dtype is not None else torch.get_autocast_dtype(device)]
        facts = Region(device, low, enabled, cached)
        around = self.stack[-1].regions.get(device)
        prepared = Prepared(facts, Policy.native(device))
        if around is not None and around.prepared.holds_inside:
            prepared = around.prepared.with_facts(facts)
        self.open(prepared, find_site, is_ours=False)

    def leave(self) -> None:
        """Leave the region that was entered last."""
        if len(self.stack) > 1:
            self.stack.pop()

    def number_for(self, op: str, devices: list[str]) -> int | None:
        """Return the region that rules a call on these device types; cpu scalars beside an accelerator do not count."""
        now = self.stack[-1].regions
        ruled = [d for d in devices if d in now]
        if not ruled:
            return None
        region = now[next((d for d in ruled if d != "cpu"), ruled[0])]
        return region.ours if op in region.prepared.changed else region.torchs

    def is_on(self, number: int | None) -> bool:
        """Return whether the region of this number casts."""
        return number is not None and list(self.numbers)[number].facts.enabled


def _hiding(around: Open | None, prepared: Prepared, find_site: Callable[[], Site]) -> HidingBlock | None:
    """Return the block by which a region keeps the one around it on its device type from ruling, if it does so."""
    if around is None or not around.prepared.facts.enabled:
        return None
    device, policy = prepared.facts.device_type, around.prepared.policy.name
    if not prepared.facts.enabled:
        return HidingBlock("", device, find_site())
    hides = around.prepared.differs and prepared.policy is Policy.native(device)
    return HidingBlock(policy, device, find_site()) if hides else None
