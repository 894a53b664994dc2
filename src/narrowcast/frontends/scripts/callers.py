"""Where inlined nodes of a script come from: the submodules and the user's functions around them, and the user's line.

TorchScript keeps little of that: of a submodule the last part of its name, `0` for `steps.0`, and of a call in torch's
library the library's line. So calls are marked before they are inlined, by nodes around them that do nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from narrowcast.core.policy import NOWHERE, Site
from narrowcast.frontends.scripts import runtime
from narrowcast.frontends.scripts.decorated import check_class
from narrowcast.frontends.scripts.places import functions_around, site_of
from narrowcast.frontends.scripts.region_facts import constant
from narrowcast.runtime.sites.python_stack import is_user_file
from narrowcast.runtime.torch_surface.jit import compiled_methods, find_type, inserting_after

_MARK = "prim::TimePoint"  # nothing removes it, and nothing is to be seen of it where one is left
_PREFIX = "narrowcast "
_TORCH_ELSEWHERE = re.compile(r"[/\\](site|dist)-packages[/\\]torch[/\\]")
_EXIT = f"{_PREFIX}exit"
Bound = Callable[[Any, Any], tuple[dict[str, Any], Any, Any]]


def mark_calls(graph: Any, bound: Bound | None = None) -> None:
    """Mark the calls of submodules, methods and functions in a graph, in place.

    bound: lets what goes into a module's call and comes out pass through its boundary; returns what is to be noted of
    it, and the nodes with which it begins and ends.
    """
    hold_norms(graph)  # torch inlines methods as it optimizes them
    for call in (*graph.findAllNodes("prim::CallMethod"), *graph.findAllNodes("prim::CallFunction")):
        facts: dict[str, Any] = {}
        if call.kind() == "prim::CallMethod":
            check_class(call)
            facts = _facts_of_method(call)
        file, line = site_of(call)
        if _is_users(file):
            facts |= {"file": file, "line": line}
        first = last = call
        if bound is not None and "path" in facts and is_forward(call.s("name")):
            noted, first, last = bound(graph, call)
            facts |= noted
        hold(graph, call.output(), last)
        if facts:
            _mark(graph, _PREFIX + json.dumps(facts)).insertBefore(first)
            _mark(graph, _EXIT).insertAfter(last)


def is_forward(method: str) -> bool:
    """Return whether a method is what a module's call runs: `forward`, or one of its overloads (`forward__0`)."""
    return method.partition("__")[0] == "forward"


def mark_whole(graph: Any, facts: dict[str, Any], first: Any) -> None:
    """Mark a whole graph as one call, in place; it begins with the node `first`."""
    _mark(graph, _PREFIX + json.dumps(facts)).insertBefore(first)
    graph.appendNode(_mark(graph, _EXIT))


def function_name(function: Callable[..., Any]) -> str:
    """Return the qualified name of a user's function; empty for any other."""
    code = getattr(function, "__code__", None)
    if code is None or not is_user_file(code.co_filename):
        return ""
    return f"{function.__module__}.{function.__qualname__}"


def unmark(graph: Any) -> None:
    """Take out what `mark_calls` has put in, where calls are not inlined."""
    for node in graph.findAllNodes(_MARK):
        if is_caller_mark(node):
            node.destroy()
    release(graph)


def graphs_of(module: Any) -> list[Any]:
    """Return the graphs of the methods and hooks of a script module and its parts, each once: classes are shared."""
    methods: dict[tuple[str, str], Any] = {}
    for part in module.modules():
        for name, method in compiled_methods(part).items():
            methods.setdefault((find_type(part), name), method)
    return [method.graph for method in methods.values()]


def is_caller_mark(node: Any) -> bool:
    """Return whether a node is a mark of ours."""
    return bool(node.kind() == _MARK and node.hasAttribute("name") and node.s("name").startswith(_PREFIX))


def cross(callers: list[Site], mark: Any) -> dict[str, Any] | None:
    """Go over a mark: the innermost caller comes last. Returns what an entry says of the call; None for an exit."""
    text = mark.s("name")
    if text == _EXIT:
        callers.pop()
        return None
    facts, outer = json.loads(text.removeprefix(_PREFIX)), callers[-1]
    path = f"{outer.module_path}.{facts.get('path', '')}".strip(".")
    classes, functions = ([facts[name]] if name in facts else [] for name in ("class", "function"))
    file, line = facts.get("file", outer.file), facts.get("line", outer.line)
    callers.append(Site(path, (*classes, *outer.classes), (*functions, *outer.functions), file, line, outer.around))
    return dict(facts)


def site_in(caller: Site, node: Any) -> Site:
    """Return the place of a node: its own line, or if that is a library's, that of the user's call."""
    file, line = site_of(node)
    path = caller.module_path or _path_in_hierarchy(node)
    if caller.file and not _is_users(file):
        file, line = caller.file, caller.line
    functions = functions_around(node) + caller.functions
    if not (path or file or functions or caller.classes or caller.around):
        return NOWHERE
    return Site(path, caller.classes, functions, file, line, caller.around)


def set_names(graph: Any) -> set[str]:
    """Return the names of attributes that a graph sets."""
    return {node.s("name") for node in graph.findAllNodes("prim::SetAttr")}


def path_of(node: Any) -> tuple[str, ...] | None:
    """Return the names by which an attribute is read off the module; None if it is not read off it."""
    names: list[str] = []
    while node.kind() == "prim::GetAttr":
        names.append(node.s("name"))
        node = node.inputsAt(0).node()
    return tuple(reversed(names)) if node.kind() == "prim::Param" else None


def class_name(qualified: str) -> str:
    """Return the Python name of a script type's class: `models.Block`; of the main program's `__main__.Block`."""
    name = re.sub(r"___torch_mangle_\d+\.", "", qualified).removeprefix("__torch__.")
    return name if "." in name else f"__main__.{name}"


def method_name(class_of: str, name: str) -> str:
    """Return the qualified name of a method; empty if its class is torch's."""
    return "" if class_of.startswith("torch.") else f"{class_of}.{name}"


def _facts_of_method(call: Any) -> dict[str, Any]:
    if call.inputsAt(0).type().kind() != "ClassType":  # an interface: nobody knows yet
        return {}
    path = path_of(call.inputsAt(0).node())
    kind = class_name(str(call.inputsAt(0).type().qualified_name()))
    facts: dict[str, Any] = {}
    if path:
        facts = {"path": ".".join(path), "class": kind}
        if is_forward(call.s("name")):
            facts["called"] = True
    if method_name(kind, call.s("name")):
        facts["function"] = method_name(kind, call.s("name"))
    return facts


def _is_users(file: str) -> bool:
    """Return whether a line is the user's; a script from a file may have been made with a torch that lay elsewhere."""
    return bool(file) and is_user_file(file) and not _TORCH_ELSEWHERE.search(file)


def _mark(graph: Any, text: str) -> Any:
    mark = graph.create(_MARK, [], 1)
    mark.s_("name", text)
    return mark


def _path_in_hierarchy(node: Any) -> str:
    """Return the path that TorchScript itself keeps of the submodules."""
    parts = (part.partition("(") for part in node.getModuleHierarchy().split("."))
    unnamed = ("SELF", "UNKNOWN_INSTANCE", "INSTANCE_NAME_UNKNOWN", "TOP", "")
    return ".".join(name for name, _, kind in parts if kind and name not in unnamed)


# -- norms that write to running statistics ----------------------------------------------------------------------------
#
# TorchScript does not know that they do, and drops one that nothing reads, and the call of a method that has one.


_NORMS = ("aten::batch_norm", "aten::instance_norm")
_NORM_MARK = "narrowcast_norm"


def hold(graph: Any, value: Any, after: Any) -> None:
    """Let a node read a value that passes do not drop, in place."""
    mark = graph.create("prim::Print", [value], 0)
    mark.s_("name", _NORM_MARK)
    mark.insertAfter(after)


def release(graph: Any) -> None:
    """Take such nodes out."""
    for mark in graph.findAllNodes("prim::Print"):
        if mark.hasAttribute("name") and mark.s("name") == _NORM_MARK:
            mark.destroy()


def hold_norms(graph: Any) -> None:
    """Hold what such norms give."""
    for norm in _norms(graph):
        hold(graph, norm.output(), norm)


@contextmanager
def norms_kept(graph: Any) -> Iterator[None]:
    """Keep such norms in the graph in passes inside."""
    hold_norms(graph)
    yield
    release(graph)


def keep_norms(graph: Any) -> None:
    """Let something read the norms that nothing reads, in place: TorchScript drops what is unused when it runs, too."""
    for norm in _norms(graph):
        if not norm.output().uses():
            with inserting_after(graph, norm):
                graph.insertGraph(runtime.graph_of(runtime.keep), [norm.output()])


def _norms(graph: Any) -> list[Any]:
    """Return the norms that have running statistics, and may be training."""
    norms = [node for kind in _NORMS for node in graph.findAllNodes(kind)]
    return [n for n in norms if n.inputsAt(3).type().kind() != "NoneType" and constant(n.inputsAt(5)) is not False]
