"""A call of the reference run, run again alone in the formats that it has under the policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from narrowcast.analysis.compare.kernel_inputs import Samples
from narrowcast.analysis.compare.reference import KeptCall, reads_opaque, sample_like
from narrowcast.core.ledger.identity import CallId
from narrowcast.frontends.eager.boundary import cast_results
from narrowcast.frontends.eager.kernels import invoke
from narrowcast.observation.observer.observer import Observer
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.statistics.statistics import checksum
from narrowcast.observation.trial.finiteness import is_floating
from narrowcast.observation.trial.rerun import can_run_again, copies_of_written, in_dtypes
from narrowcast.runtime.torch_bridge import FORMATS, tensors_in


@dataclass(slots=True)
class Alone:
    """What a call gave alone: samples in fp64 of its results in low formats. is_same: as in the first reference run."""

    is_same: bool
    low: Samples


class RunAlone(Observer):
    """The reference again, each call also alone as the policy has it."""

    def __init__(
        self, policies: tuple[Any, ...], reference: dict[CallId, KeptCall], under: dict[CallId, KeptCall]
    ) -> None:
        super().__init__(policies)
        self._reference, self._under = reference, under
        self.found: dict[CallId, Alone] = {}

    def before(self, call: SeenCall) -> None:
        """Run it alone before it may write to its arguments."""
        kept, wanted = self._reference.get(call.id), self._under.get(call.id)
        if call.is_cast or kept is None or wanted is None:
            return
        if wanted.dtypes != kept.dtypes or wanted.output != kept.output:
            samples = map(sample_like, run_low(call, wanted) or [], kept.samples)
            call.notes["alone"] = [sample for sample in samples if sample is not None]

    def after(self, call: SeenCall) -> None:
        """Whether it gave what it gave the first time."""
        kept = self._reference.get(call.id)
        if call.is_cast or kept is None:
            return
        sums = tuple(checksum(t) for t in call.results if is_floating(t))
        self.found[call.id] = Alone(sums == kept.checksums, call.notes.get("alone") or [])


def run_low(call: SeenCall, wanted: KeptCall) -> Samples | None:
    """The floating results of a call run again as another run had it, in its formats; None where it cannot run so."""
    if not can_run_again(call) or reads_opaque(call.facts):
        return None
    dtypes = [dtype if dtype in FORMATS else None for dtype in wanted.dtypes]
    try:
        return _run(call, wanted, *in_dtypes(call.facts, call.args, call.kwargs, dtypes))
    except (RuntimeError, NotImplementedError, ValueError):  # also random numbers inside vmap
        return None


def _run(call: SeenCall, wanted: KeptCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Samples:
    plan = wanted.call.plan
    args, kwargs = copies_of_written(call.facts, args, kwargs)
    if plan is None:
        result = call.facts.op(*args, **_dtype_as(wanted, kwargs))
    else:
        result = invoke(call.facts, plan, args, kwargs)
        result = cast_results(result, plan) if plan.results else result
    return [t for t in tensors_in(result) if is_floating(t)]


def _dtype_as(wanted: KeptCall, kwargs: dict[str, Any]) -> dict[str, Any]:
    """A dtype that was passed is the one that the policy's run passed."""
    theirs = wanted.call.kwargs
    return {k: theirs[k] if isinstance(v, torch.dtype) and k in theirs else v for k, v in kwargs.items()}
