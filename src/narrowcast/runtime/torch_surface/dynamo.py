"""Between Dynamo and us: what it traces, what it must not trace, the compilers that it drives.

Importing Dynamo takes a second: only what runs it already does, so its classes are looked up when they are asked for.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from traceback import walk_stack
from types import CodeType
from typing import Any

import torch
from torch._functorch import config as functorch_configuration

from narrowcast.errors import NarrowcastError, RunError, first_line

InductorCompiler = torch._TorchCompileInductorWrapper
"""What torch.compile makes of backend="inductor"."""
functorch_config: Any = functorch_configuration
"""The settings of AOTAutograd."""
Frame = tuple[str, int, str]
"""A file, a line, and the name of the function there, as Python writes it: `forward`, `<lambda>`."""
_BACKENDS_MODES = (torch._C._TorchDispatchModeKey.FUNCTIONAL, torch._C._TorchDispatchModeKey.PROXY)


def __getattr__(name: str) -> Any:
    if name == "OptimizedModule":  # the class of compiled modules
        return torch._dynamo.OptimizedModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def dynamo_frames() -> tuple[dict[str, Any], tuple[Frame, ...]] | None:
    """Return what Dynamo is tracing on this thread: modules called inside the traced frame, and the frames' places.

    Modules as Dynamo keeps them, by id: a source text and a class. None if Dynamo traces nothing, or has handed its
    graph to a backend that traces now.
    """
    root = dynamo_trace()
    if root is None:
        return None
    frames = []
    inner = tx = root.output.current_tx
    while inner is not None:
        frames.append((inner.f_code.co_filename, inner.lineno, inner.f_code.co_name))
        inner = getattr(inner, "parent", None)
    return dict(tx.nn_module_stack), tuple(reversed(frames))


def dynamo_trace() -> Any:
    """Return what Dynamo keeps of the frame that it traces on this thread. None if it traces nothing, or has handed its
    graph to a backend that traces now.
    """
    return None if _backend_traces() else _dynamo_root()


def _backend_traces() -> bool:
    return any(torch._C._get_dispatch_mode(key) is not None for key in _BACKENDS_MODES)


def _dynamo_root() -> Any:
    convert = sys.modules.get("torch._dynamo.symbolic_convert")
    return getattr(getattr(convert, "tls", None), "current_tx", None)


def dynamo_code() -> CodeType | None:
    """Return the code of the frame that Dynamo is compiling on this thread, its backend included; None for none."""
    code: CodeType | None = getattr(_dynamo_root(), "f_code", None)
    return code


def is_resumption(code: CodeType) -> bool:
    """Return whether Dynamo made this code to go on behind a graph break."""
    return code.co_name.startswith("torch_dynamo_resume_in")


def traced_local(name: str) -> Any:
    """Return the object that a local variable of the frame that Dynamo is tracing represents."""
    from torch._dynamo.symbolic_convert import tls

    return tls.current_tx.output.current_tx.symbolic_locals[name].realize().value


def on_dynamo_cleanup(clean_up: Callable[[], None]) -> None:
    """Have Dynamo call this when it is done with what it traces now, or gives it up. Nothing if it traces nothing."""
    root = _dynamo_root()
    if root is not None:
        root.output.add_cleanup_hook(clean_up)


@contextmanager
def watch_frames() -> Iterator[list[tuple[str, int, str]]]:
    """Collect where Dynamo leaves a frame, or from torch 2.15 on a call in it, to Python: file, line, why.

    Filled in at the end, from Dynamo's own records, which keep the last 64 frames.
    """
    from torch._dynamo.utils import get_compilation_metrics, graph_break_reasons

    left: list[tuple[str, int, str]] = []
    earlier = {id(metrics) for metrics in get_compilation_metrics()}
    breaks = len(graph_break_reasons)
    try:
        yield left
    finally:
        for metrics in get_compilation_metrics():
            if id(metrics) not in earlier and metrics.fail_type:
                reason = _first_sentences(str(metrics.fail_reason or metrics.fail_type))
                left.append((metrics.fail_user_frame_filename or "", metrics.fail_user_frame_lineno or 0, reason))
        for broken in graph_break_reasons[breaks:]:
            if broken.user_stack:
                frame = broken.user_stack[-1]
                left.append((frame.filename, frame.lineno or 0, _first_sentences(str(broken.reason))))


def _first_sentences(reason: str) -> str:
    """Return Dynamo's message, and its explanation, in one line."""
    first, *rest = reason.strip().splitlines()
    explained = next((line.strip() for line in rest if line.strip().startswith("Explanation:")), "")
    return f"{first}: {explained.removeprefix('Explanation:').strip()}" if explained else first


def inner_compiler(
    backend: str | Callable[..., Any], mode: str | None, options: dict[str, Any] | None, dynamic: bool | None
) -> Callable[..., Any]:
    """Return the compiler that torch.compile makes of these arguments; equal arguments make equal compilers.

    Raises NarrowcastError for a backend that torch.compile does not know.
    """
    if backend == "inductor":
        return torch._TorchCompileInductorWrapper(mode, options, dynamic)
    if not callable(backend) and backend not in torch._dynamo.list_backends(exclude_tags=()):
        raise NarrowcastError(
            asked=f"backend={backend!r}", found="torch.compile knows no such backend",
            advice=f"Give one of {', '.join(torch._dynamo.list_backends())}, or a function.",
        )  # fmt: skip
    return torch._TorchCompileWrapper(backend, mode, options, dynamic)


def compiler_text(compiler: Any) -> str:
    """Return a description of a compiler that is the same in every process: a function by its name."""
    facts = vars(compiler).items() if hasattr(compiler, "__dict__") else ()
    named = {k: f"{v.__module__}.{v.__qualname__}" if hasattr(v, "__qualname__") else v for k, v in facts}
    return f"{type(compiler).__name__}{named}"


def without_wrappers(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled graph without the wrapper that keeps Dynamo out, for code that Dynamo skips as a whole."""
    from torch._dynamo.eval_frame import innermost_fn

    inner: Callable[..., Any] = innermost_fn(compiled)
    return inner


def forget_original(compiled: Any) -> None:
    """Keep what compiles this module again from looking through it to the one that it was compiled of."""
    for name in ("_torchdynamo_orig_callable", "get_compiler_config"):
        compiled.__dict__.pop(name, None)


def begins_again(error: Exception) -> bool:
    """Return whether a compiler asks Dynamo with this exception to trace again, which is no failure."""
    return isinstance(error, torch._dynamo.exc.RestartAnalysis)


@cache
class CompiledCode:
    """`with CompiledCode(on=False):` what torch.compile compiled runs as eager code inside, on every thread; inside
    that, `with CompiledCode(on=True):` lets it run. Nothing where Dynamo was never needed. Left in any order: what was
    before holds again when the last one that switched it off is left.
    """

    _lock = threading.Lock()
    _holders = 0
    _first: Any = None

    def __init__(self, on: bool) -> None:
        self._on = on
        self._holds = False

    def __enter__(self) -> None:
        if "torch._dynamo" not in sys.modules:
            return
        with CompiledCode._lock:
            self._holds = True
            if self._on:
                if CompiledCode._holders:
                    torch.compiler.set_stance("default")  # from here on
                return
            if not CompiledCode._holders:
                try:
                    CompiledCode._first = torch.compiler.set_stance("force_eager")
                except RuntimeError as error:  # torch takes none in code that it compiled
                    self._holds = False
                    found = "it is inside of a function that torch.compile compiled"
                    advice = "Put it around the call of that function."
                    raise RunError("a block that observes calls", found, advice=advice) from error
            CompiledCode._holders += 1

    def __exit__(self, *raised: object) -> None:
        if not self._holds:
            return
        with CompiledCode._lock:
            if not self._on:
                CompiledCode._holders -= 1
                if not CompiledCode._holders:
                    CompiledCode._first.__exit__(None, None, None)
            elif CompiledCode._holders:
                torch.compiler.set_stance("force_eager")


@contextmanager
def between_compilations() -> Iterator[None]:
    """Hold Dynamo's lock, so that no other thread compiles inside: what it has read by then would be another at the end
    of its compilation, where it writes its guards. After a while without it, go on.
    """
    frames = sys.modules.get("torch._dynamo.convert_frame")
    lock = getattr(frames, "compile_lock", None)
    holds = lock is not None and lock.acquire(timeout=_PATIENCE)
    try:
        yield
    finally:
        if lock is not None and holds:
            lock.release()


_PATIENCE = 60.0
"""Seconds to wait for another thread's compilation."""


def in_compiled_code() -> bool:
    """Return whether torch.compile compiled the code that calls this, even if it runs as eager code now."""
    if "torch._dynamo" not in sys.modules:
        return False
    return any(f.f_code.co_filename.endswith(_COMPILED_CALLS) for f, _ in walk_stack(sys._getframe(1)))


_COMPILED_CALLS = f"torch{os.sep}_dynamo{os.sep}eval_frame.py"


def missing_cpp_compiler(named: str | None) -> str:
    """Return why Inductor finds no C++ compiler, first line; empty where it finds one. named: the variable CXX."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        compiler = get_cpp_compiler()
    except Exception as error:
        return first_line(error)
    return "" if shutil.which(compiler) else f"{compiler} is not there"


def load_cpp(source: str) -> Any:
    """Return a library of C++ that Inductor compiles for this machine, and keeps; with its flags, but for loops in
    vector code, which it writes itself, and square roots that may set errno.
    """
    from torch._inductor.codecache import CppCodeCache

    return CppCodeCache.load(source, extra_flags=("-ftree-loop-vectorize", "-fno-math-errno"))


def register_backend(name: str, backend: Callable[..., Any]) -> None:
    """Enter a backend into Dynamo's registry, unless it is there."""
    from torch._dynamo.backends import registry

    if name not in registry._COMPILER_FNS:
        registry.register_backend(backend, name=name)


def forget_compiled_code() -> None:
    """Compile code that Dynamo has compiled again at its next call. Nothing if Dynamo never ran."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


def constant_for_dynamo(function: Callable[..., Any]) -> None:
    """Let Dynamo run this function while it traces, and take what it returns for a constant."""
    function.__dict__["_dynamo_marked_constant"] = True  # torch._dynamo.assume_constant_result, without its import


def allow_in_graph(*functions: Callable[..., Any]) -> None:
    """Let Dynamo put calls of these functions into its graphs. For use while it traces: it may not be loaded before."""
    for function in functions:
        torch._dynamo.allow_in_graph(function)


def know_torchs_call(call: Callable[..., Any]) -> None:
    """Have Dynamo know torch's own call of modules: it takes what it finds when it is imported for that."""
    for name in ("torch._dynamo.utils", "torch._dynamo.variables.nn_module"):
        vars(importlib.import_module(name))["unpatched_nn_module_call_impl"] = call


def never_trace(*functions: Callable[..., Any], with_calls: bool = True) -> None:
    """Let Dynamo leave these functions, and what they call, to Python: they change the state that it guards on.

    What `torch._dynamo.disable` does for a frame, without importing Dynamo, which takes a second.
    """
    frames: Any = torch._C._dynamo.eval_frame
    skip, default = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
    for function in functions:
        strategy = frames._FrameExecStrategy(skip, skip if with_calls else default)
        frames.set_code_exec_strategy(function.__code__, strategy)


never_begin_at = partial(never_trace, with_calls=False)
"""Dynamo compiles no frame of these functions by itself. What they call it may; inside others it follows them."""


def wrapped_in(error: BaseException) -> BaseException | None:
    """Return the error for which Dynamo raised one of its own, if it is known; any other error itself. Since torch 2.14
    a RuntimeError stands between, of what fake tensors met.
    """
    inner: BaseException | None = error
    while inner is not None and type(inner).__module__.startswith("torch._dynamo"):
        inner = getattr(inner, "inner_exception", None) or inner.__cause__ or inner.__context__
    is_between = inner is not error and inner is not None and isinstance(inner.__cause__, NarrowcastError)
    return inner.__cause__ if is_between and inner is not None else inner


def is_traced(types: Iterable[type]) -> bool:
    """Return whether tensors of these types are those of no run, but of code that is traced on this thread: by Dynamo
    or a backend, or for the derivative of an op of higher order.
    """
    fx = sys.modules.get("torch._subclasses.fake_tensor")
    is_fake = fx is not None and any(issubclass(t, fx.FakeTensor) for t in types)
    return is_fake and (_dynamo_root() is not None or _backend_traces())


def tracing_compiled_code() -> bool:
    """Return whether a backend of torch.compile is tracing on this thread: the stack lacks the user's frames then."""
    return torch._guards.TracingContext.try_get() is not None and not torch.compiler.is_exporting()
