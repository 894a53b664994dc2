"""When a run is stuck: too many steps skipped in a row, or the scale can fall no further; and how that is reported."""

from __future__ import annotations

from dataclasses import dataclass

from narrowcast.output.words import counted
from narrowcast.reports.results.scaler_history import ScaledStep

AT_FLOOR = 4
"""After how many skipped steps in a row at the lowest scale a warning is due: one may be a bad batch."""
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Streak:
    """Steps skipped in a row, how many of these at the lowest scale, and after how many the next word is due."""

    skipped: int = 0
    at_floor: int = 0
    told_at: int = 0

    def after(self, row: ScaledStep, floor: float) -> Streak:
        """Return the streak with one more step."""
        if not row.skipped:
            return Streak()
        return Streak(self.skipped + 1, self.at_floor + (row.scale <= floor), self.told_at)

    def is_stuck(self, patience: int) -> bool:
        """Return whether a warning is due now: when patience ends, then each time that the streak has doubled."""
        if self.told_at:
            return self.skipped >= 2 * self.told_at
        return self.skipped >= patience or self.at_floor >= AT_FLOOR

    def told(self) -> Streak:
        """Return the streak after it was reported."""
        return Streak(self.skipped, self.at_floor, self.skipped)


def why_skipped(parameters: tuple[tuple[str, str], ...], op: str, note: str = "") -> str:
    """Return why a step was skipped. parameters: name and `NaN` or `infinite`. op: what made it, under a watch."""
    if parameters:
        shown = ", ".join(f"{name} is {what}" for name, what in parameters[:_NAMED])
        more = f" and {len(parameters) - _NAMED} more" if len(parameters) > _NAMED else ""
        cause = f"the gradient of {shown}{more}"
    else:
        cause = "a gradient was not finite" + (f" ({note})" if note else "")
    return f"{cause}; {op}" if op else cause


def found_text(streak: Streak, row: ScaledStep) -> str:
    """Return what was found about a run that is stuck."""
    times = f"{counted(streak.skipped, 'step', 'were')} skipped in a row"
    at = f", {streak.at_floor} of them at the lowest scale, {row.scale:g}" if streak.at_floor else ""
    of = f" (loss {row.loss})" if row.loss else ""
    return f"{times}{at}{of}. Step {row.step}: {row.why}"


def advice_text(streak: Streak, watched: bool) -> str:
    """Return what to do about it."""
    if streak.at_floor:
        first = (
            "At this scale the gradients overflow by themselves, or hold NaN: look at the loss, the data and the "
            "learning rate, or compute what overflows in bf16 or fp32 (nc.repair finds it)."
        )
    else:
        first = "The weights have not changed meanwhile."
    return first + ("" if watched else " `with nc.watch() as w:` around the step names the op.")
