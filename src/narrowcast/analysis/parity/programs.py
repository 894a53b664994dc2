"""One of the two programs: a model that is run again with something of the other's, or a run that was kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from narrowcast.analysis.capture.capture import capture, observed_region
from narrowcast.analysis.capture.tokens import NAMES, log_probabilities_of, logits_of, without_padding
from narrowcast.analysis.parity.exchange import Exchange, Kept
from narrowcast.analysis.parity.outputs import error_of_outputs
from narrowcast.errors import RunError
from narrowcast.frontends.eager import autocast
from narrowcast.frontends.eager.asked import Under
from narrowcast.observation.trial.trial import Trial, detached
from narrowcast.observation.trial.uncast import Uncast
from narrowcast.reports.results.parity import RELATIVE, Distance, distance_in_nats
from narrowcast.reports.results.run import Run
from narrowcast.runtime.torch_bridge import tensors_in
from narrowcast.runtime.torch_surface.dispatch import quietly
from narrowcast.runtime.torch_surface.modules import dropped_share

Change = Callable[[torch.nn.Module], AbstractContextManager[Any]]
"""What is changed in a model while it runs."""


@dataclass(slots=True)
class OneProgram:
    """One of the two. run: its calls; those of a program that runs are captured when they are needed.

    ids, log_probabilities: of a language model's tokens, in a row; tokens: the ids as they were given, [..., T].
    """

    name: str
    run: Run
    ids: list[int] = field(default_factory=list)
    log_probabilities: list[float] = field(default_factory=list)
    tokens: torch.Tensor | None = None


@dataclass(slots=True, kw_only=True)
class Live(OneProgram):
    """One that runs: a model with its inputs, in its region, if it has one. output: what it gives by itself.
    noise: how far rounding may move that, once it was asked (`rounding.noise_of`).
    """

    trial: Trial
    region: autocast | None
    under: Under
    output: Any = None
    noise: float | None = None

    @property
    def is_module(self) -> bool:
        """Whether it can run with something changed: not a function, nor what compilers made, which is not copied."""
        return not self.trial.is_made and isinstance(self.trial.model, torch.nn.Module) and self.trial.process() is None

    @property
    def module(self) -> torch.nn.Module:
        """The model, where it is a module."""
        return cast("torch.nn.Module", self.trial.model)

    def exchanged(
        self, changes: Sequence[Change] = (), region_of: Live | None = None, **given: Any
    ) -> tuple[Any, Kept]:
        """Return the output of a copy with these changes, and what its modules returned. given: of `Exchange`.

        region_of: the program in whose region it runs; itself by default.
        """
        region = (region_of or self).region
        with torch.no_grad(), self.trial.copied(None) as run, ExitStack() as stack:
            for change in changes:
                stack.enter_context(change(run.model))
            module = run.model if isinstance(run.model, torch.nn.Module) else torch.nn.Module()  # a function has none
            observer = Exchange(module, **given)
            stack.enter_context(region or Uncast(self.trial.device_type))
            stack.enter_context(observer.observing())
            return detached(run()), observer.kept

    def captured(self, changes: Sequence[Change] = ()) -> Run:
        """Return the calls of a run with these changes."""
        with torch.no_grad(), ExitStack() as stack:
            if not changes:
                trial = self.trial
                found = capture(trial.model, (trial.args, trial.kwargs), under=self.under)
                found.keep_tokens(self.ids, self.log_probabilities)
                return found
            run = stack.enter_context(self.trial.copied(None))
            for change in changes:
                stack.enter_context(change(run.model))
            return capture(run.model, (run.args, run.kwargs), under=self.under)


def program_of(name: str, model: Any, inputs: Any, under: Under, tokens: torch.Tensor | None) -> OneProgram:
    """Return a program: of a run, or of a model, which runs once by itself. RunError for what cannot be compared."""
    if isinstance(model, Run):
        return OneProgram(name, model, list(model.tokens), list(model.log_probabilities))
    return live_program(name, Trial.of("parity", model, inputs), under, tokens)


def live_program(name: str, trial: Trial, under: Under, tokens: torch.Tensor | None) -> Live:
    """Return the program of a model, which runs once by itself. RunError for what cannot be compared."""
    _check_draws(trial, name)
    opened = observed_region("parity", trial, under)
    region = None if isinstance(opened, Uncast) else opened
    program = Live(name, Run(), trial=trial, region=region, under=under)
    with torch.no_grad():
        program.output = trial.run(region).output
        again = trial.run(region, _seeded()).output
    if error_of_outputs(program.output, again) > 0:
        found, advice = "two runs differ, with another seed", "Call model.eval() before, and draw nothing."
        raise RunError(f"parity: {name}", found, advice=advice)
    program.tokens = _tokens_of(trial, program.output) if tokens is None else without_padding(tokens, trial)
    if program.tokens is not None:
        program.ids, program.log_probabilities = numbers_of(program.output, program.tokens)
    return program


@contextmanager
def _seeded() -> Iterator[None]:
    """Have what draws draw other numbers; the random state is restored by what runs the model."""
    torch.manual_seed(1)
    yield


def numbers_of(output: Any, tokens: torch.Tensor) -> tuple[list[int], list[float]]:
    """Return the tokens in a row, and the log-probability of each given those before it."""
    ids, values = log_probabilities_of(output, tokens)
    return ids.tolist(), values.tolist()


def distance(a: Live, b: Live, output: Any, limit: float | None = None) -> Distance:
    """Return how far apart a's numbers are from those of b where that returns this output."""
    if a.log_probabilities and b.tokens is not None:
        return distance_in_nats(a.log_probabilities, numbers_of(output, b.tokens)[1], limit)
    with quietly():
        return Distance(RELATIVE, error_of_outputs(a.output, output))


def _tokens_of(trial: Trial, output: Any) -> torch.Tensor | None:
    """Return the integers among the inputs that a model returns logits of, if it does."""
    named = [trial.kwargs[name] for name in NAMES if name in trial.kwargs]
    for given in (*named, *trial.args, *trial.kwargs.values()):
        if isinstance(given, torch.Tensor) and given.dtype in (torch.int64, torch.int32) and given.dim():
            with suppress(RunError):
                wanted = without_padding(given, trial)
                logits_of(output, wanted)
                return wanted
    return None


def _check_draws(trial: Trial, name: str) -> None:
    """Raise RunError for a model that draws numbers: those of two programs are others."""
    modules = trial.model.named_modules() if isinstance(trial.model, torch.nn.Module) else ()
    for path, module in modules:
        if share := dropped_share(module):
            found = f"{path or type(module).__name__} draws what it drops, with p={share:g}"
            advice = "Call model.eval() before: what two programs draw is another in each."
            raise RunError(f"parity: {name}", found, advice=advice)


def other_inputs(a: OneProgram, b: OneProgram) -> list[str]:
    """Return a sentence where two programs were given tensors of the same shapes and other values."""
    if not (isinstance(a, Live) and isinstance(b, Live)):
        return []
    of_a, of_b = (tensors_in(one.trial.args, one.trial.kwargs) for one in (a, b))
    if [t.shape for t in of_a] != [t.shape for t in of_b] or all(map(same_bits, of_a, of_b)):
        return []
    return [f"{a.name} and {b.name} were given inputs with other values: what differs may come of that alone"]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same numbers, in the same format."""
    return a.dtype == b.dtype and torch.equal(a.cpu(), b.cpu())
