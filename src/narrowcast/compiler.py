"""`compile`: torch.compile with explicit casts, equal to eager."""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from narrowcast.eager import autocast
from narrowcast.eager.caching import follow_mutators
from narrowcast.eager_choice import is_raced, run_watched
from narrowcast.errors import NarrowcastError, RegionError
from narrowcast.formats import Format
from narrowcast.fx.backend import GraphBackend, register
from narrowcast.fx.backward import parse_backward
from narrowcast.goals import CAST, Goal, as_goal
from narrowcast.policy import Policy, as_policy
from narrowcast.torch_bridge import check_ops, tensors_in
from narrowcast.torch_surface.dispatch import count_dispatch_modes
from narrowcast.torch_surface.dynamo import (
    BackendCompilerFailed,
    OptimizedModule,
    inner_compiler,
    missing_cpp_compiler,
    never_trace,
)

F = TypeVar("F", bound=Callable[..., Any])


def compile(
    model: F | None = None,
    *,
    policy: Policy | str | None = None,
    dtype: torch.dtype | str | Format | None = None,
    device_type: str | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    backward: str | Sequence[Mapping[str, Any]] = "as_eager",
    goal: str = "exact",
    verify: bool = True,
    weights: str = "folded",
    profile: str = "",
    memory_limit_bytes: int | None = None,
) -> Any:
    """Compile a module or function so that every graph has plain casts, those of eager autocast, and no region.

    policy, dtype, device_type, enabled, cache_enabled: the region in which it runs, as for `narrowcast.autocast`. If
        policy, dtype and device_type are all None no region is opened: those around the call, and those inside the
        model, hold in any case. A device_type left out is that of the module's parameters, or of the first tensor that
        it is called with.
    backend, mode, options, dynamic, fullgraph: as for torch.compile; the explicit graph goes to that backend.
    backward: under which autocast the backward runs: `as_eager` and `off` (ops of the backward run as their inputs
        are), `same_as_forward`, or a list of keyword sets of torch.autocast. A backward that is called under another
        state than this is an error (BackwardError). Rules of the policy about the backward (`backward.aten.mm`,
        `dgrad.aten.mm`, `wgrad.aten.mm`) hold besides.

    goal: `exact`: bit for bit eager. `fast`: the formats that take least time on this device; never less precise per op
        than the policy: calls that it lowers may run in fp32 where that is cheaper. `memory`: those that keep fewest
        bytes for the backward.
    verify: with `fast`, candidates (placed by cost, as the policy says, all as high as may be) are compiled and timed
        on the first call's inputs, the best is kept, and the choice is remembered on disk.
    weights: `cast` at each call; `folded`: where no gradient flows they are cast once and kept, until they change;
        `working_copies`: in training, too. What changes parts of `weight.data` needs narrowcast.invalidate.
    profile: file of a profile to plan with, instead of this device's own (another device's only with verify=False).
    memory_limit_bytes: with `fast`, what may be kept for the backward and in cast copies, per graph.

    What Dynamo cannot capture runs as eager code in the same region. A graph that cannot be given explicit casts runs
    as eager autocast would run it, with a warning. Without `model` a decorator is returned.

    Raises RegionError, PolicyError and UnknownOpError as `narrowcast.autocast` does; GoalError, ProfileError.
    """
    if model is None:
        return functools.partial(
            compile, policy=policy, dtype=dtype, device_type=device_type, enabled=enabled,
            cache_enabled=cache_enabled, backend=backend, mode=mode, options=options, dynamic=dynamic,
            fullgraph=fullgraph, backward=backward, goal=goal, verify=verify, weights=weights, profile=profile,
            memory_limit_bytes=memory_limit_bytes,
        )  # fmt: skip
    if not callable(model):
        raise RegionError(
            asked=f"compile({type(model).__name__})", found="not callable", advice="Give a Module or a function."
        )
    chosen = as_policy(policy)
    check_ops(chosen)
    rules = chosen.backward() if chosen.has_backward_rules else None
    wanted = as_goal(goal, verify, weights, profile, memory_limit_bytes)
    if wanted.places:  # a goal never raises where fp32 runs
        chosen = chosen.repairing()
        backend = _usable_backend(backend, device_type or _device_of(model))
    if wanted.weights != CAST:
        follow_mutators()  # fused optimizers and swapped tensors tell nobody
    register()
    graphs = GraphBackend(inner_compiler(backend, mode, options, dynamic), parse_backward(backward), rules, wanted)
    compiled = torch.compile(model, backend=graphs, dynamic=dynamic, fullgraph=fullgraph)
    around = _Compiled()
    if not (policy is None and dtype is None and device_type is None):
        around = _Around(
            lambda device: autocast(device, dtype, enabled, cache_enabled, policy=chosen.forward()),
            device_type or _device_of(model),
            wanted,
        )
    if isinstance(compiled, torch.nn.Module):
        compiled.__class__ = CompiledModule
        object.__setattr__(compiled, "_around", around)
        return compiled

    @functools.wraps(model)
    def run(*args: Any, **kwargs: Any) -> Any:
        return around.run(compiled, args, kwargs)

    return run


def _usable_backend(backend: str | Callable[..., Any], device_type: str | None) -> str | Callable[..., Any]:
    """The backend, or one that needs no C++ compiler where there is none."""
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


class CompiledModule(OptimizedModule):  # type: ignore[misc]
    """A compiled module that runs in its region. Parameters, state_dict and attributes are the original's."""

    _around: _Compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's result, computed in the region."""
        return object.__getattribute__(self, "_around").run(super().__call__, args, kwargs)

    def __bool__(self) -> bool:  # torch 2.11 asks for a length, which most models have not
        return bool(self._orig_mod)

    def __reduce__(self) -> Any:
        raise NarrowcastError(
            asked="pickling or copying a compiled module",
            found="compiled code cannot be copied",
            advice="Copy or save the original module (or its state_dict), and compile the copy.",
        )


class _Compiled:
    """What runs a compiled call. An error of ours that Dynamo has wrapped comes out as it was raised."""

    def run(self, compiled: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self._call(compiled, args, kwargs)
        except BackendCompilerFailed as error:
            inner = getattr(error, "inner_exception", None)
            if isinstance(inner, NarrowcastError):
                raise inner from None
            raise

    def _call(self, compiled: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return compiled(*args, **kwargs)


class _Around(_Compiled):
    """Runs a compiled call in a region, which is made when it is first known for which device type.

    make: gives the region on a device type. Under a goal the first call shows what runs as eager code in it; the region
    of those that follow is made for that.
    """

    def __init__(self, make: Callable[[str], autocast], device_type: str | None, goal: Goal) -> None:
        self._make, self._device_type, self._goal = make, device_type, goal
        self._regions: dict[str, autocast] = {}
        self._lock = threading.Lock()
        if device_type is not None:
            make(device_type)  # what is wrong with the arguments is said at once

    def _call(self, compiled: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device_type = self._device_type
        if device_type is None:
            device_type = next((t.device.type for t in tensors_in(args, kwargs)), "cpu")
        region = self._regions.get(device_type)
        if region is None:
            return self._first_call(device_type, compiled, args, kwargs)
        with region:
            return compiled(*args, **kwargs)

    def _first_call(self, device_type: str, compiled: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        region = self._make(device_type)
        if torch.compiler.is_dynamo_compiling():  # what is made while Dynamo traces is for what it traces
            with region:
                return compiled(*args, **kwargs)
        if not is_raced(region, self._goal):
            self._regions[device_type] = region
        # while it is recorded, or on fake tensors, no time says much; another thread may be here already
        if device_type in self._regions or count_dispatch_modes() or not self._lock.acquire(False):
            with region:
                return compiled(*args, **kwargs)
        try:
            results, policy = run_watched(lambda: compiled(*args, **kwargs), region)
            self._regions[device_type] = region if policy is region.policy else region.with_eager_policy(policy)
            return results
        finally:
            self._lock.release()


never_trace(_Around._first_call)  # not even where the call is made by code that is compiled itself


def _device_of(model: Any) -> str | None:
    if isinstance(model, torch.nn.Module):
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:  # then it is yet to come to a device
                return tensor.device.type
    return None
