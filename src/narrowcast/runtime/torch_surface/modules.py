"""Modules: what their calls go through, what is inside them, what changes their weights, what recomputes them."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from types import CodeType, FrameType, MethodType
from typing import Any

import torch
import torch.utils.checkpoint
from torch.nn import Module
from torch.nn.modules.lazy import LazyModuleMixin

from narrowcast.runtime.torch_surface.dynamo import between_compilations, never_trace
from narrowcast.runtime.torch_surface.patches import note_staying, once

CALL = "_call_impl"
"""The method of `torch.nn.Module` that every call of a module goes through."""

call_of_module: Any = Module.__call__
"""A module's call, without what a class of modules puts before it."""
has_global_hooks: Any = torch.nn.modules.module._has_any_global_hook
"""Whether hooks on all modules are set."""


_HOOKS: dict[Any, Any] = torch.nn.modules.module._global_forward_pre_hooks
_KEY = -1
_told: list[Callable[..., object]] = []


def _tell(module: Module, args: Any) -> None:
    if not torch.compiler.is_dynamo_compiling():  # which follows hooks into what it compiles
        for tell in tuple(_told):
            tell(module)


never_trace(_tell)


def by_no_other_thread(tell: Callable[..., object]) -> Callable[..., object]:
    """Return a function that hears nothing of the threads that run already: what they train or serve meanwhile is no
    part of what this one runs.
    """
    others = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}
    return lambda *args: None if threading.get_ident() in others else tell(*args)


@contextmanager
def told_of_module_calls(tell: Callable[..., object]) -> Iterator[None]:
    """Call a function with each module that is about to be called, by no other thread. By one hook under one key:
    Dynamo guards on the keys of hooks, and compiles again where another is there.
    """
    tell = by_no_other_thread(tell)
    with between_compilations():
        _told.append(tell)
        _HOOKS[_KEY] = _tell
    try:
        yield
    finally:
        with between_compilations():
            _told.remove(tell)
            if not _told:
                _HOOKS.pop(_KEY, None)


STACK = "nn_module_stack"
"""What Dynamo and torch.export note beside a node of a graph: the modules that were being called, outermost first."""
COMPILED = "_orig_mod"
"""Under which name the wrapper of torch.compile holds the module that it was made of."""


def without_wrapper(path: str) -> str:
    """Return the path of a module or a parameter as it is in the model: the wrapper of torch.compile adds nothing."""
    return path if COMPILED not in path else ".".join(part for part in path.split(".") if part != COMPILED)


def compiled_of(model: Any) -> Module | None:
    """Return the module that torch.compile made this one of; None of another."""
    module = getattr(model, COMPILED, None)
    return module if isinstance(module, Module) else None


children: Callable[[Module], dict[str, Module | None]] = attrgetter("_modules")
"""The modules inside one, by name."""


def tensors_held(module: Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameters of a module itself by name, and its buffers: the mappings that it looks them up in."""
    return module._parameters, module._buffers


def dropped_share(module: Module) -> float:
    """Return the share of elements that a module drops at random as it is now; 0 of any other, or in evaluation."""
    if not isinstance(module, torch.nn.modules.dropout._DropoutNd):
        return 0.0
    return module.p if module.training else 0.0


def mutators() -> tuple[tuple[Any, str], ...]:
    """Return functions that change weights and that torch has no hooks for, as owner and name: loading a state_dict,
    moving or converting a module, averaged models, vectors written into parameters.
    """
    vectors = torch.nn.utils.convert_parameters
    return (
        (Module, "load_state_dict"), (Module, "_apply"), (torch.optim.swa_utils.AveragedModel, "update_parameters"),
        (torch.nn.utils, "vector_to_parameters"), (vectors, "vector_to_parameters"),
        (vectors, "_check_param_device"),  # which it calls, whatever has imported it before
    )  # fmt: skip


def optimized_by(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield all parameters of an optimizer, group by group."""
    for group in optimizer.param_groups:
        yield from group["params"]


def has_step_hooks(optimizer: Any) -> bool:
    """Return whether hooks of this optimizer's own run with its steps."""
    return any(getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post"))


def step_without_hooks(optimizer: Any) -> Callable[[], Any]:
    """Return what makes a step of an optimizer, and tells nobody: neither a profiler, nor hooks on all optimizers."""
    step = type(optimizer).step
    return partial(step.__wrapped__ if getattr(step, "hooked", False) else step, optimizer)


def hooked_step(optimizer: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that steps in an optimizer's place, with the hooks that run with its steps around it."""
    is_torch = isinstance(optimizer, torch.optim.Optimizer)
    return torch.optim.Optimizer.profile_hook_step(step) if is_torch else step


def told_of_replicas(model: Module, tell: Callable[[Any], object]) -> Any:
    """Call a function with each DistributedDataParallel that is made around a model, or a part of it, from now on.

    Returns a handle, whose `remove()` ends it.
    """
    own = {id(one) for one in model.parameters()}

    def hear(outer: Module, name: str, inner: Any) -> None:
        if isinstance(outer, torch.nn.parallel.DistributedDataParallel) and isinstance(inner, Module):
            if any(id(one) in own for one in inner.parameters()):
                tell(outer)

    return torch.nn.modules.module.register_module_module_registration_hook(hear)


def has_schedule(optimizer: Any) -> bool:
    """Return whether a schedule of its learning rate counts an optimizer's steps."""
    return hasattr(optimizer.step, "_wrapped_by_lr_sched")


def step_for_schedules(optimizer: Any, step: Callable[..., Any]) -> MethodType:
    """Return a method that steps an optimizer, and that schedules of its learning rate, made before or later, count."""

    def counted(own: Any, *given: Any, **named: Any) -> Any:
        own._opt_called = True
        return step(own, *given, **named)

    counted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return MethodType(counted, optimizer)


@contextmanager
def told_of_optimizer_steps(tell: Callable[..., object], before: bool = False) -> Iterator[None]:
    """Call a function with each optimizer that steps inside, after its step or before."""
    _hear_of_steps()
    heard = _told_before if before else _told_after
    heard.append(tell)
    try:
        yield
    finally:
        heard.remove(tell)


_told_before: list[Callable[..., object]] = []
_told_after: list[Callable[..., object]] = []


@once
def _hear_of_steps() -> None:
    """Register torch's hooks on the steps of all optimizers, to stay: another thread may be going through them."""
    owner: Any = sys.modules[torch.optim.Optimizer.__module__]
    owner.register_optimizer_step_pre_hook(partial(_tell_step, _told_before))
    owner.register_optimizer_step_post_hook(partial(_tell_step, _told_after))
    note_staying("hooks on every optimizer's step, of what observes", "steps are seen")


def _tell_step(told: list[Callable[..., object]], optimizer: Any, args: Any, kwargs: Any) -> None:
    for tell in tuple(told):
        tell(optimizer)


def module_call_code() -> CodeType:
    """Return the code of what runs when a module is called, as it is now: pins and rules about modules replace it."""
    call = getattr(Module, CALL)
    code: CodeType = getattr(call, "__wrapped__", call).__code__  # below what is held around it for a while
    return code


def is_uninitialized(module: Module) -> bool:
    """Return whether a lazy module is still to become another in its first call, which cannot be undone."""
    return isinstance(module, LazyModuleMixin) and module.has_uninitialized_params()


def is_sharded(module: Module) -> bool:
    """Return whether FSDP2 (fully_shard) shards the module's parameters."""
    sharding: Any = sys.modules.get("torch.distributed.fsdp._fully_shard._fully_shard")
    return sharding is not None and isinstance(module, sharding.FSDPModule)


def reduces_gradients(module: Module) -> bool:
    """Return whether a module sums its gradients over processes: DistributedDataParallel, or sharded by FSDP2."""
    return isinstance(module, torch.nn.parallel.DistributedDataParallel) or is_sharded(module)


def formats_of_wrapper(module: Module) -> dict[str, torch.dtype | None]:
    """Return the dtypes, by name, of a module's MixedPrecisionPolicy, if FSDP2 shards it; the reduction's filled in."""
    if not is_sharded(module):
        return {}
    policy = module._get_fsdp_state()._mp_policy  # type: ignore[operator]
    reduce_dtype = policy.reduce_dtype or policy.param_dtype
    return {"param_dtype": policy.param_dtype, "output_dtype": policy.output_dtype, "reduce_dtype": reduce_dtype}


def hooks_of_wrapper(module: Module) -> list[str]:
    """Return the names of the hooks that reduce a module's gradients, FSDP2's or DistributedDataParallel's."""
    hooks: list[Any] = []
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        hooks = [hook for hook, _ in module._comm_hooks]
    elif is_sharded(module):
        state: Any = module._get_fsdp_state()  # type: ignore[operator]
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        hooks = [hook for group in groups if (hook := getattr(group, "_all_reduce_hook", None)) is not None]
    return [str(getattr(hook, "__name__", type(hook).__name__)) for hook in hooks]


# -- checkpoints -------------------------------------------------------------------------------------------------------

CHECKPOINT_FILE = torch.utils.checkpoint.__file__
CHECKPOINT_STATE = "_get_autocast_kwargs"
"""What torch.utils.checkpoint asks at the forward for the autocast state to restore: keyword arguments of the device's
region and of the cpu's.
"""
RECOMPUTING = ("recompute_fn", "backward")
"""The functions of that file in which a forward is recomputed, without and with reentrant autograd."""
_RUNS_BACKWARD = torch.autograd.graph._engine_run_backward.__code__


_NEW = 3
"""The references to a snapshot of a frame's variables that nobody else has: the frame's, and two of who looks."""


def variable_of(frame: FrameType, name: str) -> Any:
    """Return a variable of a function that runs; None without one. Until Python 3.13 the frame keeps a snapshot of all
    its variables once they were asked for, which would keep their values alive: it is emptied if nobody else has it.
    """
    scope = frame.f_locals
    value = scope.get(name)
    is_snapshot = isinstance(scope, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if is_snapshot and sys.getrefcount(scope) <= _NEW:
        scope.clear()
    return value


def carried_state(frame: FrameType) -> Any:
    """Return the cpu's keyword arguments at the forward that this frame recomputes; None if it recomputes none."""
    if not is_recomputation(frame):
        return None
    kept = variable_of(frame, "cpu_autocast_kwargs")
    return kept or getattr(variable_of(frame, "ctx"), "cpu_autocast_kwargs", None)


def find_recomputation() -> FrameType | None:
    """Return the frame of torch's in which a checkpoint recomputes its forward on this thread's Python stack.

    None in a backward that runs inside of one, as reentrant checkpoints run that of what they have recomputed.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_recomputation(frame):
        frame = frame.f_back if frame.f_code is not _RUNS_BACKWARD else None
    return frame


def is_recomputation(frame: FrameType) -> bool:
    """Return whether a checkpoint recomputes its forward in this frame."""
    return frame.f_code.co_filename == CHECKPOINT_FILE and frame.f_code.co_name in RECOMPUTING
