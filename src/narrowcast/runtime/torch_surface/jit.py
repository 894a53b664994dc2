"""TorchScript: compiled graphs, the passes that change them, the compiler's parts that we stand in for."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import _jit_internal
from torch.jit import _recursive, _script, _state, frontend

from narrowcast.runtime.torch_surface.patches import Wrap, held

BOOL, INT = torch._C.BoolType.get(), torch._C.IntType.get()
NONE, TENSOR = torch._C.NoneType.get(), torch._C.TensorType.get()
PREPACKED = "prim::ConstantMKLDNNTensor"
"""What torch.jit.optimize_for_inference makes of weights."""
TensorType, ListType, OptionalType = torch._C.TensorType, torch._C.ListType, torch._C.OptionalType
ScriptFunction, ScriptMethod = torch._C.ScriptFunction, torch._C.ScriptMethod
TracedModule, TopTracedModule = torch.jit.TracedModule, torch.jit.TopLevelTracedModule  # type: ignore[attr-defined]

tracing_state = torch._C._get_tracing_state
"""What torch.jit.trace is writing on this thread; None if it traces nothing."""
_set_tracing_state = torch._C._set_tracing_state  # type: ignore[attr-defined]
optimizes = torch._C._get_graph_executor_optimize
"""Whether scripts are optimized when they run."""
function_from_graph = torch._C._create_function_from_graph
"""A script function of this name with this graph."""
is_ignored = _jit_internal.is_ignored_fn
"""Whether scripts call a function in Python, or not at all."""
wrap_module = _recursive.wrap_cpp_module
"""The Python object of a compiled module."""


def traced_graph(state: Any) -> Any:
    """Return the graph that a tracing state writes to."""
    return state.graph() if callable(state.graph) else state.graph


@contextmanager
def deprecations_unsaid() -> Iterator[None]:
    """Silence torch's deprecation of all of TorchScript, which users have seen before."""
    with warnings.catch_warnings():
        for category in (DeprecationWarning, FutureWarning):  # the second one since torch 2.14
            warnings.filterwarnings("ignore", message="`torch.jit", category=category)
        yield


# -- passes ------------------------------------------------------------------------------------------------------------

_lock = threading.Lock()
_off = 0
_before = True


@contextmanager
def own_pass_off() -> Iterator[None]:
    """Switch torch's autocast pass off for the process inside, on any number of threads; afterwards it is as before."""
    global _off, _before
    with _lock:
        if not _off:
            _before = torch._C._jit_set_autocast_mode(False)
        _off += 1
    try:
        yield
    finally:
        with _lock:
            _off -= 1
            if not _off:
                torch._C._jit_set_autocast_mode(_before)


def inline(graph: Any) -> None:
    """Replace calls of functions and methods by their bodies, without the casts of torch's own pass."""
    with own_pass_off():
        torch._C._jit_pass_inline(graph)


def simplify(graph: Any) -> None:
    """Decide what constants and types decide, and remove lists that are taken apart at once. Torch's peephole pass
    would do more: it takes `x * 1` for x, and then a result for a weight.
    """
    torch._C._jit_pass_peephole_list_idioms(graph)  # type: ignore[attr-defined]
    for node in (*graph.findAllNodes("aten::__is__"), *graph.findAllNodes("aten::__isnot__")):
        kinds = {value.type().kind() for value in node.inputs()}
        if "NoneType" in kinds and kinds <= {"NoneType", "TensorType"}:
            graph.setInsertPoint(node)
            is_none, asks = len(kinds) == 1, node.kind() == "aten::__is__"
            node.output().replaceAllUsesWith(graph.insertConstant(is_none == asks))
    graph.setInsertPoint(graph.block())
    torch._C._jit_pass_constant_propagation_immutable_types(graph)  # type: ignore[attr-defined]


def inserted(graph: Any, kind: str, inputs: list[Any], type_of: Any) -> Any:
    """Return the output of a new node, a value of this type; the node is inserted where the graph is written to."""
    node = graph.insertNode(graph.create(kind, inputs, 1))
    node.output().setType(type_of)
    return node.output()


@contextmanager
def inserting_after(graph: Any, node: Any) -> Iterator[None]:
    """Insert inside behind this node; afterwards, at the end of the graph."""
    mark = graph.create("prim::Constant", [], 1)
    mark.insertAfter(node)
    graph.setInsertPoint(mark)
    yield
    graph.setInsertPoint(graph.block())
    mark.destroy()


forget_shapes = torch._C._jit_pass_erase_shape_information
"""Values have the types that scripts give them: element types and sizes of a trace are forgotten."""
drop_unused = torch._C._jit_pass_dce
"""What nothing reads goes."""


# -- compiled modules and functions ------------------------------------------------------------------------------------


def method_names(module: Any) -> list[str]:
    """Return the names of a script module's compiled methods."""
    return list(module._c._method_names())


def compiled_method(module: Any, name: str) -> Any:
    """Return a script module's compiled method."""
    return module._c._get_method(name)


def hooks_of(module: Any) -> list[tuple[dict[int, Any], list[Any]]]:
    """Return where a script module keeps its hooks before and after `forward`, and these as they were compiled."""
    before, after = module._c._get_forward_pre_hooks(), module._c._get_forward_hooks()
    return [(module._forward_pre_hooks, before), (module._forward_hooks, after)]


def compiled_methods(module: Any) -> dict[str, Any]:
    """Return a script module's compiled methods and hooks, by name."""
    hooks = {hook.name: hook for _, compiled in hooks_of(module) for hook in compiled}
    return {name: compiled_method(module, name) for name in method_names(module)} | hooks


compiled: Callable[[Any], Any] = attrgetter("_c")
"""The compiled module behind a script module: `getattr`, `hasattr` and `setattr` of its attributes."""


def find_type(module: Any) -> str:
    """Return the qualified name of a script module's compiled type."""
    return str(module._c._type().qualified_name())


def field_names(type_of: Any) -> list[str]:
    """Return the names of a tuple type's fields, which only its text has: `NamedTuple(a : Tensor, b : (Tensor, int))`;
    none of a tuple without names.
    """
    name, _, fields = type_of.str().partition("(")
    depth, names, start = 0, [], 0
    for at, letter in enumerate(fields):
        if letter == ":" and not depth:
            names.append(fields[start:at].strip())
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            start = at + 1
    return names if name == "NamedTuple" else []


def python_class(module: Any) -> type | None:
    """Return the class that a script module was compiled from; None where it was loaded."""
    kind: type | None = getattr(module.__dict__.get("_concrete_type"), "py_class", None)
    return kind


compiler_lock = threading.RLock()
"""TorchScript's compiler and its tracer keep state of the process: one thread at a time."""


@contextmanager
def compiler_replaced(get_closure: Wrap, script: Wrap, is_own: Callable[[Any], bool]) -> Iterator[None]:
    """Replace what the compiler asks of a function: the names that it sees, and its own script when it is called.

    What it makes of modules, and of functions that `is_own` names, is not kept: outside it is compiled without us.
    """
    own: dict[Any, Any] = {}

    def get(kept: Any) -> Any:
        return lambda function: own.get(function) if is_own(function) else kept(function)

    def keep(kept: Any) -> Any:
        return lambda function, script: own.update({function: script}) if is_own(function) else kept(function, script)

    def unshared(get_type: Any) -> Any:
        return lambda module, share_types=True: get_type(module, False)

    why = "functions that are decorated with regions are compiled as scripts"
    with (
        held(_jit_internal, why, get_closure=get_closure),
        held(torch.jit, why, script=script),
        held(_script, why, _try_get_jit_cached_function=get, _set_jit_function_cache=keep),
        held(_recursive, why, get_module_concrete_type=unshared),
    ):
        yield


@contextmanager
def parser_replaced(parse_def: Wrap) -> Iterator[None]:
    """Replace the parsing of a function's source. One thread at a time. One thread at a time."""
    with compiler_lock, held(frontend, "regions are written so that the compiler takes them", parse_def=parse_def):
        yield


@contextmanager
def script_calls_replaced(wrap: Wrap, why: str) -> Iterator[None]:
    """Replace the calls of script functions and methods."""
    with held(ScriptFunction, why, __call__=wrap), held(ScriptMethod, why, __call__=wrap):
        yield


def forks_replaced(fork: Wrap, wait: Wrap) -> AbstractContextManager[None]:
    """Replace what torch.jit.fork and torch.jit.wait call."""
    return held(torch._C, "traces follow forks", fork=fork, wait=wait)


def function_calls_replaced(wrap: Wrap) -> AbstractContextManager[None]:
    """Replace `apply` of torch.autograd.Function, which takes the class first."""
    return held(torch.autograd.Function, "traces compare autograd functions", apply=wrap)


@contextmanager
def not_traced() -> Iterator[None]:
    """Keep what this thread does out of the trace that it is writing, where sizes that are read are calls."""
    state = tracing_state()
    _set_tracing_state(None)
    try:
        yield
    finally:
        _set_tracing_state(state)


@contextmanager
def recorded_inside(names: Iterable[str]) -> Iterator[None]:
    """Let torch.jit.trace record what these ops (aten::...) call, not their own calls. One thread at a time."""
    library = torch.library.Library("aten", "IMPL")
    names = list(names)
    _inside.update(names)
    before, _tracers[:] = list(_tracers), [threading.get_ident()]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that a kernel is overridden, which is the purpose
            for name in names:
                library.impl(name, torch.library.fallthrough_kernel, "Tracer", allow_override=True)
        yield
    finally:
        library._destroy()
        _inside.difference_update(names)
        _tracers[:] = before


_inside = set[str]()
_tracers: list[int] = []  # the thread inside


def is_inside_recorded() -> bool:
    """Return whether this call is made by an op that a trace of ours, on this thread, records as one call."""
    return bool(_tracers) and tracing_state() is None and threading.get_ident() in _tracers


def records_whole(op: str) -> bool:
    """Return whether a trace that runs on this thread records calls of this op (`aten::sum`), not what it calls."""
    return tracing_state() is not None and op not in _inside


def add_text(module: Any, name: str, text: str) -> Any:
    """Return the script module, with an attribute that is saved with it; an attribute that it has is overwritten."""
    if module._c.hasattr(name):
        module._c.setattr(name, text)
    else:
        module._c._register_attribute(name, torch._C.StringType.get(), text)
    return module


# -- the compiler ------------------------------------------------------------------------------------------------------


def script_function(function: Callable[..., Any]) -> Any:
    """Return a new script function, which is not shared."""
    definition = frontend.get_jit_def(function, function.__name__)
    callback = _jit_internal.createResolutionCallbackFromClosure(function)
    name = _jit_internal._qualified_name(function)
    script = torch._C._jit_script_compile(name, definition, callback, frontend.get_default_args(function))
    script.__doc__ = function.__doc__
    return script


def script_module(module: torch.nn.Module) -> Any:
    """Return a new script module, whose types no other module shares. Methods that objects have of their own are those
    of their classes otherwise, if these have some.
    """

    def stubs_of(part: torch.nn.Module) -> Any:
        stubs = _recursive.infer_methods_to_compile(part)
        known = {stub.def_.name().name for stub in stubs}
        own = [n for n, method in own_methods(part).items() if not is_ignored(method)]
        new = [name for name in own if name not in known and hasattr(type(part), name)]
        return stubs + [_recursive.make_stub_from_method(part, name) for name in new]

    prepared = _script.call_prepare_scriptable_func(module)
    return _recursive.create_script_module(prepared, stubs_of, share_types=False)


def own_methods(module: torch.nn.Module) -> dict[str, Any]:
    """Return the methods that an object has as attributes, by name: its class's, decorated, and others."""

    def method(value: Any) -> Any:
        return inspect.unwrap(value, stop=inspect.ismethod) if inspect.isroutine(value) else None

    return {name: value for name, value in vars(module).items() if inspect.ismethod(method(value))}


def add_script_class(python_class: type, source: type, name: str) -> None:
    """Have TorchScript take `python_class` for what it compiles from `source`, under a qualified name."""
    callback = _jit_internal.createResolutionCallbackForClassMethods(source)
    compiled = _recursive._compile_and_register_class(source, callback, name)
    torch.jit._state._add_script_class(python_class, compiled)


def script_classes(interface: Any = None) -> dict[str, type]:
    """Return the classes that TorchScript has compiled, by qualified name; only those that fit an interface."""
    known = _state._script_classes.items()
    return {str(t.qualified_name()): kind for kind, t in known if interface is None or t.isSubtypeOf(interface)}


class_method: Callable[[str], Any] = _state._python_cu.find_function
"""A method of such a class, by qualified name."""


def compiled_functions() -> list[Any]:
    """Return all functions and methods, of classes and modules, that TorchScript has compiled here, in that order."""
    compiled: Any = _state._python_cu
    return list(compiled.get_functions())
