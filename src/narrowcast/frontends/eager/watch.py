"""Watchers: what a kernel tells a recording. Here so that kernels need not know what a recording is."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from narrowcast.core.decide import Plan
from narrowcast.core.policy import DEVICE_TYPES, Policy, Site
from narrowcast.runtime.devices.device import is_here
from narrowcast.runtime.sites.python_stack import find_site
from narrowcast.runtime.torch_bridge import OpFacts, Slot

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]
"""What a call is given by position, and by name."""


@dataclass(slots=True)
class DecidedCall:
    """A call with its input tensors, what will be done with it, and by which policy.

    `noted`: where it is, as a graph or a boundary says. `caches`: whether the region casts weights once. `args`,
    `kwargs`: all that was given; empty for modules' calls. `number`: which call of the op it is in its module's call,
    from 1; 0 where calls are not counted.
    """

    facts: OpFacts
    plan: Plan
    noted: Site | None
    tensors: list[tuple[Slot, torch.Tensor | None]]
    policy: Policy
    caches: bool
    args: Arguments = ()
    kwargs: Keywords = field(default_factory=dict)
    number: int = 0

    @property
    def site(self) -> Site:
        """Where it is. What nobody noted is read off the Python stack, and so has to be asked for while it runs."""
        if self.noted is None:
            self.noted = find_site(self.policy.table.asks_for_names)
        return self.noted


class Watcher:
    """Notified of every call that reaches one of our kernels: first begin, then end or fail. Calls nest.

    steps_graphs: whether compiled graphs are to run step by step, so that it is notified of their calls, too.
    """

    steps_graphs: bool = False

    def begin(self, call: DecidedCall) -> None:
        """Note that a call is decided and about to run."""

    def end(self, result: Any) -> None:
        """Note that the call that began last has returned this result."""

    def fail(self, error: BaseException) -> None:
        """Note that the call that began last has raised this error."""

    def called(self, call: Callable[..., Any], module: Any, args: Arguments, kwargs: Keywords) -> Any:
        """Return `call(args, kwargs)`, a module's call; used if `steps_graphs` holds."""
        return call(args, kwargs)

    def wants_whole(self, op: str, device_type: str) -> bool:
        """Return whether it wants to see an op that the policy leaves to the ops inside; else it sees those."""
        return False

    def let_go(self, tensors: tuple[Any, ...]) -> None:
        """Keep no references to these, not even weak ones: they are to be swapped."""
        return None


class _Watchers(threading.local):
    """Per thread, as a recording's dispatch mode is. stepping: those that want compiled graphs to run step by step."""

    now: tuple[Watcher, ...] = ()
    stepping: tuple[Watcher, ...] = ()


_watchers = _Watchers()


def watchers() -> tuple[Watcher, ...]:
    """Return the watchers of this thread, outermost first."""
    return _watchers.now


def stepping() -> tuple[Watcher, ...]:
    """Return the watchers that want compiled graphs to run step by step."""
    return _watchers.stepping


def add_watcher(watcher: Watcher) -> None:
    """Start telling `watcher`."""
    _set_watchers((*_watchers.now, watcher))


def remove_watcher(watcher: Watcher) -> None:
    """Stop telling `watcher`."""
    _set_watchers(tuple(w for w in _watchers.now if w is not watcher))


def _set_watchers(now: tuple[Watcher, ...]) -> None:
    _watchers.now, _watchers.stepping = now, tuple(w for w in now if w.steps_graphs)


def present_device_types() -> list[str]:
    """Return cpu and the accelerator that this machine has."""
    return [device_type for device_type in DEVICE_TYPES if is_here(device_type)]


def told(watching: Sequence[Watcher], call: DecidedCall, run: Callable[[], Any]) -> Any:
    """Return what `run()` returns, with the watchers notified of the call around it, the last one first of its end."""
    begun: list[Watcher] = []
    try:
        for watcher in watching:
            watcher.begin(call)
            begun.append(watcher)
        result = run()
        while begun:
            begun.pop().end(result)
    except BaseException as error:
        while begun:
            begun.pop().fail(error)
        raise
    return result
