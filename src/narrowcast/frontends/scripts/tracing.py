"""Traces: the casts of eager code are in them as torch records them; the regions that made them are marked, so that
nobody casts these parts again (cast_already.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch

from narrowcast.core.policy import NOWHERE
from narrowcast.errors import ScriptError, ScriptWarning
from narrowcast.frontends.eager import autocast
from narrowcast.frontends.scripts import scripted
from narrowcast.frontends.scripts.callers import graphs_of, mark_calls, site_in, unmark
from narrowcast.frontends.scripts.calls import device_of_regions
from narrowcast.frontends.scripts.cast_already import enter_off, has_cast, leave_off, prepare_marks, switch_off
from narrowcast.frontends.scripts.composites import casts_inside, is_closed, tell_of_inside, traced_inside
from narrowcast.frontends.scripts.convert import inline_calls, make_graph_explicit
from narrowcast.frontends.scripts.region_facts import region_class
from narrowcast.frontends.scripts.scopes import policy_of
from narrowcast.runtime.devices.device import random_state_kept
from narrowcast.runtime.regions.ruling import ruled_device_types
from narrowcast.runtime.regions.stack import told_of_regions
from narrowcast.runtime.sites.python_stack import find_site, warn_here
from narrowcast.runtime.torch_bridge import map_tensors, tensors_in
from narrowcast.runtime.torch_surface import jit
from narrowcast.runtime.torch_surface.state import any_autocast, is_enabled


@contextmanager
def tracing() -> Iterator[None]:
    """Mark regions that are entered in a trace, and have scripts of torch's own cast by the regions around.

    One thread at a time.
    """
    kept: list[scripted.Method] = []
    with jit.compiler_lock:
        prepare_marks()  # TorchScript compiles the class of native regions for it, as that class is outside
        marker = _Marker()
        marked = told_of_regions(marker, "traces mark regions")
        recorded = jit.recorded_inside(traced_inside())
        with _following(kept), _forks_inside(marker), _functions_compared(), marked, recorded:
            yield


def _forks_inside(marker: _Marker) -> AbstractContextManager[None]:
    """Record what is forked in a region where it is forked, as eager code runs it: in a graph of its own its casts
    would be out of reach of the code around it, which takes them from torch's weight cache.
    """

    def fork(plain: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        if jit.tracing_state() is None or not (any_autocast() or any(marker.open.values())):
            return plain(function, *args, **kwargs)
        return _Forked(function(*args, **kwargs))

    def wait(plain: Any, future: Any) -> Any:
        return future.wait() if isinstance(future, _Forked) else plain(future)

    return jit.forks_replaced(lambda plain: partial(fork, plain), lambda plain: partial(wait, plain))


class _Forked:
    def __init__(self, result: Any) -> None:
        self.result = result

    def wait(self) -> Any:
        return self.result

    value = wait


def _following(kept: list[scripted.Method]) -> AbstractContextManager[None]:
    """Follow scripts in a trace. kept: the forms that were made; a trace refers to them until it is inlined."""

    def cast(call: Any, script: Any, *args: Any, **kwargs: Any) -> Any:
        if not any_autocast() or scripted.methods_of(script):
            return call(script, *args, **kwargs)
        raw = script.graph.copy()
        inner = [node for kind in ("prim::CallMethod", "prim::CallFunction") for node in raw.findAllNodes(kind)]
        if inner and scripted.ambient({})[2]:
            text = "narrowcast: a trace calls a script that torch made, of which it does not know the modules and "
            text += "functions inside: rules about these hold for none of its calls. Make the script with nc.script"
            warn_here(text, ScriptWarning)
        inline_calls(raw)
        owner = getattr(script, "owner", None)  # a function has none
        kept.append(scripted.Method(script.name, script.schema, raw, {}, owner))
        return kept[-1].run(script, args, kwargs)

    return jit.script_calls_replaced(partial(partial, cast), "traces cast the scripts that they call")


def _functions_compared() -> AbstractContextManager[None]:
    """Refuse an autograd.Function whose results depend on the region: a trace runs it as Python code, without one."""

    def apply(plain: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        is_traced, found = jit.tracing_state() is not None, ""
        if is_traced and any_autocast() and not _ignores_regions(plain, function, args, kwargs):
            found = f"a trace calls {function.__qualname__} in Python, where no region is open: its results are others"
        result = None if found else plain(function, *args, **kwargs)
        if is_traced and {*map(id, tensors_in(result))} & {*map(id, tensors_in(args, kwargs))}:
            found = f"{function.__qualname__} writes to an argument (mark_dirty), which TorchScript cannot do"
        if found:
            advice = "Use narrowcast.compile or narrowcast.export, which cast inside of it, or write it as a plain "
            raise ScriptError("a trace of an autograd.Function", found, find_site().origins, f"{advice}function.")
        return result

    return jit.function_calls_replaced(lambda plain: partial(apply, plain))


def _ignores_regions(plain: Any, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether results and gradients of an autograd.Function have the same bits outside of all regions."""
    with jit.not_traced():
        try:
            inside = _results(partial(plain, function), args, kwargs)
        except Exception:  # as the trace will
            return True
        with _outside_of_regions():
            try:
                outside = _results(partial(plain, function), args, kwargs)
            except Exception:  # operands of several formats
                return False
        pairs = zip(inside, outside, strict=False)
        return len(inside) == len(outside) and all(a.dtype == b.dtype and torch.equal(*_bits(a, b)) for a, b in pairs)


@contextmanager
def _outside_of_regions() -> Iterator[None]:
    with ExitStack() as off:
        for device_type in ruled_device_types():
            off.enter_context(autocast(device_type, enabled=False))
        yield


def _results(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Run an autograd.Function on copies, and its backward outside of regions; return what both give."""
    leaves = []

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor.detach().clone()
        leaves.append(tensor.detach().clone().requires_grad_())
        return leaves[-1].clone()  # which may be written to

    args, kwargs = map_tensors(copied, args), map_tensors(copied, kwargs)
    with random_state_kept():
        results = tensors_in(call(*args, **kwargs))
    reached = [result for result in results if result.requires_grad]
    if not leaves or not reached:
        return results
    with _outside_of_regions(), suppress(Exception):  # one without a backward has no gradients
        gradients = torch.autograd.grad(reached, leaves, [torch.ones_like(r) for r in reached], allow_unused=True)
        results += [gradient for gradient in gradients if gradient is not None]
    return results


def _bits(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers of both, NaN as one that is equal to itself."""
    a, b = a.detach(), b.detach()
    return (a.nan_to_num(), b.nan_to_num()) if a.is_floating_point() else (a, b)


# -- marks -------------------------------------------------------------------------------------------------------------


class _Marker:
    """Marks each region that is entered while this thread traces."""

    def __init__(self) -> None:
        self.open: dict[int, list[Any]] = {}

    def entered(self, region: Any) -> None:
        state = jit.tracing_state()
        if state is not None:
            marks = enter_off(jit.traced_graph(state), [region.device], is_enabled(region))
            self.open.setdefault(id(region), []).append(marks)

    def left(self, region: Any, raised: bool) -> None:
        if self.open.get(id(region)):
            marks, state = self.open[id(region)].pop(), jit.tracing_state()
            if state is not None:
                leave_off(jit.traced_graph(state), marks)


# -- what was traced ---------------------------------------------------------------------------------------------------


def traced_function(function: Any, regions: tuple[str, ...]) -> scripted.ExplicitFunction:
    """Return a traced function; `regions` are the device types that a region around the trace ruled, and rules."""
    inline_calls(function.graph)
    _cast_inside(function.graph, regions)
    method = scripted.Method(function.name, function.schema, function.graph.copy(), {}, fixed=bool(regions))
    return scripted.with_method(function, method)


def traced_module(traced: Any, regions: tuple[str, ...]) -> scripted.ExplicitModule:
    """Return the module that torch traced, with explicit casts; regions: those open around the trace."""
    graphs = graphs_of(traced)
    for graph in graphs:
        mark_calls(graph)
    for graph in graphs:
        inline_calls(graph)
    module = jit.wrap_module(jit.compiled(traced))
    methods = {}
    for name in jit.method_names(module):
        plain = jit.compiled_method(module, name)
        _cast_inside(plain.graph, regions, module, name)
        caller = scripted.caller_of(module, name)
        methods[name] = scripted.Method(name, plain.schema, plain.graph.copy(), {}, module, caller, fixed=bool(regions))
    for graph in graphs_of(module):
        unmark(graph)
    return scripted.with_methods(module, methods)


def _cast_inside(graph: Any, regions: tuple[str, ...], module: Any = None, name: str = "forward") -> None:
    """Cast, in place, what torch has recorded as one op: the rest of the graph is cast already."""
    _tell_inside(graph)
    scopes = {device: scope for device, scope in scripted.ambient({})[1].items() if device in regions}
    policies = [policy_of(scope) for scope in scopes.values()]
    device_type = device_of_regions(scopes.values())
    inside = [node for node in graph.nodes() if policies and casts_inside(node, policies, device_type)]
    for node in graph.nodes():
        if policies and is_closed(node, policies, device_type):
            tell_of_inside(node, site_in(NOWHERE, node))
    if not inside:
        switch_off(graph, regions)
        return
    graph.setInsertPoint(next(iter(graph.nodes())))
    off = enter_off(graph, scopes)
    for node in inside:
        graph.setInsertPoint(node)
        leave_off(graph, off)
        with jit.inserting_after(graph, node):
            off = enter_off(graph, scopes)
    graph.setInsertPoint(graph.block())
    leave_off(graph, off)
    make_graph_explicit(graph, scopes, module, name, marked=True)


def _tell_inside(graph: Any) -> None:
    """Warn of ops in regions inside the traced code that torch has recorded without what they cast."""
    marks: list[bool] = []
    for node in graph.nodes():
        if node.kind() == "prim::Enter" and region_class(node.inputsAt(0)):
            marks.append(has_cast(node.inputsAt(0)))
        elif node.kind() == "prim::Exit" and region_class(node.inputsAt(0)):
            marks.pop()
        elif marks and marks[-1] and casts_inside(node, (), "cpu"):
            name = node.kind().replace("::", ".")
            text = f"narrowcast: {name} ({site_in(NOWHERE, node)}) is in a region inside the traced code, and torch "
            text += "does not record what it casts there: the trace runs it as its inputs are. Open the region around "
            warn_here(f"{text}nc.trace, or use nc.script", ScriptWarning)
