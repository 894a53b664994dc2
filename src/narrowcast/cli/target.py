"""A TARGET: a Python file or a dotted path with a `case()`."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import narrowcast as nc
from narrowcast.errors import Origin, TargetError

_ADVICE = (
    "TARGET is a file (examples/minilm.py) or a dotted path (package.module), with `:function` for another name than "
    "case; the function takes nothing and returns narrowcast.Case(model, inputs, evaluate=..., name=...)."
)


def load_case(target: str) -> nc.Case:
    """Return the case that TARGET names. TargetError if it cannot be imported, or its function fails or gives none."""
    path, _, function = target.partition(":") if not Path(target).exists() else (target, "", "")
    module = _import(path, target)
    name = function or "case"
    make = getattr(module, name, None)
    if not callable(make):
        origin = Origin(getattr(module, "__file__", None) or path)
        raise _wrong(target, f"it defines no function {name}()", origin)
    try:
        case = make()
    except (Exception, SystemExit) as error:
        advice = f"{_ADVICE} narrowcast --traceback shows where it raised."
        raise _wrong(target, f"{name}() raised {type(error).__name__}: {error}", _where(error, path), advice) from error
    if not isinstance(case, nc.Case):
        code = getattr(make, "__code__", None)
        origin = Origin(code.co_filename, code.co_firstlineno) if code else Origin(path)
        raise _wrong(target, f"{name}() returned {type(case).__name__}", origin)
    return case


def grad(is_on: bool, case: nc.Case | None = None) -> AbstractContextManager[Any]:
    """Return a context with gradients, or without; with them for a case of a function, which may be a step of training.
    torch is imported only when a command runs a model.
    """
    import torch

    is_function = case is not None and not isinstance(case.model, torch.nn.Module)
    return torch.set_grad_enabled(is_on or is_function)


def _import(path: str, target: str) -> ModuleType:
    is_file = path.endswith(".py")
    if is_file and not Path(path).is_file():
        raise _wrong(target, "no such file", Origin(path), "Give the path of a Python file, or a dotted path.")
    try:
        if not is_file:
            sys.path.insert(0, "")  # a package in the current folder, as `python -m` finds it
            try:
                return importlib.import_module(path)
            finally:
                sys.path.remove("")
        name = f"narrowcast_target_{Path(path).stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot read {path} as Python")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        sys.path.insert(0, str(Path(path).resolve().parent))
        try:
            spec.loader.exec_module(module)
        finally:
            sys.path.pop(0)
        return module
    except (Exception, SystemExit) as error:
        found = f"importing it raised {type(error).__name__}: {error}"
        raise _wrong(target, found, _where(error, path)) from error


def _wrong(target: str, found: str, where: Origin, advice: str = _ADVICE) -> TargetError:
    return TargetError(f"target {target!r}", found, (where,), advice)


def _where(error: BaseException, path: str) -> Origin:
    """Return the deepest line of the target's own file in the traceback."""
    if isinstance(error, SyntaxError) and error.filename:
        return Origin(error.filename, error.lineno or 0)
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if Path(f.filename).stem == Path(path).stem]
    return Origin(own[-1].filename, own[-1].lineno or 0) if own else Origin(path)
