"""Prices for placement from measured times: code that runs op by op, and code that a compiler fuses.

Op by op, a call costs its time and a cast its own. Fused, what lies between calls of a library (products, convolutions,
attention) becomes loops: their values cost the bytes that enter and leave them, and a cast inside them costs the
conversion of its elements, not their way through memory. A cast before a library's call that reads what another library
call, or the caller, made is a loop of its own.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from narrowcast.costs.model import CostModel, Estimate
from narrowcast.costs.signature import Signature, cast_signature, signature_of
from narrowcast.families import VIEW, op_kind
from narrowcast.formats import Format, fp32
from narrowcast.passes.prices import Reads, ValuePrice
from narrowcast.program import Step, Value

CONVERSION_NS = 0.02
"""Least cost of converting one element inside a loop."""


class TimePrices:
    """Nanoseconds under a cost model.

    fused:   a compiler fuses. weights: ids of values that come from memory each time. at_rest: ids of weights whose
    casts are made once and kept.
    """

    unit = "ns"

    def __init__(self, model: CostModel, fused: bool, weights: Set[int] = frozenset(), at_rest: bool = False) -> None:
        self.model = model
        self.fused = fused
        self.weights = weights
        self.at_rest = at_rest
        self.seen: dict[tuple[int, str], Estimate] = {}

    # -- calls

    def signature(self, step: Step, operands: Sequence[Value], format: Format, weights: Sequence[int] = ()) -> Signature:
        """The signature under which a call is measured and looked up."""
        return signature_of(step, operands, format, weights)

    def call(self, step: Step, operands: Sequence[Value], format: Format) -> float:
        """The call's own time; for a fused one what is left of it without its way through memory."""
        if step.is_cast or op_kind(step.op).family == VIEW or step.op.startswith(("region.", "getitem", "attribute")):
            return 0.0
        weights = [n for n, o in enumerate(step.operands) if o.value in self.weights]
        if not self.is_fused(step):
            return self._time(step, operands, format, weights).ns
        found = self._time(step, operands, fp32 if format.bits < 32 else format, weights)
        work = signature_of(step, operands, format).work
        traffic = self._copy_ns(work.moved_bytes) * (2 if step.value.gradient else 1)
        return max(found.ns - self._overhead() - traffic, 0.0)

    def _time(self, step: Step, operands: Sequence[Value], format: Format, weights: Sequence[int]) -> Estimate:
        key = (step.id, format.name)
        if key not in self.seen:
            self.seen[key] = self.model.estimate(self.signature(step, operands, format, weights))
        return self.seen[key]

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
        if maker is None and self.at_rest and value.id in self.weights:
            return ValuePrice(dict.fromkeys(pairs, 0.0))
        back = 2 if value.gradient else 1
        if not self.fused:
            return ValuePrice({(a, b): back * self._cast_ns(value, a, b) for a, b in pairs})
        loops = [r for r in readers if not self.stores(r)]
        in_loop = maker is not None and self.is_fused(maker)
        # the conversion alone, where the value is made or read inside a loop; else a loop of its own
        alone = not in_loop and not loops
        casts = {(a, b): back * (self._cast_ns(value, a, b) if alone else self._convert_ns(value)) for a, b in pairs}
        sizes = {f: value.elements * f.bits / 8 for f in formats}
        reads = {} if in_loop or not loops else {f: back * self._copy_ns(sizes[f]) / 2 for f in formats}
        stores = {f: back * self._copy_ns(sizes[f]) / 2 for f in formats} if in_loop else {}
        return ValuePrice(casts, reads, stores)

    def _cast_ns(self, value: Value, src: Format, dst: Format) -> float:
        return self.model.estimate(cast_signature(value.shape, src, dst)).ns

    def _convert_ns(self, value: Value) -> float:
        return value.elements * CONVERSION_NS

    def _copy_ns(self, moved_bytes: float) -> float:
        """The way of so many bytes through memory, read and written together."""
        elements = max(int(moved_bytes / 8), 1)
        found = self.model.estimate(cast_signature((elements,), fp32, fp32))
        return max(found.ns - self._overhead(), 0.0)

    def _overhead(self) -> float:
        """What calling anything costs."""
        return self.model.estimate(cast_signature((16,), fp32, fp32)).ns
