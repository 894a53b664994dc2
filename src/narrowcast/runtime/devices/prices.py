"""Prices for placement from measured times: code that runs op by op, and code that a compiler fuses.

Op by op, a call costs its time and a cast its own. Fused, what lies between calls of a library (products, convolutions,
attention) becomes loops: their values cost the bytes that enter and leave them, and a cast inside them costs the
conversion of its elements, not their way through memory. A cast before a library's call that reads what another library
call, or the caller, made is a loop of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from narrowcast.core.ops import COPY, VIEW, op_kind
from narrowcast.formats import Format, fp32
from narrowcast.programs.placement.prices import Reads, ValuePrice
from narrowcast.programs.program import Step, Value
from narrowcast.reports.results.profile import Profile, Sample
from narrowcast.runtime.devices.signature import (
    TINY_WITH_BACKWARD,
    Signature,
    Work,
    cast_signature,
    known_shape,
    signature_of,
)

# -- the cost model: measured where the very call was measured, interpolated from its neighbours else ------------------
#
# Interpolation: within one family, format and direction  t = a + b flops + c bytes  with a, b, c >= 0 (non-negative
# least squares on relative errors; a roofline's terms), times what the nearest measured calls are off by. How sure it
# is: the factor by which those neighbours disagree, larger the farther they are.

NEIGHBOURS = 3
_ASSUMED_NS_A_BYTE = 0.2
"""Where nothing was measured."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Nanoseconds, the factor that they may be off by (1.2: 20 %), and where they come from.

    source: `measured`, `interpolated`, or `assumed` (nothing like it was measured on the device).
    """

    ns: float
    factor: float
    source: str


class CostModel:
    """Times of calls on one device. New samples are seen at once."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._groups: dict[tuple[str, str, bool], _FittedGroup] = {}
        self._counted = -1

    def estimate(self, signature: Signature) -> Estimate:
        """Return the time of one call."""
        sample = self.profile.samples.get(signature.text)
        if sample is not None:
            return Estimate(sample.ns, 1.0 + sample.spread, "measured")
        return self._interpolate(signature.family, signature.format.name, signature.backward, signature.work)

    def _interpolate(self, family: str, format: str, backward: bool, work: Work) -> Estimate:
        group = self._group(family, format, backward)
        if group is not None:
            return group.estimate(work.flops, work.moved_bytes)
        if backward:  # twice the forward's work, and the forward
            alone = self._interpolate(family, format, False, work)
            return replace(alone, ns=alone.ns * 3, factor=alone.factor * 1.5)
        copies = self._group(COPY, fp32.name, False)  # of the unknown the way through memory is known
        if copies is not None:
            return replace(copies.estimate(work.elements, work.moved_bytes), factor=5.0, source="assumed")
        return Estimate(1000 + work.moved_bytes * _ASSUMED_NS_A_BYTE, 5.0, "assumed")

    def _group(self, family: str, format: str, backward: bool) -> _FittedGroup | None:
        if self._counted != len(self.profile.samples):
            samples_by_key: dict[tuple[str, str, bool], list[Sample]] = {}
            for s in list(self.profile.samples.values()):
                samples_by_key.setdefault((s.family, s.format, s.backward), []).append(s)
            self._groups = {key: _FittedGroup(samples) for key, samples in samples_by_key.items()}
            self._counted = len(self.profile.samples)
        return self._groups.get((family, format, backward))


class _FittedGroup:
    """The samples of one family, format and direction."""

    def __init__(self, samples: list[Sample]) -> None:
        from scipy.optimize import nnls  # half a second, so only where it is used

        rows = np.array([[1.0, s.flops, s.moved_bytes] for s in samples])
        times = np.array([s.ns for s in samples])
        scale = np.maximum(rows.max(axis=0), 1e-12)
        weights = 1.0 / times
        self.terms = nnls(rows / scale * weights[:, None], times * weights)[0] / scale
        self.where = np.array([_position(s.flops, s.moved_bytes) for s in samples])
        fitted = np.maximum(rows @ self.terms, 1.0)
        self.off = np.log(times / fitted)
        self.estimate = lru_cache(maxsize=4096)(self._compute)

    def _compute(self, flops: float, moved: float) -> Estimate:
        distance = np.abs(self.where - np.array(_position(flops, moved))).sum(axis=1)
        nearest = np.argsort(distance, kind="stable")[:NEIGHBOURS]
        weights = 1.0 / (distance[nearest] + 0.05)
        weights /= weights.sum()
        off = float(weights @ self.off[nearest])
        apart = float(weights @ np.abs(self.off[nearest] - off))
        fitted = max(float(np.array([1.0, flops, moved]) @ self.terms), 1.0)
        factor = math.exp(min(apart + 0.1 * float(distance[nearest].min()), 3.0)) * 1.1
        return Estimate(fitted * math.exp(off), factor, "interpolated")


def _position(flops: float, moved: float) -> tuple[float, float]:
    """Return the coordinates of a call: one unit is a factor of e in work, or in bytes."""
    return math.log(flops + 1), math.log(moved + 1)


# -- prices ------------------------------------------------------------------------------------------------------------

CONVERSION_NS, _CONVERSION_PART = 0.02, 0.1
"""What converting one element inside a loop costs: so much on a CPU, and at most this part of copying it."""


@dataclass(eq=False)
class TimePrices:
    """Nanoseconds under a cost model.

    fused:    a compiler fuses. streamed: ids of values that come from memory each time, and not from a cache.
    at_rest:  ids of weights whose casts are made once and kept; with `trains` also where gradients flow through them.
    sizes:    what symbolic sizes are taken for.
    """

    unit = "ns"
    model: CostModel
    fused: bool
    streamed: Set[int] = frozenset()
    at_rest: Set[int] = frozenset()
    trains: bool = False
    sizes: Mapping[str, int] = field(default_factory=dict)
    seen: dict[tuple[int, str], Estimate] = field(default_factory=dict)

    # -- calls

    def signature(self, step: Step, operands: Sequence[Value], format: Format) -> Signature:
        """Return the signature under which a call is measured and looked up."""
        streamed = [n for n, o in enumerate(step.operands) if o.value in self.streamed]
        return signature_of(step, operands, format, streamed, self.sizes)

    def call(self, step: Step, operands: Sequence[Value], format: Format) -> float:
        """Return the call's own time; for a fused one what is left of it without its way through memory."""
        if not costs_time(step):
            return 0.0
        if not self.is_fused(step):
            return self.estimate(step, operands, format).ns
        alone = fp32 if format.bits < 32 else format
        signature = self.signature(step, operands, alone)
        traffic = self._copy_ns(signature.work.moved_bytes) * (2 if step.value.gradient else 1)
        return max(self.estimate(step, operands, alone).ns - self._overhead(signature.backward) - traffic, 0.0)

    def estimate(self, step: Step, operands: Sequence[Value], format: Format) -> Estimate:
        """Return the model's estimate of the call alone, its way through memory included."""
        key = (step.id, format.name)
        if key not in self.seen:
            self.seen[key] = self.model.estimate(self.signature(step, operands, format))
        return self.seen[key]

    def sure(self) -> float:
        """Return the part of all estimated time that was measured."""
        whole = sum(e.ns for e in self.seen.values())
        return sum(e.ns for e in self.seen.values() if e.source == "measured") / whole if whole else 0.0

    def is_fused(self, step: Step) -> bool:
        """Return whether a compiler makes it part of a loop."""
        return self.fused and (step.is_cast or op_kind(step.op).is_fused or step.op == "getitem")

    # -- values

    def stores(self, reader: Step | None) -> bool:
        """Return whether this reader reads from memory, as library calls and the caller do."""
        return reader is None or not self.is_fused(reader)

    def value(self, value: Value, maker: Step | None, readers: Reads, formats: Sequence[Format]) -> ValuePrice:
        """See the module's docstring."""
        pairs = [(a, b) for a in formats for b in formats if a is not b]
        follows = value.gradient and any(r is None or r.grad_mode for r in readers)
        if maker is None and value.id in self.at_rest and (self.trains or not follows):
            return ValuePrice(dict.fromkeys(pairs, 0.0))
        ways = 2 if follows else 1  # there, and back with the gradient
        if not self.fused:
            return ValuePrice({(a, b): ways * self._cast_ns(value, a, b) for a, b in pairs})
        is_made_in_loop = maker is not None and self.is_fused(maker)
        is_read_in_loop = any(not self.stores(reader) for reader in readers)
        half_way = {f: ways * self._copy_ns(self._elements(value) * f.bits / 8) / 2 for f in formats}
        if is_made_in_loop or is_read_in_loop:  # the conversion alone
            elements = self._elements(value)
            each = min(elements * CONVERSION_NS, self._copy_ns(elements * 8) * _CONVERSION_PART)
            casts = dict.fromkeys(pairs, ways * each)
        else:  # a loop of its own
            casts = {(a, b): ways * self._cast_ns(value, a, b) for a, b in pairs}
        reads = half_way if is_read_in_loop and not is_made_in_loop else {}
        return ValuePrice(casts, reads, half_way if is_made_in_loop else {})

    def _cast_ns(self, value: Value, src: Format, dst: Format) -> float:
        return self.model.estimate(cast_signature(value.shape, src, dst, self.sizes)).ns

    def _elements(self, value: Value) -> int:
        return math.prod(known_shape(value.shape, self.sizes))

    def _copy_ns(self, moved_bytes: float) -> float:
        """Return the time of moving this many bytes through memory, read and written together."""
        elements = max(int(moved_bytes / 8), 1)
        copy = self.model.estimate(cast_signature((elements,), fp32, fp32))
        return max(copy.ns - self._overhead(), 0.0)

    def _overhead(self, backward: bool = False) -> float:
        """Return the time of calling anything; one that is measured with its backward starts autograd's engine, too."""
        return self.model.estimate(TINY_WITH_BACKWARD if backward else cast_signature((16,), fp32, fp32)).ns


def costs_time(step: Step) -> bool:
    """Return whether a step is a call that takes time by itself: no cast, no view, nothing of a region."""
    if step.is_cast or step.blocks or op_kind(step.op).family == VIEW:
        return False
    return "." in step.op and not step.op.startswith(("region.", "cast.", "prim."))
