"""Where a call of a graph, or of a running script, is made: what Dynamo and torch.export noted beside each node.

The modules that were called before the compiled frame are on the Python stack; those inside it are in the node's
`nn_module_stack`. Together they give the path that eager code has.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import Module

from narrowcast.core.policy import NOWHERE, Site
from narrowcast.runtime.sites.python_stack import Around, is_user_file, module_path, name_in
from narrowcast.runtime.torch_surface.dynamo import Frame, dynamo_code, dynamo_frames, is_resumption
from narrowcast.runtime.torch_surface.modules import COMPILED, STACK, without_wrapper
from narrowcast.runtime.torch_surface.patches import note_staying, once


@dataclass(frozen=True, slots=True)
class Outside(Around):
    """Where a graph is called. begins: it begins where the call of the innermost module does, or of no module."""

    begins: bool = True

    @classmethod
    def now(cls) -> Outside:
        """Return the modules around this call, and its site, read off the Python stack."""
        around = Around.now()
        return Outside(around.modules, around.site, begins_here(around.modules))


def begins_here(called: tuple[Module, ...]) -> bool:
    """Return whether Dynamo traces the beginning of a module's call, or of code that no module calls."""
    code = dynamo_code()
    if code is None:
        return not called
    if is_resumption(code):
        return False
    return not called or code is getattr(type(called[0]).forward, "__code__", None)


NO_OUTSIDE = Outside()


GraphCall = tuple[object, str]
"""The call of a module that a node of a graph stands in: the run of the graph, and the key by which Dynamo and
torch.export keep calls of one module apart (`...@1` is the second).
"""


class _NodeNow(threading.local):
    """The place of the node that a front end is running on this thread, the module's call that it stands in, and what
    numbers the calls that it makes.
    """

    site: Site | None = None
    call: GraphCall | None = None
    number: Callable[[str], int] | None = None


_now = _NodeNow()


@contextmanager
def at_site(site: Site, call: GraphCall | None = None, number: Callable[[str], int] | None = None) -> Iterator[None]:
    """Place calls inside at this site. number: which call of an op the next one is (0: unknown)."""
    before, _now.site, _now.call, _now.number = (_now.site, _now.call, _now.number), site, call, number
    try:
        yield
    finally:
        _now.site, _now.call, _now.number = before


def number_in_graph(op: str) -> int | None:
    """Return which call of this op the next one is, in its module's call; None where no graph's node is run."""
    return None if _now.site is None else 0 if _now.number is None else _now.number(op)


def current_graph_call() -> GraphCall | None:
    """Return the call of a module around the node that a front end is running; None if it is not inside the graph."""
    return _now.call


def graph_call(meta: Mapping[str, Any], run: object) -> GraphCall | None:
    """Return the call of a module around a node; None for what the graph's outermost module computes itself."""
    modules = meta.get(STACK) or {}
    if not modules:
        return None
    key, (source, _) = next(reversed(modules.items()))
    return None if _is_root(source) else (run, key)


def current_site() -> Site | None:
    """Return the place of the node that a front end is running on this thread, if one is."""
    return _now.site


def traced_site() -> Site | None:
    """Return the place of the call that Dynamo, AOTAutograd or a front end of ours is tracing; None if unknown."""
    if _now.site is not None:
        return _now.site
    meta = torch.fx.traceback.get_current_meta() if torch.fx.traceback.has_preserved_node_meta() else {}
    if STACK in meta or "stack_trace" in meta:
        return node_site(meta, Outside.now())
    frames = dynamo_frames()
    return _site(*frames, Outside.now()) if frames is not None else None


def node_site(meta: Mapping[str, Any], outside: Outside = NO_OUTSIDE) -> Site:
    """Return the place of a node of a graph that is called `outside`."""
    return _site(meta.get(STACK) or {}, _frames(meta.get("stack_trace") or ""), outside)


def _site(modules: Mapping[str, Any], frames: tuple[Frame, ...], outside: Outside) -> Site:
    called = outside.modules
    if not modules and not frames and outside is NO_OUTSIDE:
        return NOWHERE
    users = [frame for frame in frames if is_user_file(frame[0])]
    file, line = users[-1][:2] if users else (outside.site.file, outside.site.line)
    functions = tuple(function_at(*frame) for frame in reversed(users))
    around = outside.site.functions
    if functions and around and functions[-1] == around[0]:
        around = around[1:]
    path, around_root = _path(modules, called)
    inside = [kind for _, kind in modules.values()][::-1]
    classes = tuple(map(_class_name, (*inside, *map(type, called))))
    return Site(path, classes, functions + around, file, line, outside.site.around if called else around_root)


_FRAME = re.compile(r'^[ \t]*File "(.*?)", line (\d+)(?:, in (\S+)|,|[ \t]*$)', re.MULTILINE)


@lru_cache(maxsize=4096)
def _frames(trace: str) -> tuple[Frame, ...]:
    """Return files, lines and names of functions of a stack trace as text, outermost first."""
    return tuple((file, int(line), name) for file, line, name in _FRAME.findall(trace))


def _class_name(kind: Any) -> str:
    return kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"


def _path(modules: Mapping[str, Any], called: tuple[Module, ...]) -> tuple[str, str]:
    """Return the dotted path of the innermost module, and that of the outermost in the one whose method called it."""
    outer = module_path(list(called)) if called else ""
    names = [outer] if outer else []
    parent: Module | None = called[0] if called else None
    before = root = ""
    for key, (source, _) in modules.items():
        module = _members(parent).get(key.partition("@")[0]) if parent is not None else None  # @1: its second call
        if module is not None and parent is not None:
            names.append(name_in(parent, module))
            parent = module
        else:
            parent = None
            if not (names or before or called) and source[:2] in ("L[", "G["):  # a part, called by a traced method
                root = "" if _is_root(source) else _relative("", source)
            elif before or not _is_root(source):
                names.append(_relative(before, source))
        before = source
    parts = [part for name in names for part in without_wrapper(name).split(".") if part]
    path = ".".join(parts[1:] if parts[:1] == ["_export_root"] else parts)  # torch.export's wrapper adds nothing
    return path, without_wrapper(root)


def _is_root(source: str) -> bool:
    """Return whether a text is that of a module that the traced frame reached by itself: `L['self']`, `G['model']`."""
    return source == "" or (source[:2] in ("L[", "G[") and source.endswith(("]", f".{COMPILED}")))


def _relative(before: str, source: str) -> str:
    """Return a module's name inside another: b for `L['self'].a.b` inside `L['self'].a`; export writes a.b inside a."""
    if before and source.startswith(before):
        return source[len(before) :].strip(".")
    return source.partition("].")[2] if source[:2] in ("L[", "G[") else source


_known_members: dict[int, tuple[weakref.ref[Module], weakref.WeakValueDictionary[str, Module]]] = {}


def _members(module: Module) -> Mapping[str, Module]:
    """Return the modules inside one, by their ids as Dynamo writes them. The latest module is remembered, weakly."""
    known = _known_members.get(0)
    if known is None or known[0]() is not module:
        known = _known_members[0] = (
            weakref.ref(module),
            weakref.WeakValueDictionary({str(id(m)): m for m in module.modules()}),
        )
    return known[1]


def function_at(file: str, line: int, called: str = "") -> str:
    """Return the qualified name of the function around a line, `package.module.Class.method`. called: what Python calls
    it; a lambda, or a comprehension, has no name of its own.
    """
    lines = linecache.getlines(file)  # of cells of a notebook, too; another list when the file was read again
    known = _known_names.get(file)
    if known is None or known[0] is not lines:
        known = _known_names[file] = lines, _names_by_line(lines)
    qualname = known[1].get(line, _MODULE)
    if called.startswith("<") and called != _MODULE:
        qualname = called if qualname == _MODULE else f"{qualname}.<locals>.{called}"
    return f"{_module_name(file)}.{qualname}"


_MODULE = "<module>"
_known_names: dict[str, tuple[list[str], dict[int, str]]] = {}
"""By file: its lines when it was read, and the function around each of them."""


def _names_by_line(lines: list[str]) -> dict[int, str]:
    """Return by line the qualified name of the innermost function around it."""
    names: dict[int, str] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                own = range(child.lineno, (child.end_lineno or child.lineno) + 1)
                names.update(dict.fromkeys(own, f"{prefix}{child.name}"))
                visit(child, f"{prefix}{child.name}.<locals>.")
            else:
                visit(child, f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix)

    with suppress(SyntaxError, ValueError):
        visit(ast.parse("".join(lines)), "")
    return names


@lru_cache(maxsize=256)
def _module_name(file: str) -> str:
    """Return the name under which a file was imported; what is in no file was typed in."""
    for name, module in list(sys.modules.items()):
        if getattr(module, "__file__", None) == file:
            return name
    return Path(file).stem if Path(file).is_file() else "__main__"


# -- where in a script the interpreter is: told by an op that observed scripts call before each call of theirs ---------


MARK = "narrowcast::at"
"""The op; it takes the number of a site."""


class _ScriptNow(threading.local):
    wanted = 0
    site: Site | None = None


_running = _ScriptNow()
_script_sites: list[Site] = []
_numbers: dict[Site, int] = {}
_library: list[torch.library.Library] = []


@contextmanager
def told_of_script_sites() -> Iterator[None]:
    """Have scripts that are called on this thread report where they are."""
    _register()
    _running.wanted += 1
    try:
        yield
    finally:
        _running.wanted -= 1


def are_wanted() -> bool:
    """Return whether a caller wants script sites."""
    return _running.wanted > 0


def script_site() -> Site | None:
    """Return the place of the call that a script makes now; None where none runs, or it does not report one."""
    return _running.site


@contextmanager
def inside_script() -> Iterator[None]:
    """Restore the site at the end of a script that reports where it is."""
    before = _running.site
    try:
        yield
    finally:
        _running.site = before


def number_of(site: Site) -> int:
    """Return the number by which the op names a site."""
    if site not in _numbers:
        _numbers[site] = len(_script_sites)
        _script_sites.append(site)
    return _numbers[site]


def _at(number: int) -> None:
    _running.site = _script_sites[number]


@once
def _register() -> None:
    library = torch.library.Library("narrowcast", "FRAGMENT")
    library.define("at(int number) -> ()", alias_analysis="CONSERVATIVE")  # nothing may drop or move it
    library.impl("at", _at, "CompositeExplicitAutograd")
    _library.append(library)
    note_staying(MARK, "observed scripts say where they are")
