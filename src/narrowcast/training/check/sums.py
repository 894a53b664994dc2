"""Inspects sums that are accumulated in a low format: losses, counters, gradients, batch norm statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from narrowcast.core.ledger.identity import BACKWARD
from narrowcast.core.ops import named
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.statistics.arguments import tensors_by_name
from narrowcast.observation.statistics.by_storage import ByStorage, has_storage
from narrowcast.output.words import number_text
from narrowcast.runtime.torch_bridge import FORMATS, LOW, tensors_in
from narrowcast.runtime.torch_surface import dispatch
from narrowcast.training.check.gradients import Found

SUM = "a sum in a low format"
_LOST = 4.0
"""Terms are lost where a sum is this many units off, relatively: more than a few roundings, which low formats have."""
_LARGEST = 4096
"""The most elements of a sum whose value is followed."""


@dataclass(slots=True)
class _LineSum:
    """A sum that is accumulated at one line: how many additions, the step of the first of them, and, where it is
    followed, what it is and what it would be in fp64.
    """

    at: tuple[str, str, int]
    additions: int
    since: int
    followed: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def error(self) -> float:
        """The relative error (L2) of the sum; 0 where it is not followed, or would not be finite in fp64 either."""
        if self.followed is None or not bool(self.followed[1].isfinite().all()):
            return 0.0
        value, exact = self.followed
        off = float((value - exact).norm())
        return off / float(exact.norm()) if off else 0.0


class Sums:
    """Sums that are accumulated in a low format."""

    def __init__(self, was_there: Callable[[torch.Tensor], bool]) -> None:
        self._was_there = was_there
        self._sums: ByStorage[_LineSum] = ByStorage()
        self._casts: ByStorage[bool] = ByStorage()  # of gradients
        self._step = 0

    def end_of_step(self) -> None:
        """Count a step."""
        self._step += 1

    def of_gradients(self, call: SeenCall, is_gradient: Callable[[torch.Tensor], bool]) -> torch.dtype | None:
        """Return the low format of a sum to which a call adds a gradient again, or a part of it; None for others."""
        if dispatch.op_name(call.facts.op) in named("gradients.part"):
            if self._is_gradient(call.args[0], is_gradient) and has_storage(call.result):
                self._casts.put(call.result, True)
            return None
        for total, term, result in _additions(call):
            is_sum = self._is_gradient(term, is_gradient) and not self._is_gradient(total, is_gradient)
            if result.numel() > 1 and is_sum and self._again(call, total, term, result).additions > 1:
                return result.dtype
        return None

    def counts(self, call: SeenCall) -> bool:
        """Return whether a call adds to a number that is kept, such as a buffer."""
        tensors = tensors_in(call.args, call.kwargs)
        return all(t.numel() == 1 for t in tensors) and any(self._was_there(t) or self._sums.get(t) for t in tensors)

    def of_losses(self, call: SeenCall) -> Found | None:
        """Return a finding if a call adds to a low sum that has lost terms, or to a number from step to step."""
        finding = self._of_numbers(call)
        for total, term, result in _additions(call):
            is_number = result.numel() == term.numel() == 1
            has_gradient = total.requires_grad or term.requires_grad
            if not is_number and (has_gradient or call.id.direction == BACKWARD):
                continue
            if term.shape != result.shape or result.numel() > _LARGEST:
                continue
            now = self._follow(call, total, term, result)
            if is_number and now.since < self._step and now.additions > 1:
                return _low_sum(call, result, has_gradient)
            if not now.error <= _LOST * FORMATS[result.dtype].epsilon:
                return _low_sum(call, result, has_gradient, now.error)
        return finding

    def _follow(self, call: SeenCall, total: torch.Tensor, term: torch.Tensor, result: torch.Tensor) -> _LineSum:
        """Return the sum after a call, with its value; another one where something else was written in between."""
        known = self._sums.get(total) or self._sums.get(term)
        now, value = self._again(call, total, term, result, over_steps=True), result.detach().double()
        added = term.detach().double() * call.kwargs.get("alpha", 1)
        is_in_place = dispatch.op_name(call.facts.op).endswith("_")
        before = known.followed if known is not None and now.additions > 1 else None
        if before is not None and (
            before[0].shape != value.shape or not torch.equal((before[0] + added).to(result.dtype), result.detach())
        ):
            now.additions, now.since, before = 1, self._step, None
        if before is not None:
            exact = before[1] + added
        else:
            exact = value if is_in_place else total.detach().double() + added
        now.followed = value, exact
        return now

    def _of_numbers(self, call: SeenCall) -> Found | None:
        """Return a finding if a number is added again to a counter that no longer changes; else it may begin a sum."""
        if dispatch.op_name(call.facts.op) not in named("gradients.accumulate") or not any(
            isinstance(value, int | float) for value in call.args[:2]
        ):
            return None
        for result in call.results:
            total, term = call.args[:2]
            known = self._sums.get(total) if isinstance(total, torch.Tensor) else None
            is_again = known is not None and known.at == call.site.at and known.since < self._step
            self._sums.put(result, known if known is not None and is_again else _LineSum(call.site.at, 1, self._step))
            if is_again and result.dtype in LOW and result.numel() == 1 and bool(result + term == result) and term:
                return _low_sum(call, result, False)
        return None

    def _is_gradient(self, tensor: Any, is_gradient: Callable[[torch.Tensor], bool]) -> bool:
        is_tensor = isinstance(tensor, torch.Tensor) and has_storage(tensor)
        return is_tensor and (is_gradient(tensor) or self._casts.get(tensor) is not None)

    def _again(
        self, call: SeenCall, total: torch.Tensor, term: torch.Tensor, result: torch.Tensor, over_steps: bool = False
    ) -> _LineSum:
        """Return the sum with how many times this line has added to it, this one included."""
        at = call.site.at
        known = self._sums.get(total) or self._sums.get(term)
        if known is None or known.at != at or not (over_steps or known.since == self._step):
            is_old = over_steps and (self._was_there(total) or self._was_there(term))
            known = _LineSum(at, 0, self._step - is_old)
        now = _LineSum(at, known.additions + 1, known.since)
        self._sums.put(result, now)
        return now


def _low_sum(call: SeenCall, result: torch.Tensor, has_gradient: bool, error: float = 0.0) -> Found:
    why = "a term that is less than half a unit of the sum is lost"
    why += f": it is {number_text(error)} off" if error else ", so that in the end the sum no longer changes"
    if not bool(torch.isfinite(result).all()):
        why = f"the sum is not finite; the largest number there is {FORMATS[result.dtype].max:g}"
    term = "loss.float()" if has_gradient else "loss.detach().float()"
    return (
        SUM,
        f"{call.id.op} adds up term by term in {FORMATS[result.dtype]}: {why}",
        f"Add up in fp32: total = total + {term}, from a total that is a number or fp32.",
        call.site,
    )


def _additions(call: SeenCall) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Return, of additions in a low format, the sum so far, the term and the new sum."""
    name = dispatch.op_name(call.facts.op)
    if name.removeprefix("_foreach_") not in named("gradients.accumulate") or len(call.args) < 2:
        return []
    lists = [value if isinstance(value, list | tuple) else [value] for value in call.args[:2]]
    results = lists[0] if name.endswith("_") else call.results
    rows = zip(*lists, results, strict=False)
    return [
        row for row in rows if all(isinstance(t, torch.Tensor) and has_storage(t) for t in row) and row[2].dtype in LOW
    ]


def low_statistics(call: SeenCall) -> Found | None:
    """Return a finding if a call updates statistics in a low format; those of a frozen module are not updated."""
    if "batch_norm" not in call.facts.id:
        return None
    names = [argument.name for argument in dispatch.schema_of(call.facts.op).arguments]
    flag = next((names.index(name) for name in ("training", "train") if name in names), None)
    if flag is None or not (call.args[flag] if flag < len(call.args) else call.kwargs.get(names[flag])):
        return None
    for name, tensor in tensors_by_name(call.facts, call.args, call.kwargs):
        if name in ("running_mean", "running_var") and tensor.dtype in LOW:
            return (
                "batch norm statistics in a low format",
                f"{name} of {call.id.module_path or 'the module'} is {FORMATS[tensor.dtype]}: what each step adds to "
                "it is soon lost in rounding",
                "Keep the module in fp32 (module.float()): a region gives it what it needs.",
                call.site,
            )
    return None
