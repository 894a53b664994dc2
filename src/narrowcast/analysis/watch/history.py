"""The history of values that are not finite: which memory holds them, which calls made and read them, and the outcome.

A value that is not finite in fp64, too, is no fault by itself: `exp(log(0))`, a quotient under `where`, a mask. It is a
fault if it has consequences: it becomes NaN that no later call masks, it exists at the end of the block, or it reaches
a gradient. So a cause waits until its readers have shown which it is. An overflow of a low format is reported at once,
except the one number of a mask; that, and an overflow of fp32 (`exp(100)`), only if a reader's result differs from its
result for the largest number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch

from narrowcast.analysis.watch.culprit import has_poles, unscales
from narrowcast.core.ledger.identity import BACKWARD, CallId
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.statistics.by_storage import ByStorage
from narrowcast.observation.trial.finiteness import (
    Flags,
    ReadFlags,
    fills,
    inputs_of,
    inspected,
    is_finite,
    numbers_not_finite,
    reads,
)
from narrowcast.reports.results.findings import FOR_SCALER, GIVEN, OP, Finding
from narrowcast.runtime.torch_surface.dispatch import StorageWeakRef
from narrowcast.runtime.torch_surface.grad_scaling import UPDATE_SCALE

_CALLS = 4096
"""How many calls of the forward are remembered for their backward."""
Place = tuple[str | int, ...]
"""Where a call is made: module path, op, direction, file, line."""

_EXACT = "an exact limit, masked before it was used"
_MISSING = "NaN in what was given, masked before it was used"
_LEFT_OUT = "a loss that was not finite, which the loop asked for and left out"
_INEXACT = "more than its format holds, with a reader to whom that is the same"


@dataclass(slots=True, eq=False)
class Maker:
    """The origin of values that are not finite: reported (is_told), intentional (`why`), or waiting for consequences.

    number: counts causes as they are made. call: without its tensors; None if intentional from the start. became: where
    an infinity became NaN. is_masked: a reader of it, or of values computed from it, returned finite values; is_beside:
    a reader read finite values of the same memory. is_fault: a fault even without consequences. is_trained: a call that
    has a gradient made or read its values.
    """

    number: int
    why: str = ""
    call: SeenCall | None = None
    finding: Finding | None = None
    is_told: bool = False
    is_masked: bool = False
    is_beside: bool = False
    is_fault: bool = False
    is_trained: bool = False
    became: str = ""

    @property
    def is_open(self) -> bool:
        """Whether its consequences are not yet known."""
        return not (self.is_told or self.why)

    @property
    def is_passed_by(self) -> bool:
        """Whether calls masked it, or read what is beside it."""
        return self.is_masked or self.is_beside

    @property
    def is_exact(self) -> bool:
        """Whether fp64 has it, too."""
        return self.finding is None or self.finding.made_by in (GIVEN, OP)

    @property
    def harmless(self) -> str:
        """Why it has no consequences, once that is known."""
        if self.finding is not None and self.finding.made_by == GIVEN:
            return _MISSING
        return _EXACT if self.is_exact else _INEXACT


@dataclass(slots=True, eq=False)
class Carrier:
    """Memory with values that are not finite. is_read: a call read them, and its results have an entry of their own or
    are finite; is_looked_at: a call read finite elements of the same memory; is_compared: a call compared it, with a
    mask as its result; is_alone: it is one number, such as a loss.
    """

    causes: tuple[Maker, ...]
    has_nan: bool
    is_read: bool = False
    is_looked_at: bool = False
    is_compared: bool = False
    is_alone: bool = False

    def read_beside(self) -> None:
        """Note that a call read finite elements of the same memory."""
        self.is_looked_at = True
        for cause in self.causes:
            cause.is_beside = True

    @property
    def waiting(self) -> list[Maker]:
        """The causes whose consequences are not yet known; none where a scaler discards the gradients."""
        thrown_away = any(cause.why == FOR_SCALER for cause in self.causes)
        return [] if thrown_away else [cause for cause in self.causes if cause.is_open]


class ValueHistory:
    """What made values that are not finite. carriers: by memory. made: the last cause by place. due: causes that have
    consequences, with these. at_step: those that a smaller scale of the loss would fix: intentional if a scaler skips
    the step. compared: those whose values were compared and freed, as `isfinite` does before it masks others; and
    whether that was one number.
    """

    def __init__(self) -> None:
        self.carriers: ByStorage[Carrier] = ByStorage(self._freed)
        self.made: dict[Place, Maker] = {}
        self.skipped: list[Maker] = []  # left to a scaler in this step
        self._seen_by: dict[CallId, tuple[Maker, ...]] = {}
        self._count = 0
        self.due: list[tuple[Maker, str]] = []
        self.at_step: list[Maker] = []
        self.compared: list[tuple[Maker, bool]] = []
        self.is_scaled = False

    def __bool__(self) -> bool:
        return bool(self.carriers)

    # -- as calls end --------------------------------------------------------------------------------------------------

    def cause(
        self, why: str = "", call: SeenCall | None = None, finding: Finding | None = None, is_fault: bool = False
    ) -> Maker:
        """Add a new cause, and return it."""
        self._count += 1
        light = None if call is None else call.without_tensors()
        cause = Maker(self._count, why, light, finding, is_fault=is_fault)
        if cause.call is not None:
            self.made[place_of(cause.call)] = cause
        return cause

    def met(self, call: CallId, causes: Iterable[Maker], is_trained: bool) -> None:
        """Note causes of a forward call's inputs or results; what it keeps for its backward may have them, too.
        is_trained: it has a gradient.
        """
        for cause in causes:
            cause.is_trained |= is_trained
        self._seen_by[call] = tuple(dict.fromkeys((*self.met_by(call), *causes)))
        if len(self._seen_by) > _CALLS:
            del self._seen_by[next(iter(self._seen_by))]

    def met_by(self, call: CallId | None) -> tuple[Maker, ...]:
        """Return the causes of a forward call's inputs and results."""
        return () if call is None else self._seen_by.get(call, ())

    def carries(self, tensors: Iterable[torch.Tensor], causes: Iterable[Maker], has_nan: bool = False) -> None:
        """Note that tensors hold values that are not finite, with these causes, and not yet read."""
        together = tuple(dict.fromkeys(causes))
        for tensor in tensors:
            self.carriers.put(tensor, Carrier(together, has_nan))

    def asked(self, tensor: torch.Tensor, carrier: Carrier) -> None:
        """Note that a tensor of this memory was compared, or its values were read by the program itself."""
        if all(map(is_finite, inspected([tensor]))):
            carrier.read_beside()
        else:
            carrier.is_compared, carrier.is_alone = True, tensor.numel() == 1 and fills(tensor)

    # -- consequences --------------------------------------------------------------------------------------------------

    def came_to(self, causes: Iterable[Maker], what: str = "") -> None:
        """Note that causes have a consequence; those that wait for one are to be reported."""
        self.due += [(cause, what) for cause in causes if cause.is_open]

    def _freed(self, carrier: Carrier) -> None:
        """Report the causes of freed memory that no call read, of NaN or of what fp64 does not have; not of others."""
        if not (carrier.is_read or carrier.is_looked_at):
            causes = [cause for cause in carrier.waiting if carrier.has_nan or not cause.is_exact]
            if carrier.is_compared:
                self.compared += [(cause, carrier.is_alone) for cause in causes]
            else:
                self.came_to(causes)

    def has_new_scale(self, call: SeenCall) -> bool:
        """Return whether a scaler updates its scale. That ends the step for causes which wait for it: of several
        optimizers one may step and another not.
        """
        self.is_scaled |= unscales(call)
        is_new = call.facts.id == UPDATE_SCALE
        if is_new:
            self.is_scaled = False
            self.step_ends(is_skipped=False)
        return is_new

    def step_ends(self, is_skipped: bool, final: bool = False) -> int:
        """Report what waited for the end of the step, or ignore it if a scaler skips that; return how many."""
        if self.is_scaled and not (is_skipped or final):
            return 0
        waiting, self.at_step = [cause for cause in self.at_step if cause.is_open], []
        if not is_skipped:
            self.came_to(cause for cause in waiting if cause.is_fault)
            return 0
        for cause in waiting:
            cause.why = FOR_SCALER
        self.skipped = waiting or self.skipped
        return len(waiting)

    def steps_nevertheless(self) -> None:
        """Report what was left to a scaler, whose step an optimizer makes by itself."""
        for cause in self.skipped:
            cause.why = ""
            cause.became = "an optimizer steps with it, and does not ask the scaler: scaler.step(optimizer)"
        self.came_to(self.skipped)
        self.skipped = []

    def ends(self) -> None:
        """Report at the end of the block the causes of what exists then, and was masked by no reader."""
        self.carriers.sweep()
        for carrier in self.carriers.living():
            if carrier.has_nan or not carrier.is_looked_at:
                left = [cause for cause in carrier.waiting if not (carrier.is_read and cause.is_passed_by)]
                self.came_to(left, "its output exists at the end, and nothing masked it")
        self.sweep()

    def sweep(self, goes_on: bool = False) -> list[str]:
        """Forget what was freed; report the causes of values that were compared, where nothing has masked them. Return
        why others are intentional. goes_on: an optimizer steps, which without their gradients is one of other losses.
        """
        self.carriers.sweep()
        compared, self.compared = self.compared, []
        for cause, is_alone in compared:
            if goes_on and self.is_scaled and cause in self.at_step:  # another optimizer's: its step may be skipped
                self.compared.append((cause, is_alone))
                continue
            if cause.is_masked if is_alone else cause.is_passed_by:
                continue
            if goes_on and is_alone and cause.is_trained and cause.is_exact and cause.is_open:
                cause.why = _LEFT_OUT
            self.came_to([cause], "it was compared, and nothing masked it")
        return [cause.why for cause, _ in compared if cause.why == _LEFT_OUT]


def place_of(call: SeenCall) -> Place:
    """Return where a call is made. A recomputation is where its forward was."""
    direction = "forward" if call.id.direction == "recomputation" else call.id.direction
    return (call.id.module_path, call.id.op, direction, call.site.file, call.site.line)


class Verdict(Enum):
    """Why results are not finite: SPREAD: the inputs were not; MEANT: intentional; SKIPPED: left to a scaler."""

    SPREAD, MEANT, SKIPPED, FINDING = range(4)


@dataclass(frozen=True, slots=True)
class PutOff:
    """A call without its tensors, with the flags of its inputs and of its results, and the memory of its results.
    numbers: why an infinity is intentional.
    """

    call: SeenCall
    came: list[int]
    gave: list[int]
    lies: list[StorageWeakRef]
    numbers: str

    @property
    def may_overflow(self) -> bool:
        """Whether its format may overflow: the range of fp16 is smaller than that of bf16 and fp32."""
        return "fp16" in self.call.computes

    @property
    def may_be_exact(self) -> bool:
        """Whether it may be infinite in every format: a logarithm, a quotient, what fp16 does not compute. A cast that
        overflows makes masks.
        """
        return self.call.is_cast or not self.may_overflow or has_poles(self.call)


@dataclass(slots=True, eq=False)
class Later:
    """What is judged once the flags are read. losses: those of tensors of which gradients were taken; asked: of tensors
    that were compared, or whose values the program itself has read; alone: of results that are one number.
    """

    calls: list[PutOff] = field(default_factory=list)
    losses: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    alone: set[int] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.calls)

    def put_off(self, call: SeenCall, read: list[int], results: Sequence[torch.Tensor], flags: Flags) -> None:
        """Add a call that has run, with the flags of its arguments, and its results, of which nothing is kept."""
        if call.facts.writes:
            pairs = zip(inputs_of(call), read, strict=True)
            read = [flag for (name, _), flag in pairs if reads(call, name)]
        gave, lies = [*map(flags.number, results)], [StorageWeakRef(t.untyped_storage()) for t in results]
        self.calls.append(PutOff(call.without_tensors(), read, gave, lies, numbers_not_finite(call)))
        self.alone.update(n for n, result in zip(gave, results, strict=True) if result.numel() == 1)


def judged(
    later: Later, read: ReadFlags, is_skipped: bool, is_used: Callable[[], bool]
) -> Iterator[tuple[PutOff, Verdict, str]]:
    """Yield the calls with results that are not finite, the verdict, and why. is_skipped: a scaler skips the step;
    is_used: asks whether an optimizer steps nevertheless.
    """
    calls = later.calls
    masked, compared = masked_by_readers(later, read)
    is_skipped |= any(unscales(p.call) and not all(map(read.is_finite, p.came)) for p in calls) and not is_used()
    is_told = has_gone_back = False
    for put_off in calls:
        has_gone_back |= put_off.call.id.direction == BACKWARD
        bad = [n for n in put_off.gave if not read.is_finite(n)]
        if not bad:
            continue
        is_masked = all(read.memory[n] in masked for n in bad)
        is_thrown_away = is_skipped and put_off.call.id.direction == BACKWARD
        if not all(map(read.is_finite, put_off.came)):
            is_new = read.has_nan(bad) and not read.has_nan(put_off.came) and not is_told
            if not is_new or all(read.memory[n] in masked | compared for n in bad) or (is_skipped and has_gone_back):
                yield put_off, Verdict.SPREAD, ""
                continue
            why = "NaN computed from intentional infinities"
        elif put_off.numbers and not read.has_nan(bad):
            yield put_off, Verdict.MEANT, put_off.numbers
            continue
        elif is_masked and put_off.may_be_exact:
            yield put_off, Verdict.MEANT, "masked by all who read it"
            continue
        elif is_thrown_away and (put_off.call.is_cast or put_off.may_overflow):
            yield put_off, Verdict.SKIPPED, ""
            continue
        else:
            why = "its inputs were finite"
        is_told = True
        yield put_off, Verdict.FINDING, why


def masked_by_readers(later: Later, read: ReadFlags) -> tuple[set[int], set[int]]:
    """Return the memory of values that are not finite and in the end led to nothing but finite values, and infinities
    that were freed unread; and that of values of which nothing is known but that they were compared, and freed.
    """
    masked: set[int] = set()
    compared = {read.memory[number] for number in later.asked if not read.is_finite(number)}
    beside = {read.memory[number] for number in later.asked if read.is_finite(number)}
    spoiled = {read.memory[number] for number in later.losses if not read.is_finite(number)}
    in_numbers: set[int] = set()  # which led to one number, such as a loss, that was compared
    for put_off in reversed(later.calls):
        beside.update(read.memory[number] for number in put_off.came if read.is_finite(number))
        bad = [number for number in put_off.came if not read.is_finite(number)]
        if not put_off.gave and not put_off.call.is_cast:  # a mask; or its result was not used
            compared.update(read.memory[number] for number in bad)
            continue
        is_through, is_compared = True, False
        for number, storage in zip(put_off.gave, put_off.lies, strict=True):
            memory = read.memory[number]
            is_nothing = memory not in spoiled and storage.expired()
            is_beside = memory in beside - in_numbers
            if is_nothing and not read.is_finite(number) and (is_beside or not read.has_nan([number])):
                masked.add(memory)
            is_through &= read.is_finite(number) or memory in masked
            is_compared |= memory in compared - masked - spoiled and storage.expired()
        # of a result that was compared alone nothing is known; a cast without results is one to integers
        led_to = compared if is_compared else masked if is_through else spoiled
        led_to.update(read.memory[number] for number in bad)
        if is_compared and any(number in later.alone or read.memory[number] in in_numbers for number in put_off.gave):
            in_numbers.update(read.memory[number] for number in bad)
        masked -= spoiled
    return masked, compared - masked - spoiled
