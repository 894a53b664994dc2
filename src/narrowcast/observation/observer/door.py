"""The one door that an error of our own code goes through while it inspects a program of the user's."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from narrowcast.errors import NarrowcastError

T = TypeVar("T")
NOT_INSPECTED = "not inspected: "
"""How a note begins about what our own code could not inspect."""
_OUT_OF_MEMORY = ("DefaultCPUAllocator", "not enough memory", "can't allocate memory")


class Door:
    """Notes what looking at a program raised, once for each cause, and lets the program go on.

    What is for the user passes: errors of ours with their four parts (`stop=True`, a disk that is full), what a
    callback of theirs raises, and memory that has run out.
    """

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes
        self.times = 0
        self._causes: dict[tuple[str, str, int | None], tuple[str, int]] = {}
        self._of_user: BaseException | None = None

    def caught(self, error: Exception, what: Any) -> None:
        """Note it; or raise it again. To be called where it was caught. what: the inspected call, named by its text."""
        if error is self._of_user or passes(error):
            self._of_user = None
            raise error
        self.times += 1
        frames = traceback.extract_tb(error.__traceback__)
        cause = (type(error).__name__, frames[-1].filename, frames[-1].lineno) if frames else (repr(error), "", 0)
        note, times = self._causes.get(cause, ("", 0))
        if not note:
            trace = "".join(traceback.format_exception(error)).rstrip()
            note = f"{_text(what)}; a bug of Narrowcast, which the program did not see. Please report it:\n{trace}"
            self.notes.append(NOT_INSPECTED + note)
        elif (noted := _said(note, times)) in self.notes:
            self.notes[self.notes.index(noted)] = _said(note, times + 1)
        self._causes[cause] = note, times + 1

    def run(self, what: Any, look: Callable[..., T], *args: Any) -> T | None:
        """Return `look(*args)`, or None where it raises."""
        try:
            return look(*args)
        except Exception as error:
            self.caught(error, what)
            return None

    def of_user(self, function: Callable[..., T], *args: Any) -> T:
        """Return `function(*args)`, which is the user's: what it raises passes."""
        try:
            return function(*args)
        except BaseException as error:
            self._of_user = error
            raise


def passes(error: BaseException) -> bool:
    """Return whether an error is no bug of ours: one with advice for the user, or memory that has run out."""
    if isinstance(error, NarrowcastError | MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _OUT_OF_MEMORY)


def _said(note: str, times: int) -> str:
    """Return the note with how often there was cause for it."""
    more = f"({times} times, this is the first) " if times > 1 else ""
    return f"{NOT_INSPECTED}{more}{note}"


def _text(what: Any) -> str:
    try:
        return str(what)
    except Exception:  # who a call is is found by our own code, too
        return "a call"
