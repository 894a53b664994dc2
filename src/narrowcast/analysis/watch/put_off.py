"""Calls that are judged once a step has ended, by flags that are read together: who read what of whom, and no proof."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from narrowcast.analysis.watch.culprit import unscales
from narrowcast.core.ledger.identity import BACKWARD
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.trial.finiteness import ReadFlags
from narrowcast.runtime.torch_surface.dispatch import StorageWeakRef


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
