"""Choosing: the candidates of a graph are timed on the real inputs of its first call, and the best one is kept."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from narrowcast.frontends.race.remembered import RememberedTimes
from narrowcast.frontends.race.rounds import LEAST_SECONDS, SECONDS, time_sides
from narrowcast.frontends.race.sides import CandidateSide, Compiled, is_entangled
from narrowcast.runtime.devices.device import is_capturing
from narrowcast.runtime.torch_surface.dispatch import count_dispatch_modes


class Choosing:
    """Runs the best of several compiled candidates; times them when it is first called.

    sides: the one that is predicted best first. written: positions of inputs that calls write to. found: told what was
    chosen. seconds: how long the rounds may take.
    """

    def __init__(
        self,
        sides: Sequence[CandidateSide],
        written: frozenset[int],
        found: Callable[[RememberedTimes], None],
        seconds: float = SECONDS,
    ) -> None:
        self.sides = list(sides)
        self.seconds = min(max(seconds, LEAST_SECONDS), SECONDS)
        self.written = written
        self.found = found
        self.chosen: Compiled | None = self.sides[0].run if len(self.sides) == 1 else None
        self.lock = threading.Lock()

    def __call__(self, *args: Any) -> Any:
        """The graph's results."""
        if self.chosen is None:
            if count_dispatch_modes() or getattr(_timing, "on", False) or is_capturing():
                return self.sides[0].run(*args)  # recorded, on fake tensors, recomputed, captured: no time says much
            with self.lock:
                if self.chosen is None:
                    self._choose(args)
        return self.chosen(*args)  # type: ignore[misc]

    def _choose(self, args: Sequence[Any]) -> None:
        _timing.on = True
        try:
            if is_entangled(args, self.written):  # no copies behave as these do: the prediction is taken
                choice = RememberedTimes(self.sides[0].name, {}, {}, 0, 0.0)
            else:
                choice = time_sides(self.sides, args, self.written, self.seconds)
        finally:
            _timing.on = False
        self.chosen = next(side.run for side in self.sides if side.name == choice.chosen)
        self.found(choice)
        self.sides = []


_timing = threading.local()
