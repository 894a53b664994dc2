"""`compile`: torch.compile with explicit casts, equal to eager."""

from __future__ import annotations

import functools
import os
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, Unpack, overload

import torch

from narrowcast.core.goals import CAST, WORKING, Goal, GoalName, WeightsName, as_goal
from narrowcast.core.policy import Kind, Policy
from narrowcast.errors import GoalError, RegionError
from narrowcast.frontends.compiled import compiled_model
from narrowcast.frontends.compiled.backend import GraphBackend, compile_graph
from narrowcast.frontends.eager.asked import Under, asked_region
from narrowcast.frontends.eager.caching import follow_mutators
from narrowcast.frontends.graphs.backward import parse_backward
from narrowcast.frontends.graphs.explicit import refuse_scripts
from narrowcast.runtime.torch_bridge import check_ops, device_type_of
from narrowcast.runtime.torch_surface.dynamo import inner_compiler, missing_cpp_compiler, register_backend

F = TypeVar("F", bound=Callable[..., Any])


class _Arguments(TypedDict, total=False):
    under: Under
    backend: str | Callable[..., Any]
    mode: str | None
    options: dict[str, Any] | None
    dynamic: bool | None
    fullgraph: bool
    backward: str | Sequence[Mapping[str, Any]]
    goal: GoalName | Goal
    weights: WeightsName | None


@overload
def compile(model: F, **arguments: Unpack[_Arguments]) -> F: ...
@overload
def compile(model: None = None, **arguments: Unpack[_Arguments]) -> Callable[[F], F]: ...
def compile(
    model: F | None = None,
    *,
    under: Under = None,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    backward: str | Sequence[Mapping[str, Any]] = "as_eager",
    goal: GoalName | Goal = "exact",
    weights: WeightsName | None = None,
) -> Any:
    """Compile a module or function so that every graph has plain casts, those of eager autocast, and no region.

    under: the region in which it runs, as for `narrowcast.explain`. If it is None no region is opened: those around the
        call, and those inside the model, hold in any case. The device is the region's, or that of the module's
        parameters, or of the first tensor that it is called with.
    backend, mode, options, dynamic, fullgraph: as for torch.compile; the explicit graph goes to that backend.
    backward: under which autocast the backward runs: `as_eager` and `off` (ops of the backward run as their inputs
        are), `same_as_forward`, or a list of keyword sets of torch.autocast. A backward that is called under another
        state than this is an error (BackwardError). Rules of the policy about the backward (`backward.aten.mm`,
        `dgrad.aten.mm`, `wgrad.aten.mm`) hold as well.

    goal: `exact`: bit for bit eager. `fast`: the formats that take least time on this device; never less precise per op
        than the policy: calls that it lowers may run in fp32 where that is cheaper. Candidates (placed by cost, as the
        policy says, all as high as may be) are timed on the first call's inputs. `memory`: those that hold fewest bytes
        at once. `Goal.fast(...)` and `Goal.memory(...)` take settings.
    weights: `cast` at each call; `folded`, the default: where no gradient flows they are cast once and kept, until they
        change; `working_copies`: in training, too. What changes parts of `weight.data` needs
        narrowcast.frontends.eager.invalidate.

    What Dynamo cannot capture runs as eager code in the same region. A graph that cannot be given explicit casts runs
    as eager autocast would run it, with a warning. Without `model` a decorator is returned.

    Raises RegionError, PolicyError and UnknownOpError as `narrowcast.autocast` does; GoalError, ProfileError;
    CaptureError for a script. A model of FSDP2 is refused if a block of it, of torch's own class, would run uncompiled.
    """
    arguments: dict[str, Any] = {
        "under": under, "backend": backend, "mode": mode, "options": options, "dynamic": dynamic,
        "fullgraph": fullgraph, "backward": backward, "goal": goal, "weights": weights,
    }  # fmt: skip
    again = functools.partial(compile, **arguments)
    if model is None:
        return again
    if not callable(model):
        raise RegionError(
            asked=f"compile({type(model).__name__})", found="not callable", advice="Give a Module or a function."
        )
    refuse_scripts("compile", model)
    if isinstance(model, torch.nn.Module):
        compiled_model.refuse_sharded(model)
    before = compiled_model.asked_before(model)
    if before is not None:
        return compile(compiled_model.original(model), **compiled_model.asked_again(before, arguments))
    asked = asked_region("compile", under)
    chosen = asked.policy
    check_ops(chosen)
    rules = chosen.backward() if chosen.has_backward_rules else None
    wanted = as_goal(goal, weights)
    if rules is not None and wanted.weights == WORKING:
        _check_gradients(rules)
    if wanted.places:  # a goal never raises where fp32 runs
        chosen = chosen.repairing()
        backend = _usable_backend(backend, asked.device_type or device_type_of(model))
    if wanted.weights != CAST:
        follow_mutators()  # fused optimizers and swapped tensors tell nobody
    register_backend("narrowcast", compile_graph)  # whether or not this package was installed with its entry points
    graphs = GraphBackend(
        inner_compiler(backend, mode, options, dynamic), parse_backward(backward), rules, wanted,
        weakref.ref(model) if isinstance(model, torch.nn.Module) else None,
    )  # fmt: skip
    compiled = torch.compile(model, backend=graphs, dynamic=dynamic, fullgraph=fullgraph)
    around = compiled_model.Compiled()
    if asked.is_there:
        known = asked.device_type or device_type_of(model)
        around = compiled_model.InRegion(lambda device: asked.on(device, chosen.forward()), known, wanted)
    if isinstance(compiled, torch.nn.Module):
        return compiled_model.CompiledModule.of(compiled, around, again)
    return compiled_model.compiled_function(model, compiled, around, arguments)


def _check_gradients(rules: Policy) -> None:
    """Raise GoalError for a rule about weights' gradients beside low copies of weights, whose gradients are low."""
    kinds = (Kind.FULL, Kind.TO, Kind.INSIDE)
    told = next((r for r in rules.rules if r.matches_direction("wgrad") and r.action.kind in kinds), None)
    if told is not None:
        found = f"the gradient of a low copy is rounded to its format, whatever the rule {told} computes it in"
        advice = 'Give weights="folded" or "cast"; or the rule for dgrad. alone.'
        raise GoalError(f'weights="{WORKING}" with a rule about gradients of weights', found, advice=advice)


def _usable_backend(backend: str | Callable[..., Any], device_type: str | None) -> str | Callable[..., Any]:
    """Return the backend, or one that needs no C++ compiler where there is none."""
    if backend != "inductor" or device_type not in ("cpu", None):
        return backend
    missing = missing_cpp_compiler(os.environ.get("CXX"))
    if not missing:
        return backend
    warnings.warn(
        f"narrowcast: there is no C++ compiler for Inductor here ({missing}): graphs run op by op. Install one (g++), "
        'or write backend="aot_eager"',
        stacklevel=3,
    )
    return "aot_eager"
