"""Measuring: calls timed on the device, formats interleaved round by round, medians with their quartiles kept.

A call is measured on tensors of the shapes, strides and devices that it is to have, filled with small random numbers.
Weights come from memory and not from a cache: they are measured over copies that together are larger than any cache.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch

from narrowcast.formats import FORMATS as BY_NAME
from narrowcast.reports.results.profile import Device, Profile, Sample
from narrowcast.runtime.devices.device import elapsed_ns, own_saved_tensors, random_state_kept
from narrowcast.runtime.devices.signature import Signature
from narrowcast.runtime.torch_bridge import DTYPES
from narrowcast.runtime.torch_surface.dispatch import tree_flatten, tree_leaves, tree_unflatten, without_modes
from narrowcast.runtime.torch_surface.state import autocast_off

ROUNDS = 7
LEAST_NS = 60_000
"""A round repeats short calls for at least this long."""
ENOUGH_NS = 250_000_000
"""A call is not measured again once all its rounds together took this long."""
UNSURE = 0.3
"""A spread above which a call is measured longer, and again by the next process: something else ran on the machine."""
STREAM_BYTES = 192 * 2**20
LARGEST_BYTES = 2 * 2**30
"""What needs more memory than this is not measured, but interpolated."""

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class MeasuredOperand:
    """A tensor that a call is measured with: sizes, strides, element type, device, and whether it takes a gradient."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    type: str
    device: str
    gradient: bool = False

    @property
    def bytes(self) -> int:
        """Bytes of the memory that the tensor spans, with its strides."""
        span = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True)) if self.shape else 1
        return max(span, 1) * _dtype(self.type).itemsize


@dataclass(frozen=True, slots=True)
class Measurable:
    """A call that can be measured: its signature, the callable, and its arguments, `MeasuredOperand` for tensors."""

    signature: Signature
    op: Callable[..., Any]
    args: Any
    kwargs: Any


def measure(
    profile: Profile,
    calls: Iterable[Sequence[Measurable]],
    seconds: float = 20.0,
    progress: Callable[[], object] = lambda: None,
) -> int:
    """Measure what the profile lacks, and add it; return the number of measured calls.

    calls: groups whose members are measured side by side, in turn. seconds: when they are over the rest is left to
    interpolation. A call that raises, or that needs too much memory, is left out.
    """
    start = time.perf_counter()
    count = 0
    for group in calls:
        missing = [m for m in group if _is_missing(profile, m.signature.text)]
        if missing and time.perf_counter() - start < seconds:
            count += _measure_group(profile, missing)
        progress()
    return count


def _is_missing(profile: Profile, text: str) -> bool:
    """Return whether a call was not measured yet, or only on a machine too busy: then once more per process."""
    sample = profile.samples.get(text)
    if sample is None:
        return True
    key = (profile.device, text)
    if sample.spread < UNSURE or key in _again:
        return False
    _again.add(key)
    return True


_again: set[tuple[Device, str]] = set()


def _measure_group(profile: Profile, group: Sequence[Measurable]) -> int:
    prepared: list[tuple[Measurable, list[Call]]] = []
    # whatever asks may be tracing, on fake tensors
    with (
        without_modes(), random_state_kept(), autocast_off(),
        own_saved_tensors(),
    ):  # fmt: skip
        for call in group:
            try:
                runs = _prepare(call)
                for run in runs[:2]:
                    run()
                prepared.append((call, runs))
            except Exception:  # a call that the device does not know in this format has no time
                continue
        sides = [runs for _, runs in prepared]
        times = _alternate(sides)
        if any(as_sample(call.signature, t).spread > UNSURE for (call, _), t in zip(prepared, times, strict=True)):
            times = [a + b for a, b in zip(times, _alternate(sides), strict=True)]
    for (call, _), measured in zip(prepared, times, strict=True):
        profile.samples[call.signature.text] = as_sample(call.signature, measured)
    return len(prepared)


def as_sample(signature: Signature, times_ns: Sequence[float]) -> Sample:
    """Return the median with quartiles; of the faster half, where rounds are far apart: other load only adds time."""
    ordered = sorted(times_ns)
    lower, upper = ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]
    if upper - lower > 2 * UNSURE * statistics.median(ordered):
        ordered = ordered[: (len(ordered) + 1) // 2]
    work = signature.work
    return Sample(
        signature.family or signature.op, signature.format.name, signature.backward, work.flops, work.moved_bytes,
        work.elements, max(statistics.median(ordered), 1.0), lower, upper, len(ordered),
    )  # fmt: skip


def _alternate(sides: Sequence[Sequence[Call]]) -> list[list[float]]:
    """Return nanoseconds per call of each side, one figure per round; every round runs every side."""
    times: list[list[float]] = [[] for _ in sides]
    spent = [0.0] * len(sides)
    repeats = [1] * len(sides)
    for number in range(ROUNDS):
        for side, runs in enumerate(sides):
            if (number >= 3 and spent[side] > ENOUGH_NS) or (number >= 1 and spent[side] > 4 * ENOUGH_NS):
                continue
            elapsed = _time(runs, repeats[side])
            spent[side] += elapsed
            if number == 0:
                repeats[side] = max(1, min(int(LEAST_NS / max(elapsed, 1)), 200))
                if repeats[side] > 1:
                    elapsed = _time(runs, repeats[side])
            times[side].append(elapsed / repeats[side])
    return times


def _time(runs: Sequence[Call], repeats: int) -> float:
    turns = cycle(runs)
    return elapsed_ns(lambda: next(turns)(), repeats)


def _prepare(call: Measurable) -> list[Call]:
    """Return the call bound to tensors made for it; several where operands are streamed."""
    leaves, spec = tree_flatten((call.args, call.kwargs))
    operands = [leaf for leaf in leaves if isinstance(leaf, MeasuredOperand)]
    if sum(o.bytes for o in operands) > LARGEST_BYTES:
        raise MemoryError
    streamed = sum(o.bytes for n, o in enumerate(operands) if n in call.signature.streamed)
    copies = max(1, min(STREAM_BYTES // streamed, 24)) if streamed > 2**17 else 1
    shared: dict[int, torch.Tensor] = {}
    return [_bind(call, leaves, spec, shared) for _ in range(copies)]


def _bind(call: Measurable, leaves: list[Any], spec: Any, shared: dict[int, torch.Tensor]) -> Call:
    tensors: list[torch.Tensor] = []
    filled = []
    for leaf in leaves:
        if isinstance(leaf, MeasuredOperand):
            number = len(tensors)
            if number in call.signature.streamed or number not in shared:
                shared[number] = make_tensor(leaf)
            tensors.append(shared[number])
            filled.append(shared[number])
        else:
            filled.append(leaf)
    args, kwargs = tree_unflatten(filled, spec)
    op = call.op
    if not call.signature.backward:

        def forward() -> object:
            with torch.no_grad():
                return op(*args, **kwargs)

        return forward
    wanted = [t for t in tensors if t.requires_grad]

    def both() -> object:
        with torch.enable_grad():
            result = op(*args, **kwargs)
        outs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad][:1]
        return torch.autograd.grad(outs, wanted, [torch.ones_like(t) for t in outs], allow_unused=True)

    return both


def make_tensor(operand: MeasuredOperand) -> torch.Tensor:
    """Return a tensor like the operand, filled with small random numbers."""
    dtype = _dtype(operand.type)
    tensor = torch.empty_strided(operand.shape, operand.stride, dtype=dtype, device=operand.device)
    if dtype.is_floating_point:
        whole = torch.as_strided(tensor, (operand.bytes // dtype.itemsize,), (1,))
        whole.copy_(torch.rand(whole.shape, device=operand.device) * 0.1 + 0.05)
        return tensor.requires_grad_(operand.gradient)
    return tensor.zero_()


def _dtype(type: str) -> torch.dtype:
    if type in BY_NAME:
        return DTYPES[BY_NAME[type]]
    others = {"bool": torch.bool, "u8": torch.uint8, "i8": torch.int8, "i16": torch.int16, "i32": torch.int32}
    return others.get(type, torch.int64)


def machine_load() -> float:
    """Return how many processes want to run, averaged over a minute; 0 where that is not known."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
