"""Who is told of regions that are entered and left: recordings, and traces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch

from narrowcast.runtime.torch_surface.patches import held


class RegionWatcher(Protocol):
    """Told of every region, native or ours, that is entered and left on any thread."""

    def entered(self, region: Any) -> None:
        """A region is entered."""

    def left(self, region: Any, raised: bool) -> None:
        """It is left; whether by an exception."""


region_watchers: list[RegionWatcher] = []
"""Mostly empty: this is looked at each time that a region of ours is entered."""


@contextmanager
def told_of_regions(watcher: RegionWatcher, why: str) -> Iterator[None]:
    """Have a watcher told of every region, ours and torch's. why: what torch's class stands replaced for."""

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
