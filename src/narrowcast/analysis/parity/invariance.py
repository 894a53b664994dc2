"""`nc.check_invariance`: whether the numbers of one sample depend on its batch, its place, padding and caches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from narrowcast.analysis.capture.capture import observed_region
from narrowcast.analysis.parity.batches import Own, Results, ResultsOfCalls, Samples, own_elements
from narrowcast.analysis.parity.decoding import Decoding, decoding_of
from narrowcast.analysis.parity.exchange import OF_NOISE, Exchange
from narrowcast.core.ledger.identity import CallId
from narrowcast.errors import RunError
from narrowcast.frontends.eager import autocast
from narrowcast.frontends.eager.asked import Under
from narrowcast.frontends.eager.registered import leaves_no_kernels
from narrowcast.observation.trial.finiteness import is_floating
from narrowcast.observation.trial.noise import Noise
from narrowcast.observation.trial.output_errors import error_of
from narrowcast.observation.trial.trial import Trial, tensors_of
from narrowcast.output.words import sizes
from narrowcast.reports.results.invariance import Invariance, Variant
from narrowcast.reports.results.verdicts import CACHE, INVARIANT, LEAK, NOT_JUDGED, SHAPE
from narrowcast.runtime.torch_bridge.case import Case
from narrowcast.runtime.torch_bridge.inputs import Inputs

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_MATES, _OTHER_MATES, _GIVEN_MATES, _OTHERS = 1, 2, 5, (3, 4)  # seeds of other samples
_PADDING, _CHUNK = (1, 5), 4
"""By how many tokens a sample is padded, and how many it is read in at once."""
_SMALLEST = 2
_WORDS = ("length", "padded", "own", "in_chunks")


@leaves_no_kernels()
def check_invariance(
    model: Callable[..., Any] | Case,
    inputs: Inputs = (),
    *,
    under: Under = None,
    batches: Sequence[int] = (2, 8, 17),
    dim: int = 0,
    decoding: Decoding | None = None,
) -> Invariance:
    """Check whether the numbers of one sample depend on who shares its batch, on its place there, and, of a language
    model, on padding, chunks and caches.

    model, inputs, under: as for `capture`; of the inputs the first sample is taken. The model has to be in evaluation.
    batches: sizes of the batches that it is put into, at the first place, the last one, and one between.
    dim:     the dimension of samples, in all input tensors that have as many there.
    decoding: how the model is given padding and caches (`analysis/parity/decoding.py` has the protocol); models of
             transformers that read tokens alone need none.

    Which elements of a result are the sample's is found by changing the others and the sample: no dimension of results
    is guessed. What depends on both is shared. Where the sample's bits are others than alone, they are within what
    rounding may make of them (`batch shape`: kernels depend on shapes), or not (`cache or position`: a mask or a
    position is wrong). The model runs five times for each place, and is left as it is. Raises RunError for inputs
    without such a dimension, and for a model that draws.
    """
    if (
        isinstance(batches, int)
        or not batches
        or any(not isinstance(size, int) or size < _SMALLEST for size in batches)
    ):
        advice = "Give sizes from 2 on, (2, 8, 17) for example: what shares a batch with the sample is what is changed."
        raise RunError(f"check_invariance(batches={batches!r})", "these are no sizes of batches", advice=advice)
    lacking = next(
        (name for name in _WORDS if decoding is not None and not callable(getattr(decoding, name, None))), None
    )
    if lacking is not None:
        advice = "Give an object with the methods of Decoding, analysis/parity/decoding.py."
        of = type(decoding).__name__
        raise RunError(f"check_invariance(decoding={decoding!r})", f"{of} has no {lacking}()", advice=advice)
    trial = Trial.of("check_invariance", model, inputs)
    check = _Check(trial, observed_region("check_invariance", trial, under), dim)
    result = Invariance(trial.name)
    for size in batches:
        for place in dict.fromkeys((0, size // 2, size - 1)):
            result.variants.append(check.in_batch(size, place))
    found = (decoding, dict(trial.kwargs)) if decoding else decoding_of(trial.model, *check.sample)
    if found is not None:
        result.variants += check.decoded(*found)
    result.runs = check.runs
    result.notes += check.notes
    return result


class _Check:
    """One sample, and how it comes out alone."""

    def __init__(self, trial: Trial, region: autocast, dim: int) -> None:
        self._trial, self._region, self._dim = trial, region, dim
        self.runs, self.notes = 0, list[str]()
        self._samples = Samples((trial.args, trial.kwargs), dim)
        if not self._samples.count:
            raise RunError("check_invariance", f"no input has a dimension {dim}", advice="Give dim=, that of samples.")
        self.sample = self._samples.first()
        self._others = [self._samples.another_like(self.sample, seed, seed == _OTHERS[1]) for seed in _OTHERS]
        self._alone, self._calls = self._run(self.sample)
        again, _ = self._run(self.sample, seed=1)
        if any(not torch.equal(x, y) for x, y in zip(self._alone, again, strict=True)):
            advice = "Call model.eval() before: what draws numbers, or depends on threads, cannot be checked."
            found = "two runs of the same sample differ, with another seed"
            raise RunError(f"check_invariance({trial.name})", found, advice=advice)
        try:
            self._alone_others = [self._run(other) for other in self._others]
        except Exception:  # whole numbers of several kinds: each column has its own
            if self._samples.keeps_columns or self._samples.count < 2:
                raise
            self._samples.keeps_columns = True
            self._others = [self._samples.another_like(self.sample, seed, seed == _OTHERS[1]) for seed in _OTHERS]
            self._alone_others = [self._run(other) for other in self._others]
        self._bound = OF_NOISE * max(_relative_error(self._alone, self._moved(seed)) for seed in (0, 1))

    def in_batch(self, size: int, place: int) -> Variant:
        """Return how the sample comes out at a place in a batch."""
        mates, *others = (self._mates(seed, size) for seed in (_MATES, _OTHER_MATES, _GIVEN_MATES))
        ways = (mates, self.sample), *((mates, other) for other in self._others), *((o, self.sample) for o in others)
        runs = [self._run(self._batch(around, sample, place)) for around, sample in ways]
        name = f"batch of {size}, place {place + 1}"
        own = [self._own(together) for together in zip(*(output for output, _ in runs), strict=True)]
        outputs = zip(self._alone, *(output for output, _ in self._alone_others), strict=True)
        alone = [own_elements(first, rest, (), self._bound) for first, *rest in outputs]
        shared = sum(one.shared for one in own if one is not None), sum(one.count for one in own if one is not None)
        count = sum(one.count for one in alone if one is not None)
        if shared[0] or (count and not shared[1]):  # or where nothing of the batch is the sample's
            calls = self._first_shared([calls for _, calls in runs])
            return Variant(name, LEAK, **calls, shared=(shared[0], shared[1] or count))
        pairs = [(x.values, y.values) for x, y in zip(alone, own, strict=True) if x is not None and y is not None]
        if not any(x.numel() for x, _ in pairs) or any(x.shape != y.shape for x, y in pairs):
            self.notes.append(f"{name}: nothing of the output was found to be the sample's")
            return Variant(name, NOT_JUDGED)
        first = self._first_other([calls for _, calls in runs])
        return self._variant(name, [x for x, _ in pairs], [y for _, y in pairs], first)

    def decoded(self, decoding: Decoding, inputs: dict[str, Any]) -> Iterator[Variant]:
        """Yield how the sample comes out padded, in chunks, and token by token."""
        own = Samples(inputs, self._dim).first()
        length = decoding.length(own)
        alone = decoding.own(self._call(partial(_with, own)), 0, 0)
        if alone.dim() < 2 or alone.shape[1] != length:
            self.notes.append("not padded, nor read in chunks: the output has not one row for each token")
            return
        for n in _PADDING:
            for before, after, fill in ((n, 0, 0), (0, n, 0), (n, 0, 1)):
                padded = decoding.padded(own, before, after, fill)
                found = decoding.own(self._call(partial(_with, padded)), before, after)
                yield self._variant(f"padded {'left' if before else 'right'} by {n} (token {fill})", [alone], [found])
        chunk = min(_CHUNK, length - 1)
        ways = {f"in chunks of {chunk}": [chunk] * (length // chunk) + [length % chunk] * bool(length % chunk)}
        ways |= {f"after a prefix of {length - 1}": [length - 1, 1], "token by token": [1] * length}
        for name, lengths in ways.items() if length > 1 else ():
            output = self._call(partial(_in_chunks, decoding, own, lengths))
            if output is not None:
                yield self._variant(name, [alone], [output])

    # -- runs ----------------------------------------------------------------------------------------------------------

    def _mates(self, seed: int, size: int) -> list[Any]:
        is_given = seed == _GIVEN_MATES
        return [self._samples.another_like(self.sample, 10 * seed + n, is_given) for n in range(size)]

    def _batch(self, mates: list[Any], sample: Any, place: int) -> Any:
        return self._samples.together([*mates[:place], sample, *mates[place + 1 :]])

    def _run(self, arguments: Any, seed: int | None = None) -> tuple[list[torch.Tensor], Results]:
        observer = ResultsOfCalls()
        args, kwargs = arguments
        output = self._call(lambda model: model(*args, **kwargs), observer, seed)
        return _numbers_of(output), observer.kept

    def _call(self, call: Callable[[Any], Any], observer: Any = None, seed: int | None = None) -> Any:
        self.runs += 1
        with torch.no_grad(), self._trial.copied(None) as run, self._region:
            if seed is not None:
                torch.manual_seed(seed)  # the state is kept by what copies
            if observer is None:
                return call(run.model)
            with observer.observing():
                return call(run.model)

    def _moved(self, seed: int) -> list[torch.Tensor]:
        args, kwargs = self.sample
        self.runs += 1
        with torch.no_grad(), self._trial.copied(None) as run, self._region:
            model = run.model if isinstance(run.model, torch.nn.Module) else torch.nn.Module()
            with Exchange(model, moves=Noise(seed)).observing():
                return _numbers_of(run.model(*args, **kwargs))

    # -- what is said --------------------------------------------------------------------------------------------------

    def _variant(
        self,
        name: str,
        alone: Sequence[torch.Tensor],
        found: Sequence[torch.Tensor],
        first: Mapping[str, Any] = _NOTHING,
    ) -> Variant:
        error = _relative_error(alone, found)
        if error == 0 and all(torch.equal(x, y) for x, y in zip(alone, found, strict=True)):
            return Variant(name, INVARIANT, **first)
        return Variant(name, SHAPE if error <= self._bound else CACHE, error, self._bound, **first)

    def _first_other(self, runs: list[Results]) -> dict[str, Any]:
        """Return the first call whose bits are others for the sample than alone, its line, and both shapes."""
        for call, alone in self._calls.tensors.items():
            others = [calls.tensors.get(call) for _, calls in self._alone_others]
            there = [run.tensors.get(call) for run in runs]
            if any(one is None for one in (*others, *there)):
                continue
            mine, own = own_elements(alone, _there(others), (), self._bound), self._own(_there(there))
            if mine is None or own is None or own.values.shape != mine.values.shape:
                continue
            if not torch.equal(own.values, mine.values):
                return self._at(call, self._calls, there[0])
        return {}

    def _first_shared(self, runs: list[Results]) -> dict[str, Any]:
        """Return the first call with elements that depend on the sample and on others."""
        for call in runs[0].tensors:
            there = [run.tensors.get(call) for run in runs]
            own = None if any(one is None for one in there) else self._own(_there(there))
            if own is not None and own.shared:
                return self._at(call, runs[0], there[0])
        return {}

    def _own(self, together: Sequence[torch.Tensor]) -> Own | None:
        """Return the sample's elements of the results of one batch: as it is, with other samples, with other mates."""
        base, rest = together[0], together[1:]
        return own_elements(base, rest[: len(_OTHERS)], rest[len(_OTHERS) :], self._bound)

    def _at(self, call: CallId, of: Results, there: torch.Tensor | None) -> dict[str, Any]:
        shapes = [sizes(None if tensor is None else tensor.shape) for tensor in (self._calls.tensors.get(call), there)]
        return {"call": call, "place": of.places[call], "shapes": tuple(shapes)}


def _there(tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _with(inputs: Mapping[str, Any], model: Any) -> Any:
    return model(**inputs)


def _in_chunks(decoding: Decoding, inputs: Mapping[str, Any], lengths: Sequence[int], model: Any) -> Any:
    return decoding.in_chunks(model, inputs, lengths)


def _relative_error(reference: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float:
    """Return the relative error (L2) of all of them together; NaN where shapes differ, or there is nothing."""
    if not reference or [x.shape for x in reference] != [y.shape for y in found]:
        return math.nan
    return error_of([y.double() for y in found], [x.double() for x in reference])


def _numbers_of(output: Any) -> list[torch.Tensor]:
    """Return the floating-point tensors of an output, zero where they are not finite, as rows of masks alone are."""
    return [x.nan_to_num(0.0, 0.0, 0.0) for x in tensors_of(output) if is_floating(x)]
