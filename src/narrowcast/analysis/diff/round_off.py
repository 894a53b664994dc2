"""How far apart calls of two runs may be by rounding alone: unit roundoffs of the formats that they compute in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from narrowcast.analysis.diff.alignment import Aligned
from narrowcast.analysis.diff.sides import Bundle, Side
from narrowcast.core.ops import named, op_kind
from narrowcast.core.ops.bounds import rounding
from narrowcast.core.ops.facts import CONV, GEMM
from narrowcast.formats import FORMATS, Format, tf32
from narrowcast.reports.results.run import Run

BAND = 4.0
"""A call's results may differ by this many unit roundoffs of both sides' formats: its inputs are rounded to them, sums
are taken in another order, and its results are rounded.
"""
LEAST_BAND = 2.0**-21
"""Sketches are kept in fp32, ranges in nine digits."""


def band_of_formats(formats: Sequence[str]) -> float:
    """Return how far apart results in these formats may be."""
    return max(LEAST_BAND, BAND * sum(FORMATS[name].epsilon / 2 for name in formats if name in FORMATS))


BAND_OF_FP32 = band_of_formats(("fp32", "fp32"))


class RoundOff:
    """The rounding bounds of relative differences between calls of two sides."""

    def __init__(self, a: Side, b: Side) -> None:
        self._sides = (a, b)
        self.of_call = cache(self._of_call)

    def _of_call(self, side: int, bundle: Bundle) -> float:
        """Return the rounding bound of one call's result."""
        return band_of_formats([_coarsest(_formats_of(self._sides[side].runs[0], bundle))])

    def of_inputs(self, pair: Aligned) -> float:
        """Return the rounding bound of inputs of both calls: casts are no pairs."""
        numbers = [(side, n) for side, bundles in zip(self._sides, (pair.a, pair.b), strict=True)
                   for _, n in (*bundles[0].call.inputs, *bundles[0].call.outputs)]  # fmt: skip
        formats = [side.runs[0].tensors[n].format for side, n in numbers]
        known = [name for name in formats if name in FORMATS]
        return band_of_formats([_coarsest(known)] * 2) if known else LEAST_BAND

    def of_pair(self, pair: Aligned) -> float:
        """Return the rounding bound of the results' difference, where nothing cancels."""
        both = list(zip(self._sides, (pair.a, pair.b), strict=True))
        formats = [
            _coarsest([name for x in bundles for name in _formats_of(side.runs[0], x)]) for side, bundles in both
        ]
        smallest = min(_smallest(side, bundles[0]) for side, bundles in both)  # infinity if all 0
        return band_of_formats(formats) + BAND * sum(rounding(FORMATS[name], False)[1] for name in formats) / smallest


def _smallest(side: Side, bundle: Bundle) -> float:
    """Return the smallest rms of inputs and first result: below a format's smallest number, values are lost."""
    first = bundle.first
    unread = op_kind(bundle.id.op).name.removesuffix("_") in named("finite.written_unread")
    numbers = [n for _, n in (*(() if unread else first.call.inputs), *first.call.outputs[:1])]
    return min((rms for n in numbers if (rms := side.piece(first.rank, n).rms)), default=math.inf)


def _formats_of(run: Run, bundle: Bundle) -> list[str]:
    found = [*bundle.call.computes.split(","), *(run.tensors[n].format for _, n in bundle.call.outputs)]
    known = [name for name in found if name in FORMATS] or ["fp32"]
    return [*known, tf32.name] if _allows_tf32(run, bundle) else known


def _allows_tf32(run: Run, bundle: Bundle) -> bool:
    """Return whether an accelerator may compute a call's products of fp32 in tf32."""
    flags = run.environment.get("flags") or {}
    if run.environment.get("device_type") != "cuda":
        return False
    if bundle.family == CONV or op_kind(bundle.id.op).name in named("multiplies.recurrent"):
        return bool(flags.get("backends.cudnn.allow_tf32"))
    lowers = flags.get("get_float32_matmul_precision", "highest") != "highest"
    return bundle.family == GEMM and bool(lowers or flags.get("backends.cuda.matmul.allow_tf32"))


def _coarsest(names: Sequence[str]) -> str:
    coarsest: Format = max((FORMATS[name] for name in names), key=lambda format: format.epsilon)
    return coarsest.name
