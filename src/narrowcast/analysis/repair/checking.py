"""What a repair requires of a run, and runs that are judged by it: under a policy with some rules, or in fp32."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from narrowcast.analysis.repair.looking import ForwardCall, RepairObserver
from narrowcast.core.ledger.identity import CallId
from narrowcast.errors import NarrowcastError, RefusedError, first_line
from narrowcast.frontends.eager import autocast
from narrowcast.observation.restore.modules import restored
from narrowcast.observation.trial.output_errors import output_errors
from narrowcast.observation.trial.raising import SeeFunctions
from narrowcast.observation.trial.trial import Loss, Outcome, Trial
from narrowcast.observation.trial.uncast import Uncast
from narrowcast.output.progress import Step
from narrowcast.output.words import counted, number_text
from narrowcast.reports.results.findings import Finding
from narrowcast.reports.results.repair import ERROR, METRIC, NOT_FINITE, RAISED
from narrowcast.reports.results.verdicts import TREND
from narrowcast.runtime.torch_bridge.case import Evaluate, Metric, figures_of
from narrowcast.runtime.torch_surface.dispatch import quietly

HIGHER, LOWER = "higher", "lower"
DEFAULT_TOLERANCE = 0.01
"""How much worse than in fp32 a metric may be unless a tolerance is given: this fraction of fp32's."""
FAR_OFF = 0.1
"""An output with a larger relative error is mentioned where no budget was asked for."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is required of a run besides that it finishes, and stays finite.

    error: the largest relative error of an output against fp32. metric: called with the output. evaluate: called with
    the model, which it runs itself. better: HIGHER or LOWER. tolerance: how much worse than in fp32.
    """

    error: float | None = None
    metric: Metric | None = None
    evaluate: Evaluate | None = None
    better: str = HIGHER
    tolerance: float | None = None

    @property
    def compares(self) -> bool:
        """Whether a run is compared with one in fp32."""
        return self.error is not None or self.measures

    @property
    def measures(self) -> bool:
        """Whether there is a metric."""
        return self.metric is not None or self.evaluate is not None

    def __str__(self) -> str:
        requirements = ["it runs, and is finite where fp32 is"]
        if self.error is not None:
            requirements.append(f"output error at most {number_text(self.error)}")
        if self.measures:
            worse = f"{self.tolerance:g}" if self.tolerance is not None else f"{DEFAULT_TOLERANCE:.0%}"
            requirements.append(f"metric at most {worse} {'below' if self.better == HIGHER else 'above'} fp32's")
        return "; ".join(requirements)

    def excess(self, reference: Mapping[str, float], figures: Mapping[str, float]) -> float:
        """Return how much worse than fp32's the metric is, as a multiple of what is allowed; 0 if it is no worse."""
        worst = 0.0
        for name, expected in reference.items():
            value = figures.get(name, math.nan)
            worse = expected - value if self.better == HIGHER else value - expected
            allowed = self.tolerance if self.tolerance is not None else DEFAULT_TOLERANCE * abs(expected)
            if math.isnan(worse):
                return math.inf if not math.isnan(expected) else worst
            worst = max(worst, 0.0 if worse <= 0 else worse / allowed if allowed else math.inf)
        return worst


@dataclass(slots=True)
class Ran:
    """One run. error: what it raised. outcome: its output. relative: its error against fp32; NaN if not compared.

    in_metric: whether the metric or the evaluation raised, and not the model by itself. own: how many calls the model
    made before an evaluation ran it again.
    """

    look: RepairObserver
    error: Exception | None = None
    outcome: Outcome | None = None
    metric: dict[str, float] = field(default_factory=dict)
    relative: float = math.nan
    in_metric: bool = False
    own: int | None = None

    @property
    def calls(self) -> list[tuple[CallId, ForwardCall]]:
        """The calls of the model, once."""
        return self.look.calls[: self.own]

    @property
    def findings(self) -> list[Finding]:
        """The findings of calls that made NaN or infinity."""
        return [f for f in self.look.watching.findings if f.made_by != TREND]


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a run. said: as a sentence. excess: the error or metric, as a multiple of what is allowed."""

    cause: str
    said: str
    excess: float = 1.0
    findings: tuple[Finding, ...] = ()


_KEY = attrgetter("id.module_path", "id.op", "id.direction")
"""Findings of two runs are the same if this is equal."""


class Checks:
    """Runs a model, counts the runs, and judges them."""

    def __init__(self, trial: Trial, wanted: Wanted, step: Step, device: str) -> None:
        self.trial, self.wanted, self.step, self._device = trial, wanted, step, device
        self.count = 0
        self._dtype = trial.fp32_for_low()
        self.expected: Ran | None = None
        self._weights = trial.kept_weights()

    def run_in_fp32(
        self, make: Callable[[], RepairObserver], backward: Callable[[RepairObserver], Loss] | None = None
    ) -> Ran:
        """Run the model in a region that casts nothing: a copy in fp32 of one in a low format, unless it does not run,
        since its code names that format. make: makes what looks on; backward: gives the loss, as for `run`, of that.
        """
        look = make()
        look.casts_scripts = False
        loss = None if backward is None else backward(look)
        ran = self.run(Uncast(self._device), look, backward=loss, dtype=self._dtype)
        if self._dtype is None or not isinstance(ran.error, RuntimeError):
            return ran
        self._dtype = None
        return self.run_in_fp32(make, backward)

    def run(
        self,
        region: autocast,
        look: RepairObserver,
        functions: bool = False,
        backward: bool | Loss | None = None,
        dtype: torch.dtype | None = None,
    ) -> Ran:
        """Run the model in a region, its metric included. backward: a loss other than the trial's; no metric then.
        dtype: runs a copy in that format.
        """
        ran = Ran(look)
        evaluates = self.wanted.evaluate is not None and backward is None
        if not (evaluates and self.wanted.error is None and not self.trial.backward):
            self._run_model(ran, region, functions, backward, dtype)
        if evaluates and ran.error is None:
            seen = self._seen(look, functions)
            with self._counted(ran), restored(self.trial.model), self._converted(dtype) as model, seen, region:
                ran.metric = replace(self.trial, model=model).measure()  # it runs the model, and is watched for it
            ran.in_metric = ran.error is not None
        if self.expected is not None:
            ran.relative = self.relative(self.expected, ran)
        return ran

    def relative(self, expected: Ran, ran: Ran) -> float:
        """Return the largest relative error of an output; infinity for NaN that fp32 has not, NaN without outputs."""
        if expected.outcome is None or ran.outcome is None:
            return math.nan
        errors = [e.relative_error for e in output_errors(expected.outcome.output, ran.outcome.output)]
        return max((math.inf if math.isnan(e) else e for e in errors), default=math.nan)

    def lost_gradients(self, ran: Ran) -> tuple[list[str], int]:
        """Return the names of parameters whose gradients are all zero, and not in fp32; and how many have one there."""
        if self.expected is None or self.expected.outcome is None or ran.outcome is None:
            return [], 0
        with quietly():
            in_fp32, here = (
                {name for name, gradient in outcome.gradients.items() if bool(gradient.any())}
                for outcome in (self.expected.outcome, ran.outcome)
            )
        return [name for name in ran.outcome.gradients if name in in_fp32 - here], len(in_fp32)

    def judge(self, ran: Ran) -> Problem | None:
        """Return what is wrong with a run; None if nothing is. Findings that fp32 has, too, do not count."""
        known = set(map(_KEY, self.expected.findings)) if self.expected is not None else set()
        findings = tuple(f for f in ran.findings if _KEY(f) not in known)
        raised = f"raises {first_line(ran.error)}" if ran.error is not None else ""
        if findings:
            first = findings[0]
            more = f", and {counted(len(findings) - 1, 'call')} more" if len(findings) > 1 else ""
            said = f"{first.what} made by {first.id}{more}" + (f"; then it {raised}" if raised else "")
            return Problem(NOT_FINITE, said, math.inf, findings)
        if raised:
            return Problem(RAISED, raised)
        return None if self.expected is None else self._compare(ran, self.expected)

    def _compare(self, ran: Ran, expected: Ran) -> Problem | None:
        excess = self.wanted.excess(expected.metric, ran.metric) if self.wanted.measures else 0.0
        if excess > 1:
            return Problem(METRIC, "the metric is worse than allowed", excess)
        if self.wanted.error is not None and not ran.relative <= self.wanted.error:
            message = f"the output is off by more than {number_text(self.wanted.error)}"
            times = ran.relative / self.wanted.error if self.wanted.error else math.inf
            return Problem(ERROR, message, times if math.isfinite(times) else math.inf)
        return None

    @contextmanager
    def _converted(self, dtype: torch.dtype | None) -> Iterator[Any]:
        """Yield the model, or a copy of it in a format."""
        if dtype is None:
            yield self.trial.model
        else:
            with self.trial.copied(dtype) as run:
                yield run.model

    def _run_model(
        self, ran: Ran, region: autocast, functions: bool, backward: bool | Loss | None, dtype: torch.dtype | None
    ) -> None:
        outputs: list[Any] = []
        trial = replace(self.trial, reads=outputs.append)
        if backward is not None:
            trial = replace(trial, backward=backward)
        with self._counted(ran):
            ran.outcome = trial.run(region, self._seen(ran.look, functions), dtype)
        ran.own = len(ran.look.calls)
        if self.wanted.metric is not None and ran.error is None:
            try:
                with torch.no_grad():
                    ran.metric = figures_of("repair(metric=...)", self.wanted.metric, self.wanted.metric(outputs[0]))
            except Exception as error:
                ran.error, ran.in_metric = error, True

    @contextmanager
    def _seen(self, look: RepairObserver, functions: bool) -> Iterator[None]:
        look.weights = self._weights
        with look.observing(), SeeFunctions(look.raising) if functions else nullcontext():
            try:
                yield
            finally:  # what raises may do so because of a NaN
                with quietly():
                    look.door.run("the end of a run", partial(look.settle, final=True))

    @contextmanager
    def _counted(self, ran: Ran) -> Iterator[None]:
        """Count a run; note what the model raises, and restore weights that it changes."""
        self.count += 1
        try:
            with self._weights:
                yield
        except Exception as error:
            if isinstance(error, NarrowcastError) and not isinstance(error, RefusedError):
                raise  # it is about how the repair was asked for
            ran.error = error
        finally:
            self.step()
