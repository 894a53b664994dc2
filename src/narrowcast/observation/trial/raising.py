"""The call that raises in a run, seen by modes: torch's functions, and ops."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode

from narrowcast.core.policy import Site
from narrowcast.observation.observer.mode import WatchingMode
from narrowcast.observation.observer.words import format_names
from narrowcast.runtime.sites.python_stack import find_site
from narrowcast.runtime.torch_bridge import find_op, op_id, tensors_in
from narrowcast.runtime.torch_surface.dispatch import OpOverload
from narrowcast.runtime.torch_surface.dynamo import in_compiled_code


def said_of(error: RuntimeError) -> str:
    """Return the line of an error with the cause; TorchScript at times names only the code."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if "TorchScript interpreter" not in lines[0]:
        return lines[0]
    code = next((before for before, line in itertools.pairwise(lines) if "<--- HERE" in line), "")
    return lines[-1].removeprefix("RuntimeError:").strip() or f"a script raised at {code!r}"


class Raising:
    """The innermost call that raised: its op, or function, the formats that it got, where it was made, what was called
    with what. compiled: ops to which its own is added, if torch.compile compiled the code that calls it.
    """

    def __init__(self, compiled: set[str] | None = None) -> None:
        self.op, self.formats = "", ""
        self.site: Site | None = None
        self.called: Callable[..., Any] | None = None
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self._compiled = set() if compiled is None else compiled

    def note(self, op: str, called: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a call raised; calls around it raise after it."""
        if self.site is None:
            self.op, self.site = op, find_site()
            self.formats = format_names([t.dtype for t in tensors_in(args, kwargs)])
            self.called, self.args, self.kwargs = called, args, kwargs
            self._compiled |= {op} if in_compiled_code() else set()


class SeeFunctions(TorchFunctionMode):
    """Sees calls of torch's functions: those that raise before any op runs are seen by nobody else."""

    def __init__(self, seen: Raising) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except Exception:
            name = getattr(func, "__name__", str(func))
            op = find_op(f"aten.{name}.default")
            self._seen.note(op_id(op) if op is not None else f"torch's {name}", func, args, kwargs)
            raise


class SeeOps(WatchingMode):
    """Sees ops, which run with autocast on if it is: kernels that call other ops must find it so."""

    def __init__(self, seen: Raising) -> None:
        super().__init__([])
        self._seen = seen

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self._execute(func, args, kwargs or {}, self._autocast_on())
        except Exception:
            self._seen.note(op_id(func), func, args, kwargs or {})
            raise
