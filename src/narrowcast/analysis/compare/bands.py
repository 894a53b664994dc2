"""Rounding bounds, measured: runs of a reference in which every result is perturbed by one unit in the last place."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from operator import attrgetter
from typing import Any

import torch

from narrowcast.analysis.compare.reference import Compared, Keep, KeptCall, reads_opaque, sample_like
from narrowcast.core.ledger.identity import FORWARD, CallId
from narrowcast.core.ledger.pairing import grouped, pairs_of
from narrowcast.core.ops import named, op_kind
from narrowcast.core.ops.facts import ATTENTION, CONV, GEMM
from narrowcast.formats import Format, parse_format
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.statistics.arguments import draws_numbers
from narrowcast.observation.statistics.by_storage import ByStorage
from narrowcast.observation.trial.finiteness import is_floating
from narrowcast.observation.trial.noise import Noise
from narrowcast.observation.trial.output_errors import error_of, gradient_error, output_errors
from narrowcast.observation.trial.trial import Outcome
from narrowcast.output.words import or_infinity
from narrowcast.runtime.torch_bridge import FORMATS, OpFacts, tensors_in
from narrowcast.runtime.torch_surface.dispatch import op_name, tree_map, version_of

_epsilon = attrgetter("epsilon")


def rounded_to(kept: KeptCall) -> list[torch.dtype]:
    """Return the formats that a call rounds to: its results', and its inputs' if it cannot be run alone."""
    return [*kept.output, *(d for d in kept.dtypes if d in FORMATS and reads_opaque(kept.call.facts))]


def cast_formats(reference: Keep, under: Keep, is_own: bool) -> dict[CallId, Format]:
    """Return of each call that casts arguments, by the policy or in its kernel, the coarsest format it casts to; of a
    product in another program, as a graph whose casts are calls of their own, that of arguments which the reference has
    in a finer one.
    """
    formats: dict[CallId, list[Format]] = {}
    for identity, kept in under.calls.items():
        planned = kept.call.plan.formats if kept.call.plan else ()
        formats[identity] = [*(f for f in planned if f is not None), *map(parse_format, kept.call.inside)]
    pairs = {} if is_own else pairs_of(reference.calls, under.calls).both
    for identity, (expected, kept) in pairs.items():
        if not formats[identity] and op_kind(identity.op).family in (GEMM, CONV, ATTENTION):
            both = zip(expected.dtypes, kept.dtypes, strict=False)
            known = [(FORMATS[a], FORMATS[b]) for a, b in both if a in FORMATS and b in FORMATS]
            formats[identity] += [here for there, here in known if here.epsilon > there.epsilon]
    return {identity: max(cast_to, key=_epsilon) for identity, cast_to in formats.items() if cast_to}


def by_names_of(reference: Mapping[CallId, KeptCall], calls: dict[CallId, KeptCall]) -> dict[CallId, KeptCall]:
    """Return the calls of another program by the names that the reference has for them: graphs and scripts call addmm
    where eager code calls linear, and know no module that was made in a forward. Calls of one kind in a module are the
    same, one after the other, if there are as many, with results of the same sizes; else those on the same lines, one
    after the other. Names of calls that it lacks are as they come.
    """
    names: dict[CallId, CallId] = {}
    theirs, ours = (grouped(side, _kind) for side in (reference, calls))
    for kind, here in ours.items():
        there = theirs.get(kind, [])
        sizes = [[s.numel() for i in ids for s in side[i].samples] for side, ids in ((reference, there), (calls, here))]
        if len(here) == len(there) and set(here) != set(there) and sizes[0] == sizes[1]:
            names |= zip(here, there, strict=True)
        elif there and len(here) != len(there):
            names |= _on_the_same_lines(reference, there, calls, here)
    return {names.get(identity, identity): kept for identity, kept in calls.items()}


def _on_the_same_lines(
    reference: Mapping[CallId, KeptCall], there: list[CallId], calls: Mapping[CallId, KeptCall], here: list[CallId]
) -> dict[CallId, CallId]:
    """Return the names of some calls in the reference, and others for those that it lacks."""
    lines, others = ([side[i].call.site.at for i in ids] for side, ids in ((reference, there), (calls, here)))
    blocks = SequenceMatcher(None, lines, others, autojunk=False).get_matching_blocks()
    names = {here[b + n]: there[a + n] for a, b, size in blocks for n in range(size)}
    rest = [identity for identity in here if identity not in names]
    last = max(identity.number for identity in there)
    return names | {identity: replace(identity, number=last + n) for n, identity in enumerate(rest, 1)}


def _kind(identity: CallId) -> tuple[str, str, str]:
    path = ".".join(name for name in identity.module_path.split(".") if not name.startswith("<"))
    family, op = op_kind(identity.op).family, identity.op
    if identity.direction == FORWARD:  # a backward has other products than that of another op
        op = family if family in (GEMM, CONV, ATTENTION) else op.rpartition(".")[0]
    return path, op, identity.direction


class Moved(Compared):
    """A run in which each result is perturbed by up to one unit in the last place of the format that it has under the
    policy, and arguments that the policy casts likewise: where terms cancel, that changes a result by far more.

    formats: of results. cast_formats: of the arguments of calls that the policy casts. kept: samples of the reference's
    results; `errors` holds the errors of this run's against them. keeps_exact: results computed from whole numbers
    alone (lengths, positions, tables of them) are left, unless the policy gives them a lower format: they are the same
    in each run of the model, and shapes may depend on them. underflows: values near the smallest number of a format are
    perturbed by as much as underflow changes them. shrinks: values are moved towards zero alone, within their limits.
    """

    sees_inside = True

    def __init__(
        self, policies: tuple[Any, ...], formats: dict[CallId, Format], cast_formats: dict[CallId, Format],
        kept: dict[CallId, list[torch.Tensor]], seed: int, keeps_exact: bool, underflows: bool, shrinks: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(policies)
        self._formats, self._cast_formats, self._kept = formats, cast_formats, kept
        self._noise = Noise(seed, shrinks)
        self._exact: ByStorage[int] | None = ByStorage() if keeps_exact else None
        self._underflows = underflows
        self.errors: dict[CallId, float] = {}

    def gives(self, seen: SeenCall, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Return the result, perturbed."""
        format, cast_format = self._formats.get(seen.id), self._cast_formats.get(seen.id)
        if format is None or not facts.computes or draws_numbers(facts, args, kwargs):
            return result
        takes_a_part = op_name(facts.op).removesuffix("_") in named("rounding.takes_a_part")
        if cast_format is None and takes_a_part:
            return result
        if cast_format is None and self._is_exact(format, args, kwargs, result):
            return result
        if cast_format is not None and not facts.writes and not reads_opaque(facts):
            with suppress(RuntimeError):  # of a kernel that needs the memory layout of its arguments
                result = facts.op(*self._moved(args, cast_format), **self._moved(kwargs, cast_format))
        return result if takes_a_part else self._moved(result, format)

    def _is_exact(self, format: Format, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
        """Return whether a result is computed from whole numbers alone; note it with its version: writes may follow."""
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
        """Note the error of the results against the reference's."""
        super().after(call)
        reference = self._kept.get(call.id)
        if reference is None or call.is_cast:
            return
        results = [t for t in call.results if is_floating(t)]
        pairs = [(sample_like(t, r), r.double()) for t, r in zip(results, reference, strict=False)]
        sampled = [(t, r) for t, r in pairs if t is not None]
        self.errors[call.id] = error_of([t for t, _ in sampled], [r for _, r in sampled])


def moved_formats(reference: Keep, under: Keep, low: Format, is_own: bool, is_same: bool) -> dict[CallId, Format]:
    """Return by call of the reference the format by whose unit its results are perturbed.

    It is the coarser one of both: a reference may compute in a low format, too. low: the region's. is_same: the program
    that was compiled is the same one: it may cast results to a low format itself, which is no cast in the reference;
    casts of another do not count.
    """
    pairs = pairs_of(reference.calls, under.calls)
    formats = {
        identity: max(
            (FORMATS[d] for d in [*rounded_to(a), *rounded_to(b), *(b.cast_to if is_same else ())]), key=_epsilon
        )
        for identity, (a, b) in pairs.both.items()
    }
    if not is_own:
        rounded = (FORMATS[d] for kept in pairs.only_b.values() for d in rounded_to(kept))
        low = max(rounded, key=_epsilon, default=low)
    # a call without a partner under the policy is assumed to round there
    return formats | dict.fromkeys(pairs.only_a, low)


@dataclass(slots=True)
class Bands:
    """Rounding bounds: the largest relative errors of calls, of the output, and of gradients by parameter, over runs in
    which every result was perturbed. kernels: by parameter the error of the kernel that made the gradient, which may
    add up in a low format. runs: how many of these counted.
    """

    calls: dict[CallId, float] = field(default_factory=dict)
    output: float = 0.0
    gradients: dict[str, float] = field(default_factory=dict)
    kernels: dict[str, float] = field(default_factory=dict)
    runs: int = 0

    def of_gradient(self, parameter: str) -> float:
        """Return the bound of a parameter's gradient."""
        band = self.gradients.get(parameter, 0.0)
        return band and band + self.kernels.get(parameter, 0.0)

    def add_calls(self, errors: dict[CallId, float]) -> None:
        """Add the errors of calls in one more run; where one is not finite, no error is beyond round-off."""
        for identity, error in errors.items():
            self.calls[identity] = max(self.calls.get(identity, 0.0), or_infinity(error))

    def add(self, expected: Outcome, moved: Outcome) -> None:
        """Add the errors of outputs and gradients of one more run, unless its outputs are not finite where the
        reference's are, or have other shapes (which depend on values).
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
