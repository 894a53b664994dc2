"""Prices for placement from measured times: code that runs op by op, and code that a compiler fuses.

Op by op, a call costs its time and a cast its own. Fused, what lies between calls of a library (products, convolutions,
attention) becomes loops: their values cost the bytes that enter and leave them, and a cast inside them costs the
conversion of its elements, not their way through memory. A cast before a library's call that reads what another library
call, or the caller, made is a loop of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from narrowcast.core.ops import VIEW, op_kind
from narrowcast.formats import Format, fp32
from narrowcast.programs.placement.prices import Reads, ValuePrice
from narrowcast.programs.program import Step, Value
from narrowcast.runtime.devices.model import CostModel, Estimate
from narrowcast.runtime.devices.signature import Signature, cast_signature, known_shape, signature_of

CONVERSION_NS = 0.02
"""Least cost of converting one element inside a loop."""


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
        """The signature under which a call is measured and looked up."""
        streamed = [n for n, o in enumerate(step.operands) if o.value in self.streamed]
        return signature_of(step, operands, format, streamed, self.sizes)

    def call(self, step: Step, operands: Sequence[Value], format: Format) -> float:
        """The call's own time; for a fused one what is left of it without its way through memory."""
        if not costs_time(step):
            return 0.0
        if not self.is_fused(step):
            return self.estimate(step, operands, format).ns
        alone = fp32 if format.bits < 32 else format
        work = self.signature(step, operands, alone).work
        traffic = self._copy_ns(work.moved_bytes) * (2 if step.value.gradient else 1)
        return max(self.estimate(step, operands, alone).ns - self._overhead() - traffic, 0.0)

    def estimate(self, step: Step, operands: Sequence[Value], format: Format) -> Estimate:
        """What the model says of the call by itself, its way through memory included."""
        key = (step.id, format.name)
        if key not in self.seen:
            self.seen[key] = self.model.estimate(self.signature(step, operands, format))
        return self.seen[key]

    def sure(self) -> float:
        """The part of all estimated time that was measured."""
        whole = sum(e.ns for e in self.seen.values())
        return sum(e.ns for e in self.seen.values() if e.source == "measured") / whole if whole else 0.0

    def is_fused(self, step: Step) -> bool:
        """Whether a compiler makes it part of a loop."""
        return self.fused and (step.is_cast or op_kind(step.op).is_fused or step.op == "getitem")

    # -- values

    def stores(self, reader: Step | None) -> bool:
        """Library calls and the caller read from memory."""
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
            casts = dict.fromkeys(pairs, ways * (self._elements(value) * CONVERSION_NS))
        else:  # a loop of its own
            casts = {(a, b): ways * self._cast_ns(value, a, b) for a, b in pairs}
        reads = half_way if is_read_in_loop and not is_made_in_loop else {}
        return ValuePrice(casts, reads, half_way if is_made_in_loop else {})

    def _cast_ns(self, value: Value, src: Format, dst: Format) -> float:
        return self.model.estimate(cast_signature(value.shape, src, dst, self.sizes)).ns

    def _elements(self, value: Value) -> int:
        return math.prod(known_shape(value.shape, self.sizes))

    def _copy_ns(self, moved_bytes: float) -> float:
        """The way of this many bytes through memory, read and written together."""
        elements = max(int(moved_bytes / 8), 1)
        found = self.model.estimate(cast_signature((elements,), fp32, fp32))
        return max(found.ns - self._overhead(), 0.0)

    def _overhead(self) -> float:
        """What calling anything costs."""
        return self.model.estimate(cast_signature((16,), fp32, fp32)).ns


def costs_time(step: Step) -> bool:
    """Whether a step is a call that takes time by itself: no cast, no view, nothing of a region."""
    if step.is_cast or step.blocks or op_kind(step.op).family == VIEW:
        return False
    return "." in step.op and not step.op.startswith(("region.", "cast.", "prim."))
