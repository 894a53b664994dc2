"""Parameters in fp32 that an optimizer is lent for its step, in the place of those that are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from narrowcast.errors import RunError
from narrowcast.runtime.torch_bridge import is_sharded_tensor, with_part
from narrowcast.runtime.torch_surface.dispatch import version_of
from narrowcast.runtime.torch_surface.modules import step_without_hooks
from narrowcast.training.storage.rounding import PLAIN
from narrowcast.training.storage.slots import StoredParameter

Store = Callable[[StoredParameter, torch.Tensor, dict[Any, Any]], None]
_IN_FP32 = "Train with weights in fp32."


class Lending:
    """Lets an optimizer step copies of its parameters. known: all that are stored."""

    def __init__(self, optimizer: Any, known: Mapping[torch.Tensor, StoredParameter]) -> None:
        self._optimizer, self._known = optimizer, known
        self._copies: dict[StoredParameter, torch.nn.Parameter] = {}
        self._begun: list[tuple[torch.Tensor, tuple[int, int | None]]] = []

    def once(self, loss: Any) -> Callable[[], Any]:
        """Return a closure that gives a loss which was computed before, one time, and while nothing has changed."""
        rest = [loss]

        def closure() -> Any:
            if not rest or any(_versions(one) != versions for one, versions in self._begun):
                advice = "Train with weights in fp32, or with an optimizer that asks for the loss once."
                raise RunError("a step of what is stored", "the optimizer computes its loss again", advice=advice)
            return rest.pop()

        return closure

    def step(self, slots: list[StoredParameter], given: list[Any], named: dict[str, Any], store: Store) -> None:
        """Step some parameters. given, named: the arguments. store: called with each of them, the stepped copy, and the
        states of all, of which it replaces its own.
        """
        optimizer = self._optimizer
        slots = [slot for slot in slots if slot.parameter.requires_grad or slot.parameter.grad is not None]
        if not any(slot.parameter.grad is not None for slot in slots):
            return
        lent = {slot.parameter: self._copy_of(slot) for slot in slots}
        self._begun = [(one, _versions(one)) for one in lent.values()]
        before = [(group, group["params"]) for group in optimizer.param_groups]
        own = {one: optimizer.state.pop(one) for one in self._known if one in optimizer.state}
        versions = {one: version_of(one) for one, copied in lent.items() if one is not copied}
        try:
            for group, parameters in before:
                group["params"] = [lent[one] for one in parameters if one in lent]
            for slot in slots:
                if slot.parameter in own:
                    optimizer.state[lent[slot.parameter]] = slot.widened(own[slot.parameter])
            step_without_hooks(optimizer)(*given, **named)
            if any(version_of(one) != version for one, version in versions.items()):
                found = f"{type(optimizer).__name__} steps parameters that it holds itself, not those of its groups"
                raise RunError("a step of what is stored", found, advice=_IN_FP32)
            for (parameter, copied), (_, (_, version)) in zip(lent.items(), self._begun, strict=True):
                _follow_gradient(parameter, copied, version)
            own |= {slot.parameter: optimizer.state.pop(lent[slot.parameter], {}) for slot in slots}
            for slot in slots:
                store(slot, lent[slot.parameter], own)
        finally:
            for group, parameters in before:
                group["params"] = parameters
            for slot in slots:
                optimizer.state.pop(lent[slot.parameter], None)
            for parameter, state in own.items():
                if state:
                    optimizer.state[parameter] = state
            self._begun = []
            for copied in self._copies.values():
                copied.grad, copied.data = None, copied.data.new_empty(0)

    def _copy_of(self, slot: StoredParameter) -> torch.Tensor:
        """Return a parameter in fp32, the same one in each step: an optimizer may know it by its identity."""
        gradient = slot.parameter.grad
        if slot.way == PLAIN and slot.dtype_of_gradient is torch.float32:
            return slot.parameter
        wide = with_part(slot.parameter.detach(), slot.wide())
        if is_sharded_tensor(slot.parameter):
            copied = torch.nn.Parameter(wide, slot.parameter.requires_grad)
        else:
            copied = self._copies.setdefault(slot, torch.nn.Parameter(wide.new_empty(0)))
            copied.data = wide
            copied.requires_grad_(slot.parameter.requires_grad)
        vars(copied).update(vars(slot.parameter))
        copied.grad = None if gradient is None else gradient.float()
        return copied


def _versions(one: torch.Tensor) -> tuple[int, int | None]:
    """Return the versions of a tensor and of its gradient."""
    return version_of(one), None if one.grad is None else version_of(one.grad)


def _follow_gradient(parameter: torch.Tensor, copied: torch.Tensor, version: int | None) -> None:
    """Do with a gradient what a step did with the one that it was lent: some clear it, some write to it."""
    if copied is parameter or parameter.grad is None:
        return
    if copied.grad is None:
        parameter.grad = None
    elif copied.grad is not parameter.grad and version_of(copied.grad) != version:
        parameter.grad.copy_(copied.grad)
