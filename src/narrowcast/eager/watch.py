"""Watchers: what a kernel tells a recording. Here so that kernels need not know what a recording is."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol

import torch

from narrowcast.decide import Plan
from narrowcast.policy import Place, Policy
from narrowcast.torch_bridge import OpFacts, Slot


class Watcher(Protocol):
    """Told of every call that reaches one of our kernels: first begin, then end or fail. Calls nest."""

    def begin(
        self,
        facts: OpFacts,
        plan: Plan,
        place: Place,
        tensors: list[tuple[Slot, torch.Tensor | None]],
        policy: Policy,
    ) -> None:
        """The call with its arguments as they came, and what will be done with it."""

    def end(self, result: Any) -> None:
        """The call's result."""

    def fail(self, error: BaseException) -> None:
        """The call raised."""


_watchers: ContextVar[tuple[Watcher, ...]] = ContextVar("narrowcast_watchers", default=())


def watchers() -> tuple[Watcher, ...]:
    """The watchers of this thread, outermost first."""
    return _watchers.get()


def add_watcher(watcher: Watcher) -> None:
    """Start telling `watcher`."""
    _watchers.set((*_watchers.get(), watcher))


def remove_watcher(watcher: Watcher) -> None:
    """Stop telling `watcher`."""
    _watchers.set(tuple(w for w in _watchers.get() if w is not watcher))
