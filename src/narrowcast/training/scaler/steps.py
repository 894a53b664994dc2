"""Steps that have ended: each becomes a row of the history once its numbers have come, and is judged there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from narrowcast.errors import ScalerError, ScalerWarning
from narrowcast.reports.results.scaler_history import History, ScaledStep
from narrowcast.runtime.sites.python_stack import loop_line, warn_at
from narrowcast.training.scaler.readings import HostNumbers
from narrowcast.training.scaler.results import StepResult
from narrowcast.training.scaler.stuck import Streak, advice_text, found_text

_MOST_WAITING = 64


@dataclass(slots=True, eq=False)
class EndedStep:
    """One update of one scale, whose numbers may still be on their way. found: a flag of its own, for what no result
    tells: gradients that were unscaled and not stepped with, or those of one loss among several. not_stepped: called if
    such gradients were finite.
    """

    number: int
    scale: HostNumbers
    floor: HostNumbers
    results: tuple[StepResult, ...]
    found: HostNumbers | None = None
    loss: str = ""
    is_watched: bool = False
    not_stepped: Callable[[], None] | None = None

    @property
    def is_here(self) -> bool:
        """Whether all numbers have come."""
        return all(each is None or each.is_here for each in (self.scale, self.found, self.floor, *self.results))

    def row(self) -> ScaledStep:
        """Return the row of the history; wait for numbers that are not there yet."""
        lost = [result for result in self.results if result.skipped]
        is_flagged = self.found is not None and any(self.found.values())
        skipped = is_flagged if self.loss else bool(lost) or is_flagged
        if not skipped:
            return ScaledStep(self.number, self.scale.values()[0], False, "", self.loss, ())
        why = "; ".join(dict.fromkeys(result.why for result in lost)) or "a gradient was not finite"
        names = dict.fromkeys(name for result in lost for name in result.parameters)
        return ScaledStep(self.number, self.scale.values()[0], True, why, self.loss, tuple(names))


class Steps:
    """History and pending steps of one scaler; says when it is stuck. waiting: steps that ended, the latest last."""

    restored_with_owner = True

    def __init__(self, patience: int, on_stuck: str) -> None:
        self.patience, self.on_stuck = patience, on_stuck
        self.history = History()
        self.number = 0
        self.streaks: dict[str, Streak] = {}
        self.waiting: deque[EndedStep] = deque()
        self._stuck: tuple[str, str] | None = None

    @property
    def was_skipped(self) -> bool:
        """Whether the last step that the host knows of was skipped."""
        return any(streak.skipped for streak in self.streaks.values())

    def let_go(self) -> None:
        """Let go of the gradients: new ones are about to be computed."""
        for step in self.waiting:
            for result in step.results:
                result.let_go()

    def collect(self, wait: bool = False) -> None:
        """Note every step whose numbers have come, or all of them; all of them, too, where many are waiting, as on a
        device that cannot say what has come.
        """
        wait = wait or len(self.waiting) > _MOST_WAITING
        for step in self.waiting:
            for result in step.results:
                result.look_if_skipped()
        while self.waiting and (wait or self.waiting[0].is_here):
            step = self.waiting.popleft()
            row = step.row()
            self.history.add(row)
            if step.not_stepped is not None and not row.skipped:
                step.not_stepped()
            streak = self.streaks.get(row.loss, Streak()).after(row, step.floor.values()[0])
            if streak.is_stuck(self.patience):
                streak = streak.told()
                self._stuck = found_text(streak, row), advice_text(streak, step.is_watched)
            self.streaks[row.loss] = streak

    def speak(self) -> None:
        """Say, once and at the user's line, that the run is stuck: raise ScalerError if that was asked for."""
        if self._stuck is not None:
            site, (found, advice) = loop_line(), self._stuck
            self._stuck = None
            error = ScalerError("training with a scaler", found, site.origins, advice)
            if self.on_stuck == "raise":
                raise error
            warn_at(str(error), site, ScalerWarning)
