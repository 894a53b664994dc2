"""Script functions and modules with explicit casts, and what they do when they are called inside a region.

A script's graph has the casts of its own regions and of the one that it was made with: that graph is saved. Called
inside a region, eager or native, it is converted once more from the graph that it was made of, with that region around
it, and the result runs with autocast off. So what the script switches off is off, whatever calls it, and what it leaves
open follows the caller.

A script that was given no region is a part of what calls it: rules about places mean it as eager code does, by paths
from the outermost module that is called. One that was given a region is a program of its own: paths begin at it.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from narrowcast.core.policy import NOWHERE, Policy, Site
from narrowcast.frontends.scripts import callers
from narrowcast.frontends.scripts.boundaries import Modules, bound_whole
from narrowcast.frontends.scripts.convert import inline_calls, make_graph_explicit
from narrowcast.frontends.scripts.scopes import Scope, Scopes, close_passages
from narrowcast.reports.results.graphs import CompiledGraph
from narrowcast.runtime.regions.failures import note_failure
from narrowcast.runtime.regions.pinned import Pin
from narrowcast.runtime.regions.ruling import ruling_regions
from narrowcast.runtime.sites.graph_nodes import are_wanted, inside_script
from narrowcast.runtime.sites.python_stack import called_modules, find_site, module_path, path_around
from narrowcast.runtime.torch_bridge import DTYPES, FORMATS
from narrowcast.runtime.torch_surface import jit
from narrowcast.runtime.torch_surface.dynamo import never_trace
from narrowcast.runtime.torch_surface.state import any_autocast, autocast_off


@dataclass(slots=True)
class Method:
    """One function of a script: the graph that it was made of, what was done to it, and its forms in other regions.

    fixed: traced in its regions: it leaves nothing open. called: by another method of its module; TorchScript keeps
    what it inlined then, and would run that instead of the graph. asked: what rules of its own regions ask of places.
    """

    name: str
    schema: Any
    raw: Any
    around: Scopes
    module: Any = None
    caller: Site = NOWHERE
    fixed: bool = False
    called: bool = False
    asked: frozenset[str] = frozenset()
    variants: dict[tuple[Any, ...], Any] = field(default_factory=dict)
    lock: Any = field(default_factory=threading.Lock)

    def convert_own(self, graph: Any) -> None:
        """Convert the graph that others get, in place, with the method's own regions."""
        reading, _ = make_graph_explicit(graph, self.around, self.module, self.name, self.caller)
        self.asked = frozenset().union(*(_asked_of_sites(policy) for policy in reading.policies.values()))

    def run(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call it, in whatever region we are."""
        try:
            return self._run(plain, args, kwargs)
        except RuntimeError as error:
            scope = next(iter(self.around.values()), None)
            low = "" if scope is None else str(FORMATS.get(scope.low, ""))
            note_failure(error, "cpu" if scope is None else scope.device_type, low=low)
            raise

    def _run(self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_on = any_autocast()
        key, scopes, asked = ambient(self.around) if is_on and not self.fixed else ((), {}, frozenset())
        observed = are_wanted()  # then in a form that says where it is, paths and lines as eager code has them
        caller = self._called_from(_NAMES if observed else asked | self.asked)
        if not (scopes or observed or self.called) and caller == self.caller:
            with autocast_off() if is_on else nullcontext(), _as_written():
                return plain(*args, **kwargs)
        with self.lock:
            begins = ("call" not in asked and not observed) or self._begins()
            name = (observed, *key, caller, begins)
            if name not in self.variants:
                graph, around = self.raw.copy(), {**scopes, **self.around}
                with jit.not_traced():
                    make_graph_explicit(graph, around, self.module, self.name, caller, False, observed, begins)
                self.variants[name] = jit.function_from_graph(self.name, graph)
            variant = self.variants[name]
        with autocast_off(), _as_written(), inside_script() if observed else nullcontext():
            return variant(*self._bound(args, kwargs))

    def _begins(self) -> bool:
        """Return whether it begins where the call of a module does, or no module is around its call."""
        is_call = isinstance(self.module, torch.nn.Module) and callers.is_forward(self.name)
        return is_call or not called_modules()

    def _called_from(self, asked: frozenset[str]) -> Site:
        """Return what is around everything in the method where it is called now, as far as rules ask for that."""
        if not asked or self.around:
            return self.caller
        here, modules = find_site(), called_modules()
        path, around, classes = here.module_path, here.around, here.classes
        if modules and isinstance(modules[0], torch.jit.ScriptModule):  # the call of this script
            classes = classes[1:]
        elif isinstance(self.module, torch.nn.Module):
            path = module_path([self.module, *modules])
            around = around if modules else path_around([self.module])
        return Site(
            path if "module" in asked else "",
            (*self.caller.classes, *(classes if "module_class" in asked else ())),
            (*self.caller.functions, *(here.functions if "function" in asked else ())),
            around=around if "module" in asked else "",
        )

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return all arguments by position: functions made of graphs know no names and no defaults."""
        arguments = list(self.schema.arguments)
        given: list[Any] = []
        if self.module is not None:
            given.append(self.module)
            arguments = arguments[1:]
        if len(args) > len(arguments):
            raise TypeError(f"{self.name}() takes {len(arguments)} arguments, {len(args)} were given")
        given += args
        left = dict(kwargs)
        for argument in arguments[len(args) :]:
            if argument.name in left:
                given.append(left.pop(argument.name))
            elif argument.has_default_value():
                given.append(argument.default_value)
            else:
                raise TypeError(f"{self.name}() is missing value for argument '{argument.name}'")
        if left:
            raise TypeError(f"{self.name}() got an unexpected argument '{next(iter(left))}'")
        return given

    def explained(self, number: int, scopes: Scopes) -> CompiledGraph:
        """Return what becomes of it in these regions, for explanations."""
        graph, around = self.raw.copy(), self.around if self.fixed else {**scopes, **self.around}
        start = time.perf_counter()
        reading, outcome = make_graph_explicit(graph, around, self.module, self.name, self.caller, marked=False)
        seconds = time.perf_counter() - start
        first = next((step.site for step in reading.program.steps.values() if step.site.file), NOWHERE)
        return CompiledGraph(
            number, first, reading.program, outcome.program, edits=outcome.edits, policies=reading.policies,
            hidden=reading.hidden, seconds=seconds,
        )  # fmt: skip


def _as_written() -> Any:
    """Run a graph as it stands. TorchScript's executor would take an `addmm` apart, make one of equal casts, which then
    add up gradients in the low format, and give some gradients in the format of the wrong operand.
    """
    return torch.jit.optimized_execution(False) if jit.optimizes() else nullcontext()  # type: ignore[attr-defined]


def ambient(around: Scopes) -> tuple[tuple[Any, ...], Scopes, frozenset[str]]:
    """Return the regions around us, without those that a script's own replace; a key for them; what rules ask."""
    scopes: Scopes = {}
    key: list[Any] = []
    asked: frozenset[str] = frozenset()
    for device_type, region in ruling_regions().items():
        if device_type not in around:
            facts, policy = region.prepared.facts, region.prepared.policy
            scopes[device_type] = Scope(device_type, facts.enabled, DTYPES[facts.low], policy.digest, facts.cache)
            key.append((facts, policy.digest))
            asked |= _asked_of_sites(policy)
    return tuple(key), scopes, asked


_NAMES = frozenset(("module", "module_class", "function"))


@functools.cache
def _asked_of_sites(policy: Policy) -> frozenset[str]:
    """Return what a policy's rules ask of the places of calls: `module`, `module_class`, `function`, and `call`."""
    return frozenset(n for n in (*_NAMES, "call") for rule in policy.rules if getattr(rule, n) is not None)


class ExplicitFunction(torch.jit.ScriptFunction):  # type: ignore[type-arg]
    """A script function whose casts are explicit."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it; regions around the call hold in what the script leaves open."""
        return methods_of(self)["forward"].run(super().__call__, args, kwargs)


class ExplicitModule(torch.jit.RecursiveScriptModule):  # type: ignore[name-defined, misc]
    """A script module whose casts are explicit."""

    def __getattr__(self, attr: str) -> Any:
        """A method that runs in whatever region it is called, or anything else that a script module has."""
        methods = self.__dict__.get("_narrowcast_methods", {})
        if attr in methods and attr in jit.method_names(self):  # and is no hook
            return BoundMethod(methods[attr], jit.compiled_method(self, attr))
        return super().__getattr__(attr)

    def __copy__(self) -> ExplicitModule:
        return _as_explicit(super().__copy__(), methods_of(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> ExplicitModule:
        return _as_explicit(super().__deepcopy__(memo), methods_of(self))


class BoundMethod:
    """A method of an ExplicitModule; whatever else is asked of it, torch's own script method answers."""

    def __init__(self, method: Method, plain: Any) -> None:
        self._method = method
        self._plain = plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it; regions around the call hold in what the script leaves open."""
        return self._method.run(self._plain, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


class BoundHook(BoundMethod):
    """A hook of an ExplicitModule."""

    def __call__(self, module: Any, *args: Any) -> Any:
        """Call it, as a method is called."""
        return self._method.run(functools.partial(self._plain, module), args, {})


# Dynamo calls scripts, and does not look into them
never_trace(ExplicitFunction.__call__, BoundMethod.__call__, BoundHook.__call__)


def explicit_function(
    function: Any, around: Scopes, written: Callable[..., Any] | None = None, pin: Pin | None = None
) -> ExplicitFunction:
    """Return the script function, with explicit casts from here on. written: the Python function it was made of."""
    graph = function.graph
    callers.mark_calls(graph)
    if pin is not None:
        bound_whole(graph, [a.name for a in function.schema.arguments], pin, is_method=False)
    inline_calls(graph)
    name = callers.function_name(written) if written is not None else ""
    caller = Site(functions=(name,)) if name else NOWHERE
    method = Method(function.name, function.schema, graph.copy(), around, caller=caller)
    method.convert_own(graph)
    return with_method(function, method)


def explicit_module(module: Any, around: Scopes, written: torch.nn.Module | None = None) -> ExplicitModule:
    """Return the script module, all methods of its own with explicit casts. written: what it was made of."""
    modules, graphs = Modules.of(module, written), callers.graphs_of(module)
    for graph in graphs:
        callers.mark_calls(graph, modules.bound)
    calls = [node for graph in graphs for node in graph.findAllNodes("prim::CallMethod")]
    called = {node.s("name") for node in calls}
    chosen = any(node.inputsAt(0).type().kind() == "InterfaceType" for node in calls)
    parts = {jit.find_type(part): part for part in (module.modules() if chosen else [module])}
    compiled: dict[tuple[str, str], Any] = {}
    for kind, part in parts.items():
        for name, plain in jit.compiled_methods(part).items():
            if name == "forward":
                bound_whole(plain.graph, modules.arguments[kind], modules.pins.get(kind), is_method=True)
            compiled[kind, name] = plain
    for plain in compiled.values():  # before any is changed: they call each other
        inline_calls(plain.graph)
    methods = {}
    for (kind, name), plain in compiled.items():
        regions, owner = (around, module) if kind == jit.find_type(module) else ({}, None)
        made_of = (name, plain.schema, plain.graph.copy())
        methods[kind, name] = Method(*made_of, regions, owner, caller_of(parts[kind], name), called=name in called)
    for key, plain in compiled.items():
        methods[key].convert_own(plain.graph)
    for graph in graphs:
        callers.unmark(graph)
        close_passages(graph)
    own = {name: method for (_, name), method in methods.items() if method.module is module}
    for name in own:
        module.__dict__.pop(name, None)
    return with_methods(module, own)


def with_method(function: Any, method: Method) -> ExplicitFunction:
    """Return a script function, whose graph is explicit, as one that knows its method."""
    function.__class__ = ExplicitFunction
    function._narrowcast_methods = {"forward": method}
    return function  # type: ignore[no-any-return]


def with_methods(module: Any, methods: dict[str, Method]) -> ExplicitModule:
    """Return a script module, whose graphs are explicit, as one that knows its methods."""
    module.__class__ = ExplicitModule
    module.__dict__["_narrowcast_methods"] = methods
    for hooks, compiled in jit.hooks_of(module):
        hooks.update((n, BoundHook(methods[hook.name], hook)) for n, hook in enumerate(compiled))
    return module  # type: ignore[no-any-return]


def _as_explicit(module: Any, methods: dict[str, Method]) -> ExplicitModule:
    copies = {n: replace(m, module=module, variants={}, lock=threading.Lock()) for n, m in methods.items()}
    return with_methods(module, copies)


def caller_of(module: Any, method: str) -> Site:
    """Return what is around everything in a method: the module's class, and the method itself."""
    kind = callers.class_name(jit.find_type(module))
    name = callers.method_name(kind, method)
    return Site(classes=(kind,), functions=(name,) if name else ())


def methods_of(script: Any) -> dict[str, Method]:
    """Return what was done to each function of a script; nothing for other objects."""
    methods: dict[str, Method] = getattr(script, "__dict__", {}).get("_narrowcast_methods") or {}
    return methods
