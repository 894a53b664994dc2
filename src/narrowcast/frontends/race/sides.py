"""A side of a race: a compiled candidate, run on inputs of its own.

A run leaves no trace: what a candidate writes to is a copy, and gradients are computed without reaching anybody's
`.grad`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from narrowcast.runtime.devices.device import elapsed_ns
from narrowcast.runtime.torch_bridge import tensors_in

Compiled = Callable[..., Any]


@dataclass(slots=True)
class CandidateSide:
    """A compiled candidate: its name, and what runs it."""

    name: str
    run: Compiled


class Runner:
    """Runs a side. given: the inputs of the call. written: positions of those that calls write to.

    Each run begins with what was given. Where gradients are taken, inputs are without anybody's hooks.
    """

    def __init__(self, side: CandidateSide, given: Sequence[Any], written: frozenset[int]) -> None:
        self.side = side
        self.trains = torch.is_grad_enabled() and any(isinstance(a, torch.Tensor) and a.requires_grad for a in given)
        self._written = {n: given[n] for n in written}
        self._own = [_own(value, n in written, self.trains) for n, value in enumerate(given)]
        self._homes = {n: _stretch(self._own[n]) for n in written}  # where in memory the copies were made

    def once(self) -> float:
        """Nanoseconds of one call, with its backward if there is one."""
        with torch.no_grad():
            for n, value in self._written.items():
                if isinstance(value, torch.Tensor):
                    self._restore(n, value)
        return time_call(self.side.run, self._own, self.trains)

    def often(self, calls: int) -> float:
        """The median of several calls; after one more, untimed, that leaves the caches as this side does."""
        if calls > 1:
            self.once()
        return statistics.median(self.once() for _ in range(calls))

    def _restore(self, n: int, given: torch.Tensor) -> None:
        """Give a copy its value again; or make another, if a call made it part of autograd's graph, or gave it the
        memory of something else (`x.data = y`).
        """
        own = self._own[n]
        if _stretch(own) == self._homes[n] and own.shape == given.shape and own.grad_fn is None:
            own.copy_(given)
        else:
            self._own[n] = _own(given, True, self.trains)
            self._homes[n] = _stretch(self._own[n])


def time_call(run: Compiled, args: Sequence[Any], trains: bool) -> float:
    """Nanoseconds of one call, with its backward if there is one."""

    def call() -> None:
        results = run(*args)
        if trains:
            outs = [r for r in tensors_in(results) if r.requires_grad]
            wanted = [a for a in tensors_in(args) if a.requires_grad]
            if outs and wanted:
                torch.autograd.grad(outs, wanted, [torch.ones_like(r) for r in outs], allow_unused=True)

    return elapsed_ns(call)


def is_entangled(args: Sequence[Any], written: frozenset[int]) -> bool:
    """Whether an input that is written to shares elements with another: copies of them would not."""
    return any(_shares(args[n], t) for n in written for k, t in enumerate(args) if k != n)


def _own(value: Any, copied: bool, trains: bool) -> Any:
    """A tensor without anybody's hooks, where gradients are taken; a copy if it is written to."""
    if not isinstance(value, torch.Tensor) or not (copied or (trains and value.requires_grad)):
        return value
    with torch.no_grad():
        made = value.detach().clone() if copied else value.detach()
    return made.requires_grad_(value.requires_grad and trains)


def _shares(a: Any, b: Any) -> bool:
    """Whether two tensors may have elements in common: the stretches of memory that they span overlap."""
    first, second = _stretch(a), _stretch(b)
    return first is not None and second is not None and first[0] < second[1] and second[0] < first[1]


def _stretch(value: Any) -> tuple[int, int] | None:
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided or not value.numel():
        return None
    spanned = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.data_ptr(), value.data_ptr() + spanned * value.itemsize
