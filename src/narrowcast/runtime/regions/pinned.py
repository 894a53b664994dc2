"""Pins: what a module, a class of modules or a function is pinned to, and where that is kept."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn import Module

from narrowcast.core.policy import Kind, Policy
from narrowcast.errors import PinError
from narrowcast.runtime.torch_surface.dynamo import forget_compiled_code
from narrowcast.runtime.torch_surface.patches import once

ATTRIBUTE = "_narrowcast_pin"
_numbers = itertools.count()
_changes = itertools.count(1)
class_pins = "0"
"""Another text after each pin of a class. Dynamo guards on it, and on pins of modules by itself; it would take a number
for a size that changes.
"""
_begins: list[Callable[[], None]] = []
_forget_compiled = once(forget_compiled_code)  # what was compiled before the first pin does not ask modules for theirs


class Pin:
    """What is pinned to: rules about calls, as a policy, and a region around them.

    Immutable except for what is remembered of decisions. Pickled with its module, in eager/pins.py: a process that
    loads one watches calls of modules from then on.
    """

    __slots__ = ("boundaries", "policy", "region", "tag")

    def __init__(self, policy: Policy, region: Any = None) -> None:
        self.policy = policy
        self.region = region  # of narrowcast.autocast
        self.tag = f"pin {next(_numbers)}"  # no other pin's; what Dynamo guards on
        self.boundaries: dict[Any, Any] = {}

    @property
    def lowers(self) -> bool:
        """Whether something computes in a lower format than fp32 by it."""
        formats = [rule.action.format for rule in self.policy.rules if rule.action.kind is not Kind.LOWER]
        is_low = len(formats) < len(self.policy.rules) or any(f is not None and f.bits < 32 for f in formats)
        return is_low or self.region is not None

    def __deepcopy__(self, memo: dict[int, Any]) -> Pin:
        return self

    def __repr__(self) -> str:
        parts = [str(rule) for rule in self.policy.rules] + ([repr(self.region)] if self.region is not None else [])
        return f"Pin({'; '.join(parts)})"


def pin_of(target: Any) -> Pin | None:
    """Return the pin of a module, or else of its class; of a class, its own or a base's."""
    return getattr(target, ATTRIBUTE, None)


def own_pin(target: Any) -> Pin | None:
    """Return the pin that was set on this very module or class."""
    pin: Pin | None = vars(target).get(ATTRIBUTE)
    return pin


@contextmanager
def without_low_pins(model: Any) -> Iterator[None]:
    """Leave the pins of a model's modules that lower them aside, also those of their classes."""
    modules = [m for m in model.modules() if (pin := pin_of(m)) and pin.lowers] if isinstance(model, Module) else []
    own = [(vars(module), vars(module).get(ATTRIBUTE)) for module in modules]
    try:
        for attributes, _ in own:
            attributes[ATTRIBUTE] = None
        yield
    finally:
        for attributes, pin in own:
            attributes.pop(ATTRIBUTE, None)
            if pin is not None:
                attributes[ATTRIBUTE] = pin


def is_module(target: Any) -> bool:
    """Return whether the target is a module, or a class of modules."""
    return isinstance(target, Module) or (isinstance(target, type) and issubclass(target, Module))


def name_of(target: Any) -> str:
    """Return the name of what is pinned, for messages."""
    return getattr(target, "__qualname__", None) or type(target).__qualname__


def set_pin(target: Any, pin: Pin) -> None:
    """Pin a module or a class of them: it asks for its pin from its next call on, compiled code of it likewise.

    Raises PinError for what has no call to pin, and for what is pinned.
    """
    asked = f"{name_of(target)} pinned to {pin}"
    if target is Module:
        raise PinError("pinning torch.nn.Module", "that is every module there is", (), "Pin a class of your own.")
    if inspect.isgeneratorfunction(inspect.unwrap(target.forward)):
        raise PinError(
            asked, "its forward is a generator, which runs in steps",
            advice="Decorate its forward with @narrowcast.autocast(...), which holds in steps.",
        )  # fmt: skip
    watch_module_calls()
    _forget_compiled()
    if own_pin(target) is not None:
        raise PinError(asked, f"it is pinned already: {own_pin(target)}", advice="narrowcast.unpin it first.")
    if isinstance(target, Module):
        target.__dict__[ATTRIBUTE] = pin  # a script would put it among its own attributes
    else:
        setattr(target, ATTRIBUTE, pin)
        _compile_anew()


def take_pin(target: Any) -> None:
    """Undo `set_pin`."""
    if isinstance(target, Module):
        del target.__dict__[ATTRIBUTE]
    else:
        delattr(target, ATTRIBUTE)
        _compile_anew()


def begin_watching(begin: Callable[[], None]) -> None:
    """Have `begin` run when the first pin is set, or the first region opened whose policy has rules about modules."""
    _begins.append(begin)


def watch_module_calls() -> None:
    """Let calls of modules ask for their pins, and for rules about them, from now on."""
    for begin in _begins:
        begin()


def _compile_anew() -> None:
    """Compile code that calls modules again at its next call."""
    global class_pins
    class_pins = str(next(_changes))
