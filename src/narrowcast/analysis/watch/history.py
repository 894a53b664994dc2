"""The history of what is not finite: which memory holds it, who made it, who read it, and so what came of it.

What is not finite in fp64, too, is no fault by itself: `exp(log(0))`, a quotient under `where`, a mask. It is one if
something came of it: it became NaN that nobody took out again, it is there at the end of the block, a gradient was
taken of it or is it. So a cause waits until its readers have shown which it is. What a low format alone makes is told
at once, but for the one number of a mask; that, and what fp32 alone makes (`exp(100)`), if a reader gives something
else than it would for the largest number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

import torch

from narrowcast.analysis.watch.culprit import unscales
from narrowcast.core.ledger.identity import BACKWARD, CallId
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.statistics.by_storage import ByStorage
from narrowcast.observation.trial.finiteness import ReadFlags
from narrowcast.reports.results.findings import OP, Finding
from narrowcast.runtime.torch_surface.dispatch import StorageWeakRef
from narrowcast.runtime.torch_surface.grad_scaling import UPDATE_SCALE

_CALLS = 4096
"""How many calls of the forward are remembered for their backward."""
Place = tuple[str | int, ...]
"""Where a call is made: module path, op, direction, file, line."""

_EXACT = "an exact limit, masked before it was used"
_INEXACT = "more than its format holds, with a reader to whom that is the same"
FOR_SCALER = "the scale is too high, the scaler skips this step"


@dataclass(slots=True, eq=False)
class Cause:
    """Who made something that is not finite. It is told, or meant (`why`), or waits for what comes of it.

    number: counts causes as they are made. call: without its tensors; None of what is meant from the start. became:
    where an infinity became NaN. is_masked: a reader of it, or of what came of it, gave finite values. is_fault: by
    itself, whatever comes of it.
    """

    number: int
    why: str = ""
    call: SeenCall | None = None
    finding: Finding | None = None
    is_told: bool = False
    is_masked: bool = False
    is_fault: bool = False
    became: str = ""

    @property
    def is_open(self) -> bool:
        """Whether it is yet to be seen what comes of it."""
        return not (self.is_told or self.why)

    @property
    def is_exact(self) -> bool:
        """Whether fp64 gives it, too."""
        return self.finding is None or self.finding.made_by == OP

    @property
    def harmless(self) -> str:
        """Why nothing came of it, once that is seen."""
        return _EXACT if self.is_exact else _INEXACT


@dataclass(slots=True, eq=False)
class Carrier:
    """Memory that holds what is not finite. is_read: somebody read that, and what he gave has its own entry, or is
    finite; is_looked_at: somebody read finite elements beside it.
    """

    causes: tuple[Cause, ...]
    has_nan: bool
    is_read: bool = False
    is_looked_at: bool = False

    @property
    def waiting(self) -> list[Cause]:
        """The causes of which it is yet to be seen what comes; none where a scaler throws all away."""
        thrown_away = any(cause.why == FOR_SCALER for cause in self.causes)
        return [] if thrown_away else [cause for cause in self.causes if cause.is_open]


class ValueHistory:
    """Who made what is not finite: carriers, by the memory it lies in; made, the last cause by place. due: causes that
    came to something, with what that is. at_step: those that a smaller scale of the loss would fix, of which a scaler
    may say that it skips the step.
    """

    def __init__(self) -> None:
        self.carriers: ByStorage[Carrier] = ByStorage(self._freed)
        self.made: dict[Place, Cause] = {}
        self._seen_by: dict[CallId, tuple[Cause, ...]] = {}
        self._count = 0
        self.due: list[tuple[Cause, str]] = []
        self.at_step: list[Cause] = []
        self.is_scaled = False

    def __bool__(self) -> bool:
        return bool(self.carriers)

    # -- as calls end --------------------------------------------------------------------------------------------------

    def cause(
        self, why: str = "", call: SeenCall | None = None, finding: Finding | None = None, is_fault: bool = False
    ) -> Cause:
        """A new cause."""
        self._count += 1
        light = None if call is None else call.without_tensors()
        found = Cause(self._count, why, light, finding, is_fault=is_fault)
        if found.call is not None:
            self.made[place_of(found.call)] = found
        return found

    def met(self, call: CallId, causes: Iterable[Cause]) -> None:
        """A call of the forward read or gave what these made; so may what it keeps for its backward."""
        self._seen_by[call] = tuple(dict.fromkeys((*self.met_by(call), *causes)))
        if len(self._seen_by) > _CALLS:
            del self._seen_by[next(iter(self._seen_by))]

    def met_by(self, call: CallId | None) -> tuple[Cause, ...]:
        """The causes of what a call of the forward read or gave."""
        return () if call is None else self._seen_by.get(call, ())

    def carries(self, tensors: Iterable[torch.Tensor], causes: Iterable[Cause], has_nan: bool = False) -> None:
        """These hold what is not finite, out of these causes; nobody has read it yet."""
        together = tuple(dict.fromkeys(causes))
        for tensor in tensors:
            self.carriers.put(tensor, Carrier(together, has_nan))

    # -- what came of it -----------------------------------------------------------------------------------------------

    def came_to(self, causes: Iterable[Cause], what: str = "") -> None:
        """Something came of these."""
        self.due += [(cause, what) for cause in causes if cause.is_open]

    def _freed(self, carrier: Carrier) -> None:
        """Infinities that nobody read are nothing; NaN is, and what fp64 does not give."""
        if not (carrier.is_read or carrier.is_looked_at):
            self.came_to(cause for cause in carrier.waiting if carrier.has_nan or not cause.is_exact)

    def has_new_scale(self, call: SeenCall) -> bool:
        """Whether a scaler sets its scale again. Of several optimizers one may step and another not: what waits for the
        end of the step waits for that.
        """
        self.is_scaled |= unscales(call)
        is_new = call.facts.id == UPDATE_SCALE
        if is_new:
            self.is_scaled = False
            self.step_ends(is_skipped=False)
        return is_new

    def step_ends(self, is_skipped: bool, final: bool = False) -> int:
        """What waited for the end of the step: told, or meant, if a scaler skips it; how many were."""
        if self.is_scaled and not (is_skipped or final):
            return 0
        waiting, self.at_step = [cause for cause in self.at_step if cause.is_open], []
        if not is_skipped:
            self.came_to(cause for cause in waiting if cause.is_fault)
            return 0
        for cause in waiting:
            cause.why = FOR_SCALER
        return len(waiting)

    def ends(self) -> None:
        """The block has ended: what is there, and was masked by no reader, is what the program made."""
        self.carriers.sweep()
        for carrier in self.carriers.living():
            if carrier.has_nan or not carrier.is_looked_at:
                left = [cause for cause in carrier.waiting if not (carrier.is_read and cause.is_masked)]
                self.came_to(left, "its output exists at the end, and nothing masked it")


def place_of(call: SeenCall) -> Place:
    """Where a call is made. A recomputation is where its forward was."""
    direction = "forward" if call.id.direction == "recomputation" else call.id.direction
    return (call.id.module_path, call.id.op, direction, call.site.file, call.site.line)


class Verdict(Enum):
    """What became of a call that gave what is not finite: SPREAD passes it on, SKIPPED is a scaler's to fix."""

    SPREAD, MEANT, SKIPPED, FINDING = range(4)


@dataclass(frozen=True, slots=True)
class PutOff:
    """A call without its tensors; the flags of what it read, and of what it gave, and the memory that lies in. numbers:
    why an infinity is meant.
    """

    call: SeenCall
    came: list[int]
    gave: list[int]
    lies: list[StorageWeakRef]
    numbers: str

    @property
    def may_overflow(self) -> bool:
        """Whether its format may be who does it: fp16 ends where bf16 and fp32 do not."""
        return "fp16" in self.call.computes


def judged(
    calls: list[PutOff], losses: list[int], read: ReadFlags, is_skipped: bool
) -> Iterator[tuple[PutOff, Verdict, str]]:
    """Those that gave what is not finite, what became of it, and why. losses: of what gradients were taken.
    is_skipped: a scaler skips the step.
    """
    masked = masked_by_readers(calls, losses, read)
    is_skipped |= any(unscales(put_off.call) and not all(map(read.is_finite, put_off.came)) for put_off in calls)
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
            if not is_new or is_masked or (is_skipped and has_gone_back):
                yield put_off, Verdict.SPREAD, ""
                continue
            why = "NaN computed from intentional infinities"
        elif put_off.numbers:
            yield put_off, Verdict.MEANT, put_off.numbers
            continue
        elif is_masked and (put_off.call.is_cast or not put_off.may_overflow):
            yield put_off, Verdict.MEANT, "masked by all who read it"
            continue
        elif is_thrown_away and (put_off.call.is_cast or put_off.may_overflow):
            yield put_off, Verdict.SKIPPED, ""
            continue
        else:
            why = "its inputs were finite"
        is_told = True
        yield put_off, Verdict.FINDING, why


def masked_by_readers(calls: list[PutOff], losses: list[int], read: ReadFlags) -> set[int]:
    """The memory of what is not finite, was read, and of which in the end nothing came but finite values, and
    infinities that were freed unread.
    """
    masked: set[int] = set()
    spoiled = {read.memory[number] for number in losses if not read.is_finite(number)}
    for put_off in reversed(calls):
        is_through = True
        for number, lies in zip(put_off.gave, put_off.lies, strict=True):
            memory = read.memory[number]
            is_nothing = memory not in spoiled and lies.expired() and not read.has_nan([number])
            is_through &= read.is_finite(number) or memory in masked or is_nothing
        # a cast that gave nothing is one to integers; of another it was asked, and not used
        for number in put_off.came if put_off.gave or put_off.call.is_cast else ():
            if not read.is_finite(number):
                (masked if is_through else spoiled).add(read.memory[number])
        masked -= spoiled
    return masked
