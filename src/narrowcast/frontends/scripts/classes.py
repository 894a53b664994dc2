"""Classes that are no modules: TorchScript compiles each once for the process, and drops what decorates its methods."""

from __future__ import annotations

import inspect
from typing import Any

from narrowcast.errors import ScriptError
from narrowcast.frontends.scripts.decorated import places_of, regions_around, undecorated
from narrowcast.frontends.scripts.places import shown_at
from narrowcast.frontends.scripts.region_facts import region_class
from narrowcast.runtime.torch_surface.jit import class_method, inline, script_classes

_seen: set[str] = set()
_dropped: dict[str, Any] = {}  # methods by qualified name


def note_classes(by_us: bool = False) -> None:
    """Note the classes that were compiled since the last time: by us, or by torch alone, without their regions."""
    for name, kind in script_classes().items():
        if name not in _seen and not by_us:
            for method, found in vars(kind).items():
                is_property = isinstance(found, property)
                value = found.fget if is_property else getattr(found, "__func__", found)
                if inspect.isfunction(value) and _opens(value):
                    _dropped[f"{name}.__{method}_getter" if is_property else f"{name}.{method}"] = value
        _seen.add(name)


def check_class(call: Any) -> None:
    """ScriptError for a call of a method whose regions are in no script."""
    kind, method = call.inputsAt(0).type(), call.s("name")
    if kind.kind() != "InterfaceType":
        _check_method(f"{kind.qualified_name()}.{method}", call)
        return
    for name in script_classes(kind):
        _check_method(f"{name}.{method}", call)
        graph = class_method(f"{name}.{method}").graph.copy()
        inline(graph)
        if any(region_class(node.output()) for node in graph.findAllNodes("prim::CreateObject")):
            found = f"an interface represents {name.rpartition('.')[2]}, and no script knows that its {method} has one"
            advice = "Give the class itself as the argument's type, or open the region around the call."
            raise ScriptError("a region in a script", found, shown_at(call), advice)


def _check_method(name: str, call: Any) -> None:
    if name in _dropped:
        method = _dropped[name]
        raise ScriptError(
            asked=f"a script of {undecorated(method).__qualname__}",
            found="torch.jit.script compiled its class before, without the region that decorates the method",
            where=(*shown_at(call), *places_of(undecorated(method), method)),
            advice="Open the region in the method: with torch.autocast(...): ...",
        )
    if name.rpartition(".")[0] in _seen:
        for inner in class_method(name).graph.findAllNodes("prim::CallMethod"):
            if inner.inputsAt(0).type().kind() == "ClassType":
                _check_method(f"{inner.inputsAt(0).type().qualified_name()}.{inner.s('name')}", call)


def _opens(method: Any) -> bool:
    try:
        return bool(regions_around(method))
    except ScriptError:
        return True
