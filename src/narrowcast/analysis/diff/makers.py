"""Which calls made the tensors of one side, and what they read."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache, cached_property

from narrowcast.analysis.diff.pieces import is_whole
from narrowcast.analysis.diff.sides import Bundle, Side
from narrowcast.core.ledger.identity import BACKWARD, FORWARD
from narrowcast.formats import FORMATS
from narrowcast.reports.results.run_records import CallRecord


@dataclass(frozen=True, slots=True)
class Upstream:
    """The calls that made some tensors. alone: those without a partner, in order; known: the nearest before them with
    one; both empty where the tensors are from outside of the run.
    """

    alone: tuple[Bundle, ...]
    known: tuple[Bundle, ...]


class Makers:
    """Which calls made tensors of one side: on the first of several ranks, since all make the same calls."""

    def __init__(self, side: Side) -> None:
        self._side, self._tensors, self.bundles = side, side.runs[0].tensors, side.bundles
        placed = (
            (one.call, b)
            for b in side.bundles
            for module_call in b.module_calls
            for one in module_call
            if one.rank == 0
        )
        self._of = {id(call): bundle for call, bundle in placed}
        self._before = cache(self._makers_of)  # upstream of many calls are the same ones

    def of(self, number: int) -> Bundle | None:
        """Return the call that made a tensor."""
        call = self._side.maker(0, number)
        return None if call is None else self.bundle(call)

    def bundle(self, call: CallRecord) -> Bundle:
        """Return what a call of the first rank's run is part of."""
        return self._of[id(call)]

    def upstream(self, numbers: Iterable[int], paired: Collection[Bundle]) -> Upstream:
        """Return the calls that made these tensors, back to calls that have a partner."""
        alone: dict[Bundle, None] = {}
        known: dict[Bundle, None] = {}
        waiting = [self.of(number) for number in numbers]
        while waiting:
            bundle = waiting.pop()
            if bundle is None or bundle in alone:
                continue
            if bundle in paired:
                known[bundle] = None
                continue
            alone[bundle] = None
            waiting += self._before(bundle)
        return Upstream(tuple(sorted(alone, key=lambda b: b.position)), tuple(known))

    def _makers_of(self, bundle: Bundle) -> list[Bundle | None]:
        """Return the calls that made what a call read."""
        return [self.of(number) for number in self.read(bundle)]

    def last(self, bundle: Bundle) -> int:
        """Return the number of a call's first result in its first module call, after the last cast of it."""
        number = self._last.get(bundle)
        return bundle.call.outputs[0][1] if number is None else number

    def as_returned(self, bundle: Bundle) -> int:
        """Return the number of a call's first result as a model returned it; of the result itself if none did."""
        numbers = (number for number in self._side.runs[0].returned if self.of(number) == bundle)
        return next(numbers, bundle.call.outputs[0][1])

    @cached_property
    def _last(self) -> dict[Bundle | None, int]:
        casts = [call for call in self._side.runs[0].calls if call.is_cast and call.id.direction == FORWARD]
        return {self.of(call.outputs[0][1]): call.outputs[0][1] for call in casts}

    @staticmethod
    def read(bundle: Bundle, name: str = "") -> list[int]:
        """Return the tensors that a call read in all module calls, or those by one name."""
        calls = [placed.call for module_call in bundle.module_calls for placed in module_call if placed.rank == 0]
        return [number for call in calls for n, number in call.inputs if name in ("", n)]

    @cached_property
    def ends(self) -> list[Bundle]:
        """The calls of a forward whose first results no call of it reads, if only in their last module call (of a model
        that is evaluated after training), and which models returned, if a run knows.
        """
        returned = self.returned
        forward = [b for b in self.bundles if b.id.direction == FORWARD]
        read = {self._call_of(number) for b in forward for number in self.read(b)}
        ends = (b for b in forward if self._last_call(b) not in read and (not returned or b in returned or not b.path))
        return [b for b in ends if b.call.outputs and self._is_floating(b.call.outputs[0][1])]

    def _call_of(self, number: int) -> int:
        call = self._side.maker(0, number)
        return 0 if call is None else id(call)

    @staticmethod
    def _last_call(bundle: Bundle) -> int:
        return id(bundle.module_calls[-1][0].call)

    def is_later(self, bundle: Bundle) -> bool:
        """Return whether a call, in its last module call, comes after every call of a backward, of which there are, and
        computes with no gradient, as what clips these does.
        """
        return self._last_call(bundle) in self._later and bundle not in self.of_gradients

    @cached_property
    def of_gradients(self) -> frozenset[Bundle]:
        """The calls of a forward that compute with what a backward made: norms of gradients, and factors that clip. A
        weight that steps have moved is none.
        """
        found = set[Bundle]()
        for bundle in self.bundles:
            numbers = self.read(bundle) if bundle.id.direction == FORWARD else ()
            made_by = (self.of(number) for number in numbers if not self._side.has_moved(number))
            if any(x is not None and (x.id.direction == BACKWARD or x in found) for x in made_by):
                found.add(bundle)
        return frozenset(found)

    @cached_property
    def _later(self) -> frozenset[int]:
        calls = self._side.runs[0].calls
        backward = [n for n, call in enumerate(calls) if call.id.direction == BACKWARD]
        return frozenset(map(id, calls[backward[-1] + 1 :])) if backward else frozenset()

    @cached_property
    def returned(self) -> list[Bundle]:
        """The calls that made what models returned, in order."""
        bundles = {self.of(number) for number in self._side.runs[0].returned}
        return [b for b in self.bundles if b in bundles and b.call.outputs]

    @cached_property
    def of_inputs(self) -> frozenset[Bundle]:
        """The calls of a backward that may compute the gradient of an input: no call is seen to read their results, no
        parameter has them, and their call of the forward reads tensors from outside of the run.
        """
        read = {self.of(number) for b in self.bundles for number in self.read(b)}
        gradients = [row["gradient"] for row in self._side.runs[0].parameters.values() if "gradient" in row]
        known = read | {self.of(number) for number in gradients}
        outside = {b.id for b in self.bundles if any(self.of(n) is None for n in self._floats_of(b))}
        backward = [b for b in self.bundles if b.id.direction == BACKWARD and b not in known]
        return frozenset(b for b in backward if b.call.forward is None or b.call.forward in outside)

    def _floats_of(self, bundle: Bundle) -> list[int]:
        """Return the floating-point tensors that a call read in its first module call, without weights and buffers."""
        first = bundle.first
        named = [(name, n) for name, n in first.call.inputs if self._is_floating(n)]
        return [number for name, number in named if not self._side.is_given(first, name)]

    def choosers(self, bundle: Bundle) -> list[Bundle]:
        """Return the calls that computed whole numbers or flags which a call reads (indices, conditions, counts) from
        floats that other calls made.
        """
        waiting, seen = self.read(bundle), {bundle: False}
        while waiting:
            number = waiting.pop()
            maker = self.of(number) if is_whole(self._tensors[number].format) else None
            if maker is not None and maker not in seen:
                numbers = self.read(maker)
                seen[maker] = any(self._is_floating(n) and self.of(n) is not None for n in numbers)
                waiting += numbers
        return [maker for maker, chooses in seen.items() if chooses]

    def _is_floating(self, number: int) -> bool:
        return self._tensors[number].format in FORMATS
