"""`script` and `trace`: TorchScript with explicit casts."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from narrowcast.core.policy import DEVICE_TYPES, Policy, Site
from narrowcast.errors import NarrowcastError, ScriptError, ScriptWarning
from narrowcast.frontends.eager.asked import AskedRegion, Under, asked_region
from narrowcast.frontends.eager.steps import runs_in_steps
from narrowcast.frontends.scripts.callers import class_name, graphs_of
from narrowcast.frontends.scripts.cast_already import cast_for_all
from narrowcast.frontends.scripts.compiling import around, compile_anew, compiling
from narrowcast.frontends.scripts.decorated import check_methods, places_of, undecorated
from narrowcast.frontends.scripts.places import shown_at, shown_in
from narrowcast.frontends.scripts.scopes import Scopes, policy_of
from narrowcast.frontends.scripts.scripted import ExplicitModule, explicit_function, explicit_module
from narrowcast.frontends.scripts.tracing import traced_function, traced_module, tracing
from narrowcast.runtime.devices.abilities import for_target
from narrowcast.runtime.devices.device import random_state_kept
from narrowcast.runtime.regions.ruling import ruled_device_types
from narrowcast.runtime.sites.python_stack import warn_here
from narrowcast.runtime.sites.sightings import tell_whole
from narrowcast.runtime.torch_bridge import DTYPES, device_type_of, tensors_in
from narrowcast.runtime.torch_bridge.case import unpacked
from narrowcast.runtime.torch_bridge.inputs import Inputs, call_arguments
from narrowcast.runtime.torch_surface.jit import (
    PREPACKED,
    TopTracedModule,
    add_text,
    deprecations_unsaid,
    find_type,
    function_from_graph,
    tracing_state,
)
from narrowcast.runtime.torch_surface.modules import told_of_module_calls


def script(target: Callable[..., Any] | torch.nn.Module, *, under: Under = None, made_for: str = "") -> Any:
    """Compile a function or a module with TorchScript so that its graphs have plain casts, those of eager autocast.

    target: a function, a Module, or a script or trace that exists already (loaded from a file, for example), which is
        copied: it does not say which functions it was made of, so that rules about functions hold in its methods only.

    under: the region around it all, as for `narrowcast.explain`; None opens none. The device is the region's, or that
        of the module's parameters, or cpu.

    Regions inside hold in every form: `torch.autocast`, `torch.cpu.amp.autocast`, `torch.cuda.amp.autocast` and
    `narrowcast.autocast` as with statements or decorators, nested, made earlier, chosen by a condition, with `enabled`
    and `dtype` that only the running script knows. Returns a torch.jit.ScriptFunction or a torch.jit.ScriptModule; what
    it saves runs in plain torch. Called inside a region, what the script leaves open follows that region.

    made_for: file of the profile of the device that the script is for, if it is not this one;
        `narrowcast.frontends.target.target_of` reads it off a module, also off one that was saved.

    Raises ScriptError, with file, line and column, for code in a region that cannot be cast; whatever TorchScript
    raises for code that it cannot compile.
    """
    if isinstance(target, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        return _with_casts(target, under, made_for)
    if not isinstance(target, torch.nn.Module) and not inspect.isfunction(target):
        raise _no_code("script", target, "Give a Python function, or an instance of a Module.")
    written = undecorated(target)
    if inspect.isfunction(target) and (getattr(written, "__name__", "") == "<lambda>" or runs_in_steps(written)):
        raise _no_code("script", target, "Give a function that is written with def, and that returns its results.")
    asked = asked_region("script", under)
    scopes, made_on = _scopes(target, asked, made_for)
    if isinstance(target, torch.nn.Module):
        _tell_closed(target, asked.policy)
    with compiling(_device_types(target)), _explained(target):
        compiled = compile_anew(target)
        if isinstance(target, torch.nn.Module):
            made = add_text(explicit_module(compiled, scopes, target), TARGET, made_on)
            tell_whole(map(policy_of, scopes.values()), target)
            return made
        return explicit_function(compiled, scopes, written, getattr(target, "__narrowcast_pinned__", None))


def _with_casts(script: Any, under: Under, made_for: str) -> Any:
    """Return an existing script or trace, loaded from a file for example, copied, with explicit casts.

    ScriptError for code in a region that cannot be cast.
    """
    asked = asked_region("script", under)
    scopes, made_on = _scopes(script, asked, made_for)
    if any(rule.function for rule in asked.policy.rules):
        text = "narrowcast: a script that exists already does not say which functions it was made of: rules about "
        text += "functions hold in its methods only (function = '*Block.forward'). nc.script knows them all"
        warn_here(text, ScriptWarning)
    if isinstance(script, ExplicitModule):
        _tell_closed(script, asked.policy)
    if scopes and set(scopes) <= cast_for_all(script):
        text = "narrowcast: this script is cast already, as a whole: the region that is given has nothing left to "
        text += (
            "rule. Give the original instead: nc.script(what was scripted, traced or loaded before it was cast, ...)"
        )
        warn_here(text, ScriptWarning)
    with deprecations_unsaid():
        if isinstance(script, torch.jit.ScriptFunction):
            return explicit_function(function_from_graph(str(script.name), script.graph.copy()), scopes)
        check_methods(script)
        return add_text(explicit_module(_copied(script), scopes), TARGET, made_on)


def _tell_closed(model: torch.nn.Module, policy: Policy) -> None:
    """Warn of rules about modules in a part that is a script or trace already, which does not say what they were."""
    rules = [rule for rule in policy.rules if not rule.function and (rule.module is not None or rule.module_class)]
    parts = [(p, m) for p, m in model.named_modules() if isinstance(m, (ExplicitModule, TopTracedModule))]
    for path, part in parts if rules else ():
        known = Site(path, (class_name(find_type(part)),))
        left = [rule for rule in rules if not rule.matches_site(known)]
        for inner, module in part.named_modules():
            site = Site(f"{path}.{inner}".strip("."), (class_name(find_type(module)),))
            told = next((rule for rule in left if inner and rule.matches_site(site)), None)
            if told is not None:
                text = f"narrowcast: {path or 'this'} is a script or trace already: the rule {told} does not hold in "
                text += f"it ({site.module_path}). Give nc.script the module that it was made of"
                warn_here(text, ScriptWarning)
                break


_MISTYPED = re.compile(r"autocast self, .*\nExpected a value of type '(.+)' for argument '(\w+)' .* type '(.+)'")
_WANTED = {"dtype": "a torch.dtype", "device_type": "text"}


@contextlib.contextmanager
def _explained(target: Any) -> Iterator[None]:
    """Raise ScriptError for what TorchScript's compiler reports of our regions, and where it fails without a place or a
    cause; add a note to what it refuses itself.
    """
    asked = f"script({getattr(target, '__qualname__', type(target).__name__)})"
    place = getattr(target, "forward", target)
    try:
        yield
    except NarrowcastError:
        raise
    except Exception as error:
        text = str(error)
        mistyped = _MISTYPED.search(text)
        if mistyped is not None:
            wanted = _WANTED.get(mistyped[2], "True or False; bool(x) of a tensor or a number x")
            found = f"its {mistyped[2]} is of type {mistyped[3]}"
            raise ScriptError("a region in a script", found, shown_in(text), f"Give {wanted}.") from None
        if "INTERNAL ASSERT FAILED" in text:
            found = f"TorchScript's compiler fails: {text.strip().partition(chr(10))[0]}"
            advice = "It does so at a with statement that is no region and follows an early return: move it into a "
            raise ScriptError(asked, found, places_of(place), f"{advice}function of its own.") from error
        where = "".join(f" ({origin})" for origin in places_of(place))
        error.add_note(
            f"narrowcast: {asked}{where}: this is an error of TorchScript itself. Write it in other words, or take "
            "narrowcast.trace or narrowcast.compile, which run the Python code as it is."
        )
        raise


def _device_types(target: Any) -> tuple[str, ...]:
    """Return the device types that regions in a script may use: of its parameters, and of this machine."""
    here = torch.accelerator.current_accelerator()
    device_types = (device_type_of(target), here.type if here is not None else None)
    return tuple(device for device in device_types if device in DEVICE_TYPES)


def _no_code(asked: str, target: Any, advice: str) -> ScriptError:
    kind = "a class" if inspect.isclass(target) else f"an object of type {type(target).__name__}"
    if inspect.isfunction(target):
        kind = "a lambda" if undecorated(target).__name__ == "<lambda>" else "a generator or a coroutine"
    asked = f"{asked}({getattr(target, '__qualname__', None) or type(target).__name__})"
    return ScriptError(asked, f"it is {kind}", places_of(undecorated(target), target), advice)


def _copied(script: torch.jit.ScriptModule) -> Any:
    """Return the same module with types of its own, in the same mode. ScriptError for one that cannot be copied."""
    fused = next((n for graph in graphs_of(script) for n in graph.findAllNodes(PREPACKED)), None)
    if fused is not None:
        found = "its weights are packed for oneDNN's fp32 kernels, and are no tensors any more"
        advice = "Give what torch.jit.freeze makes, and optimize the result: "
        advice += "torch.jit.optimize_for_inference(torch.jit.freeze(nc.script(frozen, ...).eval()))."
        raise ScriptError("script(what torch.jit.optimize_for_inference made)", found, shown_at(fused), advice)
    buffer = io.BytesIO()
    torch.jit.save(script, buffer)
    buffer.seek(0)
    copied = torch.jit.load(buffer)
    for parameter, original in zip(copied.parameters(), script.parameters(), strict=True):
        parameter.requires_grad_(original.requires_grad)
    return copied.train(script.training) if hasattr(script, "training") else copied  # a frozen one has no mode


def _scopes(target: Any, asked: AskedRegion, made_for: str) -> tuple[Scopes, str]:
    """Return the region around a script, checked as eager regions are, and the name of the device it is made for."""
    device_type = asked.device_type or device_type_of(target) or "cpu"
    chosen, made_on = for_target(asked.policy, device_type, made_for)
    if not asked.is_there:
        return {}, made_on
    region = asked.on(device_type, chosen)
    facts = region.prepared.facts
    return around(device_type, DTYPES[facts.low], facts.enabled, facts.cache, region.policy), made_on


TARGET = "narrowcast_target"
"""The attribute of modules that says for which device they were made, saved ones too."""


_one_trace_at_a_time = threading.RLock()
"""torch's weight cache is that of all threads: a cast that one trace has recorded is no value of another's graph."""


def trace(
    target: Callable[..., Any] | torch.nn.Module,
    inputs: Inputs = (),
    *,
    under: Under = None,
    made_for: str = "",
    **options: Any,
) -> Any:
    """Trace a function or a module with TorchScript, with the casts of eager autocast in the graph.

    inputs: as for `narrowcast.explain`. options: torch.jit.trace's other keywords (check_trace, strict, ...).
    under: the region around it all, as for `narrowcast.explain`; with None the regions that are open hold, and those
        inside the code.

    The weight cache works: what it kept from before the trace is let go first.
    """
    target, inputs = unpacked("trace", target, inputs)
    if not callable(target) or inspect.isclass(target):
        raise _no_code("trace", target, "Give a function, or an instance of a Module.")
    if isinstance(target, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        found, advice = "it is a script already, which torch.jit.trace returns as it is", "Give it casts by "
        advice += "nc.script(it, under=...), or trace what it was made of."
        raise ScriptError(f"trace({type(target).__name__})", found, advice=advice)
    owner = getattr(target, "__self__", None)
    if isinstance(owner, torch.nn.Module) or not (hasattr(target, "__name__") or isinstance(target, torch.nn.Module)):
        found = "a method of a module" if isinstance(owner, torch.nn.Module) else f"a {type(target).__name__}"
        advice = "Give the module, or a function that calls it: nc.trace(lambda x: module.method(x), x)."
        raise ScriptError("trace(...)", f"{found}, to which TorchScript cannot give a name", advice=advice)
    args, kwargs = call_arguments("trace", inputs)
    kwargs = kwargs or dict(options.pop("example_kwarg_inputs", None) or {})
    if not args and not kwargs:
        advice = "Give the arguments that it is called with: nc.trace(model, (x,))."
        raise ScriptError(
            f"trace({getattr(target, '__qualname__', type(target).__name__)})", "no inputs", advice=advice
        )
    if kwargs:
        if args:
            raise ScriptError("trace(target, (args, kwargs))", "TorchScript traces with one of them",
                              advice="Give all of them by position, or all by keyword.")  # fmt: skip
        options["example_kwarg_inputs"] = kwargs
    checked = options.pop("check_trace", True)
    asked = asked_region("trace", under)
    device = asked.device_type or device_type_of(target) or device_type_of(args, kwargs) or "cpu"
    chosen, made_on = for_target(asked.policy, device, made_for if asked.is_there else "")
    around = asked.on(device, chosen) if asked.is_there else contextlib.nullcontext()
    with _one_trace_at_a_time, deprecations_unsaid(), around:
        torch.clear_autocast_cache()
        ruled = ruled_device_types()
        if asked.is_there and device not in ruled:
            ruled += (device,)
        with tracing(), _cache_cleared_as_it_begins():
            try:
                traced = torch.jit.trace(target, args or None, check_trace=False, **options)
            finally:
                torch.clear_autocast_cache()
            is_module = isinstance(target, torch.nn.Module)
            explicit = traced_module(traced, ruled) if is_module else traced_function(traced, ruled)
            if asked.is_there:
                tell_whole([chosen.resolve(device)], target)
        if checked:
            low = {torch.get_autocast_dtype(device_type) for device_type in ruled}
            _check_trace(target, explicit, args, kwargs, low)
    return add_text(explicit, TARGET, made_on) if is_module else explicit


@contextlib.contextmanager
def _cache_cleared_as_it_begins() -> Iterator[None]:
    """Let go of casts that were made while torch prepared the trace, as it reads weights that a parametrization
    computes: the graph does not have them.
    """
    waiting = [True]

    def called(_: torch.nn.Module) -> None:
        if waiting and tracing_state() is not None:
            waiting.clear()
            torch.clear_autocast_cache()

    with told_of_module_calls(called):
        yield


def _check_trace(
    target: Any, traced: Any, args: tuple[Any, ...], kwargs: dict[str, Any], formats: set[torch.dtype]
) -> None:
    """Compare as torch's own check does, and let results differ by what a library's kernels may round otherwise: two
    units in the last place of the narrowest format, at the largest element.
    """
    with torch.no_grad(), random_state_kept():
        torch.manual_seed(0)
        expected = tensors_in(target(*copy.deepcopy(args), **copy.deepcopy(kwargs)))
        torch.manual_seed(0)
        results = tensors_in(traced(*copy.deepcopy(args), **copy.deepcopy(kwargs)))
    torch.clear_autocast_cache()
    pairs = zip(expected, results, strict=False)
    formats = formats | {t.dtype for t in expected if t.is_floating_point()}
    unit = max((torch.finfo(dtype).eps for dtype in formats), default=0.0)
    is_same = len(expected) == len(results) and all(_are_close(a, b, 2 * unit) for a, b in pairs)
    if not is_same:
        text = "narrowcast: the trace does not give what the code gives for the same inputs: it may depend on values, "
        warn_here(f"{text}or on what it has done before", ScriptWarning)


def _are_close(a: torch.Tensor, b: torch.Tensor, of_largest: float) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    finite = a.abs()[a.isfinite()] if a.is_floating_point() else a.new_zeros(0)
    allowed = of_largest * float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=1e-5, atol=max(allowed, 1e-8), equal_nan=True)
