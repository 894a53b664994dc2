"""What a part is given: the device, sizes, the time that is left, and where it writes down what it finds."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OK, FAILED, SKIPPED = "ok", "failed", "skipped"
LOST = ("CUDA error", "device-side assert", "illegal memory access", "unspecified launch failure")
"""In the text of an error after which the process can use the device no more."""


class Skip(Exception):
    """A part, or a check, that makes no sense here; its text says why."""


class DeviceLost(Exception):
    """The device can be used no more in this process."""


@dataclass(slots=True)
class Context:
    """Given to each part.

    device: device type that everything runs on. small: sizes for a test. deadline: of time.monotonic().
    folder: where results of this machine are.
    save:   called whenever something was found, so that a killed part loses nothing.
    kept:   what earlier attempts kept, and this one does: `keep` adds to it.
    checks: what was checked, in order. data: everything else that was found.
    """

    device: str
    small: bool
    deadline: float
    folder: Path = Path()
    save: Callable[[], None] = lambda: None
    kept: dict[str, Any] = field(default_factory=dict)
    checks: list[dict[str, str]] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    is_unfinished: bool = False

    @property
    def left_s(self) -> float:
        """Seconds that are left for this part."""
        return self.deadline - time.monotonic()

    @property
    def is_cuda(self) -> bool:
        """Whether this is the real thing."""
        return self.device == "cuda"

    def check(self, name: str, problem: object = "") -> bool:
        """Write down a check: passed if there is no problem."""
        self._note(name, FAILED if problem else OK, str(problem) if problem else "")
        return not problem

    def skip(self, name: str, reason: str) -> None:
        """Write down a check that was not made."""
        self._note(name, SKIPPED, reason)

    def keep(self, name: str, value: object) -> None:
        """Keep something for the next attempt, and save all that is there."""
        self.kept[name] = value
        self.save()

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"    {text}", flush=True)

    @contextmanager
    def attempt(self, name: str) -> Iterator[None]:
        """What raises inside is a failed check of that name; Skip a skipped one. DeviceLost ends the part."""
        try:
            yield
        except Skip as reason:
            self.skip(name, str(reason))
        except Exception as error:
            self.check(name, told(error))
            if is_lost(error):
                raise DeviceLost(told(error)) from error

    def _note(self, name: str, outcome: str, detail: str) -> None:
        self.checks.append({"name": name, "outcome": outcome, "detail": detail[:2000]})
        word = {OK: "ok     ", FAILED: "FAILED ", SKIPPED: "skipped"}[outcome]
        self.say(f"{word} {name}" + (f": {detail[:400]}" if detail else ""))
        self.save()


def told(error: BaseException) -> str:
    """An error in two lines: what it says first and last, and the last places that it came through."""
    lines = str(error).strip().splitlines() or [""]
    lines = [*lines[:2], *lines[2:][-4:]]
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = " < ".join(f"{frame.filename.rpartition('/')[2]}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__}: {' '.join(lines)[:900]} ({places})"


def is_lost(error: BaseException) -> bool:
    """Whether the process can use the device no more after this error."""
    if type(error).__name__ == "OutOfMemoryError":
        return False
    return any(word in str(error) for word in LOST)
