"""What a comparison keeps of a reference run: samples and checksums of the results of each call; and its calls, run
again alone in the formats that they have under the policy.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from narrowcast.analysis.compare.kernel_bounds import Judged, is_low, judge_kernel
from narrowcast.analysis.compare.kernel_slacks import Samples
from narrowcast.core.ledger.identity import CallId
from narrowcast.errors import RunError
from narrowcast.frontends.eager.kernels import invoke
from narrowcast.observation.observer.observer import Observer
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.statistics.arguments import draws_numbers, others_as_text, tensors_by_name
from narrowcast.observation.statistics.by_storage import ByStorage
from narrowcast.observation.statistics.statistics import checksum, sample_of
from narrowcast.observation.trial import rerun
from narrowcast.observation.trial.finiteness import (
    came_in,
    intended,
    is_finite,
    is_floating,
    returned,
)
from narrowcast.runtime.torch_bridge import FORMATS, LOW, OpFacts, map_tensors, tensors_in
from narrowcast.runtime.torch_bridge.calls import cast_results

_OPAQUE = ("workspace", "reserve", "reserveSpace")
"""Arguments that a forward kernel saves for its backward, in its own formats: unreadable in others."""
MADE, PASSED, MEANT, LIMIT = "made", "passed", "meant", "limit"
WHOLE, SMALL = 1 << 16, 1 << 12
"""How many elements of each result are compared; SMALL once those kept take half of the bytes allowed."""

REFERENCES = {"fp32": None, "fp64": torch.float64}
BY = ("op", "module")


def check_arguments(verb: str, reference: Any, by: str = "op") -> None:
    """Raise RunError for what is no choice."""
    if isinstance(reference, str) and reference not in REFERENCES:
        advice = f"Give one of {', '.join(REFERENCES)}, or another model."
        raise RunError(f"{verb}(reference={reference!r})", "no such reference", advice=advice)
    if by not in BY:
        raise RunError(f"{verb}(by={by!r})", "not a choice", advice=f"Give one of {', '.join(BY)}.")


@dataclass(slots=True)
class KeptCall:
    """Of one call: its place, formats, arguments that are no tensors, and samples of its floating-point results.

    judged: its kernel, where that was requested and a bound is known. nonfinite: where its results are not finite,
    whether it MADE that, PASSED it on, whether it is intentional (MEANT), or a LIMIT of the op, which fp64 has, too.
    cast_to: the low formats that the code itself casts its results to. read: the shape of the first floating-point
    tensor that it read, and its root mean square, of a sample.
    """

    call: SeenCall
    dtypes: list[torch.dtype | None]
    given: tuple[tuple[str, str], ...]
    samples: list[torch.Tensor]
    checksums: tuple[int, ...]
    output: list[torch.dtype] = field(default_factory=list)
    judged: Judged | None = None
    nonfinite: str = ""
    cast_to: list[torch.dtype] = field(default_factory=list)
    read: tuple[tuple[int, ...], float] | None = None

    @property
    def draws_numbers(self) -> bool:
        """Whether it draws random numbers."""
        return draws_numbers(self.call.facts, self.call.args, self.call.kwargs)


class Compared(Observer):
    """A run that is compared: attention gives zeros for queries that see no key, about which kernels differ.

    blind: how many calls have such queries.
    """

    blind = 0

    def after(self, call: SeenCall) -> None:
        """Set what such queries give to zero."""
        self.blind += rerun.zero_blind_rows(call)


class Keep(Compared):
    """Keeps samples of the results of each call of a run. judges: and judges the kernels of those in low formats."""

    def __init__(self, policies: tuple[Any, ...], limit_bytes: int, checksums: bool, judges: bool = False) -> None:
        super().__init__(policies)
        self.calls: dict[CallId, KeptCall] = {}
        self.unseen: list[CallId] = []
        """Calls that return tensors without memory of their own (jagged, sparse): their values are not compared."""
        self._casts: list[tuple[SeenCall, torch.dtype]] = []
        self._makers: ByStorage[CallId] = ByStorage()
        self._left = self._allowed = limit_bytes
        self._checksums, self._judges = checksums, judges

    def before(self, call: SeenCall) -> None:
        """Keep copies of inputs that the call writes to."""
        if self._judges and call.facts.overwrites and not call.is_cast:
            call.notes["read"] = rerun.copies_of_written(call.facts, *rerun.planned_arguments(call))

    def after(self, call: SeenCall) -> None:
        """Keep samples of the results."""
        super().after(call)
        results = returned(call)
        if not results:
            self.unseen += [call.id] * any(t.is_floating_point() for t in call.results)
            return
        if call.is_cast:
            if _rounds(call, results[0].dtype):
                self._casts.append((call.without_tensors(), results[0].dtype))
            makers = filter(None, map(self._makers.get, came_in(call)))
            for maker in makers if results[0].dtype in LOW else ():
                self.calls[maker].cast_to.append(results[0].dtype)
            return
        samples = [self._sample(t) for t in results]
        sums = tuple(map(checksum, results)) if self._checksums else ()
        self.calls[call.id] = kept = kept_of(call, results, samples, sums)
        if first := [t for t in came_in(call) if is_floating(t)][:1]:
            kept.read = (
                tuple(first[0].shape),
                float(sample_of(first[0].detach(), SMALL).double().square().mean().sqrt()),
            )
        for tensor in results:
            self._makers.put(tensor, call.id)
        if self._judges:
            if is_low(call):
                read = call.notes.get("read") or rerun.planned_arguments(call)
                with suppress(RuntimeError, NotImplementedError, ValueError):  # of an op that has no such kernel
                    kept.judged = judge_kernel(call, *read)
            if not all(map(is_finite, results)):
                kept.nonfinite = _made_by(call, results, kept.judged)

    def errors_of_kernels(self, gradients: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Return by parameter the error of the kernel that made its gradient, where that is within what bounds it."""
        made_by = {name: self._makers.get(gradient) for name, gradient in gradients.items()}
        judged = {name: self.calls[call].judged for name, call in made_by.items() if call is not None}
        return {name: one.error for name, one in judged.items() if one is not None and not one.is_beyond}

    def strange_casts(self) -> list[tuple[SeenCall, torch.dtype]]:
        """Return the casts that round to formats in which no call of the run computes, nor returns a result."""
        known = {dtype for kept in self.calls.values() for dtype in (*kept.dtypes, *kept.output)}
        return [cast for cast in self._casts if cast[1] not in known]

    def _sample(self, tensor: torch.Tensor) -> torch.Tensor:
        wanted = WHOLE if self._left > self._allowed // 2 else SMALL
        sample = sample_of(tensor.detach(), wanted).clone()
        self._left -= sample.nbytes
        return sample


def _rounds(call: SeenCall, dtype: torch.dtype) -> bool:
    """Return whether the format lacks numbers that what is cast may have."""
    to = FORMATS[dtype]
    known = [FORMATS[t.dtype] for t in came_in(call) if t.dtype in FORMATS]
    return not known or any(f.epsilon < to.epsilon or f.exponent_bits > to.exponent_bits for f in known)


def _made_by(call: SeenCall, results: list[torch.Tensor], judged: Judged | None) -> str:
    """Return what made the results of a call not finite."""
    if intended(call, results):
        return MEANT
    if judged is not None and judged.overflows:
        return MADE
    inputs = call.notes.get("read", (call.args, call.kwargs))
    if not all(is_finite(t) for t in tensors_in(inputs) if is_floating(t)):
        return PASSED
    args, kwargs = call.notes.get("read") or rerun.planned_arguments(call)
    exact = rerun.run_wide(call.facts, args, kwargs, torch.float64) if rerun.can_run_again(call) else None
    return MADE if exact is None or rerun.mends(exact, call.results) else LIMIT


def kept_of(
    call: SeenCall, results: list[torch.Tensor], samples: list[torch.Tensor] | None = None, sums: tuple[int, ...] = ()
) -> KeptCall:
    """Return what is kept of a call: the formats of inputs and results, with these samples and checksums."""
    # tensors keep their dtypes and how many dimensions they have
    empty = lambda t: torch.empty((0,) * t.dim(), dtype=t.dtype, device="cpu")  # noqa: E731
    args, kwargs = map_tensors(empty, (call.args, call.kwargs))
    light = replace(call.without_tensors(), args=args, kwargs=kwargs, plan=call.plan)
    read = tensors_by_name(call.facts, *rerun.planned_arguments(light))
    others = others_as_text(call.facts, call.args, call.kwargs)
    return KeptCall(light, [t.dtype for _, t in read], others, samples or [], sums, [t.dtype for t in results])


def sample_like(tensor: torch.Tensor, kept: torch.Tensor) -> torch.Tensor | None:
    """Return the sample of a tensor at the places of another sample, in fp64; None if their sizes differ."""
    for elements in (WHOLE, SMALL):
        sample = sample_of(tensor.detach(), elements)
        if sample.shape == kept.shape:
            return sample.double()
    return None


def reads_opaque(facts: OpFacts) -> bool:
    """Return whether an op reads what only a forward in the same formats can have saved."""
    return any(slot.name in _OPAQUE for slot in facts.slots)


@dataclass(slots=True)
class Alone:
    """A call run alone: samples in fp64 of its results in low formats. is_same: two reference runs agree on it."""

    is_same: bool
    low: Samples


class RunAlone(Compared):
    """Runs the reference again, each call also alone as the policy has it."""

    def __init__(
        self, policies: tuple[Any, ...], reference: dict[CallId, KeptCall], under: dict[CallId, KeptCall]
    ) -> None:
        super().__init__(policies)
        self._reference, self._under = reference, under
        self.found: dict[CallId, Alone] = {}

    def before(self, call: SeenCall) -> None:
        """Run the call alone before it may write to its arguments."""
        kept, wanted = self._reference.get(call.id), self._under.get(call.id)
        if call.is_cast or kept is None or wanted is None:
            return
        is_as_low = wanted.call.id.op == kept.call.id.op or (
            wanted.call.plan is None and len(set(wanted.dtypes)) == 1 and len(wanted.dtypes) == len(kept.dtypes)
        )
        if is_as_low and (wanted.dtypes != kept.dtypes or wanted.output != kept.output):
            samples = map(sample_like, run_low(call, wanted) or [], kept.samples)
            call.notes["alone"] = [sample for sample in samples if sample is not None]

    def after(self, call: SeenCall) -> None:
        """Note whether the results are those of the first run."""
        super().after(call)
        kept = self._reference.get(call.id)
        if call.is_cast or kept is None:
            return
        sums = tuple(map(checksum, returned(call)))
        self.found[call.id] = Alone(sums == kept.checksums, call.notes.get("alone") or [])


def run_low(call: SeenCall, wanted: KeptCall) -> Samples | None:
    """Run a call again in the formats of another run; return its floating-point results, None if it cannot run."""
    if not rerun.can_run_again(call) or reads_opaque(call.facts):
        return None
    dtypes = [dtype if dtype in FORMATS else None for dtype in wanted.dtypes]
    try:
        return _run(call, wanted, *rerun.in_dtypes(call.facts, call.args, call.kwargs, dtypes))
    except (RuntimeError, NotImplementedError, ValueError):  # also random numbers inside vmap
        return None


def _run(call: SeenCall, wanted: KeptCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Samples:
    plan = wanted.call.plan
    args, kwargs = rerun.copies_of_written(call.facts, args, kwargs)
    if plan is None:
        theirs = wanted.call.kwargs  # a dtype that was passed is the one that the policy's run passed
        kwargs = {k: theirs[k] if isinstance(v, torch.dtype) and k in theirs else v for k, v in kwargs.items()}
        result = call.facts.op(*args, **kwargs)
    else:
        result = invoke(call.facts, plan, args, kwargs)
        result = cast_results(result, plan) if plan.results else result
    return [t for t in tensors_in(result) if is_floating(t)]
