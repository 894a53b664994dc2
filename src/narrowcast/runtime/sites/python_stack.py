"""Where a call is made: the modules on the Python stack, and the innermost line that is the user's. Warnings there."""

from __future__ import annotations

import os
import sys
import sysconfig
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path as FilePath
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules.module import Module

from narrowcast.core.policy import NOWHERE, Site
from narrowcast.errors import RegionWarning
from narrowcast.runtime.torch_surface.modules import (
    CHECKPOINT_FILE,
    carried_state,
    children,
    is_recomputation,
    module_call_code,
    variable_of,
    without_wrapper,
)

_TORCH, _OURS = FilePath(torch.__file__).parent, FilePath(__file__).parents[2]
_LIBRARIES = tuple(f"{path}{os.sep}" for path in (_TORCH, _OURS, sysconfig.get_paths()["stdlib"]))
_LAYERS = f"{_TORCH / 'nn' / 'modules'}{os.sep}"
_COMMANDS = f"{_OURS / 'cli'}{os.sep}"
_PACKAGES = (f"{_TORCH.parent}{os.sep}",)  # site-packages lies inside stdlib's folder
_WRAPPERS = (
    "DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "OptimizedModule", "CompiledModule",
    "_FabricModule",
)  # fmt: skip

_INSTALLED = ("site-packages", "dist-packages")
"""The folders that packages are installed into."""
_FRAMEWORKS = ("lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "ignite")
"""Packages that run the user's loop for him; of transformers, which has models, too, its trainers alone."""
_TRAINERS = "transformers.trainer"

_TYPED_IN = ("<ipython-input-", "<python-input-")
"""What consoles that keep their source call it: IPython, and Python itself since 3.13."""

_CALL = module_call_code()
_KEPT = 4
"""How many lines are kept that lead to a call, beside its own."""
trials: set[int] = set()
"""Code, by its id, that runs a copy of a model for itself: its callers are not the copy's."""
_names: WeakKeyDictionary[Module, dict[int, str]] = WeakKeyDictionary()
"""By parent and the id of a module inside it; an id that another has now is noticed by what its name leads to."""


@cache
def is_user_file(file: str) -> bool:
    """Return whether code in this file is the user's, or a model library's, rather than torch's, Python's or ours."""
    if file.startswith(("<", *_LIBRARIES[:2])):
        return file.startswith(_TYPED_IN)
    return file.startswith(_PACKAGES) or not file.startswith(_LIBRARIES)


def is_own_module(name: str | None) -> bool:
    """Return whether a module of that name is of the user's own project, or typed in, and in no installed package."""
    module = sys.modules.get(name or "")
    file = getattr(module, "__file__", None) or ("" if name == "__main__" else None)
    is_installed = file is not None and any(f"{os.sep}{folder}{os.sep}" in file for folder in _INSTALLED)
    return file is not None and not is_installed and (not file or is_user_file(file))


@cache
def _may_call_modules(file: str) -> bool:
    """Return whether the methods in this file may be a user's module's, those of IPython and exec included."""
    return is_user_file(file) or (file.startswith("<") and not file.startswith("<eval_with_key>"))


@cache
def _runs_commands(file: str) -> bool:
    """Return whether code in this file is our command line's: what called it is no part of the user's program."""
    return file.startswith(_COMMANDS)


@dataclass(frozen=True, slots=True)
class Around:
    """Where something is called: the modules around it, innermost first, and the line that calls it."""

    modules: tuple[Module, ...] = ()
    site: Site = NOWHERE

    @classmethod
    def now(cls) -> Around:
        """Return the modules around this call, and its site, read off the Python stack."""
        return Around(tuple(called_modules()), find_site())


NO_AROUND = Around()


def _carried(frame: FrameType) -> Around | None:
    """Return where a checkpoint was called, if this frame recomputes it: the stack below it called the backward."""
    if not is_recomputation(frame):
        return None
    around: Around = getattr(carried_state(frame), "around", NO_AROUND)
    return around


def modules_on_stack() -> list[Module]:
    """Return the modules being called on this thread's Python stack, innermost first, with graphs and wrappers.

    Where a checkpoint recomputes its forward, those of the forward.
    """
    modules: list[Module] = []
    code = module_call_code()
    for frame, _ in walk_stack(sys._getframe(1)):
        if frame.f_code is code:
            modules.append(variable_of(frame, "self"))
        carried = _carried(frame) if code.co_filename == CHECKPOINT_FILE else None
        if carried is not None:
            modules += carried.modules
            break
    return modules


def called_modules() -> list[Module]:
    """Return the modules that are being called on this thread's Python stack, innermost first: the user's alone."""
    modules = [m for m in modules_on_stack() if not isinstance(m, torch.fx.GraphModule)]
    while modules and is_wrapper(modules[-1]):
        modules.pop()
    return modules


def in_generated_code() -> bool:
    """Return whether the call comes from the code of a graph, so that the modules around it are not on the stack."""
    for frame, _ in walk_stack(sys._getframe(1)):
        code = frame.f_code
        if code.co_filename.startswith("<eval_with_key>"):
            return True
        if code is _CALL or is_user_file(code.co_filename):
            return False
    return False


def called_by_layer() -> bool:
    """Return whether the code of one of torch's own layers makes this call, for which no line of the user's asks."""
    for frame, _ in walk_stack(sys._getframe(1)):
        file = frame.f_code.co_filename
        if is_user_file(file):
            return False
        if file.startswith(_LAYERS) and not file.endswith(f"{os.sep}module.py"):
            return True
    return False


def find_site(with_names: bool = True, frame: FrameType | None = None) -> Site:
    """Return the place of the call that is being dispatched, read off the Python stack; costs some 10 microseconds.

    Without `with_names` it lacks the names of classes and functions, which few rules ask for.

    Modules are those that were called (`module(...)`), so a path is complete where the outermost module was called
    too. Wrappers (DistributedDataParallel, torch.compile's) add nothing to the path. The line is no training
    framework's, as long as the user's own is below it. frame: of another stack.
    """
    frame = frame or sys._getframe(1)
    line_frame: FrameType | None = None
    framework: FrameType | None = None
    modules: list[Module] = []
    functions: list[str] = []
    callers: list[FrameType] = []  # of the outermost module that was called
    carried: Around | None = None
    with_callers = with_names
    while frame is not None:
        code = frame.f_code
        carried = _carried(frame) if code.co_filename == CHECKPOINT_FILE else None
        if carried is not None:
            modules += carried.modules
            break
        if _runs_commands(code.co_filename):
            break
        if code is _CALL:
            modules.append(variable_of(frame, "self"))
            callers.clear()
        elif id(code) in trials:
            with_callers = False
        elif with_callers and len(callers) < _CALLERS and _may_call_modules(code.co_filename):
            callers.append(frame)
        if code is not _CALL and (with_names or line_frame is None) and is_user_file(code.co_filename):
            if _runs_loops(frame.f_globals.get("__name__", "")):
                framework = framework or frame
            else:
                line_frame = line_frame or frame
            if with_names:
                functions.append(f"{frame.f_globals.get('__name__', '')}.{code.co_qualname}")
        frame = frame.f_back
    line_frame = line_frame or framework
    outside = carried.site if carried is not None else NOWHERE
    around = _path_around(modules[_outermost(modules)], callers) if modules and with_names else ""
    return Site(
        module_path=module_path(modules) if modules else "",
        classes=tuple(f"{type(m).__module__}.{type(m).__qualname__}" for m in modules) if with_names else (),
        functions=(*functions, *outside.functions) if with_names else (),
        file=line_frame.f_code.co_filename if line_frame is not None else outside.file,
        line=line_frame.f_lineno if line_frame is not None else outside.line,
        around=outside.around if carried is not None and carried.modules else around,
    )


def loop_line(frame: FrameType | None = None, frameworks: bool = False) -> Site:
    """Return the file and line of the user's code that called this, and nothing else: a microsecond. No training
    framework's, as long as the user's own is below it on the stack, unless `frameworks` count. frame: of another stack.
    """
    frame = frame or sys._getframe(1)
    first: FrameType | None = None
    while frame is not None and not _runs_commands(frame.f_code.co_filename):
        if is_user_file(frame.f_code.co_filename):
            if frameworks or not _runs_loops(frame.f_globals.get("__name__", "")):
                break
            first = first or frame
        frame = frame.f_back
    caller = first if frame is None or _runs_commands(frame.f_code.co_filename) else frame
    return NOWHERE if caller is None else Site(file=caller.f_code.co_filename, line=caller.f_lineno)


def callers_of(site: Site) -> tuple[tuple[str, int], ...]:
    """Return the user's lines that called the function which makes this call, up to its module's call, innermost first:
    file and number. None where the stack shows another place.
    """
    found: list[tuple[str, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) <= _KEPT and not (found and frame.f_code is _CALL):
        if _runs_commands(frame.f_code.co_filename):
            break
        if is_user_file(frame.f_code.co_filename) and not _runs_loops(frame.f_globals.get("__name__", "")):
            found.append((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(found[1:]) if found[:1] == [(site.file, site.line)] else ()


@cache
def _runs_loops(module: str) -> bool:
    """Return whether a module, by its name, is a training framework's."""
    return module.partition(".")[0] in _FRAMEWORKS or module.startswith(_TRAINERS)


def innermost_frame(error: BaseException) -> FrameType | None:
    """Return the frame that raised an error."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return frames[-1] if frames else None


_CALLERS = 6  # a method of the model calls its parts at once, or through a few others


def path_around(called: list[Module]) -> str:
    """Return the path of the outermost of these modules, which are being called, in the one whose method called it."""
    callers: list[FrameType] = []
    codes = (_CALL, module_call_code())
    for frame, _ in walk_stack(sys._getframe(1)):
        if id(frame.f_code) in trials:
            break
        if frame.f_code in codes:
            callers.clear()
        elif len(callers) < _CALLERS and _may_call_modules(frame.f_code.co_filename):
            callers.append(frame)
    return _path_around(called[_outermost(called)], callers)


def _path_around(root: Module, callers: list[FrameType]) -> str:
    for frame in reversed(callers):
        code = frame.f_code
        if code.co_argcount:
            owner = variable_of(frame, code.co_varnames[0])
            if isinstance(owner, Module) and owner is not root:
                name = name_in(owner, root)
                if not name.startswith("<"):
                    return name
    return ""


def module_path(modules: list[Module]) -> str:
    """Return the dotted path of the innermost module below the outermost (`modules` is innermost first).

    It is put together from the modules between them, so that a shared module has the name under which it was called.
    """
    outermost = _outermost(modules)
    names = [name_in(modules[n + 1], modules[n]) for n in range(outermost - 1, -1, -1)]
    return ".".join(name for name in names if name)


def _outermost(modules: list[Module]) -> int:
    outermost = len(modules) - 1
    while outermost > 0 and is_wrapper(modules[outermost]):
        outermost -= 1
    return outermost


def is_wrapper(module: Module) -> bool:
    """Return whether a module only wraps the user's: of torch's own, or torch.export's while it traces."""
    return type(module).__name__ in _WRAPPERS or "_export_root" in children(module)


def name_in(parent: Module, module: Module) -> str:
    """Return the name of a module inside the one that called it; `<Class>` if it is not registered there. Modules are
    known by their attributes: where some have two names, torch.export calls others that share these.
    """
    if vars(module) is vars(parent):
        return ""
    names = _names.get(parent)
    name = names.get(id(vars(module))) if names is not None else None
    if name is None or not _is_at(parent, name, module):
        if not _holds(parent, module):  # asked for each call of a model that another's function runs
            return f"<{type(module).__name__}>"
        names = {}
        for qualified, m in parent.named_modules(remove_duplicate=False):
            names.setdefault(id(vars(m)), qualified)
        _names[parent] = names
        name = names.get(id(vars(module)), f"<{type(module).__name__}>")
    return without_wrapper(name)


def first_names(model: Any) -> dict[str, str]:
    """Return of each name of a module inside a model the first that this module has; nothing for a function."""
    first: dict[int, str] = {}
    parts = model.named_modules(remove_duplicate=False) if isinstance(model, Module) else ()
    return {name: first.setdefault(id(part), name) for name, part in parts}


def _holds(parent: Module, module: Module) -> bool:
    """Return whether a module is registered in another, at any depth."""
    seen, waiting = {id(parent)}, [parent]
    while waiting:
        for child in children(waiting.pop()).values():
            if child is not None and vars(child) is vars(module):
                return True
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                waiting.append(child)
    return False


def _is_at(parent: Module, name: str, module: Module) -> bool:
    """Return whether a remembered name still leads to the module."""
    child: Module | None = parent
    for part in name.split("."):
        child = children(child).get(part) if child is not None else None
    return child is not None and vars(child) is vars(module)


# -- warnings at the user's line, once for each ------------------------------------------------------------------------


_said: dict[str, dict[Any, Any]] = {}  # by file: Python's memory of what was shown, which keeps it to once per line


def warn_at(text: str, site: Site, category: type[Warning] = RegionWarning) -> None:
    """Warn at a place; Python's filters show the warning once there."""
    file = site.file or "<unknown>"
    warnings.warn_explicit(text, category, file, site.line, registry=_said.setdefault(file, {}))


def warn_here(text: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's code that is running."""
    warn_at(text, find_site(with_names=False), category)
