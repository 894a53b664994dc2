"""Looks at updates of a scale: which of them are of steps that were skipped, and whether a smaller one is left."""

from __future__ import annotations

from narrowcast.core.policy import NOWHERE, Site
from narrowcast.training.check.gradients import Found


class Updates:
    """Updates of a loop's scale. skipped: those of steps that were skipped; is_known: the scale of the last one was
    there before the steps.
    """

    def __init__(self) -> None:
        self.skipped = 0
        self.is_known = False
        self._updates = 0
        self._scale = 0.0
        self._has_room = False
        self._site: Site | None = None

    def add(self, scale: float, is_skipped: bool, is_known: bool, site: Site) -> None:
        """One more."""
        self._updates += 1
        self.skipped += is_skipped
        self.is_known = is_known
        self._has_room = is_known and scale > 1 and (self._updates == 1 or scale < self._scale)
        self._scale, self._site = scale, site

    @property
    def is_stuck(self) -> bool:
        """Whether all steps so far were skipped, and a smaller scale is left."""
        return bool(self._updates) and self.skipped == self._updates and self._has_room

    def judge(self) -> Found | None:
        """Whether no step passes."""
        if not self._updates or self.skipped < self._updates or not self.is_known or self._has_room:
            return None
        return (
            "every step is skipped",
            f"{self.skipped} of {self._updates} steps, the last at a scale of {self._scale:g}, have gradients that are "
            "not finite: no weight moves",
            "Find the first call that gives NaN or infinity: with nc.watch(): step(). A scale cannot fix it.",
            self._site or NOWHERE,
        )
