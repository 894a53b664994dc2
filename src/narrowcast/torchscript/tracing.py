"""Traces: the casts of eager code are in them as torch records them; the regions that made them are marked.

A marked part is cast already. The mark is a region that is off, so a script that calls the trace from a region of its
own leaves the part as it is, and torch's own pass does, too. What no region ruled is left open to the caller.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch

from narrowcast.policy import NOWHERE
from narrowcast.torch_surface.jit import (
    NONE,
    compiled_method,
    compiled_module,
    compiler_lock,
    inline,
    method_names,
    script_calls_replaced,
    simplify,
    traced_graph,
    tracing_state,
)
from narrowcast.torch_surface.state import any_autocast, native_regions_replaced
from narrowcast.torchscript.callers import graphs_of, mark_calls, unmark
from narrowcast.torchscript.convert import inline_calls
from narrowcast.torchscript.scripted import (
    ExplicitFunction,
    ExplicitModule,
    Method,
    caller_of,
    methods_of,
    with_method,
    with_methods,
)


@contextmanager
def tracing() -> Iterator[None]:
    """Regions that are entered in a trace are marked in it, and scripts of torch's own are cast by the regions around.

    One thread at a time.
    """
    kept: list[Method] = []
    with compiler_lock:
        _mark()  # TorchScript compiles the class of native regions for it, as that class is outside
        with _following(kept), _marking():
            yield


@contextmanager
def _following(kept: list[Method]) -> Iterator[None]:
    """kept: the forms of scripts that were made; a trace refers to them until its calls are inlined."""

    def call_function(call: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if not any_autocast() or methods_of(self):
            return call(self, *args, **kwargs)
        kept.append(_method_of(self, None))
        return kept[-1].run(self, args, kwargs)

    def call_method(call: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        if not any_autocast():
            return call(self, *args, **kwargs)
        kept.append(_method_of(self, self.owner))
        return kept[-1].run(self, args, kwargs)

    with script_calls_replaced(lambda call: partial(call_function, call), lambda call: partial(call_method, call)):
        yield


def _method_of(script: Any, module: Any) -> Method:
    raw = script.graph.copy()
    inline_calls(raw)
    return Method(script.name, script.schema, raw, {}, module)


# -- marks -------------------------------------------------------------------------------------------------------------


@contextmanager
def _marking() -> Iterator[None]:
    """Every region enters a native one: there the mark is made."""
    open_marks: dict[int, list[Any]] = {}

    def enter(enter: Any, self: Any) -> Any:
        entered = enter(self)
        state = tracing_state()
        if state is not None:
            open_marks.setdefault(id(self), []).append(mark_entered(traced_graph(state), self.device))
        return entered

    def leave(leave: Any, self: Any, *raised: Any) -> Any:
        if open_marks.get(id(self)):
            instance = open_marks[id(self)].pop()
            state = tracing_state()
            if state is not None:
                mark_left(traced_graph(state), instance)
        return leave(self, *raised)

    with native_regions_replaced(lambda e: partial(enter, e), lambda e: partial(leave, e), "traces mark regions"):
        yield


def mark_entered(graph: Any, device_type: str) -> Any:
    """Enter a region that is off, where the graph is written to. Returns the region."""
    (instance,) = graph.insertGraph(_mark(), [graph.insertConstant(device_type)])
    return instance


def mark_left(graph: Any, instance: Any) -> None:
    """Leave it."""
    node = graph.create("prim::Exit", [instance], 1)
    node.output().setType(NONE)
    graph.insertNode(node)


def _region_that_is_off(device_type: str):  # type: ignore[no-untyped-def]
    region = torch.autocast(device_type, dtype=torch.bfloat16, enabled=False)
    with region:  # not `as`: torch's own pass, which sees traces, refuses it
        pass
    return region


@cache
def _mark() -> Any:
    """The graph of the function above, without the exit: it makes the region, enters it, and gives it."""
    graph = torch.jit.script(_region_that_is_off).graph.copy()
    inline(graph)
    simplify(graph)
    graph.findNode("prim::Exit").destroy()
    return graph


# -- what was traced ---------------------------------------------------------------------------------------------------


def traced_function(function: Any, regions: tuple[str, ...]) -> ExplicitFunction:
    """A traced function; `regions` are the device types that a region around the trace ruled."""
    inline_calls(function.graph)
    _mark_whole(function.graph, regions)
    return with_method(function, _method(function.name, function, None, regions))


def traced_module(traced: Any, regions: tuple[str, ...]) -> ExplicitModule:
    """A traced module, the same."""
    graphs = graphs_of(traced)
    for graph in graphs:
        mark_calls(graph)
    for graph in graphs:
        inline_calls(graph)
    module = compiled_module(traced)
    methods = {}
    for name in method_names(module):
        plain = compiled_method(module, name)
        _mark_whole(plain.graph, regions)
        methods[name] = _method(name, plain, module, regions)
    for graph in graphs_of(module):
        unmark(graph)
    return with_methods(module, methods)


def _method(name: str, plain: Any, module: Any, regions: tuple[str, ...]) -> Method:
    caller = caller_of(module, name) if module is not None else NOWHERE
    return Method(name, plain.schema, plain.graph.copy(), {}, module, caller, fixed=bool(regions))


def _mark_whole(graph: Any, regions: tuple[str, ...]) -> None:
    """The whole graph is in regions that are off."""
    instances = []
    first = next(iter(graph.nodes()), None)
    if first is None:
        return
    graph.setInsertPoint(first)
    for device_type in regions:
        instances.append(mark_entered(graph, device_type))
    graph.setInsertPoint(graph.block())
    for instance in reversed(instances):
        mark_left(graph, instance)
