"""What lives in the process and a step changes without an op: gradients, flags, groups, counters of schedules."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.nn import Module, Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from narrowcast.observation.restore.attributes import Attributes
from narrowcast.observation.statistics.by_storage import has_storage, where_it_lies
from narrowcast.runtime.torch_surface.fx import is_functorch_wrapped_tensor
from narrowcast.runtime.torch_surface.modules import optimized_by

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Parameter:
    """A parameter, and what it held."""

    parameter: Parameter
    data: torch.Tensor
    gradient: torch.Tensor | None
    requires_grad: bool

    def put_back(self) -> None:
        now, then = self.parameter.data, self.data
        if where_it_lies(now) != where_it_lies(then):
            self.parameter.grad = None  # which must fit
            self.parameter.data = then
        if self.parameter.grad is not self.gradient:
            self.parameter.grad = self.gradient
        if self.parameter.requires_grad is not self.requires_grad:
            self.parameter.requires_grad_(self.requires_grad)


@dataclass(slots=True, eq=False)
class _Module:
    """A module, its flag, and which tensors it held under which names."""

    module: Module
    training: bool
    tensors: dict[str, torch.Tensor]

    def put_back(self) -> None:
        self.module.training = self.training
        for name, tensor in self.tensors.items():
            if getattr(self.module, name, tensor) is not tensor:
                setattr(self.module, name, tensor)


class LivingObjects:
    """Modules, parameters, optimizers, schedules and scalers as they are now.

    Found by asking Python's collector: a step function does not say what it uses. What is made later, and what
    `gc.freeze` hides, is added when it is met.
    """

    def __init__(self, own: tuple[type[Any], ...]) -> None:
        """own: classes that scalers and optimizers keep their counters in, which are looked into."""
        self._own = own
        self._parameters: dict[int, _Parameter] = {}
        self._modules: dict[int, _Module] = {}
        self._optimizers: dict[int, tuple[Optimizer, Attributes]] = {}
        self._schedules: list[tuple[LRScheduler, Attributes]] = []
        self._touched: set[int] = set()
        found = _instances_of((Module, torch.Tensor, Optimizer, LRScheduler, torch.amp.GradScaler))
        self._tensors = [one for one in found if isinstance(one, torch.Tensor)]
        for one in found:
            if isinstance(one, torch.jit.ScriptModule):
                self._tensors += [*one.parameters(), *one.buffers()]
        self.scalers = [one for one in found if isinstance(one, torch.amp.GradScaler)]
        self._scalers = [Attributes(scaler, self._own) for scaler in self.scalers]
        for one in found:
            if isinstance(one, Parameter):
                self._add_parameter(one)
            elif isinstance(one, Module):
                self._add_module(one)
            elif isinstance(one, Optimizer) and hasattr(one, "param_groups"):  # else one that represents another
                self._optimizers[id(one)] = one, Attributes(one, self._own)
                for parameter in optimized_by(one):  # it may be a plain tensor
                    self._add_parameter(parameter)
            elif isinstance(one, LRScheduler):
                self._schedules.append((one, Attributes(one, self._own)))

    def tensors(self) -> list[torch.Tensor]:
        """Those that are alive, told once: they are not held any longer. Python has an object of a script's tensors, or
        of a gradient, only once it was asked for.
        """
        found, self._tensors = self._tensors, []
        owned = [t for t in found if (has_storage(t) or isinstance(t, Parameter)) and t.is_leaf and t.requires_grad]
        return found + [t.grad for t in owned if t.grad is not None]

    def model(self, model: Module) -> None:
        """A model is called: it and what is in it are to be restored."""
        for module in model.modules():
            self._add_module(module)
            self._touched.add(id(module))
        for parameter in model.parameters():
            self._add_parameter(parameter)
            self._touched.add(id(parameter))

    def optimizer(self, optimizer: Any) -> None:
        """An optimizer is about to step."""
        if id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = optimizer, Attributes(optimizer, self._own)
        self._touched.add(id(optimizer))
        for parameter in optimized_by(optimizer):
            self._add_parameter(parameter)
            self._touched.add(id(parameter))

    def put_back(self) -> None:
        """Give what the steps have touched back what it held."""
        for key, (optimizer, _) in self._optimizers.items():
            if any(id(parameter) in self._touched for parameter in optimized_by(optimizer)):
                self._touched.add(key)
        for module in self._modules.values():
            if id(module.module) in self._touched:
                module.put_back()
        for kept in self._parameters.values():
            if id(kept.parameter) in self._touched:
                kept.put_back()
        for key, (_, attributes) in self._optimizers.items():
            if key in self._touched:
                attributes.put_back()
        for schedule, attributes in self._schedules:
            if id(getattr(schedule, "optimizer", None)) in self._touched:
                attributes.put_back()
        for attributes in self._scalers:
            attributes.put_back()

    def _add_parameter(self, parameter: Any) -> None:
        if id(parameter) in self._parameters or torch.nn.parameter.is_lazy(parameter) or not parameter.is_leaf:
            return
        if is_functorch_wrapped_tensor(parameter):  # put in the place of parameters for one call
            return
        self._parameters[id(parameter)] = _Parameter(parameter, parameter.data, parameter.grad, parameter.requires_grad)

    def _add_module(self, module: Module) -> None:
        if id(module) in self._modules or isinstance(module, torch.jit.ScriptModule) or "training" not in vars(module):
            return
        tensors = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
        self._modules[id(module)] = _Module(module, module.training, tensors)


def _instances_of(classes: tuple[type[T], ...]) -> list[T]:
    """All objects of these classes. By their type: asking an object for its class may run code of others."""
    living: list[Any] = gc.get_objects()
    kinds = {kind for kind in set(map(type, living)) if issubclass(kind, classes)}
    return [one for one in living if type(one) in kinds]
