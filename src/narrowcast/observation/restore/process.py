"""What runs of a function change, restored: memory that was there before, what lives in the process, variables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from narrowcast.observation.restore.memory import CopiedMemory, in_memory
from narrowcast.observation.restore.objects import LivingObjects
from narrowcast.observation.restore.variables import Variables
from narrowcast.runtime.torch_bridge import OpFacts, written_tensors
from narrowcast.runtime.torch_surface.dispatch import StorageWeakRef, quietly, storage_key
from narrowcast.runtime.torch_surface.fx import FakeTensor
from narrowcast.runtime.torch_surface.modules import (
    by_no_other_thread,
    optimized_by,
    told_of_module_calls,
    told_of_optimizer_steps,
)
from narrowcast.runtime.weights.stored import stored_by


class Process:
    """What was there when this was made, and as it was then: tensors, modules, optimizers, schedules, scalers; of a
    function, its variables too.

    Memory is copied before it is written to for the first time, if a tensor in it was alive at the start. Other memory
    is left as it is: restoring older values would overwrite a tensor that was made later. Of objects, those that were
    met are restored.

    restoring: called before.
    """

    def __init__(self) -> None:
        with quietly():
            self._living = LivingObjects()
            there = in_memory(self._living.tensors())
            self._there = {storage_key(t): StorageWeakRef(t.untyped_storage()) for t in there}
        self._variables: Variables | None = None
        self.restoring: list[Callable[[], object]] = []
        self._memory = CopiedMemory()
        self._generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    def follow(self, function: Callable[..., Any]) -> None:
        """Restore the variables of a function, and the models, optimizers and parameters that they name."""
        self._variables = Variables(function)
        with quietly():
            for _, met in self.met:
                self._living.meet(met)

    @property
    def met(self) -> list[tuple[str, Any]]:
        """The models, optimizers and parameters that the variables of the function name, with these names."""
        return [] if self._variables is None else self._variables.met

    @property
    def is_suspended(self) -> bool:
        """Whether the function goes on with a generator, which keeps what it computes."""
        return self._variables is not None and self._variables.is_suspended

    def hold_optimizers(self) -> None:
        """Copy what the optimizers that they name may write to: of code whose ops and steps are not seen."""
        for _, met in self.met:
            if isinstance(met, torch.optim.Optimizer):
                self.optimizer(met, is_seen=False)

    def model(self, model: torch.nn.Module) -> None:
        """Note that a model is called."""
        with quietly():
            self._living.meet(model)

    def optimizer(self, optimizer: Any, is_seen: bool = True) -> None:
        """Note that an optimizer is about to step. is_seen: its ops are; else all that it may write to is copied."""
        with quietly():
            self._living.meet(optimizer)
            stored = stored_by(optimizer)
            if not is_seen or stored is not None:  # which writes without an op
                scales = [list(vars(scaler).values()) for scaler in self._living.scalers]
                besides = [] if stored is None else stored.memory()
                for tensor in in_memory(*optimized_by(optimizer), *optimizer.state.values(), *scales, *besides):
                    self._copy(tensor)

    def before_op(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Copy what an op is about to write to, and its generator's state; return the tensors that it writes to."""
        generator = kwargs.get("generator")
        if generator is not None and id(generator) not in self._generators:
            self._generators[id(generator)] = generator, generator.get_state()
        targets = written(facts, args, kwargs)
        with quietly():
            for tensor in targets:
                self._copy(tensor)
        return targets

    def was_there(self, tensor: torch.Tensor) -> bool:
        """Return whether the memory of a tensor existed at the start."""
        return storage_key(tensor) in self._there

    @contextmanager
    def restored(self, told_of_calls: bool = True) -> Iterator[None]:
        """Restore at the end what is met inside, or was before. told_of_calls: by a hook at the calls of modules, which
        Dynamo could not pass.
        """
        with ExitStack() as stack:
            stack.callback(self.restore)
            before_step = by_no_other_thread(partial(self.optimizer, is_seen=False))
            stack.enter_context(told_of_optimizer_steps(before_step, before=True))
            if told_of_calls:
                stack.enter_context(told_of_module_calls(self.model))
            yield

    def restore(self) -> None:
        """Give all of it back what it held."""
        with quietly(), torch.no_grad():
            for tell in self.restoring:
                tell()
            self._memory.restore()
            self._living.restore()
            if self._variables is not None:
                self._variables.restore()
            for generator, state in self._generators.values():
                generator.set_state(state)

    def _copy(self, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, FakeTensor) and storage_key(tensor) in self._there:
            self._memory.copy(tensor)


def written(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a call writes to, as they lie in memory."""
    return in_memory(written_tensors(facts, args, kwargs))
