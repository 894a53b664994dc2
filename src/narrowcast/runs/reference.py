"""What a comparison keeps of a reference run: samples of what each call gave, and checksums."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from narrowcast.ledger.identity import CallId
from narrowcast.runs.arguments import others_as_text, tensors_by_name
from narrowcast.runs.by_storage import ByStorage
from narrowcast.runs.finiteness import is_finite, is_floating, mask_like, numbers_not_finite
from narrowcast.runs.kernel_bounds import Judged, is_low, judge_kernel
from narrowcast.runs.noise import Noise
from narrowcast.runs.observer import Observer
from narrowcast.runs.rerun import copies_of_written, planned_arguments
from narrowcast.runs.seen_call import SeenCall
from narrowcast.runs.statistics import checksum, sample_of
from narrowcast.torch_bridge import FORMATS, OpFacts, is_random, tensors_in
from narrowcast.torch_surface.dispatch import tree_map, version_of

MADE, PASSED, MEANT = "made", "passed", "meant"
WHOLE, SMALL = 1 << 16, 1 << 12
"""So many elements of each result are compared; the fewer when those kept take half of the bytes allowed."""


@dataclass(slots=True)
class Kept:
    """Of one call: its place, formats, arguments that are no tensors, and samples of its floating results, in fp64.

    judged: its kernel, where that was asked for and something bounds it. nonfinite: where its results are not finite,
    whether it MADE that, PASSED it on, or whether it is MEANT.
    """

    call: SeenCall
    dtypes: list[torch.dtype | None]
    given: tuple[tuple[str, str], ...]
    samples: list[torch.Tensor]
    checksums: tuple[int, ...]
    output: list[torch.dtype] = field(default_factory=list)
    judged: Judged | None = None
    nonfinite: str = ""


class Keep(Observer):
    """Keeps what each call of a run gave. judges: also how good the kernels of those in low formats are."""

    def __init__(self, policies: tuple[Any, ...], limit_bytes: int, checksums: bool, judges: bool = False) -> None:
        super().__init__(policies)
        self.calls: dict[CallId, Kept] = {}
        self._left = self._allowed = limit_bytes
        self._checksums, self._judges = checksums, judges

    def before(self, call: SeenCall) -> None:
        """What it reads, before it writes to that."""
        if self._judges and call.facts.overwrites and not call.is_cast:
            call.notes["read"] = copies_of_written(call.facts, *planned_arguments(call))

    def after(self, call: SeenCall) -> None:
        """What it gave."""
        if call.is_cast:
            return
        results = [t for t in call.results if is_floating(t)]
        if not results:
            return
        samples = [self._sample(t) for t in results]
        sums = tuple(checksum(t) for t in results) if self._checksums else ()
        self.calls[call.id] = kept = kept_of(call, results, samples, sums)
        if self._judges:
            if is_low(call):
                read = call.notes.get("read") or planned_arguments(call)
                with suppress(RuntimeError, NotImplementedError, ValueError):  # of an op that has no such kernel
                    kept.judged = judge_kernel(call, *read)
            if not all(map(is_finite, results)):
                kept.nonfinite = _who_made(call, results, kept.judged)

    def _sample(self, tensor: torch.Tensor) -> torch.Tensor:
        wanted = WHOLE if self._left > self._allowed // 2 else SMALL
        sample = sample_of(tensor.detach(), wanted).clone()
        self._left -= sample.nbytes
        return sample


def _who_made(call: SeenCall, results: list[torch.Tensor], judged: Judged | None) -> str:
    """Of a call whose results are not finite, who made them so."""
    if numbers_not_finite(call) or mask_like(call, results):
        return MEANT
    if judged is not None and judged.overflows:
        return MADE
    came = call.notes["read"] if "read" in call.notes else (call.args, call.kwargs)
    return MADE if all(is_finite(t) for t in tensors_in(came) if is_floating(t)) else PASSED


def kept_of(
    call: SeenCall, results: list[torch.Tensor], samples: list[torch.Tensor] | None = None, sums: tuple[int, ...] = ()
) -> Kept:
    """What is kept of a call: the formats that it reads and gives, and of its results what was taken."""
    light = _light(call)
    read = tensors_by_name(call.facts, *planned_arguments(light))
    given = others_as_text(call.facts, call.args, call.kwargs)
    return Kept(light, [t.dtype for _, t in read], given, samples or [], sums, [t.dtype for t in results])


def sample_like(tensor: torch.Tensor, kept: torch.Tensor) -> torch.Tensor | None:
    """The sample of a tensor at the places of another's, in fp64; None if the two are not of one size."""
    for elements in (WHOLE, SMALL):
        found = sample_of(tensor.detach(), elements)
        if found.shape == kept.shape:
            return found.double()
    return None


def _light(call: SeenCall) -> SeenCall:
    """The call without its tensors, of which dtypes alone are left."""
    return SeenCall(
        call.who.known(), call.facts, *_emptied(call.args, call.kwargs), (call.came, call.computes), call.plan,
        call.rule, call.forward, call.is_cast,
    )  # fmt: skip


def _emptied(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    def of(value: Any) -> Any:
        return torch.empty(0, dtype=value.dtype) if isinstance(value, torch.Tensor) else value

    found: tuple[Any, Any] = tree_map(of, (args, kwargs))
    return found


def reads_opaque(facts: OpFacts) -> bool:
    """Whether an op reads what only a forward in the same formats can have left."""
    return any(slot.name in _OPAQUE for slot in facts.slots)


_OPAQUE = ("workspace", "reserve", "reserveSpace")
"""What a forward kernel left for its backward, in the formats that it ran in: no other format can read it."""


def rounded_to(kept: Kept) -> list[torch.dtype]:
    """The formats that a call rounds to: its results', and those that it reads if it cannot be run alone to see."""
    return [*kept.output, *(d for d in kept.dtypes if d in FORMATS and reads_opaque(kept.call.facts))]


def cast_units(under: Keep) -> dict[CallId, float]:
    """Of each call that the policy casts arguments for: the largest unit of the formats that it casts to."""
    plans = {identity: kept.call.plan for identity, kept in under.calls.items()}
    formats = {identity: [f for f in plan.formats if f is not None] for identity, plan in plans.items() if plan}
    return {identity: max(f.epsilon for f in found) for identity, found in formats.items() if found}


class Moved(Observer):
    """A run in which each result moves by up to one unit in the last place of the format that the policy gives it, and
    what the policy casts for a call by as much: where terms cancel, that moves a result by far more than its own unit.

    units: of results. cast_units: of the arguments of calls that the policy casts. keeps_exact: what comes of whole
    numbers alone (lengths, positions, tables of them) stays, where the policy gives it no lower format: it is the same
    in each run of this model, and shapes may be read from it.
    """

    def __init__(
        self, policies: tuple[Any, ...], units: dict[CallId, float], cast_units: dict[CallId, float], seed: int,
        keeps_exact: bool,
    ) -> None:  # fmt: skip
        super().__init__(policies)
        self._units, self._cast_units, self._noise = units, cast_units, Noise(seed)
        self._exact: ByStorage[int] | None = ByStorage() if keeps_exact else None
        self.samples: dict[CallId, list[torch.Tensor]] = {}
        self.kept: dict[CallId, list[torch.Tensor]] = {}

    def gives(self, seen: SeenCall, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """The result, moved."""
        unit, cast_unit = self._units.get(seen.id, 0.0), self._cast_units.get(seen.id, 0.0)
        if not unit or not facts.computes or is_random(facts.op):
            return result
        if not cast_unit and self._is_exact(unit, args, kwargs, result):
            return result
        if cast_unit and not facts.writes and not reads_opaque(facts):
            with suppress(RuntimeError):  # of a kernel that takes its arguments as they lie in memory
                result = facts.op(*self._moved(args, cast_unit), **self._moved(kwargs, cast_unit))
        return self._moved(result, unit)

    def _is_exact(self, unit: float, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool:
        """Whether a result comes of whole numbers alone; noted then with its version, since it may be written to."""
        if self._exact is None:
            return False
        results = [t for t in tensors_in(result) if is_floating(t)]
        if any(self._exact.get(t) != _version(t) for t in tensors_in(args, kwargs) if t.dtype in FORMATS):
            return False
        if any(unit > FORMATS[t.dtype].epsilon for t in results):
            return False
        for tensor in results:
            self._exact.put(tensor, _version(tensor))
        return True

    def _moved(self, values: Any, unit: float) -> Any:
        """The same values, each floating one moved."""

        def moved(value: Any) -> Any:
            if not (isinstance(value, torch.Tensor) and is_floating(value)):
                return value
            try:
                return self._noise.moved(value, unit)
            except RuntimeError:  # a format of 8 bits
                return value

        return tree_map(moved, values)

    def after(self, call: SeenCall) -> None:
        """How far it is from the reference's."""
        reference = self.kept.get(call.id)
        if reference is None or call.is_cast:
            return
        results = [t for t in call.results if is_floating(t)]
        pairs = [(sample_like(t, r), r) for t, r in zip(results, reference, strict=False)]
        self.samples[call.id] = [found for found, _ in pairs if found is not None]


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else version_of(tensor)


def moved_units(reference: Keep, under: Keep, low: float, is_own: bool) -> dict[CallId, float]:
    """By how much the results of each call of the reference are to move. low: the unit of the region's format."""
    units = {
        identity: max((FORMATS[d].epsilon for d in rounded_to(kept)), default=0.0)
        for identity, kept in under.calls.items()
        if identity in reference.calls
    }
    if not is_own:
        others = [kept for identity, kept in under.calls.items() if identity not in reference.calls]
        low = max((FORMATS[d].epsilon for kept in others for d in rounded_to(kept)), default=0.0)
    # what computes otherwise under the policy rounds there as often as not
    return units | dict.fromkeys(reference.calls.keys() - under.calls.keys(), low)
