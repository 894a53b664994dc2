"""`pin` and `unpin`: a module, a class or a function in formats of its own, wherever it is called."""

from __future__ import annotations

import copyreg
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

import torch
from torch.nn import Module

from narrowcast.core.policy import MODULE_CALL, NOWHERE, RESULT, Policy, Rule, parse_action
from narrowcast.errors import PinError
from narrowcast.formats import Format, fp32, parse_format
from narrowcast.frontends.eager.boundary import ANYWHERE, Names, make_boundary, names_of, names_of_forward
from narrowcast.frontends.eager.bounded import key_of, run_bounded, run_traced
from narrowcast.frontends.eager.steps import runs_in_steps
from narrowcast.output.words import did_you_mean
from narrowcast.runtime.regions import pinned
from narrowcast.runtime.torch_bridge import FORMATS, to_dtype

AnyFormat = torch.dtype | str | Format
T = TypeVar("T")


def _rebuilt(policy: Policy, region: Any) -> pinned.Pin:
    """Return a pin that was pickled; the process that loads it watches modules' calls from now on."""
    pinned.watch_module_calls()
    return pinned.Pin(policy, region)


copyreg.pickle(pinned.Pin, lambda pin: (_rebuilt, (pin.policy, pin.region)))

_NO_TARGET: Any = object()  # None is a mistake


@overload
def pin(
    target: T, format: AnyFormat | None = ..., *, keep: Iterable[str] = ..., only: Iterable[str] | None = ...,
    out: AnyFormat | None = ..., at_least: bool = ...,
) -> T: ...  # fmt: skip
@overload
def pin(
    *, format: AnyFormat, keep: Iterable[str] = ..., only: Iterable[str] | None = ..., out: AnyFormat | None = ...,
    at_least: bool = ...,
) -> Callable[[T], T]: ...  # fmt: skip
def pin(
    target: Any = _NO_TARGET,
    format: AnyFormat | None = None,
    *,
    keep: Iterable[str] = (),
    only: Iterable[str] | None = None,
    out: AnyFormat | None = None,
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
        the pin casts, before the cast; or a format.
    at_least: leave fp64 arguments as they are, and raise the others to fp32; format must be fp32.

    Parameters are not converted, and state_dict, hooks and class stay as they are; the pin is copied and pickled with
    the module. A pin is stronger than rules about `module.call`. `unpin` undoes it.
    docs/internals/benchmarks.md has what it costs.

    Raises PinError for what has no call to pin, for names of arguments that do not exist, and for what is pinned.
    """
    if target is _NO_TARGET or (format is None and isinstance(target, (str, torch.dtype, Format))):
        wanted = format if target is _NO_TARGET else target
        if wanted is not None:
            to_dtype(wanted)
        return functools.partial(pin, format=wanted, keep=keep, only=only, out=out, at_least=at_least)
    names, rules = _asked(target, format, keep, only, out, at_least)
    policy = Policy("pin", (tuple(rules),), extends=())
    if pinned.is_module(target):
        pinned.set_pin(target, pinned.Pin(policy))
        return target
    return _pinned_function(target, names, policy)


def unpin(target: Any) -> Any:
    """Undo the last `pin` or `nc.autocast(...)` of a module or class, which is returned, or get a function's original.

    Raises PinError for what is not pinned.
    """
    if pinned.is_module(target):
        if pinned.own_pin(target) is None:
            found = "it is not pinned" if pinned.pin_of(target) is None else "its class is pinned, not it"
            raise PinError(
                f"unpin({pinned.name_of(target)})", found, advice="Unpin what was pinned: narrowcast.pin returns it."
            )
        pinned.take_pin(target)
        return target
    if not hasattr(target, "__narrowcast_pinned__"):
        raise PinError(f"unpin({pinned.name_of(target)})", "it is not pinned", advice="Give what pin returned.")
    return target.__wrapped__


# -- what a pin asks for -----------------------------------------------------------------------------------------------


def _as_names(names: Iterable[str]) -> Iterable[str]:
    return (names,) if isinstance(names, str) else names


def _names_of(target: Any) -> Names:
    if isinstance(target, Module):
        return names_of_forward(target)
    if pinned.is_module(target):
        return names_of(target.forward, True)
    if not callable(target) or inspect.isclass(target):
        raise PinError(
            f"pin({pinned.name_of(target)})", f"it is of type {type(target).__name__}, and has no call to pin",
            advice="Give a Module, a class of Modules, or a function.",
        )  # fmt: skip
    if runs_in_steps(target):
        raise PinError(
            asked=f"pin({pinned.name_of(target)})",
            found="it runs in steps, and its results are not yet there when it returns",
            advice="Write @narrowcast.autocast(...), which holds in its steps, and pin what it calls.",
        )
    return names_of(target, False)


def _format(wanted: AnyFormat) -> Format:
    if isinstance(wanted, torch.dtype):
        if wanted not in FORMATS:
            raise PinError(f"pin to {wanted}", "not a floating-point format", (), "Give torch.float32, for example.")
        return FORMATS[wanted]
    return parse_format(wanted) if isinstance(wanted, str) else wanted


def _rules(
    names: Names, format: Format | None, keep: tuple[str, ...], only: tuple[str, ...] | None, out: str, at_least: bool
) -> list[Rule]:
    """Return the rules of a pin: what becomes of arguments as a whole, of single ones, and of results."""
    rules = []
    if format is not None:
        action = "full" if at_least else f"to({format})"
        is_off_inside = format.bits >= fp32.bits
        if only is None:
            rules = [_rule(action), *(_rule("follow", name) for name in keep)]
        elif is_off_inside:
            rules = [_rule("follow"), *(_rule(action, name) for name in only if name not in keep)]
        else:  # the whole rule says what holds inside, too
            others = (n for n in sorted(names.known) if n not in only or n in keep)
            rules = [_rule(action), *(_rule("follow", name) for name in others)]
    if out:
        rules.append(_rule(out, RESULT))
    return rules


def _rule(action: str, argument: str | None = None) -> Rule:
    kept = action == "follow" and argument not in (None, RESULT)
    return Rule(MODULE_CALL, parse_action(action), argument=argument, reason="kept by the pin" if kept else "pinned")


def _asked(
    target: Any,
    format: AnyFormat | None,
    keep: Iterable[str],
    only: Iterable[str] | None,
    out: AnyFormat | None,
    at_least: bool,
) -> tuple[Names, list[Rule]]:
    """Return the names of the arguments, and the rules of a pin, or raise PinError for what does not exist and for what
    cannot go together.
    """
    names, kept = _names_of(target), tuple(_as_names(keep))
    chosen = None if only is None else tuple(_as_names(only))
    asked = f"pin({pinned.name_of(target)}, keep={kept}, only={only})"
    named = (*kept, *(chosen or ()))
    for name in named:
        if name not in names.known and not names.open:
            raise PinError(
                asked=asked, found=f"it has no argument {name!r}{did_you_mean(name, sorted(names.known))}",
                advice=f"Name some of: {', '.join(sorted(names.known)) or '(it takes none)'}.",
            )  # fmt: skip
        if name.partition(".")[0] == RESULT:
            raise PinError(asked, f"{name!r} means what is returned", (), "Rename the argument, or pin what it calls.")
    wanted = None if format is None else _format(format)
    if at_least and wanted is not fp32:
        raise PinError(asked, f"at_least with format {wanted}", (), "Omit at_least, or give fp32.")
    if wanted is None and named:
        raise PinError(asked, "no format to cast the others to", (), "Give a format.")
    if wanted is None and out is None:
        raise PinError(asked, "neither a format nor out", (), "Give one of them.")
    action = "" if out is None else "follow" if isinstance(out, str) and out == "input" else f"to({_format(out)})"
    return names, _rules(names, wanted, kept, chosen, action, at_least)


# -- functions ---------------------------------------------------------------------------------------------------------


def _pinned_function(function: Callable[..., Any], names: Names, policy: Policy) -> Callable[..., Any]:
    boundary = make_boundary(names, policy, ANYWHERE, NOWHERE)
    key = key_of(boundary)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return run_traced(key, function, args, kwargs)
        return run_bounded(boundary, function, args, kwargs)

    run.__dict__.pop("__narrowcast_decorated__", None)  # what is below says so by itself
    run.__narrowcast_pinned__ = pinned.Pin(policy)  # type: ignore[attr-defined]
    return run
