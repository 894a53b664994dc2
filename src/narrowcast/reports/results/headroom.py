"""Headroom: from one run in fp32, what each format would lose of each tensor, without a scale and with one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from narrowcast.core.ledger.identity import FORWARD, CallId
from narrowcast.core.ops import NORM, op_kind
from narrowcast.core.ops.facts import named
from narrowcast.core.policy import Kind, Policy, Rule
from narrowcast.core.policy.rules import Action, naming
from narrowcast.errors import RunError
from narrowcast.formats import Format, bf16, e4m3fn, e5m2, fp16, fp32, parse_format
from narrowcast.output.words import counted
from narrowcast.reports.results.result import Result
from narrowcast.reports.results.run_records import CallRecord, Histogram, TensorFacts
from narrowcast.reports.results.verdicts import FITS

FORMATS = (fp16, bf16, e4m3fn, e5m2)
UNSCALED, PER_TENSOR, PER_ROW = "unscaled", "per tensor", "per row"
SCALES = (UNSCALED, PER_TENSOR, PER_ROW)


@dataclass(frozen=True, slots=True)
class TensorHeadroom:
    """What one format would make of one tensor of a call.

    argument: its name, or `result`. overflow: share of elements beyond the largest value; 0 with a scale, which maps
    the largest magnitude (of the tensor, or of each row along the last dimension) to the largest value. underflow:
    share that becomes zero; subnormal: share with fewer digits. headroom_bits: how many times the largest magnitude
    could double.
    """

    id: CallId
    argument: str
    format: str
    scale: str
    overflow: float
    underflow: float
    subnormal: float
    headroom_bits: float

    @property
    def loss(self) -> float:
        """What makes it not fit: overflow first."""
        return self.overflow * 1e6 + self.underflow


@dataclass(slots=True, repr=False)
class Headroom(Result):
    """What `run.headroom()` found. rows: by call, argument, format and scale. places: file and line of each call.

    tolerance: the share of a tensor that may underflow.
    """

    WHAT: ClassVar[str] = "headroom"
    SCHEMA: ClassVar[str] = "narrowcast.headroom/1"

    rows: list[TensorHeadroom] = field(default_factory=list)
    places: dict[CallId, str] = field(default_factory=dict)
    tolerance: float = 0.01
    notes: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        """Which of fp16 and bf16 it fits unscaled: `fits`, `fits bf16`, `fits fp16`, `fits neither`."""
        return FITS[not self.unfit(fp16), not self.unfit(bf16)]

    def unfit(self, format: Format | str, scale: str = UNSCALED) -> list[TensorHeadroom]:
        """Return the tensors that do not fit, worst first: those that overflow, or underflow beyond the tolerance."""
        name = _format(format).name
        if scale not in SCALES:
            advice = f"Give one of {', '.join(SCALES)}."
            raise RunError(f"headroom.unfit(scale={scale!r})", "no such scale", advice=advice)
        rows = [r for r in self.rows if r.format == name and r.scale == scale]
        bad = [r for r in rows if r.overflow > 0 or r.underflow > self.tolerance]
        return sorted(bad, key=lambda row: -row.loss)

    def calls(self, format: Format | str, scale: str = UNSCALED) -> list[CallId]:
        """Return the smallest set of calls that must not compute in the format: for each call a tensor does not fit."""
        return list(dict.fromkeys(row.id for row in self.unfit(format, scale)))

    def policy(self, format: Format | str, name: str = "") -> Policy:
        """Return a policy in which these calls stay in fp32, each rule with its evidence. Not for 8-bit formats."""
        low = _format(format)
        if low.bits < 16:
            advice = "List headroom.unfit(...) with a scale: 8-bit formats need one."
            raise RunError(f"headroom.policy({low.name})", "regions have 16-bit formats", advice=advice)
        worst: dict[tuple[str, str], TensorHeadroom] = {}
        for row in self.unfit(low):
            if row.id.direction == FORWARD:
                worst.setdefault((row.id.op, row.id.module_path), row)
        rules = tuple(
            Rule(op, Action(Kind.FULL), module=naming(path), reason=evidence(row), source="narrowcast headroom")
            for (op, path), row in worst.items()
        )
        return Policy(name or f"fits-{low.name}", (rules,) if rules else (), low=low.name)


def headroom_of(calls: Sequence[CallRecord], tensors: Sequence[TensorFacts], tolerance: float) -> Headroom:
    """Return the headroom of the calls and tensors of a run, for `Run.headroom`."""
    if not 0 <= tolerance < 1:
        raise RunError(f"headroom(tolerance={tolerance})", "it is a share", advice="Give a number from 0 to below 1.")
    headroom = Headroom(tolerance=tolerance)
    known: dict[int, list[tuple[str, str, float, float, float, float]]] = {}
    sampled = 0
    for call in calls:
        if call.is_cast:
            continue
        for argument, number in (*call.inputs, *call.outputs):
            facts = tensors[number]
            if facts.format not in ("fp32", "fp64") or not facts.elements or _is_no_value(call, argument, facts):
                continue
            if number in {n for _, n in call.outputs} and _cancels(call, facts, tensors):
                continue
            sampled += facts.inspected < facts.elements
            if number not in known:
                known[number] = [_figures(facts, format, scale) for format in FORMATS for scale in SCALES]
            headroom.rows += [TensorHeadroom(call.id, argument, *figures) for figures in known[number]]
            headroom.places[call.id] = f"{call.file}:{call.line}"
    if not headroom.rows:
        advice = "Capture it without a region, with its weights in fp32: nc.capture(model.float(), inputs)."
        raise RunError("run.headroom()", f"none of its {counted(len(calls), 'call')} has an fp32 tensor", advice=advice)
    if sampled:
        headroom.notes.append("underflow was read off samples: nc.capture(statistics='whole') inspects every element")
    return headroom


def _is_no_value(call: CallRecord, argument: str, facts: TensorFacts) -> bool:
    """Return whether no format is to hold a tensor: what is about to be overwritten; masks with the lowest number of
    the wide format, which is made of the dtype at hand; and what is in fp32 though the call computes in a low format: a
    normalization keeps what it is scaled by, its statistics, and what it returns besides its result.
    """
    if argument == "out" or (argument == "self" and _fills(call.id.op)) or facts.holds_a_mask:
        return True
    op = call.id.op.replace("_backward.", ".")
    moving = ("input", "grad_out", "grad_output", "result", "result.0")
    return op_kind(op).family == NORM and argument not in moving


def _cancels(call: CallRecord, result: TensorFacts, tensors: Sequence[TensorFacts]) -> bool:
    """Return whether a sum is zero up to the round-off of its terms, as the gradient of a bias before a softmax."""
    if call.id.op.split(".")[1] not in named("bound.sums") or not call.inputs:
        return False
    terms = tensors[call.inputs[0][1]]
    number = terms.elements / result.elements
    return result.largest <= 8 * fp32.epsilon * math.sqrt(number) * terms.largest


def _fills(op: str) -> bool:
    name = op.split(".")[1]
    return name.endswith("_") and name.removesuffix("_") in named("finite.written_unread")


def _figures(facts: TensorFacts, format: Format, scale: str) -> tuple[str, str, float, float, float, float]:
    """Return format, scale, overflow, underflow, subnormal, headroom."""
    largest = facts.largest
    headroom = math.log2(format.max / largest) if largest else math.inf
    smallest = format.min_exponent - format.mantissa_bits
    nonzero = facts.exponents.total / facts.inspected if facts.inspected else 0.0
    if scale == UNSCALED:
        over = facts.exponents.share(lambda e: e > format.max_exponent) * nonzero
        if largest > format.max and not over:
            over = 1 / facts.elements
        under, short = _lost(facts.exponents, smallest, format.min_exponent)
        return format.name, scale, over, under * nonzero, short * nonzero, headroom
    if scale == PER_TENSOR:
        shift = format.max_exponent - (facts.exponents.last if facts.exponents.counts else 0)
        under, short = _lost(facts.exponents, smallest - shift, format.min_exponent - shift)
    else:  # exponents under the row's largest: the larger, the smaller the value
        under = facts.below.share(lambda d: format.max_exponent - d < smallest - 1)
        short = facts.below.share(lambda d: smallest - 1 <= format.max_exponent - d < format.min_exponent)
    return format.name, scale, 0.0, under * nonzero, short * nonzero, 0.0


def _lost(exponents: Histogram, smallest: int, smallest_normal: int) -> tuple[float, float]:
    """Return the shares that become zero (below half of the smallest value), and that keep fewer digits."""
    under = exponents.share(lambda e: e < smallest - 1)
    return under, exponents.share(lambda e: smallest - 1 <= e < smallest_normal)


def evidence(row: TensorHeadroom) -> str:
    """Return what the format would lose of the tensor."""
    if row.overflow:
        return f"{row.overflow:.2g} of {row.argument} overflow {row.format}, by {-row.headroom_bits:.1f} bits"
    return f"{row.underflow:.2g} of {row.argument} underflow in {row.format}"


def _format(wanted: Format | str) -> Format:
    format = parse_format(wanted) if isinstance(wanted, str) else wanted
    if format not in FORMATS:
        names = ", ".join(f.name for f in FORMATS)
        raise RunError(f"headroom in {format.name}", "not one of those inspected", advice=f"Give one of {names}.")
    return format
