"""`nc.watch`: the first call that makes a NaN or an infinity out of finite values, and who made it.

Every tensor that a call gives is summed once: a sum is not finite if an element is not. What came in finite and goes
out otherwise was made there; the call is then run again, on the same inputs, to see whether the cast, the format or the
op itself did it (`watch_calls`). What came of it decides whether it was meant (`history`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from narrowcast.analysis.watch.trends import Trends
from narrowcast.analysis.watch.watch_calls import WatchCalls
from narrowcast.errors import NotFiniteError, Origin, RunError
from narrowcast.observation.observer.door import Door
from narrowcast.observation.observer.observer import quietly
from narrowcast.reports.results.findings import Finding, Watching
from narrowcast.reports.results.result import codec
from narrowcast.reports.results.verdicts import TREND
from narrowcast.runtime.torch_surface.modules import told_of_optimizer_steps

MOMENTS = ("auto", "op", "step")

_open: list[watch] = []
"""Those that are open now, on all threads, the innermost last."""


def open_watch() -> watch | None:
    """The watch that was opened last and is open; None if none is."""
    return _open[-1] if _open else None


class watch:  # noqa: N801 - a context manager that reads as a verb, as torch.no_grad
    """`with watch() as w:` find what makes NaN or infinity in the block; `w.first`, `w.findings`.

    at: `op`, looked at as each call ends, with the proof of who made it (on an accelerator each call waits for it);
        `step`, read once where an optimizer steps and where the block ends, without that proof; `auto`, op on the cpu.
    stop: raise NotFiniteError at the first finding. callback: called with each finding.
    every: with optimizers that step in the block: look at gradients every N steps (`w.history`), and say where a
        share of underflow above `underflow` or a growth of `growth` times since the first look shows what is to come.
    log: a file that gets a JSON line for each finding and each look.
    """

    def __init__(
        self,
        *,
        at: str = "auto",
        stop: bool = False,
        callback: Callable[[Finding], None] | None = None,
        every: int = 1,
        underflow: float = 0.5,
        growth: float = 2.0**20,
        log: str | Path | None = None,
    ) -> None:
        if at not in MOMENTS:
            raise RunError(f"watch(at={at!r})", "no such moment", advice=f"Give one of {', '.join(MOMENTS)}.")
        if every < 1:
            raise RunError(f"watch(every={every})", "steps are counted from 1", advice="Give 1 or more.")
        self._at, self._stop, self._callback = at, stop, callback
        self._trends = Trends(every, underflow, growth)
        self._log = None if log is None else Path(log)
        self._stack = ExitStack()
        self._is_entered = False
        self.found = Watching()

    def __enter__(self) -> Watching:
        if self._is_entered:
            raise RunError("entering a watch again", "it is open, or has ended", advice="Make another: nc.watch().")
        self._is_entered = True
        if self._log is not None:
            try:
                self._stream = self._stack.enter_context(self._log.open("ab", buffering=0))
            except OSError as error:
                raise RunError(
                    f"watch(log={str(self._log)!r})", f"{type(error).__name__}: {error}", (Origin(str(self._log)),),
                    "Name a file in a folder that exists.",
                ) from error  # fmt: skip
        self._observer = WatchCalls(self.found, self._at, self._tell)
        self._door = self._observer.door = Door(self.found.notes)
        tell = partial(self._door.run, "an optimizer's step", self._step)
        self._stack.enter_context(told_of_optimizer_steps(tell, before=True))
        self._stack.enter_context(self._observer.observing())
        _open.append(self)
        self._stack.callback(_open.remove, self)
        return self.found

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._door.run("the end of the block", self._ended)
        finally:
            self._stack.close()
            self.found.not_inspected = self._door.times

    @property
    def models(self) -> tuple[torch.nn.Module, ...]:
        """The outermost modules that were called in the block."""
        return tuple(self._observer.roots)

    def step_skipped(self) -> None:
        """A step ends whose optimizer is not run: it counts, and what was put off is read. Gradients that are to be
        thrown away show no trend.
        """
        with quietly():
            self._door.run("the end of a step", partial(self._observer.settle, final=False, is_skipped=True))
        self.found.steps += 1

    def _ended(self) -> None:
        with quietly():
            self._observer.settle(final=True)

    def _step(self, optimizer: Any) -> None:
        with quietly():
            if _is_told_to_skip(optimizer):
                self.step_skipped()
                return
            try:
                held = [p for group in optimizer.param_groups for p in group["params"]]
                self._observer.settle(final=False, parameters=held)
            finally:
                self.found.steps += 1
            row, findings = self._trends.look(
                optimizer, self.found.steps, self._observer.roots, self._observer.of_backward
            )
            if row is not None:
                self.found.history.append(row)
                self._write(row)
            for finding in findings:
                self._tell(finding, len(self.found.findings))

    def _tell(self, finding: Finding, position: int) -> None:
        self.found.findings.insert(position, finding)
        self._write({"finding": codec().to_data(finding)})
        if self._callback is not None:
            self._door.of_user(self._callback, finding)
        if self._stop and finding.made_by != TREND:
            raise NotFiniteError(
                f"{finding.what} made by {finding.id}", finding.sentence, (Origin(finding.file, finding.line),),
                finding.advice or "nc.watch(stop=False) goes on and lists all of them.",
            )  # fmt: skip

    def _write(self, row: dict[str, Any]) -> None:
        """Add a line to the log, whole or not at all; a disk that is full ends the log and not the training."""
        if self._log is None:
            return
        line, end = (json.dumps(row) + "\n").encode(), self._stream.seek(0, 2)
        try:
            if self._stream.write(line) == len(line):
                return
            why = "there was no room for a whole line"
        except OSError as error:
            why = f"{type(error).__name__}: {error}"
        with suppress(OSError):
            self._stream.truncate(end)
        self.found.notes.append(f"{self._log} ends at step {self.found.steps}: {why}")
        self._log = None


def _is_told_to_skip(optimizer: Any) -> bool:
    """Whether a scaler has told a fused optimizer, which looks itself, that gradients are not finite."""
    found = getattr(optimizer, "found_inf", None)
    return isinstance(found, torch.Tensor) and bool(found.any())
