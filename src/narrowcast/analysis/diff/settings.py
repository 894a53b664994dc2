"""What the steps of optimizers of two runs are set to: the first steps that are not set alike."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from narrowcast.reports.results.run import Run
from narrowcast.reports.results.run_differences import OtherSetting, OtherStep
from narrowcast.reports.results.run_records import StepRecord

_SAME = 1e-6
"""So near, in parts of either, are two numbers that a schedule computes in other ways."""


def other_step(a: Run, b: Run) -> tuple[OtherStep, tuple[int, int]] | None:
    """Return the first step of two optimizers of one class and of as many weights that is set otherwise in b, and how
    many calls of either run came before it; None where all are set alike, or the runs step in other numbers.
    """
    for number, (one, other) in enumerate(_pairs(a.optimizer_steps, b.optimizer_steps), 1):
        names = [name for name in one.settings if name in other.settings and not _are_alike(one, other, name)]
        if names:
            rows = (OtherSetting(name, _text(one, name), _text(other, name)) for name in names)
            places = [f"{step.file}:{step.line}" if step.file else "" for step in (one, other)]
            return OtherStep(one.optimizer, number, places[0], places[1], tuple(rows)), (one.calls, other.calls)
    return None


def _pairs(a: Sequence[StepRecord], b: Sequence[StepRecord]) -> Iterator[tuple[StepRecord, StepRecord]]:
    """Yield the steps in order, if both runs make them in the same order."""
    kinds = [[(step.optimizer, _elements(step)) for step in steps] for steps in (a, b)]
    if kinds[0] == kinds[1]:
        yield from zip(a, b, strict=True)


def _elements(step: StepRecord) -> int:
    return max((sum(known.values()) for known in step.settings.values()), default=0)


def _are_alike(a: StepRecord, b: StepRecord, name: str) -> bool:
    """Return whether a setting has the same values in both steps, each for as many elements."""
    left = Counter(b.settings[name])
    for text, elements in a.settings[name].items():
        same = [other for other in left if _is_same(text, other)]
        for other in same:
            taken = min(elements, left[other])
            left[other] -= taken
            elements -= taken
        if elements:
            return False
    return not any(left.values())


def _is_same(a: str, b: str) -> bool:
    """Return whether two settings are the same, numbers within rounding."""
    texts = [text.strip("()").split(", ") for text in (a, b)]
    try:
        return len(texts[0]) == len(texts[1]) and all(
            math.isclose(float(x), float(y), rel_tol=_SAME) for x, y in zip(*texts, strict=True)
        )
    except ValueError:
        return a == b


def _text(step: StepRecord, name: str) -> str:
    """Return a setting; where parameter groups differ, each of its values and for how many elements it is set."""
    known = step.settings[name]
    return next(iter(known)) if len(known) == 1 else ", ".join(f"{text} of {n}" for text, n in known.items())
