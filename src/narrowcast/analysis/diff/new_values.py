"""The calls of a run whose values another run has nowhere, and that lead to what the run comes to."""

from __future__ import annotations

import math
from collections.abc import Iterator

from narrowcast.analysis.diff.known_values import IN_FP32, KnownValues, Near, numbers_of
from narrowcast.core.ledger.identity import BACKWARD, FORWARD
from narrowcast.reports.results.run_records import CallRecord


class NewValues:
    """The calls of a run that give new values, by their numbers in order, and lead to what it comes to by such alone: a
    value that is new on the way to one which the other run has is merely computed otherwise.
    """

    def __init__(self, own: KnownValues, other: KnownValues) -> None:
        self._own, self._other, self._calls = own, other, own.calls
        self._read = own.read
        self._new = self._new_calls(other, max(own.near, other.near))
        self._region = self._leading()
        is_forward = not (own.has_backward or other.has_backward)
        acquitted = self._acquitted() if is_forward and max(own.near, other.near) == IN_FP32 else set[int]()
        if acquitted.issuperset(self._region):
            acquitted = set()
        self._new -= acquitted
        self._region = [n for n in self._region if n in self._new]
        self._first = [n for n in self._region if self._new.isdisjoint(self._read[n])]

    @property
    def has_calls(self) -> bool:
        """Whether there are any."""
        return bool(self._region)

    def ordered(self) -> Iterator[int]:
        """Yield the calls: those that read known values alone come first."""
        if not self._first:
            return
        end = self._end_of_direction(self._first[0])
        for n in self._first:
            if n < end:
                yield from (n, *self._unknown(n)[0])
        yield from (n for n in self._region if n < end)
        yield from (n for n in self._first if n >= end)
        yield from self._region

    def before(self) -> list[int]:
        """Return the calls that made the known values which the first new one reads: what one run lacks lies there."""
        return self._unknown(self._first[0])[1] if self._first else []

    def first(self) -> list[CallRecord]:
        """Return those that read known values alone."""
        return [self._calls[n] for n in self._first]

    def results(self) -> list[int]:
        """Return the numbers of what they give."""
        return [number for n in self._region for _, number in self._calls[n].outputs[:1]]

    def apart_before(self) -> float:
        """Return how far the values that the first of them read are from those of the other run, as far as elements
        show that.
        """
        read = (self._own.apart_from(self._calls[made], self._other) for n in self._first for made in self._read[n])
        return max((apart for apart in read if apart < math.inf), default=0.0)

    def _new_calls(self, other: KnownValues, near: Near) -> set[int]:
        """Return the calls that give new values. What is computed of weights alone, fused or transposed, is none; nor
        does a result say anything that is near to what it is computed of, as that of a small step.
        """
        new, of_weights, own = set[int](), set[int](), self._own
        for n, call in enumerate(self._calls):
            reads_new = not new.isdisjoint(self._read[n])
            if call.id.direction == FORWARD and own.reads_weights_alone(call, of_weights):
                of_weights.add(n)
                is_new = reads_new
            else:
                is_new = own.is_new(call, other, near, reads_new) or (reads_new and own.is_near_to_read(call, near))
            if is_new:
                new.add(n)
        return new

    def _leading(self) -> list[int]:
        """Return the new calls from which new values lead to one that nothing reads. In a forward, what only a backward
        reads besides leads nowhere.
        """
        leads, ends = set[int](), set(self._new)
        for n in range(len(self._calls) - 1, -1, -1):
            if n in ends:
                leads.add(n)
            for made in self._read[n]:
                if self._is_backward(made) or not self._is_backward(n):
                    ends.discard(made)
                    if n in leads and made in self._new:
                        leads.add(made)
        return sorted(leads)

    def _acquitted(self) -> set[int]:
        """Return the new calls from which new values lead to one that the other run has: had one of them another value,
        this had, too (but for gradients, as where a norm undoes a scale). They make no difference where else they are
        read, as a table that all layers read. What is written in place, as an average, may be nearly what it was.
        """
        acquitted = set[int]()
        for n in reversed(range(len(self._calls))):
            is_kept = n not in self._new and not self._calls[n].id.op.rpartition(".")[0].endswith("_")
            if n in acquitted or (is_kept and self._own.is_surely_in(self._calls[n], self._other)):
                acquitted |= self._new.intersection(self._read[n])
        results = {n: one for n in self._new if (one := self._own.result(self._calls[n])) is not None}
        equal = {numbers_of(results[n]) for n in acquitted if n in results}  # made again, by each layer
        return acquitted | {n for n, one in results.items() if numbers_of(one) in equal}

    def _is_backward(self, n: int) -> bool:
        return self._calls[n].id.direction == BACKWARD

    def _end_of_direction(self, n: int) -> int:
        """Return where the forward or backward ends in which a call is."""
        later = range(n, len(self._calls))
        return next((m for m in later if self._is_backward(m) != self._is_backward(n)), len(self._calls))

    def _unknown(self, n: int) -> tuple[list[int], list[int]]:
        """Return the calls that made indices and conditions which a call reads, of which no value is known; and those
        before all of these, which made values that are.
        """
        unknown, known, waiting = dict[int, None](), dict[int, None](), list(self._read[n])
        while waiting:
            made = waiting.pop(0)
            if self._own.has_floats(self._calls[made]):
                known[made] = None
            elif made not in unknown:
                unknown[made] = None
                waiting += self._read[made]
        return [*unknown], [*known]
