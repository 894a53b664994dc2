"""Optimizers that step in a run, restored: what they have, the weights that they train, and their scalers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from narrowcast.observation.restore.memory import CopiedMemory, in_memory
from narrowcast.observation.restore.objects import LivingObjects
from narrowcast.runtime.torch_surface.dispatch import quietly
from narrowcast.runtime.torch_surface.fx import FakeTensor
from narrowcast.runtime.torch_surface.modules import optimized_by, told_of_optimizer_steps


def living_objects() -> LivingObjects:
    """Return what lives in the process as it is now: a function does not say which optimizers it uses."""
    with quietly():
        living = LivingObjects(())
        living.tensors()  # which are not to be held
    return living


@contextmanager
def restored_steps(living: LivingObjects) -> Iterator[None]:
    """Restore the optimizers that step inside and were there before: weights, gradients, moments, groups, schedules,
    and the scales of scalers. living: what was there.
    """
    memory = CopiedMemory()

    def before(optimizer: Any) -> None:
        with quietly():
            living.optimizer(optimizer)
            scales = [list(vars(scaler).values()) for scaler in living.scalers]
            for tensor in in_memory(*optimized_by(optimizer), *optimizer.state.values(), *scales):
                if not isinstance(tensor, FakeTensor):
                    memory.copy(tensor)

    try:
        with told_of_optimizer_steps(before, before=True):
            yield
    finally:
        with quietly(), torch.no_grad():
            living.restore()
            memory.restore()
