"""What lives in the process and a step changes without an op: gradients, flags, groups, counters of schedules."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from itertools import compress
from typing import Any, TypeVar

import torch
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from narrowcast.observation.restore.attributes import Attributes
from narrowcast.observation.statistics.by_storage import has_storage, where_it_lies
from narrowcast.runtime.torch_surface.autograd import is_leaf
from narrowcast.runtime.torch_surface.fx import FakeTensor, is_functorch_wrapped_tensor
from narrowcast.runtime.torch_surface.modules import is_uninitialized, optimized_by

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Parameter:
    parameter: Parameter
    data: torch.Tensor
    gradient: torch.Tensor | None
    requires_grad: bool

    @property
    def is_another(self) -> bool:
        """Whether it was given other memory, `parameter.data = ...`, a gradient without any, of a run on fake tensors,
        or was written to by an op that was recorded.
        """
        is_written = not self.parameter.is_leaf or where_it_lies(self.parameter.data) != where_it_lies(self.data)
        return is_written or type(self.parameter.grad) is FakeTensor is not type(self.gradient)

    def restore(self) -> None:
        if not self.parameter.is_leaf:
            self.parameter.detach_()
        if self.is_another:
            self.parameter.grad = None  # which must fit
            self.parameter.data = self.data
        if self.parameter.grad is not self.gradient:
            self.parameter.grad = self.gradient
        if self.parameter.requires_grad is not self.requires_grad:
            self.parameter.requires_grad_(self.requires_grad)


class LivingObjects:
    """Modules, parameters, optimizers, schedules and scalers as they are now.

    Found by asking Python's collector: a step function does not say what it uses. What is made later, and what
    `gc.freeze` hides, is added when it is met.
    """

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Any, _Parameter | Attributes]] = {}
        self._optimizers: dict[int, Optimizer] = {}
        self._touched: set[int] = set()
        living = _instances_of((Module, torch.Tensor, Optimizer, LRScheduler, torch.amp.GradScaler))
        self._tensors = [one for one in living if isinstance(one, torch.Tensor)]
        for one in living:
            if isinstance(one, torch.jit.ScriptModule):
                self._tensors += [*one.parameters(), *one.buffers()]
        self.scalers = [one for one in living if isinstance(one, torch.amp.GradScaler)]
        self._scalers = [*map(Attributes, self.scalers)]
        for one in living:
            if isinstance(one, torch.Tensor):
                if isinstance(one, Parameter) or _may_have_gradient(one):
                    self._add_parameter(one)
            elif isinstance(one, Module):
                self._add_module(one)
            elif isinstance(one, Optimizer) and hasattr(one, "param_groups"):  # else one that represents another
                self._add_optimizer(one)
            elif isinstance(one, LRScheduler):
                self._kept[id(one)] = one, Attributes(one)

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors that are alive, once: they are not held any longer. Python has an object of a script's
        tensors, or of a gradient, only once it was asked for.
        """
        tensors, self._tensors = self._tensors, []
        return tensors + [t.grad for t in tensors if _may_have_gradient(t) and t.grad is not None]

    def meet(self, one: Any) -> None:
        """Restore later a model that is called, with what is in it, an optimizer that is about to step, a parameter."""
        if id(one) in self._touched:
            return
        if isinstance(one, Module):
            for module in one.modules():
                self._add_module(module)
            inner = (*one.modules(), *one.parameters())
        elif isinstance(one, torch.Tensor):
            inner = (one,)
        elif not hasattr(one, "param_groups"):  # it represents another
            return
        else:
            self._add_optimizer(one)
            inner = (one, *optimized_by(one))
        for parameter in inner:
            if isinstance(parameter, torch.Tensor):
                self._add_parameter(parameter)
        self._touched.update(map(id, inner))

    def restore(self) -> None:
        """Give what the steps have touched back what it held."""
        for optimizer in self._optimizers.values():
            if any(id(parameter) in self._touched for parameter in optimized_by(optimizer)):
                self._touched.add(id(optimizer))
        for one, kept in self._kept.values():
            is_touched = id(getattr(one, "optimizer", None) if isinstance(one, LRScheduler) else one) in self._touched
            if is_touched or (isinstance(kept, _Parameter) and kept.is_another):
                kept.restore()
        for attributes in self._scalers:
            attributes.restore()

    def _add_optimizer(self, optimizer: Any) -> None:
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = optimizer
            self._kept[id(optimizer)] = optimizer, Attributes(optimizer)
        for parameter in optimized_by(optimizer):  # it may be a plain tensor
            self._add_parameter(parameter)

    def _add_parameter(self, parameter: Any) -> None:
        if id(parameter) in self._kept or torch.nn.parameter.is_lazy(parameter) or not parameter.is_leaf:
            return
        if is_functorch_wrapped_tensor(parameter):  # put in the place of parameters for one call
            return
        kept = _Parameter(parameter, parameter.data, parameter.grad, parameter.requires_grad)
        self._kept[id(parameter)] = parameter, kept

    def _add_module(self, module: Module) -> None:
        if id(module) in self._kept or isinstance(module, torch.jit.ScriptModule) or "training" not in vars(module):
            return
        if is_uninitialized(module):
            return
        self._kept[id(module)] = module, Attributes(vars(module))


def _may_have_gradient(tensor: torch.Tensor) -> bool:
    """Return whether a backward adds to a tensor's gradient: a parameter's, or a plain tensor's."""
    return (has_storage(tensor) or isinstance(tensor, Parameter)) and tensor.requires_grad and is_leaf(tensor)


def _instances_of(classes: tuple[type[T], ...]) -> list[T]:
    """Return all objects of these classes. By their type: asking an object for its class may run code of others."""
    living: list[Any] = gc.get_objects()
    kinds = {kind for kind in set(map(type, living)) if issubclass(kind, classes)}
    return [*compress(living, map(kinds.__contains__, map(type, living)))]  # a million objects, no call of Python each
