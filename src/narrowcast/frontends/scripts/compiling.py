"""Python code as scripts with explicit casts: what TorchScript compiles anew, and what becomes of its graphs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from narrowcast.core.policy import Policy
from narrowcast.errors import RegionError
from narrowcast.frontends.scripts.boundaries import bound_whole, close_passages
from narrowcast.frontends.scripts.callers import function_name, mark_calls, mark_function, unmark
from narrowcast.frontends.scripts.cast_already import prepare_marks
from narrowcast.frontends.scripts.classes import note_classes
from narrowcast.frontends.scripts.decorated import bare, check_methods, check_pins, undecorated
from narrowcast.frontends.scripts.leaving import TORCH, make_edges
from narrowcast.frontends.scripts.policies import hold_policy
from narrowcast.frontends.scripts.region import register_region
from narrowcast.frontends.scripts.region_facts import number_of
from narrowcast.frontends.scripts.scopes import Scope
from narrowcast.frontends.scripts.source import OURS, Regions, Signature, rewriting
from narrowcast.runtime.torch_bridge import to_dtype
from narrowcast.runtime.torch_surface.jit import (
    compiled_functions,
    compiler_replaced,
    deprecations_unsaid,
    script_function,
    script_module,
)
from narrowcast.runtime.torch_surface.state import caches, is_enabled

_HERE = __name__.rpartition(".")[0]


@contextmanager
def compiling(region_class: type, device_types: tuple[str, ...] = ()) -> Iterator[None]:
    """TorchScript compiles functions that are decorated with regions, and regions of ours, inside.

    region_class: `narrowcast.autocast`, which this cannot import. device_types: those for which a region is compiled
    that takes its device type off a tensor, besides cpu and cuda.
    """

    def with_regions(get_closure: Any) -> Any:
        def closure(function: Any) -> dict[str, Any]:
            inner = undecorated(function)
            known = get_closure(inner) if inspect.isfunction(inner) else {}  # what is no function is refused later
            return {**known, OURS: region_class, TORCH: torch}

        return closure

    def compile_called(compile: Any, function: Any, *args: Any, **options: Any) -> Any:
        if not inspect.isfunction(function) or str(function.__module__).startswith(_HERE):
            return compile(function, *args, **options)
        check_pins(function)
        if function not in bared:
            bared[function] = bare(function, is_region)
        made = compile(bared[function], *args, **options)
        if isinstance(made, torch.jit.ScriptFunction) and made not in marked:
            mark_calls(made.graph)
            mark_function(made.graph, undecorated(function))
            if hasattr(function, "__narrowcast_pinned__"):
                names = [argument.name for argument in cast(Any, made).schema.arguments]
                bound_whole(made.graph, names, function.__narrowcast_pinned__, is_method=False)
            marked.append(made)
        return made

    marked: list[Any] = []
    bared: dict[Any, Any] = {}
    register_region(region_class)
    prepare_marks()  # before torch's regions are written as ours
    is_region = functools.partial(_is_region, region_class)
    note_classes(is_region)
    known = tuple(dict.fromkeys(("cpu", "cuda", *device_types)))
    regions = Regions(
        is_region,
        functools.partial(_described, region_class),
        functools.partial(_signature_of, region_class),
        lambda dtype: number_of(to_dtype(dtype)),
        known,
    )
    with deprecations_unsaid(), rewriting(regions):
        try:
            compiles = functools.partial(functools.partial, compile_called)
            with compiler_replaced(with_regions, compiles, lambda function: bool(function_name(function))):
                yield
        finally:
            note_classes()
            for made in marked:
                unmark(made.graph)
                close_passages(made.graph)


def _is_region(region_class: type, value: Any) -> bool:
    """Whether something is a region, or a class of them, or a part without gradients, which scripts have, too."""
    kind = value if isinstance(value, type) else type(value)
    return issubclass(kind, (torch.autocast, region_class)) or type(value) is torch.no_grad


def _described(region_class: Any, value: Any) -> dict[str, Any]:
    """The arguments that make a region in a script. RegionError for one that does what a user's class says."""
    if type(value) is region_class:
        facts: dict[str, Any] = {"cache_enabled": value.prepared.facts.cache, "policy": value.policy.digest}
    elif type(value) in (torch.autocast, torch.cpu.amp.autocast, torch.cuda.amp.autocast):  # type: ignore[attr-defined]
        facts = {"cache_enabled": caches(value), "policy": ""}
    else:
        found = f"scripts do not know what {type(value).__qualname__} does"
        raise RegionError("a region in a script", found, advice="Open torch.autocast or narrowcast.autocast itself.")
    return {"device_type": value.device, "dtype": number_of(value.fast_dtype), "enabled": is_enabled(value), **facts}


def _signature_of(region_class: type, value: Any) -> Signature | None:
    """The arguments of region classes in their order, and what ours takes where these do not say it."""
    if value is region_class:
        return ("device_type", "dtype", "enabled", "cache_enabled"), {}
    if value is torch.autocast:
        return ("device_type", "dtype", "enabled", "cache_enabled"), {"policy": "''"}
    names = ("enabled", "dtype", "cache_enabled")
    told = {"cache_enabled": "True", "policy": "''"}
    if value is torch.cpu.amp.autocast:  # type: ignore[attr-defined]
        return names, {"device_type": "'cpu'", "dtype": str(number_of(torch.bfloat16)), **told}
    if value is torch.cuda.amp.autocast:
        return names, {"device_type": "'cuda'", "dtype": str(number_of(torch.float16)), **told}
    return None


def compile_function(function: Callable[..., Any], region_class: type) -> Any:
    """A new script function, which nobody shares."""
    check_pins(function)
    with _edges():
        return script_function(bare(function, functools.partial(_is_region, region_class)))


def compile_module(module: torch.nn.Module, region_class: type) -> Any:
    """A new script module, whose types no other module shares."""
    check_module(module, region_class)
    with _edges():
        return script_module(module)


@contextmanager
def _edges() -> Iterator[None]:
    """What is compiled inside has the edges of its regions, before TorchScript keeps a form in which marks are gone."""
    before = len(compiled_functions())
    yield
    for function in compiled_functions()[before:]:
        make_edges(function.graph)


def check_module(module: torch.nn.Module, region_class: type) -> None:
    """ScriptError for a module, or a part of it, with regions that no script has."""
    check_methods(module, functools.partial(_is_region, region_class))


def around(device_type: str, dtype: torch.dtype, enabled: bool, cached: bool, policy: Policy) -> dict[str, Scope]:
    """The region around a whole script."""
    return {device_type: Scope(device_type, enabled, dtype, hold_policy(policy), cached, 0)}
