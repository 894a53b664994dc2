"""`nc.watch`: the first call that makes a NaN or an infinity out of finite values, and what in it does so.

Every result of a call is summed once: the sum is not finite if an element is not. A call with finite inputs whose
results are not finite made it; the call is then run again, on the same inputs, to see whether the cast, the format or
the op itself did (`watch_calls`). The consequences show whether it is intentional (`history`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from narrowcast.analysis.watch.watch_calls import WatchCalls
from narrowcast.core.ledger.identity import BACKWARD, CallId
from narrowcast.errors import NotFiniteError, Origin, RunError, reason_of
from narrowcast.observation.observer.door import Door
from narrowcast.observation.observer.module_calls import names_of_parameters
from narrowcast.observation.statistics.by_storage import has_storage
from narrowcast.observation.trial.finiteness import read_together
from narrowcast.observation.trial.output_errors import as_real
from narrowcast.reports.results.findings import Finding, GradientFigures, InspectedStep, Watching
from narrowcast.reports.results.result import codec
from narrowcast.reports.results.verdicts import TREND
from narrowcast.runtime.torch_bridge import FORMATS, values_of
from narrowcast.runtime.torch_surface.dispatch import quietly
from narrowcast.runtime.torch_surface.modules import told_of_optimizer_steps

MOMENTS = ("auto", "op", "step")

_open: list[watch] = []
"""The watches that are open now, on all threads, the innermost last."""


def open_watch() -> watch | None:
    """Return the watch that was opened last and is open; None if none is."""
    return _open[-1] if _open else None


class watch:  # noqa: N801 - a context manager that reads as a verb, as torch.no_grad
    """`with watch() as w:` find what makes NaN or infinity in the block; `w.first`, `w.findings`.

    at: `op`, inspected as each call ends, with proof of the cause (an accelerator is synchronized after each call);
        `step`, read once where an optimizer steps and where the block ends, without that proof; `auto`, op on the cpu.
    stop: raise NotFiniteError at the first finding. callback: called with each finding.
    every: with optimizers that step in the block: inspect gradients every N steps (`w.history`), and report trends: a
        share of underflow above `underflow`, or a growth of `growth` times since the first two inspections.
    log: a file to which a JSON line is added for each finding and each inspection of gradients.
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
            raise RunError(f"watch(at={at!r})", "not a choice", advice=f"Give one of {', '.join(MOMENTS)}.")
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
                    f"watch(log={str(self._log)!r})", reason_of(error), (Origin(str(self._log)),),
                    "Name a file in a folder that exists.",
                ) from error  # fmt: skip
        self._observer = WatchCalls(self.found, self._at, self._report)
        self._door = self._observer.door = Door(self.found.notes)
        on_step = partial(self._door.run, "an optimizer's step", self._step)
        self._stack.enter_context(told_of_optimizer_steps(on_step, before=True))
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
        """End a step whose optimizer is not run: count it, and read the values that were recorded in it. The gradients,
        which are discarded, do not count for trends.
        """
        with quietly():
            self._door.run("the end of a step", partial(self._observer.settle, final=False, is_skipped=True))
        self.found.steps += 1

    def _ended(self) -> None:
        with quietly():
            self._observer.settle(final=True)

    def _step(self, optimizer: Any) -> None:
        with quietly():
            if _is_to_skip(optimizer):
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
                row.scale, row.largest = self._observer.scale, self._observer.ranges.since()
                self.found.history.append(row)
                self._write(codec().to_data(row))
            for finding in findings:
                self._report(finding, len(self.found.findings))

    def _report(self, finding: Finding, position: int) -> None:
        self.found.findings.insert(position, finding)
        self._write({"finding": codec().to_data(finding)})
        if self._callback is not None:
            self._door.of_user(self._callback, finding)
        if self._stop and finding.made_by != TREND:
            raise NotFiniteError(
                f"{finding.what} made by {finding.id}", finding.sentence, (Origin(finding.file, finding.line),),
                finding.todo or "nc.watch(stop=False) goes on and lists all of them.",
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
            why = reason_of(error)
        with suppress(OSError):
            self._stream.truncate(end)
        self.found.notes.append(f"{self._log} ends at step {self.found.steps}: {why}")
        self._log = None


def _is_to_skip(optimizer: Any) -> bool:
    """Return whether a scaler passed to a fused optimizer, which skips steps itself, that gradients are not finite."""
    found_inf = getattr(optimizer, "found_inf", None)
    return isinstance(found_inf, torch.Tensor) and bool(found_inf.any())


_SMALL = 256
"""Gradients may underflow if their root mean square is below this many of the smallest numbers: few do above."""
_LOOKS = 3
"""How many inspections in a row must show a trend of a parameter."""
_EARLY = 2
"""With how many of the first inspections growth is compared."""


class Trends:
    """Inspects gradients every N steps: their rms, largest magnitude and share of zeros, by parameter.

    underflow: a trend is a share of zeros above it, for a parameter whose gradients had fewer in the first inspection,
    and are so small that some may underflow in the formats of the backward. growth: or this many times the largest
    magnitude of the first two inspections: the gradient of the very first step may be zero but for errors, as of a
    norm's input where its weights are all alike. Of a sharded gradient this rank's part is inspected.
    """

    def __init__(self, every: int, underflow: float, growth: float) -> None:
        self._every, self._underflow, self._growth = every, underflow, growth
        self._first: dict[str, tuple[float, float]] = {}
        self._early: dict[str, list[float]] = {}
        self._often: dict[tuple[str, str], int] = {}

    def look(
        self, optimizer: Any, step: int, roots: Iterable[torch.nn.Module], dtypes: Iterable[torch.dtype]
    ) -> tuple[InspectedStep | None, list[Finding]]:
        """Return the figures of this step, if it is to be inspected, and trends. dtypes: those of the backward."""
        if (step - 1) % self._every:
            return None, []
        names = names_of_parameters(roots)
        small = _SMALL * max((FORMATS[dtype].smallest for dtype in dtypes if dtype in FORMATS), default=0.0)
        rows: dict[str, GradientFigures] = {}
        findings = []
        held = [(p, _values(p)) for group in optimizer.param_groups for p in group["params"]]
        known = [(p, values) for p, values in held if values is not None]
        figures = read_together([_figures(values) for _, values in known])
        for number, ((parameter, _), (largest, rms, zeros)) in enumerate(zip(known, figures, strict=True)):
            name = names.get(id(parameter), f"parameter {number}")
            rows[name] = GradientFigures(largest, rms, zeros)
            first_rms, first_zeros = self._first.setdefault(name, (rms, zeros))
            early = self._early.setdefault(name, [])
            if len(early) < _EARLY:
                early.append(largest)
            is_small = (rms or first_rms) < small
            if self._shows(name, "underflow", is_small and zeros > self._underflow > first_zeros):
                sentence = f"{zeros:.0%} of the gradient of {name} are zero; {first_zeros:.0%} were at the first look"
                advice = "Scale the loss (GradScaler), or compute the gradients of these layers in bf16 or fp32."
                findings.append(_trend(name, "underflow", sentence, advice, step))
            if self._shows(name, "growth", 0 < max(early) * self._growth < largest):
                sentence = f"the largest gradient of {name} is {largest:.3g}, {max(early):.3g} in its first steps"
                findings.append(_trend(name, "growth", sentence, "Lower the learning rate, or clip gradients.", step))
        return InspectedStep(step, rows), findings

    def _shows(self, name: str, what: str, is_so: bool) -> bool:
        """Return whether a trend has shown for `_LOOKS` inspections in a row; True once."""
        key = (name, what)
        self._often[key] = self._often.get(key, 0) + 1 if is_so else 0
        return self._often[key] == _LOOKS


def _values(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the values of its gradient on this rank; None without one, or if its class does not list values."""
    gradient = parameter.grad
    if gradient is None:
        return None
    values = values_of(gradient.coalesce() if gradient.is_sparse else gradient)
    return values if has_storage(values) else None


def _figures(values: torch.Tensor) -> torch.Tensor:
    x = as_real(values.detach()).float()
    if not x.numel():
        return torch.zeros(3, device=x.device)
    low, high = x.aminmax()
    largest, range_ = torch.maximum(-low, high), torch.finfo(x.dtype)
    unit = largest.clamp(range_.tiny, range_.max)  # squares of what is below 1e-23 are zero
    rms = unit * torch.linalg.vector_norm(x / unit) / math.sqrt(x.numel())
    return torch.stack([largest, rms, 1 - x.count_nonzero() / x.numel()])


def _trend(name: str, what: str, sentence: str, advice: str, step: int) -> Finding:
    path, _, parameter = name.rpartition(".")
    identity = CallId(path, f"gradient.{parameter}", direction=BACKWARD)
    return Finding(identity, "", 0, what, TREND, "", sentence, advice, step=step)
