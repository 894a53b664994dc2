"""Python code as scripts with explicit casts: what TorchScript compiles anew, and what becomes of its graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from narrowcast.errors import Origin, ScriptError
from narrowcast.policy import Policy
from narrowcast.scripts.boundaries import bound_whole, close_passages
from narrowcast.scripts.callers import mark_calls, mark_function, unmark
from narrowcast.scripts.cast_already import prepare_marks
from narrowcast.scripts.policies import hold_policy
from narrowcast.scripts.region import register_region
from narrowcast.scripts.region_facts import number_of
from narrowcast.scripts.scopes import Scope, make_edges
from narrowcast.scripts.source import OURS, TORCH, Signature, rewriting
from narrowcast.torch_surface.jit import (
    compiled_method,
    compiler_replaced,
    deprecations_unsaid,
    method_names,
    script_function,
    script_module,
)
from narrowcast.torch_surface.state import caches, is_enabled


@contextmanager
def compiling(region_class: type) -> Iterator[None]:
    """TorchScript compiles functions that are decorated with regions, and regions of ours, inside.

    region_class: `narrowcast.autocast`, which this cannot import.
    """

    def with_regions(get_closure: Any) -> Any:
        return lambda function: {**get_closure(undecorated(function)), OURS: region_class, TORCH: torch}

    def compile_called(compile: Any, function: Any, location: Any) -> Any:
        check_pins(function)
        made = compile(undecorated(function), location)
        if isinstance(made, torch.jit.ScriptFunction):
            make_edges(made.graph)  # before TorchScript keeps a form of it in which marks are gone
            mark_calls(made.graph)
            mark_function(made.graph, undecorated(function))
            if hasattr(function, "__narrowcast_pinned__"):
                names = [argument.name for argument in cast(Any, made).schema.arguments]
                bound_whole(made.graph, names, function.__narrowcast_pinned__, is_method=False)
            marked.append(made)
        return made

    marked: list[Any] = []
    register_region(region_class)
    prepare_marks()  # before torch's regions are written as ours
    describe, signature_of = functools.partial(_described, region_class), functools.partial(_signature_of, region_class)
    with deprecations_unsaid(), rewriting(describe, signature_of, _as_number):
        try:
            with compiler_replaced(with_regions, lambda compile: functools.partial(compile_called, compile)):
                yield
        finally:
            for made in marked:
                unmark(made.graph)
                close_passages(made.graph)


def _described(region_class: type, value: Any) -> dict[str, Any] | None:
    """The arguments that make a region in a script."""
    if not isinstance(value, (torch.autocast, region_class)):
        return None
    value = cast(Any, value)
    facts: dict[str, Any] = {"device_type": value.device, "dtype": number_of(value.fast_dtype)}
    facts["enabled"] = is_enabled(value)
    if isinstance(value, torch.autocast):
        return {**facts, "cache_enabled": caches(value), "policy": ""}
    return {**facts, "cache_enabled": value.prepared.facts.cache, "policy": value.policy.digest}


def _as_number(value: Any) -> int | None:
    return number_of(value) if isinstance(value, torch.dtype) and value.is_floating_point else None


def _signature_of(region_class: type, value: Any) -> Signature | None:
    """The arguments of region classes in their order, and what ours takes where these do not say it."""
    if value is region_class:
        return ("device_type", "dtype", "enabled", "cache_enabled"), {}
    if value is torch.autocast:
        return ("device_type", "dtype", "enabled", "cache_enabled"), {"policy": "''"}
    names = ("enabled", "dtype", "cache_enabled")
    if value is torch.cpu.amp.autocast:  # type: ignore[attr-defined]
        return names, {"device_type": "'cpu'", "dtype": str(number_of(torch.bfloat16)), "policy": "''"}
    if value is torch.cuda.amp.autocast:
        return names, {"device_type": "'cuda'", "dtype": str(number_of(torch.float16)), "policy": "''"}
    return None


def undecorated(function: Any) -> Any:
    """The function under decorators that are regions: they are in its source, too."""
    marks = ("__script_unsupported", "__narrowcast_decorated__", "__narrowcast_pinned__")
    while any(hasattr(function, mark) for mark in marks):
        function = function.__wrapped__
    return function


def check_pins(function: Any) -> None:
    """ScriptError for a function with a pin and anything else around it: in a script their order would be lost."""
    marks = []
    inner = function
    while hasattr(inner, "__wrapped__"):
        marks += [m for m in ("__narrowcast_pinned__", "__narrowcast_decorated__") if m in vars(inner)]
        inner = inner.__wrapped__
    if "__narrowcast_pinned__" in marks and len(marks) > 1:
        raise ScriptError(
            asked=f"a script of {inner.__qualname__}", found="it has a pin, and another pin or a region around it",
            where=(Origin(inner.__code__.co_filename, inner.__code__.co_firstlineno),),
            advice="Keep one of them; open the region in the function that calls it.",
        )  # fmt: skip


def _check_methods(module: torch.nn.Module) -> None:
    """ScriptError for methods that are pinned: TorchScript reads what is below the decorator."""
    for part in module.modules():
        for kind in type(part).__mro__:
            for name, found in vars(kind).items():
                if callable(found) and hasattr(found, "__narrowcast_pinned__"):
                    code = found.__wrapped__.__code__
                    raise ScriptError(
                        asked=f"a script of {kind.__qualname__}.{name}, which is pinned",
                        found="TorchScript compiles methods without their decorators",
                        where=(Origin(code.co_filename, code.co_firstlineno),),
                        advice="Pin the module, or a function that the method calls.",
                    )


def compile_function(function: Callable[..., Any]) -> Any:
    """A new script function, which nobody shares."""
    check_pins(function)
    return script_function(undecorated(function))


def compile_module(module: torch.nn.Module) -> Any:
    """A new script module, whose types no other module shares."""
    _check_methods(module)
    made = script_module(module)
    for part in made.modules():
        for name in method_names(part):
            make_edges(compiled_method(part, name).graph)
    return made


def around(device_type: str, dtype: torch.dtype, enabled: bool, cached: bool, policy: Policy) -> dict[str, Scope]:
    """The region around a whole script."""
    return {device_type: Scope(device_type, enabled, dtype, hold_policy(policy), cached, 0)}
