"""A call of the reference run, run again alone in the formats that it has under the policy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from narrowcast.eager.kernels import invoke
from narrowcast.eager.results import cast_results
from narrowcast.formats import Format, fp64
from narrowcast.ledger.identity import CallId
from narrowcast.runs.finiteness import is_floating
from narrowcast.runs.noise import Noise
from narrowcast.runs.observer import Observer
from narrowcast.runs.output_errors import difference
from narrowcast.runs.reference import Kept, reads_opaque, sample_like
from narrowcast.runs.rerun import can_run_again, copies_of_written, in_dtypes, run_wide
from narrowcast.runs.rounding import round_to
from narrowcast.runs.seen_call import SeenCall
from narrowcast.runs.statistics import checksum
from narrowcast.torch_bridge import FORMATS, tensors_in

SEEDS = (1, 2)
Samples = list[torch.Tensor]


@dataclass(slots=True)
class Alone:
    """What a call gave alone: samples in fp64 of its results in low formats; of the same op in fp64 on the same rounded
    inputs; and with everything moved by one unit in the last place. is_same: as in the first reference run.
    """

    is_same: bool
    low: Samples
    exact: Samples | None
    moved: list[Samples]


class RunAlone(Observer):
    """The reference again, each call also alone as the policy has it."""

    def __init__(self, policies: tuple[Any, ...], reference: dict[CallId, Kept], under: dict[CallId, Kept]) -> None:
        super().__init__(policies)
        self._reference, self._under = reference, under
        self._noises = tuple(Noise(seed) for seed in SEEDS)
        self.found: dict[CallId, Alone] = {}

    def before(self, call: SeenCall) -> None:
        """Run it alone before it may write to its arguments."""
        kept, wanted = self._reference.get(call.id), self._under.get(call.id)
        if call.is_cast or kept is None or wanted is None:
            return
        is_low = wanted.dtypes != kept.dtypes or wanted.output != kept.output
        if is_low and can_run_again(call) and not reads_opaque(call.facts):
            call.notes["alone"] = _run_alone(call, wanted, kept, self._noises)

    def after(self, call: SeenCall) -> None:
        """Whether it gave what it gave the first time."""
        kept = self._reference.get(call.id)
        if call.is_cast or kept is None:
            return
        sums = tuple(checksum(t) for t in call.results if is_floating(t))
        low, exact, moved = call.notes.get("alone") or ([], None, [])
        self.found[call.id] = Alone(sums == kept.checksums, low, exact, moved)


def run_low(call: SeenCall, wanted: Kept) -> Samples | None:
    """The floating results of a call run again as another run had it, in its formats; None where it cannot run so."""
    if not can_run_again(call) or reads_opaque(call.facts):
        return None
    try:
        return _run(call, wanted, *_in_formats(call, wanted))
    except (RuntimeError, NotImplementedError, ValueError):  # also random numbers inside vmap
        return None


def _in_formats(call: SeenCall, wanted: Kept) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return in_dtypes(call.facts, call.args, call.kwargs, _floating(wanted.dtypes))


def _run_alone(
    call: SeenCall, wanted: Kept, kept: Kept, noises: tuple[Noise, ...]
) -> tuple[Samples, Samples | None, list[Samples]] | None:
    try:
        args, kwargs = _in_formats(call, wanted)
        low = _run(call, wanted, args, kwargs)
        dtypes = [t.dtype for t in low]
        samples = _samples(low, kept)
        exact = _wide(call, args, kwargs, torch.float64, None)
        moved = []
        for noise in noises:
            shaken = _Shaken(wanted, dtypes, noise)
            wide = _wide(call, call.args, call.kwargs, _widest(kept.output), shaken)
            if wide is not None:
                moved.append(_samples([shaken.result(t, n) for n, t in enumerate(wide)], kept))
    except (RuntimeError, NotImplementedError, ValueError):  # also random numbers inside vmap
        return None
    return samples, None if exact is None else _samples(exact, kept), moved


def _run(call: SeenCall, wanted: Kept, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Samples:
    plan = wanted.call.plan
    args, kwargs = copies_of_written(call.facts, args, kwargs)
    if plan is None:
        result = call.facts.op(*args, **_dtype_as(wanted, kwargs))
    else:
        result = invoke(call.facts, plan, args, kwargs)
        result = cast_results(result, plan) if plan.results else result
    return [t for t in tensors_in(result) if is_floating(t)]


def _dtype_as(wanted: Kept, kwargs: dict[str, Any]) -> dict[str, Any]:
    """A dtype that was passed is the one that the policy's run passed."""
    theirs = wanted.call.kwargs
    return {k: theirs[k] if isinstance(v, torch.dtype) and k in theirs else v for k, v in kwargs.items()}


def _floating(dtypes: list[torch.dtype | None]) -> list[torch.dtype | None]:
    return [dtype if dtype in FORMATS else None for dtype in dtypes]


def _wide(
    call: SeenCall, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype, change: Any
) -> Samples | None:
    """The floating results of the op in a wide format; None where it has no such kernel."""
    results = run_wide(call.facts, args, kwargs, dtype, change)
    return None if results is None else [t for t in results if is_floating(t)]


def _widest(dtypes: list[torch.dtype]) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _samples(tensors: Samples, kept: Kept) -> Samples:
    found = []
    for tensor, reference in zip(tensors, kept.samples, strict=False):
        sample = sample_like(tensor, reference)
        if sample is not None:
            found.append(sample)
    return found


class _Shaken:
    """Moves each tensor by up to one unit in the last place of the format that the policy gives it."""

    def __init__(self, wanted: Kept, output: list[torch.dtype], noise: Noise) -> None:
        self._noise = noise
        noise.rewind()
        self._inputs = iter([FORMATS[d] for d in wanted.dtypes if d in FORMATS])
        self._output = [FORMATS[d] for d in output]

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """An input, moved."""
        return self._moved(tensor, next(self._inputs, None))

    def result(self, tensor: torch.Tensor, number: int) -> torch.Tensor:
        """A result, moved."""
        return self._moved(tensor, self._output[number] if number < len(self._output) else None)

    def _moved(self, tensor: torch.Tensor, format: Format | None) -> torch.Tensor:
        return tensor if format is None else self._noise.moved(tensor, format.epsilon)


# -- figures -----------------------------------------------------------------------------------------------------------


def relative(difference: Samples, reference: Samples) -> float:
    """||difference|| / ||reference|| over several samples; NaN if a value is not finite on one side alone."""
    noise = sum(float(d.square().sum()) for d in difference)
    signal = sum(float(r[torch.isfinite(r)].square().sum()) for r in reference)
    if noise == 0.0:
        return 0.0
    return math.sqrt(noise / signal) if signal else math.inf


def differences(found: Samples, reference: Samples) -> Samples:
    """found - reference, zero where both are the same infinity or both NaN."""
    return [difference(r, x) for x, r in zip(found, reference, strict=False)]


def units_in_last_place(reference: torch.Tensor, format: Format) -> torch.Tensor:
    """The distance between neighbours of a format at each value."""
    _, exponents = torch.frexp(reference)
    steps = (exponents.to(torch.int64) - 1).clamp(min=format.min_exponent, max=format.max_exponent)
    return torch.ldexp(torch.ones_like(reference), steps - format.mantissa_bits)


def ulps(low: Samples, exact: Samples, dtypes: list[torch.dtype]) -> torch.Tensor:
    """Errors in units in the last place of the results' formats; finite ones, flat."""
    found = [_in_units(x - r, r, FORMATS[dtype]) for x, r, dtype in zip(low, exact, dtypes, strict=False)]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.float64)


def bias(low: Samples, exact: Samples, dtypes: list[torch.dtype]) -> tuple[float, float, int]:
    """The mean of what sets results apart from the exact ones rounded once, to nearest, ties to even: in units in the
    last place, towards +infinity or away from zero, whichever is the larger; its standard error; and of how many.

    Values that are off by more than one and a half units are no matter of rounding, and are left out.
    """
    towards, away = [], []
    for x, r, dtype in zip(low, exact, dtypes, strict=False):
        format = FORMATS[dtype]
        if format is fp64:
            continue
        rounded = round_to(r, format).double()
        e = (x - rounded) / units_in_last_place(r, format)
        near = e.abs() <= _ROUNDING  # and finite
        towards.append(e[near])
        away.append(torch.where(r < 0, -e, e)[near])
    means = [(float(e.mean()), float(e.std()) / math.sqrt(e.numel()), e.numel())
             for found in (towards, away) if found and (e := torch.cat(found)).numel() > 1]  # fmt: skip
    return max(means, key=lambda found: abs(found[0]), default=(0.0, 0.0, 0))


_ROUNDING = 1.5


def _in_units(error: torch.Tensor, at: torch.Tensor, format: Format) -> torch.Tensor:
    units = error / units_in_last_place(at, format)
    return units[torch.isfinite(units)].flatten()
