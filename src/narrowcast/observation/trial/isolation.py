"""Run a model without leaving a trace in it: on a copy that shares its weights, or has fake ones."""

from __future__ import annotations

import copy
import functools
import logging
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from narrowcast.frontends.scripts.state import ScriptState, scripts_in
from narrowcast.observation.restore.fakes import without_kept_fakes
from narrowcast.observation.restore.modules import restored_when_called
from narrowcast.observation.restore.process import Process
from narrowcast.runtime.devices.device import is_here, random_state_kept
from narrowcast.runtime.sites.python_stack import trials
from narrowcast.runtime.torch_bridge.inputs import called_with
from narrowcast.runtime.torch_surface.autograd import is_leaf
from narrowcast.runtime.torch_surface.dispatch import tree_map_only
from narrowcast.runtime.torch_surface.fx import (
    FAKE_TENSOR_LOGGER,
    FakeTensor,
    FakeTensorMode,
    as_parameter,
    fake_like,
)

StandIn = Callable[[torch.Tensor], torch.Tensor]
Through = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""What runs a model, given it, its args and its kwargs, in the place of a call."""


@contextmanager
def isolated(
    model: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    fake: bool,
    through: Through | None = None,
    stand_in: StandIn | None = None,
    of_script: Callable[[Any], Any] | None = None,
    process: Process | None = None,
) -> Iterator[Isolated]:
    """Yield a function that runs `model(*args, **kwargs)` and leaves model, arguments and random state as they are.

    What runs is a deep copy of model and arguments, in which weights are shared; or, where no call runs it (`through`),
    copied: what that writes to is not seen; or fake tensors if `fake` (then without compute or memory; meta tensors and
    devices that are not here become fake cpu tensors). So caches that a model fills while it runs stay in the copy. A
    callable that cannot be copied (a function that closes over modules, or a model whose hooks close over it) runs
    itself; the attributes and buffers of the modules that it calls are restored.

    through: what runs the copy, given model, args and kwargs, instead of a call; attributes of a callable that cannot
    be copied are then not restored. stand_in: gives the tensor of the copy for each of the model's and arguments', in
    place of sharing weights. of_script: likewise the script for each of the model's, which are shared otherwise, and
    what they keep restored: TorchScript's copies of weights get no gradients. process: what is restored besides, of a
    callable that runs itself.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
    if mode is not None:
        stand_in = _fakes(mode)
    elif stand_in is None:  # what compiled code writes to is not seen
        stand_in = _share_weights if through is None else stand_ins(lambda tensor: tensor.detach().clone())
    with ExitStack() as stack:
        stack.enter_context(random_state_kept())
        if process is not None:
            stack.enter_context(process.restored(told_of_calls=through is None))
        if not fake and of_script is None and isinstance(model, torch.nn.Module):
            stack.enter_context(ScriptState(model))
            of_script = lambda script: script  # noqa: E731
        is_converted = stand_in is not None and stand_in is not _share_weights
        copied = model if process is None else _calling(model, is_converted)
        own_model, own_args, own_kwargs = _copied((copied, args, kwargs), stand_in, of_script)
        if through is None:  # by a hook and a mode, which Dynamo could not pass
            stack.enter_context(restored_when_called(model, own_model))
        if mode is not None:
            stack.enter_context(without_kept_fakes(model))
            logger = logging.getLogger(FAKE_TENSOR_LOGGER)
            stack.callback(setattr, logger, "disabled", logger.disabled)
            logger.disabled = True  # what fake tensors cannot carry is said: torch would log a traceback too
            stack.enter_context(mode)
        yield Isolated(own_model, own_args, own_kwargs, through)


@dataclass(frozen=True, slots=True)
class Isolated:
    """A model, or a copy of it, and its arguments. Called, it runs; a generator that it returns does not run yet."""

    model: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    through: Through | None = None

    def __call__(self) -> Any:
        """The result of the run."""
        with called_with(self.model, self.args, self.kwargs):
            if self.through is not None:
                return self.through(self.model, self.args, self.kwargs)
            return self.model(*self.args, **self.kwargs)


trials.add(id(Isolated.__call__.__code__))


def _calling(model: Callable[..., Any], is_converted: bool) -> Callable[..., Any]:
    """Return a function that calls a model or another object, and is copied as itself; an object that is_converted."""
    if isinstance(model, types.FunctionType) or (is_converted and not isinstance(model, torch.nn.Module)):
        return model

    @functools.wraps(model, assigned=(), updated=())  # its signature
    def calling(*args: Any, **kwargs: Any) -> Any:
        return model(*args, **kwargs)

    return calling


def stand_ins(make: StandIn) -> StandIn:
    """Return a function from each tensor to one in its place, made by `make`, the same each time: a parameter, or one
    that requires grad, where that is.
    """
    known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def stand_in(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in known:
            other = make(tensor)
            if isinstance(tensor, torch.nn.Parameter):
                other = as_parameter(other, tensor.requires_grad)
            elif tensor.requires_grad:
                other.requires_grad_()
            known[id(tensor)] = (tensor, other)
        return known[id(tensor)][1]

    return stand_in


def _fakes(mode: FakeTensorMode) -> StandIn:
    """Return a function to fake tensors of the same sizes, strides and dtypes; those that are fake are left."""

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        device = tensor.device if not tensor.is_meta and is_here(tensor.device.type) else "cpu"
        return fake_like(tensor, mode, device)

    fakes = stand_ins(fake)
    return lambda tensor: tensor if isinstance(tensor, FakeTensor) else fakes(tensor)


def _share_weights(tensor: torch.Tensor) -> torch.Tensor:
    """Return the parameter itself, which the copy shares, or a clone of another tensor, with a gradient of its own."""
    if isinstance(tensor, torch.nn.Parameter) or not is_leaf(tensor):
        return tensor
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


class _ReplaceTensors(TorchFunctionMode):
    """While a deep copy is made: what takes the place of each tensor."""

    def __init__(self, stand_in: StandIn) -> None:
        super().__init__()
        self._stand_in = stand_in

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return self._stand_in(args[0])
        return func(*args, **(kwargs or {}))


def _copied(everything: Any, stand_in: StandIn, of_script: Callable[[Any], Any] | None) -> Any:
    """Return a deep copy with other tensors, which shares what its modules hold that has no copy (a lock, a handle); or
    if there is none the model itself with replaced arguments.
    """
    model, args, kwargs = everything
    memo: dict[int, Any] = {}
    if isinstance(model, torch.nn.Module):
        for tensor in (*model.parameters(), *model.buffers()):
            memo[id(tensor)] = stand_in(tensor)
        if of_script is not None:
            memo.update({id(script): of_script(script) for script in scripts_in(model)})
    for shared_by in (lambda _: [], _not_to_copy):
        copied, known = None, memo | {id(held): held for held in shared_by(model)}
        with suppress(Exception), _ReplaceTensors(stand_in):
            _copy_modules(model, known)
            copied = copy.deepcopy(everything, known)
        if copied is not None and isinstance(copied[0], type(model)):  # else a class answers for what it does not have
            return copied
    return model, *tree_map_only(torch.Tensor, stand_in, (args, kwargs))


_ATOMS = (bool, int, float, str, type(None))
_HOLDERS = (dict, OrderedDict, set)
_NAMED = ("_parameters", "_buffers", "_modules")


def _copy_modules(model: Any, memo: dict[int, Any]) -> None:
    """Copy a model's modules into the memo of a deep copy, as that would, which takes three times as long: a module has
    twenty attributes, nearly all of them numbers or empty. Those whose class says how it is copied are left to it.
    """
    modules = [*model.modules()] if isinstance(model, torch.nn.Module) else []
    kinds = {kind for kind in set(map(type, modules)) if _is_copied_by_its_attributes(kind)}
    plain = [module for module in modules if id(module) not in memo and type(module) in kinds]
    memo.update((id(module), type(module).__new__(type(module))) for module in plain)
    for module in plain:
        attributes = vars(memo[id(module)])
        for name, held in vars(module).items():
            if type(held) in _ATOMS:
                attributes[name] = held
                continue
            if type(held) in _HOLDERS and not held and id(held) not in memo:
                memo[id(held)] = type(held)()
            elif name in _NAMED and type(held) is dict and all(v is None or id(v) in memo for v in held.values()):
                memo[id(held)] = {key: v if v is None else memo[id(v)] for key, v in held.items()}
            attributes[name] = memo[id(held)] if id(held) in memo else copy.deepcopy(held, memo)


def _is_copied_by_its_attributes(kind: type[torch.nn.Module]) -> bool:
    """Return whether a deep copy of such a module is a new object with copies of its attributes, and nothing else."""
    ways = ("__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__new__")
    return all(getattr(kind, w, None) is getattr(torch.nn.Module, w, None) for w in ways)


def _not_to_copy(model: Any) -> list[Any]:
    """Return the attributes of modules that cannot be copied, but for modules, tensors and what may hold them."""
    found = []
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():
        for held in vars(module).values():
            if not isinstance(held, torch.nn.Module | torch.Tensor | list | tuple | dict | set):
                try:
                    copy.deepcopy(held)
                except Exception:
                    found.append(held)
    return found
