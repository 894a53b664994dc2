"""What a watch saw where all is finite: how many calls returned which format, and how much of fp16's range is left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from narrowcast.analysis.watch.history import PutOff
from narrowcast.core.ledger.identity import BACKWARD, FORWARD
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.trial.finiteness import ReadFlags, are_magnitudes
from narrowcast.reports.results.findings import Largest, Watching
from narrowcast.runtime.torch_bridge import FORMATS


class Ranges:
    """Counts calls by the format of their results, and keeps the largest finite magnitude in fp16: of the block with
    its call, and since the last inspected step. A recomputation counts as forward.
    """

    def __init__(self, watching: Watching) -> None:
        self._watching = watching
        self._since: dict[str, float] = {}

    def count(self, results: Sequence[torch.Tensor]) -> None:
        """Count a call by the format of its first result."""
        if results:
            formats, name = self._watching.formats, FORMATS[results[0].dtype].name
            formats[name] = formats.get(name, 0) + 1

    def note(self, call: SeenCall, result: torch.Tensor, total: float) -> None:
        """Note a result that is finite, with its largest magnitude, if `finiteness` returns that."""
        if are_magnitudes(result.dtype):
            self._note(call, total)

    def note_later(self, later: Iterable[PutOff], read: ReadFlags) -> None:
        """Note the results of calls whose flags were put off."""
        for put_off in later:
            for number in put_off.gave:
                if number in read.magnitudes and read.is_finite(number):
                    self._note(put_off.call, read.totals[number])

    def since(self) -> dict[str, float]:
        """Return the largest magnitudes since this was asked last, by direction."""
        largest, self._since = self._since, {}
        return largest

    def _note(self, call: SeenCall, magnitude: float) -> None:
        direction = BACKWARD if call.who.direction == BACKWARD else FORWARD
        if magnitude > self._since.get(direction, -1.0):
            self._since[direction] = magnitude
            known = self._watching.largest.get(direction)
            if known is None or magnitude > known.magnitude:
                self._watching.largest[direction] = Largest(magnitude, call.id)
