"""What rounds: the low calls from which a call's inputs come, and lines whose code asks for a low format itself."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from narrowcast.core.ledger.identity import BACKWARD, FORWARD, CallId
from narrowcast.core.policy import Kind, Policy, Site
from narrowcast.formats import Format
from narrowcast.observation.observer.observer import Observer
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.statistics.by_storage import ByStorage
from narrowcast.observation.trial.finiteness import came_in, is_floating
from narrowcast.reports.results.differences import AskedFormat, CallError, Growth
from narrowcast.runtime.sites.python_stack import called_by_layer, find_site
from narrowcast.runtime.torch_bridge import FORMATS, LOW, tensors_in
from narrowcast.runtime.torch_surface.autograd import current_graph_task
from narrowcast.runtime.torch_surface.dispatch import OpOverload, without_modes

_SEVERAL, _OF_FP32 = 3.0, 2.0**-20
"""How many times larger an error is where it grows; and errors of inputs that are rounding in fp32 alone."""
_LOW = frozenset(str(FORMATS[dtype]) for dtype in LOW)


class AsksHigh(Observer):
    """A run in which some lines get fp32 where their code asks for a low format: casts, and factory functions.

    high: these lines.
    """

    def __init__(self, policies: tuple[Policy, ...] = (), high: Collection[AskedFormat] = ()) -> None:
        super().__init__(policies)
        self._high = {asked.at for asked in high}
        self._asked: dict[tuple[str, int], AskedFormat] = {}

    @property
    def asked(self) -> list[AskedFormat]:
        """The lines that ask, in order."""
        return list(self._asked.values())

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asks = kwargs.get("dtype") in LOW and self._is_the_codes_own(args)
        site = self.door.run(str(func), find_site, False) if asks else None
        if site is not None and (site.file, site.line) in self._high:
            return super().__torch_dispatch__(func, types, args, {**kwargs, "dtype": torch.float32})
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if site is not None and site.file:
            self.door.run(str(func), self._note, site, FORMATS[kwargs["dtype"]], args, result)
        return result

    def _is_the_codes_own(self, args: Any) -> bool:
        """Return whether the code asks, no layer, kernel, decided call or backward; and its inputs are not low."""
        inside = self._local.looking or self._local.decided or self._executing.op
        is_made = inside or current_graph_task() != -1 or called_by_layer()
        return not is_made and not any(t.dtype in LOW for t in tensors_in(args))

    def _note(self, site: Site, format: Format, args: Any, result: Any) -> None:
        """Note a line that asks; also whether its result is whole numbers that the format cannot represent."""
        known = self._asked.get((site.file, site.line))
        rounds = not any(map(is_floating, tensors_in(args))) and _holds_whole_beyond(result, 2 / format.epsilon)
        rounds = rounds or (known is not None and known.rounds_whole)
        self._asked[site.file, site.line] = AskedFormat(site.file, site.line, str(format), rounds)


def _holds_whole_beyond(tensor: torch.Tensor, largest: float) -> bool:
    """Return whether all values are whole numbers, and some exceed the largest up to which a format has each."""
    with without_modes():
        return bool(tensor.numel() and (tensor == tensor.round()).all() and tensor.abs().max() > largest)


@dataclass(frozen=True, slots=True)
class LowCall:
    """A call of the forward, its line, and the calls that made its inputs. is_low: it computes in a low format;
    is_decided: because a rule casts its arguments to it.
    """

    is_low: bool
    is_decided: bool
    sources: tuple[CallId, ...]
    at: tuple[str, int]


class LowFlow(AsksHigh):
    """A run under the policy: from which calls the inputs of each call of the forward come."""

    def __init__(self, policies: tuple[Policy, ...]) -> None:
        super().__init__(policies)
        self._calls: dict[CallId, LowCall] = {}
        self._makers: ByStorage[CallId] = ByStorage()

    def after(self, call: SeenCall) -> None:
        """Note the calls that made the inputs; and of the results, the call itself, or the source's if it is a cast."""
        sources = tuple(dict.fromkeys(maker for t in came_in(call) if (maker := self._makers.get(t)) is not None))
        results = [t for t in call.results if is_floating(t)]
        if call.id.direction == FORWARD and not call.is_cast:
            is_low = not _LOW.isdisjoint(call.computes.split(","))
            is_decided = call.rule is not None and call.rule.action.kind in (Kind.LOWER, Kind.TO)
            self._calls[call.id] = LowCall(is_low, is_low and is_decided, sources, (call.site.file, call.site.line))
        for tensor in results:
            for maker in sources[:1] if call.is_cast else (call.id,):
                self._makers.put(tensor, maker)

    def upstream(self, start: CallId) -> dict[CallId, int]:
        """Return the low calls from which one's inputs come, itself included, nearest first; each with how many calls
        before it on the way were lowered by a rule, at most one.
        """
        low: dict[CallId, int] = {}
        waiting, seen = [(start, 0)], {start}
        while waiting:
            identity, passed = waiting.pop(0)
            call = self._calls.get(identity)
            if call is None:
                continue
            if call.is_low:
                low[identity] = passed
            passed += call.is_decided
            if passed <= 1:
                waiting += [(source, passed) for source in call.sources if source not in seen]
                seen.update(call.sources)
        return low

    def low_calls(self) -> list[CallId]:
        """Return all calls that compute in a low format, in order."""
        return [identity for identity, call in self._calls.items() if call.is_low]

    def __getitem__(self, identity: CallId) -> LowCall:
        return self._calls[identity]

    def growth(self, rows: Iterable[CallError], least: float) -> Growth | None:
        """Return the call whose error, above `least`, is the largest multiple of that of its inputs; None, if it is not
        several times that. What comes after the last backward, as the steps of optimizers do, made none of its errors;
        and a result that is only what rounding in fp32 leaves of a sum that cancels has none that means anything.
        """
        rows = list(rows)
        end = max((n for n, row in enumerate(rows, 1) if row.id.direction == BACKWARD), default=len(rows))
        errors = {row.id: row.total for row in rows if math.isfinite(row.total)}  # of gradients, too
        best, most = None, _SEVERAL
        for row in rows[:end]:
            if row.id not in self._calls or errors.get(row.id, 0.0) <= least:
                continue
            before = max((errors.get(source, 0.0) for source in self._calls[row.id].sources), default=0.0)
            times = row.total / max(before, least)
            is_noise = row.round_off_bound >= 1 and before <= _OF_FP32
            if times > most and not is_noise:
                best, most = Growth(row.id, row.file, row.line, before, row.total), times
        return best
