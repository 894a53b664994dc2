"""Regions that nobody asked for, put around a program to look at it: none of them is there for the program."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch

from narrowcast.core.policy import Policy
from narrowcast.frontends.eager import autocast
from narrowcast.runtime.torch_surface.patches import held
from narrowcast.runtime.torch_surface.state import autocast_nesting

NOTHING = Policy("fp32", extends=())
"""A policy without a rule: calls run as their inputs are."""
_ASKED = {"is_autocast_enabled": None, "is_autocast_cpu_enabled": "cpu"}
"""How programs ask, and of which device type where they do not say it."""
_CASTING = ("decorate_fwd", "_autocast")
"""Functions of torch that ask, and then cast: of `custom_fwd`, and of the attention of jagged tensors."""

_FLEX_ATTENTION = "_flex_attention_autocast_impl"


class Unasked(autocast):
    """A region in which the regions of the program are outermost ones: as one is left, casts of weights are forgotten,
    which the program may have changed when it enters the next. Re-entrant, as any is.
    """

    def __init__(self, device_type: str, policy: Policy | str) -> None:
        super().__init__(device_type, policy=policy)
        self._wraps: list[ExitStack] = []

    def __enter__(self) -> Self:
        super().__enter__()
        wraps = ExitStack()
        at_depth = self._wraps_at(autocast_nesting())
        wraps.enter_context(held(torch, "a region nobody asked for is none to programs", **at_depth))
        self._wraps.append(wraps)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> None:
        self._wraps.pop().close()
        super().__exit__(exc_type, None if self.policy is NOTHING else exc_val, exc_tb)  # which is not due to casts

    def _wraps_at(self, depth: int) -> dict[str, Callable[[Any], Any]]:
        """Return what stands in torch while this is the region at a depth."""
        return {"autocast_decrement_nesting": _outermost(depth)}


class Uncast(Unasked):
    """One that casts nothing: calls have the identities that they have under a policy, and to programs that ask,
    autocast is off.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__(device_type, NOTHING)

    def _wraps_at(self, depth: int) -> dict[str, Callable[[Any], Any]]:
        answers = {name: _answer(self.device, device or "cuda", depth) for name, device in _ASKED.items()}
        return super()._wraps_at(depth) | answers | {"get_autocast_dtype": _as_it_is(depth)}


def enabled(region: autocast) -> autocast:
    """Return the region; one that casts nothing in place of one that is off."""
    return region if region.prepared.facts.enabled else Uncast(region.device)


def _outermost(depth: int) -> Callable[[Any], Any]:
    """Return a wrap that counts the regions of this thread from this depth on."""
    thread = threading.get_ident()

    def wrap(original: Callable[[], int]) -> Callable[[], int]:
        def decrement_nesting() -> int:
            left = original()
            return max(0, left - depth) if threading.get_ident() == thread else left

        return decrement_nesting

    return wrap


def _answer(region: str, otherwise: str, depth: int) -> Callable[[Any], Any]:
    """Return a wrap that answers as if the region at this depth, on this device type, were not there."""

    def wrap(original: Callable[..., bool]) -> Callable[..., bool]:
        def is_enabled(*args: Any, **kwargs: Any) -> bool:
            is_on = original(*args, **kwargs)
            if not is_on or torch.compiler.is_compiling() or autocast_nesting() != depth:
                return is_on
            device_type = next((str(value) for value in (*args, *kwargs.values())), otherwise)
            return device_type != region or not _is_program(sys._getframe(2))

        return is_enabled

    return wrap


def _as_it_is(depth: int) -> Callable[[Any], Any]:
    """Return a wrap that gives flex_attention, whose own kernel casts wherever a region is open, the dtype it has."""

    def wrap(original: Callable[..., torch.dtype]) -> Callable[..., torch.dtype]:
        def autocast_dtype(*args: Any, **kwargs: Any) -> torch.dtype:
            caller = sys._getframe(2)
            if caller.f_code.co_name != _FLEX_ATTENTION or autocast_nesting() != depth:
                return original(*args, **kwargs)
            dtype: torch.dtype = caller.f_locals["query"].dtype
            return dtype

        return autocast_dtype

    return wrap


def _is_program(frame: Any) -> bool:
    """Return whether a program asks, or torch in order to cast for it; not torch, or us, to restore the state later, or
    to choose a path, which both runs take.
    """
    room = frame.f_globals.get("__name__", "").partition(".")[0]
    return room not in ("torch", "narrowcast") or frame.f_code.co_name in _CASTING
