"""The cost model: measured where the very call was measured, interpolated from its neighbours else.

Interpolation: within one family, format and direction  t = a + b flops + c bytes  with a, b, c >= 0 (non-negative least
squares on relative errors; a roofline's terms), times what the nearest measured calls are off by. How sure it is: the
factor by which those neighbours disagree, larger the farther they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from narrowcast.reports.results.profile import Profile, Sample
from narrowcast.runtime.devices.signature import Signature, Work

NEIGHBOURS = 3
_ASSUMED = {"flops": 0.05, "bytes": 0.2}  # ns per operation and byte where nothing was measured


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
        self._groups: dict[tuple[str, str, bool], _Group] = {}
        self._counted = -1

    def estimate(self, signature: Signature) -> Estimate:
        """The time of one call."""
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
        ns = 1000 + work.flops * _ASSUMED["flops"] + work.moved_bytes * _ASSUMED["bytes"]
        return Estimate(ns, 5.0, "assumed")

    def _group(self, family: str, format: str, backward: bool) -> _Group | None:
        if self._counted != len(self.profile.samples):
            found: dict[tuple[str, str, bool], list[Sample]] = {}
            for s in list(self.profile.samples.values()):
                found.setdefault((s.family, s.format, s.backward), []).append(s)
            self._groups = {key: _Group(samples) for key, samples in found.items()}
            self._counted = len(self.profile.samples)
        return self._groups.get((family, format, backward))


class _Group:
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
    """Where a call lies: one unit is a factor of e in work, or in bytes."""
    return math.log(flops + 1), math.log(moved + 1)
