"""Who is told of regions that are entered and left: recordings, and traces."""

from __future__ import annotations

from typing import Any, Protocol


class RegionWatcher(Protocol):
    """Told of every region, native or ours, that is entered and left on any thread."""

    def entered(self, region: Any) -> None:
        """A region is entered."""

    def left(self, region: Any, raised: bool) -> None:
        """It is left; whether by an exception."""


region_watchers: list[RegionWatcher] = []
"""Mostly empty: this is looked at each time that a region is entered."""


def tell_entered(region: Any) -> None:
    """Tell them of a region that was entered."""
    for watcher in tuple(region_watchers):
        watcher.entered(region)


def tell_left(region: Any, raised: bool) -> None:
    """Tell them of a region that is left."""
    for watcher in tuple(region_watchers):
        watcher.left(region, raised)
