"""`pin` and `unpin`: a module, a class or a function in formats of its own, wherever it is called."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch.nn import Module

from narrowcast.eager.boundary import Boundary, Names, make_boundary, names_of
from narrowcast.eager.bounded import run_bounded
from narrowcast.eager.find_boundary import ANYWHERE
from narrowcast.eager.module_calls import ATTRIBUTE, compile_anew, watch_module_calls
from narrowcast.eager.region import autocast
from narrowcast.eager.traced_calls import key_of, run_traced
from narrowcast.errors import PinError
from narrowcast.formats import Format, fp32, parse_format
from narrowcast.policy import MODULE_CALL, NOWHERE, RESULT, Policy, Rule, did_you_mean, parse_action
from narrowcast.torch_bridge import FORMATS, to_dtype
from narrowcast.torch_surface.dynamo import forget_compiled_code
from narrowcast.torch_surface.patches import once

T = TypeVar("T")
_numbers = itertools.count()


class Pin:
    """What a module or class is pinned to: rules about its calls, as a policy, and a region around them.

    Immutable except for what is remembered of decisions; copied and pickled with the module.
    """

    __slots__ = ("boundaries", "policy", "region", "tag")

    def __init__(self, policy: Policy, region: autocast | None) -> None:
        self.policy = policy
        self.region = region
        self.tag = f"pin {next(_numbers)}"  # no other pin's; what Dynamo guards on
        self.boundaries: dict[Any, Boundary | None] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> Pin:
        return self

    def __reduce__(self) -> Any:
        return _rebuilt, (self.policy, self.region)

    def __repr__(self) -> str:
        parts = [str(rule) for rule in self.policy.rules] + ([repr(self.region)] if self.region is not None else [])
        return f"Pin({'; '.join(parts)})"


def _rebuilt(policy: Policy, region: autocast | None) -> Pin:
    watch_module_calls()
    return Pin(policy, region)


_NO_TARGET: Any = object()  # None is a mistake


def pin(
    target: Any = _NO_TARGET,
    format: torch.dtype | str | Format | None = None,
    *,
    keep: Iterable[str] = (),
    only: Iterable[str] | None = None,
    out: torch.dtype | str | Format | None = None,
    at_least: bool = False,
) -> Any:
    """Run a module, every module of a class, or a function in one format, in autocast regions and outside of them.

    target: a Module, which is returned, pinned; a class of Modules, likewise (subclasses inherit the pin); or a
        function, of which a pinned one is returned. If it is left out, a decorator is returned.
    format: floating arguments are cast to it when the call begins: all floating tensors, nested ones too, on every
        device. Inside, fp32 and fp64 mean that autocasting is off; bf16 and fp16 that it is on, with that format and
        the policy in force around the call. None casts nothing, and leaves the regions as they are.
    keep:   names of arguments of `forward` (of the function) that are not cast. only: those that are; all if None.
    out:    the format of floating results: None leaves them as computed, "input" is that of the first argument that
        the pin casts, as it came; or a format.
    at_least: leave fp64 arguments as they are, and raise the others to fp32; format must be fp32.

    Parameters are not converted, and state_dict, hooks and class stay as they are; the pin is copied and pickled with
    the module. A pin is stronger than rules about `module.call`. `unpin` undoes it. Cost: see docs/benchmarks.md.

    Raises PinError for what has no call to pin, for names of arguments that do not exist, and for what is pinned.
    """
    if target is _NO_TARGET or (format is None and isinstance(target, (str, torch.dtype, Format))):
        wanted = format if target is _NO_TARGET else target
        if wanted is not None:
            to_dtype(wanted)
        return functools.partial(pin, format=wanted, keep=keep, only=only, out=out, at_least=at_least)
    names = _names_of(target)
    rules = _rules(target, names, format, tuple(_as_names(keep)), only, out, at_least)
    policy = Policy("pin", (tuple(rules),), extends=())
    if _is_module(target):
        return _set(target, Pin(policy, None))
    return _pinned_function(target, names, policy)


def unpin(target: Any) -> Any:
    """Undo the last `pin` or `nc.autocast(...)` of a module or class, which is returned, or get a function's original.

    Raises PinError for what is not pinned.
    """
    if _is_module(target):
        own = vars(target)
        if own.get(ATTRIBUTE) is None:
            raise PinError(
                asked=f"unpin({_name(target)})", found=_inherited(target),
                advice="Unpin what was pinned: narrowcast.pin returns it.",
            )  # fmt: skip
        if isinstance(target, Module):
            del target.__dict__[ATTRIBUTE]
        else:
            delattr(target, ATTRIBUTE)
            compile_anew()
        return target
    if not hasattr(target, "__narrowcast_pinned__"):
        raise PinError(asked=f"unpin({_name(target)})", found="it is not pinned", advice="Give what pin returned.")
    return target.__wrapped__


def pin_to_region(target: T, region: autocast) -> T:
    """`nc.autocast(...)(module)`: its calls run inside the region."""
    pinned: T = _set(target, Pin(Policy("pin", extends=()), region))
    return pinned


def _inherited(target: Any) -> str:
    found = getattr(target, ATTRIBUTE, None)
    return "it is not pinned" if found is None else "its class is pinned, not it"


def _is_module(target: Any) -> bool:
    return isinstance(target, Module) or (isinstance(target, type) and issubclass(target, Module))


def _name(target: Any) -> str:
    return getattr(target, "__qualname__", None) or type(target).__qualname__


def _set(target: Any, made: Pin) -> Any:
    if target is Module:
        raise PinError("pinning torch.nn.Module", "that is every module there is", (), "Pin a class of your own.")
    if inspect.isgeneratorfunction(inspect.unwrap(target.forward)):
        raise PinError(
            asked=f"{_name(target)} pinned to {made}", found="its forward is a generator, which runs in steps",
            advice="Decorate its forward with @narrowcast.autocast(...), which holds in steps.",
        )  # fmt: skip
    watch_module_calls()
    _forget_compiled()
    if vars(target).get(ATTRIBUTE) is not None:
        raise PinError(
            asked=f"{_name(target)} pinned to {made}", found=f"it is pinned already: {vars(target)[ATTRIBUTE]}",
            advice="narrowcast.unpin it first.",
        )  # fmt: skip
    if isinstance(target, Module):
        target.__dict__[ATTRIBUTE] = made  # a script would put it among its own attributes
    else:
        setattr(target, ATTRIBUTE, made)
        compile_anew()
    return target


@once
def _forget_compiled() -> None:
    """What was compiled before the first pin does not ask modules for theirs; what is compiled afterwards does."""
    forget_compiled_code()


# -- what a pin asks for -----------------------------------------------------------------------------------------------


def _as_names(names: Iterable[str]) -> Iterable[str]:
    return (names,) if isinstance(names, str) else names


def _names_of(target: Any) -> Names:
    if isinstance(target, Module):
        forward = target.forward
        function = getattr(forward, "__func__", forward)
        return names_of(function, function is not forward)
    if _is_module(target):
        return names_of(target.forward, True)
    if not callable(target) or inspect.isclass(target):
        raise PinError(
            asked=f"pin({_name(target)})", found=f"it is of type {type(target).__name__}, and has no call to pin",
            advice="Give a Module, a class of Modules, or a function.",
        )  # fmt: skip
    if inspect.isgeneratorfunction(target) or inspect.iscoroutinefunction(target) or inspect.isasyncgenfunction(target):
        raise PinError(
            asked=f"pin({_name(target)})", found="it runs in steps, and its results are not yet there when it returns",
            advice="Write @narrowcast.autocast(...), which holds in its steps, and pin what it calls.",
        )  # fmt: skip
    return names_of(target, False)


def _format(wanted: torch.dtype | str | Format) -> Format:
    if isinstance(wanted, torch.dtype):
        if wanted not in FORMATS:
            raise PinError(f"pin to {wanted}", "it is no floating format", (), "Give torch.float32, for example.")
        return FORMATS[wanted]
    return parse_format(wanted) if isinstance(wanted, str) else wanted


def _rules(
    target: Any,
    names: Names,
    format: torch.dtype | str | Format | None,
    keep: tuple[str, ...],
    only: Iterable[str] | None,
    out: torch.dtype | str | Format | None,
    at_least: bool,
) -> list[Rule]:
    """The rules that say what was asked."""
    asked = f"pin({_name(target)}, keep={keep}, only={only})"
    chosen = None if only is None else tuple(_as_names(only))
    for name in (*keep, *(chosen or ())):
        if name not in names.known and not names.open:
            raise PinError(
                asked=asked, found=f"it has no argument {name!r}{did_you_mean(name, sorted(names.known))}",
                advice=f"Name some of: {', '.join(sorted(names.known)) or '(it takes none)'}.",
            )  # fmt: skip
    for name in (*keep, *(chosen or ())):
        if name.partition(".")[0] == RESULT:
            raise PinError(asked, f"{name!r} means what is returned", (), "Rename the argument, or pin what it calls.")
    rules = []
    wanted = None if format is None else _format(format)
    if at_least and wanted is not fp32:
        raise PinError(asked, f"at_least with format {wanted}", (), "Omit at_least, or give fp32.")
    if wanted is None and (keep or chosen):
        raise PinError(asked, "no format to cast the others to", (), "Give a format.")
    if wanted is None and out is None:
        raise PinError(asked, "neither a format nor out", (), "Give one of them.")
    if wanted is not None:
        action = "full" if at_least else f"to({wanted})"
        inside_is_off = wanted.bits >= fp32.bits
        whole = "follow" if chosen is not None and inside_is_off else action
        rules.append(Rule(MODULE_CALL, parse_action(whole), reason="pinned"))
        if chosen is None:
            kept: Iterable[str] = keep
        elif inside_is_off:
            rules += [
                Rule(MODULE_CALL, parse_action(action), argument=n, reason="pinned") for n in chosen if n not in keep
            ]
            kept = ()
        else:
            kept = [n for n in sorted(names.known) if n not in chosen or n in keep]
        rules += [Rule(MODULE_CALL, parse_action("follow"), argument=name, reason="kept by the pin") for name in kept]
    if out is not None:
        action = "follow" if isinstance(out, str) and out == "input" else f"to({_format(out)})"
        rules.append(Rule(MODULE_CALL, parse_action(action), argument=RESULT, reason="pinned"))
    return rules


# -- functions ---------------------------------------------------------------------------------------------------------


def _pinned_function(function: Callable[..., Any], names: Names, policy: Policy) -> Callable[..., Any]:
    boundary = make_boundary(names, policy, ANYWHERE, NOWHERE)
    key = key_of(boundary)

    @functools.wraps(function)
    def pinned(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return run_traced(key, function, args, kwargs)
        return run_bounded(boundary, function, args, kwargs)

    pinned.__dict__.pop("__narrowcast_decorated__", None)  # what is below says so by itself
    pinned.__narrowcast_pinned__ = Pin(policy, None)  # type: ignore[attr-defined]
    return pinned
