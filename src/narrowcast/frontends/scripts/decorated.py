"""Decorated functions as scripts see them. TorchScript compiles what is below the decorators, so the regions among them
are read off the decorators' closures, wherever they come from: the source may name a local of a function that is gone.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from narrowcast.errors import Origin, RegionError, ScriptError, ScriptWarning
from narrowcast.frontends.eager import autocast
from narrowcast.frontends.scripts.places import shown_at
from narrowcast.frontends.scripts.region_facts import number_of, region_class
from narrowcast.runtime.sites.python_stack import find_site, is_user_file, warn_here
from narrowcast.runtime.torch_surface import jit
from narrowcast.runtime.torch_surface.state import caches, is_enabled

_OWN = f"{__name__.split('.')[0]}."
_BARE = "__narrowcast_regions__"
_WORDS = {"autocast", "custom_fwd", "set_autocast_enabled"}
_MOST = 4096


def regions_around(function: Any) -> tuple[Any, ...]:
    """Return the regions that decorate a function or method, the outermost first.

    Raises ScriptError where a decorator may open regions in code of its own, or where what is below is no function.
    """
    regions: tuple[Any, ...] = ()
    *around, inner = _layers(function)
    for layer in around:
        regions += getattr(layer, _BARE, ())
        held = [getattr(value, "__self__", value) for value in _captured(layer).values()]
        region = None if _is_pin(layer) else next(filter(is_region, held), None)
        if _is_decorator(layer) and region is not None:
            regions += (region,)
        elif not _is_pin(layer):
            _check_wrapper(function, layer)
    if not isinstance(inner, types.FunctionType | types.BuiltinFunctionType):
        raise _no_function(function, inner)
    return regions + getattr(inner, _BARE, ())


def bare(function: Any) -> Any:
    """Return the function below all decorators; a copy that knows the regions among them, if there are any."""
    regions, inner = regions_around(function), undecorated(function)
    if any(isinstance(getattr(layer, "__wrapped__", None), types.MethodType) for layer in _layers(function)):
        raise _refused(function, inner, "a region decorates a method of an object, and a script has no such function")
    if not regions or hasattr(inner, _BARE):
        return inner
    twin = types.FunctionType(inner.__code__, inner.__globals__, inner.__name__, inner.__defaults__, inner.__closure__)
    twin.__kwdefaults__ = inner.__kwdefaults__
    functools.update_wrapper(twin, inner)
    del twin.__wrapped__  # type: ignore[attr-defined]
    setattr(twin, _BARE, regions)
    return twin


def undecorated(function: Any) -> Any:
    """Return the function under all decorators that declare what they wrap; of a method, its class's function."""
    *_, inner = _layers(function)
    return inner


def check_pins(function: Any) -> None:
    """Raise ScriptError for a function with a pin and anything else around it: a script would lose their order."""
    *around, inner = _layers(function)
    ours = [layer for layer in around if _is_pin(layer) or _is_decorator(layer)]
    if len(ours) > 1 and any(map(_is_pin, ours)):
        found, where = "it has a pin, and another pin or a region around it", (_origin(inner.__code__),)
        advice = "Keep one of them; open the region in the function that calls it."
        raise ScriptError(f"a script of {inner.__qualname__}", found, where, advice)


def check_methods(module: torch.nn.Module) -> None:
    """Raise ScriptError for methods that are pinned: TorchScript reads what is below the decorator. For a `__call__`
    that opens a region: it is not in a script. And for what replaces a method, and that no script takes.
    """
    for part in module.modules():
        _check_own(part)
        if isinstance(part, torch.jit.ScriptModule):
            _check_compiled(part)
        for name in ("__call__", "_call_impl"):
            call = getattr(type(part), name)
            if call is not getattr(torch.nn.Module, name) and not isinstance(part, torch.jit.ScriptModule):
                if _may_open(call):
                    raise _refused(call, call, "it opens a region, and a script has what is in forward alone")
        for kind in type(part).__mro__:
            for name, member in vars(kind).items():
                if callable(member) and hasattr(member, "__narrowcast_pinned__"):
                    asked = f"a script of {kind.__qualname__}.{name}, which is pinned"
                    reason, where = "TorchScript compiles methods without their decorators", member.__wrapped__.__code__
                    advice = "Pin the module, or a function that the method calls."
                    raise ScriptError(asked, reason, (_origin(where),), advice)


def _check_compiled(part: Any) -> None:
    """Check the methods of a script that torch compiled: without their decorators."""
    kind = jit.python_class(part)
    for name, compiled in jit.compiled_methods(part).items() if kind is not None else ():
        method = getattr(kind, name, None)
        regions: tuple[Any, ...] = ()
        with suppress(ScriptError):
            regions = regions_around(method) if inspect.isfunction(method) else ()
        cast_already = any(map(region_class, (n.output() for n in compiled.graph.findAllNodes("prim::CreateObject"))))
        if any(not isinstance(region, torch.no_grad) for region in regions) and not cast_already:
            found = "torch.jit.script compiled it without the region that decorates it"
            raise _refused(method, method, found, "Give narrowcast.script the Python module itself, or open the region "
                           "in the method: with torch.autocast(...): ...")  # fmt: skip


def _check_own(part: torch.nn.Module) -> None:
    """Check the attributes of an object that replace methods."""
    is_script, methods = isinstance(part, torch.jit.ScriptModule), jit.own_methods(part)
    names = set(jit.method_names(part) if is_script else dir(type(part)))
    for value in vars(part).values():
        if inspect.isfunction(value) and isinstance(undecorated(value), torch.nn.Module):
            raise _no_function(type(part).forward, undecorated(value))
    for name in names & vars(part).keys():
        value, method = vars(part)[name], methods.get(name)
        if is_script:
            if isinstance(value, jit.ScriptMethod) or not _may_open(value):
                continue
            found = f"{name} was decorated when it was a script already, which runs without the region"
        elif not inspect.isroutine(value):
            if not callable(value) or not inspect.isroutine(getattr(type(part), name)):
                continue
            found = f"its attribute {name} is {_named(value)}, and TorchScript compiles functions alone"
        elif method is not None and inspect.unwrap(method, stop=inspect.ismethod).__self__ is not part:
            found = f"its attribute {name} is the method of another object, and a script compiles it as its own"
        elif jit.is_ignored(value) and _may_open(value):
            found = f"its attribute {name} is decorated, and a script calls the method of its class in Python"
        elif name == "forward" and method is None:
            found = "its attribute forward is a function without self, and a script compiles it as a method"
        else:
            continue
        asked = f"a script of {part.original_name if is_script else type(part).__qualname__}"
        advice = "Write a method of the class, with the region inside: with torch.autocast(...): ..."
        raise ScriptError(asked, found, places_of(undecorated(value), value), advice)


def namespace(function: Any) -> dict[str, Any]:
    """Return the names that a function sees: its module's, and those it closes over."""
    inner = undecorated(function)
    return {**getattr(inner, "__globals__", {}), **_captured(inner)}


def _layers(function: Any) -> Iterator[Any]:
    """Yield the function, and what each decorator wraps, the innermost last."""
    while True:
        function = getattr(function, "__func__", function)
        yield function
        if not hasattr(function, "__wrapped__"):
            return
        function = function.__wrapped__


def _captured(function: Any) -> dict[str, Any]:
    captured: dict[str, Any] = {}
    if isinstance(function, types.FunctionType):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # not filled yet
                captured[name] = cell.cell_contents
    return captured


def _is_pin(layer: Any) -> bool:
    return "__narrowcast_pinned__" in getattr(layer, "__dict__", {})


def _is_decorator(layer: Any) -> bool:
    """Return whether it is what torch's context managers, or our regions, make of a function, not a wrapper of it."""
    home = getattr(layer, "__globals__", {}).get("__name__", "")  # `__module__` is that of what it wraps
    return str(home).startswith((_OWN, "torch.amp.", "torch.utils."))


def _named(value: Any) -> str:
    return f"the class {value.__qualname__}" if isinstance(value, type) else f"an object of type {type(value).__name__}"


def _check_wrapper(function: Any, layer: Any) -> None:
    """Refuse or report a decorator of somebody else: what it does is not in a script."""
    code = getattr(layer, "__code__", None)
    if _may_open(layer):
        found = "a decorator opens a region in code of its own, and TorchScript compiles only what is below decorators"
        raise _refused(function, layer, found)
    if code is not None and (is_user_file(code.co_filename) or _is_decorator(layer)):  # others are called in Python
        text = f"narrowcast: the script of {undecorated(function).__qualname__} leaves out what its decorator does "
        text += f"({code.co_filename}:{code.co_firstlineno}): TorchScript compiles what is below decorators"
        warn_here(text, ScriptWarning)


def _may_open(wrapper: Any) -> bool:
    """Return whether the code of a decorator, or what it reaches, names a region; what is decorated does not count."""
    seen, waiting = {id(layer) for layer in _layers(wrapper)} - {id(wrapper)}, [wrapper]
    while waiting and len(seen) < _MOST:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, torch.nn.Module | torch.Tensor | types.ModuleType):
            continue
        seen.add(id(value))
        if is_region(value):
            return True
        code = getattr(value, "__code__", None)
        if isinstance(code, types.CodeType) and (value is wrapper or is_user_file(code.co_filename)):
            names = set(_names_of(code))
            if names & _WORDS:
                return True
            waiting += [reached for name, reached in value.__globals__.items() if name in names]
        if isinstance(value, Mapping):
            waiting += value.values()
        elif isinstance(value, list | tuple | set):
            waiting += value
        else:
            waiting += [getattr(value, name, None) for name in ("__self__", "__func__", "func")]
            waiting += _captured(value).values()
            waiting += [*getattr(value, "__dict__", {}).values(), *vars(type(value)).values()]
    return False


def _names_of(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _names_of(constant)


def _no_function(function: Any, layer: Any) -> ScriptError:
    found = f"a region decorates {_named(layer)}, and TorchScript compiles functions alone"
    advice = "Decorate its forward, or open the region where it is called: with torch.autocast(...): ..."
    return _refused(function, layer, found, advice)


def places_of(*values: Any) -> tuple[Origin, ...]:
    """Return the lines of functions, or of what objects run when called; if none is known, the user's that asks."""
    known = [vars(value if isinstance(value, type) else type(value)) for value in values]
    pairs = zip(values, known, strict=True)
    calls = [v if hasattr(v, "__code__") else names.get("__call__") or names.get("forward") for v, names in pairs]
    codes = dict.fromkeys(code for call in calls if (code := getattr(call, "__code__", None)) is not None)
    places = tuple(_origin(code) for code in codes if is_user_file(code.co_filename))
    return places or find_site().origins


def _origin(code: types.CodeType) -> Origin:
    return Origin(code.co_filename, code.co_firstlineno)


def _refused(function: Any, layer: Any, found: str, advice: str = "") -> ScriptError:
    inner = undecorated(function)
    asked = f"a script of {getattr(inner, '__qualname__', None) or 'a decorated ' + type(inner).__name__}"
    advice = advice or "Open the region where the function is called, or in its body: with torch.autocast(...): ..."
    return ScriptError(asked, found, places_of(inner, layer), advice)


# -- classes that are no modules ---------------------------------------------------------------------------------------


_seen: set[str] = set()
_dropped: dict[str, Any] = {}  # methods by qualified name


def note_classes(by_us: bool = False) -> None:
    """Note the classes that were compiled since the last time: by us, or by torch alone, without their regions."""
    for name, kind in jit.script_classes().items():
        if name not in _seen and not by_us:
            for method, attribute in vars(kind).items():
                is_property = isinstance(attribute, property)
                value = attribute.fget if is_property else getattr(attribute, "__func__", attribute)
                if inspect.isfunction(value) and _opens(value):
                    _dropped[f"{name}.__{method}_getter" if is_property else f"{name}.{method}"] = value
        _seen.add(name)


def check_class(call: Any) -> None:
    """Raise ScriptError for a call of a method whose regions are in no script."""
    kind, method = call.inputsAt(0).type(), call.s("name")
    if kind.kind() != "InterfaceType":
        _check_method(f"{kind.qualified_name()}.{method}", call)
        return
    for name in jit.script_classes(kind):
        _check_method(f"{name}.{method}", call)
        graph = jit.class_method(f"{name}.{method}").graph.copy()
        jit.inline(graph)
        if any(region_class(node.output()) for node in graph.findAllNodes("prim::CreateObject")):
            found = f"an interface represents {name.rpartition('.')[2]}, and no script knows that its {method} has one"
            advice = "Give the class itself as the argument's type, or open the region around the call."
            raise ScriptError("a region in a script", found, shown_at(call), advice)


def _check_method(name: str, call: Any) -> None:
    if name in _dropped:
        method = _dropped[name]
        found = "torch.jit.script compiled its class before, without the region that decorates the method"
        where = (*shown_at(call), *places_of(undecorated(method), method))
        advice = "Open the region in the method: with torch.autocast(...): ..."
        raise ScriptError(f"a script of {undecorated(method).__qualname__}", found, where, advice)
    if name.rpartition(".")[0] in _seen:
        for inner in jit.class_method(name).graph.findAllNodes("prim::CallMethod"):
            if inner.inputsAt(0).type().kind() == "ClassType":
                _check_method(f"{inner.inputsAt(0).type().qualified_name()}.{inner.s('name')}", call)


def _opens(method: Any) -> bool:
    try:
        return bool(regions_around(method))
    except ScriptError:
        return True


# -- regions as objects of Python: which objects are some, and the arguments that make them in a script ----------------


Signature = tuple[tuple[str, ...], dict[str, str]]
"""Of a region class: names of its arguments, and what ours is given, as source, where a call does not say it."""


def is_region(value: Any) -> bool:
    """Return whether something is a region, a class of them, or a part without gradients, which scripts have, too."""
    kind = value if isinstance(value, type) else type(value)
    return issubclass(kind, (torch.autocast, autocast)) or type(value) is torch.no_grad


def described(value: Any) -> dict[str, Any]:
    """Return the arguments that make a region in a script. RegionError for a user's own class of regions."""
    if type(value) is autocast:
        facts: dict[str, Any] = {"cache_enabled": value.prepared.facts.cache, "policy": value.policy.digest}
    elif type(value) in (torch.autocast, torch.cpu.amp.autocast, torch.cuda.amp.autocast):  # type: ignore[attr-defined]
        facts = {"cache_enabled": caches(value), "policy": ""}
    else:
        found = f"scripts do not know what {type(value).__qualname__} does"
        raise RegionError("a region in a script", found, advice="Open torch.autocast or narrowcast.autocast itself.")
    return {"device_type": value.device, "dtype": number_of(value.fast_dtype), "enabled": is_enabled(value), **facts}


def signature_of(value: Any) -> Signature | None:
    """Return the arguments of region classes in their order, and what ours takes where these leave them open."""
    return _SIGNATURES.get(value) if isinstance(value, type) else None


_ALL, _OLD = ("device_type", "dtype", "enabled", "cache_enabled"), ("enabled", "dtype", "cache_enabled")
_TOLD = {"cache_enabled": "True", "policy": "''"}
_SIGNATURES: dict[type, Signature] = {
    autocast: (_ALL, {}),
    torch.autocast: (_ALL, {"policy": "''"}),
    torch.cpu.amp.autocast: (_OLD, {"device_type": "'cpu'", "dtype": str(number_of(torch.bfloat16)), **_TOLD}),  # type: ignore[attr-defined]
    torch.cuda.amp.autocast: (_OLD, {"device_type": "'cuda'", "dtype": str(number_of(torch.float16)), **_TOLD}),
}
