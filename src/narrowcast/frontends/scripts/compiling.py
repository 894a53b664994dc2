"""Python code as scripts with explicit casts: what TorchScript compiles again, and what becomes of its graphs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from narrowcast.core.policy import Policy
from narrowcast.frontends.eager import autocast
from narrowcast.frontends.scripts.boundaries import bound_whole
from narrowcast.frontends.scripts.callers import function_name, mark_calls, mark_whole, unmark
from narrowcast.frontends.scripts.cast_already import prepare_marks
from narrowcast.frontends.scripts.decorated import bare, check_methods, check_pins, note_classes, undecorated
from narrowcast.frontends.scripts.leaving import OURS, TORCH, make_edges
from narrowcast.frontends.scripts.region_facts import hold_policy, register_region
from narrowcast.frontends.scripts.scopes import Scope, close_passages
from narrowcast.frontends.scripts.source import rewriting
from narrowcast.runtime.torch_surface import jit

_HERE = __name__.rpartition(".")[0]


@contextmanager
def compiling(device_types: tuple[str, ...] = ()) -> Iterator[None]:
    """Let TorchScript compile functions that are decorated with regions, and regions of ours, inside.

    device_types: those for which a region is compiled that takes its device type off a tensor, besides cpu and cuda.
    """

    def with_regions(get_closure: Any) -> Any:
        def closure(function: Any) -> dict[str, Any]:
            inner = undecorated(function)
            known = get_closure(inner) if inspect.isfunction(inner) else {}  # what is no function is refused later
            return {**known, OURS: autocast, TORCH: torch}

        return closure

    def compile_called(compile: Any, function: Any, *args: Any, **options: Any) -> Any:
        if not inspect.isfunction(function) or str(function.__module__).startswith(_HERE):
            return compile(function, *args, **options)
        check_pins(function)
        if function not in bared:
            bared[function] = bare(function)
        scripted = compile(bared[function], *args, **options)
        if isinstance(scripted, torch.jit.ScriptFunction) and scripted not in marked:
            mark_calls(scripted.graph)
            name, first = function_name(undecorated(function)), next(iter(scripted.graph.nodes()), None)
            if name and first is not None:
                mark_whole(scripted.graph, {"function": name}, first)
            if hasattr(function, "__narrowcast_pinned__"):
                names = [argument.name for argument in cast(Any, scripted).schema.arguments]
                bound_whole(scripted.graph, names, function.__narrowcast_pinned__, is_method=False)
            marked.append(scripted)
        return scripted

    marked: list[Any] = []
    bared: dict[Any, Any] = {}
    register_region(autocast)
    prepare_marks()  # before torch's regions are written as ours
    note_classes()
    with jit.deprecations_unsaid(), rewriting(tuple(dict.fromkeys(("cpu", "cuda", *device_types)))):
        try:
            compiles = functools.partial(functools.partial, compile_called)
            with jit.compiler_replaced(with_regions, compiles, lambda function: bool(function_name(function))):
                yield
        finally:
            note_classes(by_us=True)
            for scripted in marked:
                unmark(scripted.graph)
                close_passages(scripted.graph)


def compile_anew(target: Callable[..., Any] | torch.nn.Module) -> Any:
    """Return a new script of a function, or of a module, whose types no other module shares.

    It has the edges of its regions, before TorchScript keeps a form in which marks are gone.
    """
    before = len(jit.compiled_functions())
    if isinstance(target, torch.nn.Module):
        check_methods(target)
        scripted = jit.script_module(target)
    else:
        check_pins(target)
        scripted = jit.script_function(bare(target))
    for function in jit.compiled_functions()[before:]:
        make_edges(function.graph)
    return scripted


def around(device_type: str, dtype: torch.dtype, enabled: bool, cached: bool, policy: Policy) -> dict[str, Scope]:
    """Return the region around a whole script."""
    return {device_type: Scope(device_type, enabled, dtype, hold_policy(policy), cached, 0)}
