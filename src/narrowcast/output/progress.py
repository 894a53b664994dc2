"""What takes long says so: one line on standard error, after three seconds, where that is a terminal.

`NARROWCAST_PROGRESS=0` switches it off; `NARROWCAST_PROGRESS=1` has it where standard error is no terminal, too.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

VARIABLE = "NARROWCAST_PROGRESS"
AFTER_SECONDS = 3.0

Step = Callable[..., object]
"""Called when a part of the work is done, or begins: what it is, if that is not the same as before."""


@contextmanager
def long_work(what: str, total: int) -> Iterator[Step]:
    """Show what is done, how much of it, for how long and how long yet, if it takes long. The line goes when it ends.

    total: how many parts there are. `step()` says that one is done; `step("...", done=False)` what is done now.
    """
    if not _is_wanted():
        yield lambda text="", done=True: None
        return
    line = _Line(what, total)
    timer = threading.Timer(AFTER_SECONDS, line.show)
    timer.daemon = True
    timer.start()
    try:
        yield line.step
    finally:
        timer.cancel()
        line.end()
        timer.join()


def _is_wanted() -> bool:
    wanted = os.environ.get(VARIABLE, "")
    if wanted in ("0", "1"):
        return wanted == "1"
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # none, or closed
        return False


class _Line:
    """The line: made when it is first shown, since most work ends before."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._began = time.monotonic()  # rich's clock
        self._lock = threading.Lock()
        self._shown: Any = None
        self._ended = False

    def step(self, text: str = "", done: bool = True) -> None:
        with self._lock:
            self._what = text or self._what
            self._done += done
            if self._shown is not None:
                self._shown.update(self._shown.task_ids[0], description=self._what, completed=self._done)

    def show(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        with self._lock:
            if self._ended:
                return
            self._shown = Progress(
                TextColumn("narrowcast: {task.description}"), BarColumn(bar_width=12),
                TextColumn("{task.completed} of {task.total}"), TimeElapsedColumn(), TextColumn("left:"),
                TimeRemainingColumn(), console=Console(file=sys.stderr), transient=True,
                refresh_per_second=2,
            )  # fmt: skip
            self._shown.add_task(self._what, total=self._total, completed=self._done)
            self._shown.tasks[0].start_time = self._began
            self._shown.start()

    def end(self) -> None:
        with self._lock:
            self._ended = True
            if self._shown is not None:
                self._shown.stop()
