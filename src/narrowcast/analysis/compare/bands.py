"""How far round-off may go: runs of a reference in which everything moves by one unit in the last place."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from narrowcast.analysis.compare.reference import Keep, KeptCall, reads_opaque, sample_like
from narrowcast.core.ledger.identity import CallId
from narrowcast.formats import Format, parse_format
from narrowcast.observation.observer.observer import Observer
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.statistics.by_storage import ByStorage
from narrowcast.observation.trial.finiteness import is_floating
from narrowcast.observation.trial.noise import Noise
from narrowcast.observation.trial.output_errors import error_of, gradient_error, output_errors
from narrowcast.observation.trial.trial import Outcome
from narrowcast.runtime.torch_bridge import FORMATS, OpFacts, is_random, tensors_in
from narrowcast.runtime.torch_surface.dispatch import tree_map, version_of

_epsilon = attrgetter("epsilon")


def rounded_to(kept: KeptCall) -> list[torch.dtype]:
    """The formats that a call rounds to: its results', and those that it reads if it cannot be run alone to see."""
    return [*kept.output, *(d for d in kept.dtypes if d in FORMATS and reads_opaque(kept.call.facts))]


def cast_formats(under: Keep) -> dict[CallId, Format]:
    """Return of each call that casts arguments, by the policy or in its kernel, the coarsest format it casts to."""
    formats: dict[CallId, list[Format]] = {}
    for identity, kept in under.calls.items():
        planned = kept.call.plan.formats if kept.call.plan else ()
        formats[identity] = [*(f for f in planned if f is not None), *map(parse_format, kept.call.inside)]
    return {identity: max(found, key=_epsilon) for identity, found in formats.items() if found}


class Moved(Observer):
    """A run in which each result moves by up to one unit in the last place of the format that the policy gives it, and
    what the policy casts for a call by as much: where terms cancel, that moves a result by far more than its own unit.

    formats: of results. cast_formats: of the arguments of calls that the policy casts. kept: samples of the reference's
    results; `errors` are how far those of this run are from them. keeps_exact: what comes of whole numbers alone
    (lengths, positions, tables of them) stays, where the policy gives it no lower format: it is the same in each run of
    this model, and shapes may be read from it. underflows: what is near the end of a format moves as that makes it.
    """

    sees_inside = True

    def __init__(
        self, policies: tuple[Any, ...], formats: dict[CallId, Format], cast_formats: dict[CallId, Format],
        kept: dict[CallId, list[torch.Tensor]], seed: int, keeps_exact: bool, underflows: bool,
    ) -> None:  # fmt: skip
        super().__init__(policies)
        self._formats, self._cast_formats, self._noise, self._kept = formats, cast_formats, Noise(seed), kept
        self._exact: ByStorage[int] | None = ByStorage() if keeps_exact else None
        self._underflows = underflows
        self.errors: dict[CallId, float] = {}

    def gives(self, seen: SeenCall, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """The result, moved."""
        format, cast_format = self._formats.get(seen.id), self._cast_formats.get(seen.id)
        if format is None or not facts.computes or is_random(facts.op):
            return result
        if cast_format is None and self._is_exact(format, args, kwargs, result):
            return result
        if cast_format is not None and not facts.writes and not reads_opaque(facts):
            with suppress(RuntimeError):  # of a kernel that takes its arguments as they lie in memory
                result = facts.op(*self._moved(args, cast_format), **self._moved(kwargs, cast_format))
        return self._moved(result, format)

    def _is_exact(self, format: Format, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
        """Whether a result comes of whole numbers alone; noted then with its version, since it may be written to."""
        if self._exact is None:
            return False
        results = [t for t in tensors_in(result) if is_floating(t)]
        if any(self._exact.get(t) != version_of(t) for t in tensors_in(args, kwargs) if t.dtype in FORMATS):
            return False
        if any(format.epsilon > FORMATS[t.dtype].epsilon for t in results):
            return False
        for tensor in results:
            self._exact.put(tensor, version_of(tensor))
        return True

    def _moved(self, values: Any, format: Format) -> Any:
        least = format.smallest if self._underflows else 0.0

        def moved(value: Any) -> Any:
            if not (isinstance(value, torch.Tensor) and is_floating(value)):
                return value
            try:
                return self._noise.moved(value, format.epsilon, least)
            except RuntimeError:  # a format of 8 bits
                return value

        return tree_map(moved, values)

    def after(self, call: SeenCall) -> None:
        """How far it is from the reference's."""
        reference = self._kept.get(call.id)
        if reference is None or call.is_cast:
            return
        results = [t for t in call.results if is_floating(t)]
        pairs = [(sample_like(t, r), r.double()) for t, r in zip(results, reference, strict=False)]
        found = [(t, r) for t, r in pairs if t is not None]
        self.errors[call.id] = error_of([t for t, _ in found], [r for _, r in found])


def moved_formats(reference: Keep, under: Keep, low: Format, is_own: bool) -> dict[CallId, Format]:
    """The format to which the results of each call of the reference are to move. low: the region's. The same program
    may cast them to a low one itself, which is no cast in the reference; casts of another are its own fault.
    """
    formats = {
        identity: max((FORMATS[d] for d in [*rounded_to(kept), *(kept.cast_to if is_own else ())]), key=_epsilon)
        for identity, kept in under.calls.items()
        if identity in reference.calls
    }
    if not is_own:
        others = [kept for identity, kept in under.calls.items() if identity not in reference.calls]
        low = max((FORMATS[d] for kept in others for d in rounded_to(kept)), key=_epsilon, default=low)
    # what computes otherwise under the policy rounds there as often as not
    return formats | dict.fromkeys(reference.calls.keys() - under.calls.keys(), low)


@dataclass(slots=True)
class Bands:
    """How far round-off may go: the largest relative errors of runs in which everything moved, of calls, of the output,
    and of gradients by parameter. runs: those that went through.
    """

    calls: dict[CallId, float] = field(default_factory=dict)
    output: float = 0.0
    gradients: dict[str, float] = field(default_factory=dict)
    runs: int = 0

    def add_calls(self, errors: dict[CallId, float]) -> None:
        """The errors of calls in one more run; where it is not finite, nothing is beyond round-off."""
        for identity, error in errors.items():
            band = math.inf if math.isnan(error) else error
            self.calls[identity] = max(self.calls.get(identity, 0.0), band)

    def add(self, expected: Outcome, moved: Outcome) -> None:
        """What one more run gave; nothing, if its outputs are not finite where the reference's are, or have other
        shapes (lengths that come of values).
        """
        errors = [e.relative_error for e in output_errors(expected.output, moved.output)]
        if any(map(math.isnan, errors)) or len(errors) < len(output_errors(expected.output, expected.output)):
            return
        self.runs += 1
        self.output = max([self.output, *errors])
        for name, gradient in moved.gradients.items():
            if name in expected.gradients and gradient.shape == expected.gradients[name].shape:
                error = gradient_error(expected.gradients[name], gradient)
                self.gradients[name] = max(self.gradients.get(name, 0.0), error)
