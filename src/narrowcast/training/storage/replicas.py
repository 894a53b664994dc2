"""What completes weights, made equal on all ranks, as DistributedDataParallel makes the weights themselves equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

import torch

from narrowcast.runtime.torch_surface.modules import told_of_replicas
from narrowcast.training.storage.slots import StoredParameter


class Replicas:
    """Knows the DistributedDataParallel that is made around a model from now on, until `remove()`; none without it."""

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self._outer: Callable[[], Any] = lambda: None
        self._handle: Any = None
        if model is not None and torch.distributed.is_available():
            self._handle = told_of_replicas(model, self._note)

    def _note(self, outer: Any) -> None:
        self._outer = ref(outer)

    def make_equal(self, slots: Iterable[StoredParameter]) -> bool:
        """Take what completes weights from the rank that the weights are of, once. Return whether there are others."""
        outer, self._outer = self._outer(), lambda: None
        for slot in slots if outer is not None else ():
            if slot.rest is not None:
                torch.distributed.broadcast(slot.rest.view(torch.uint8), group_src=0, group=outer.process_group)
        return outer is not None

    def remove(self) -> None:
        """Hear of none any longer."""
        if self._handle is not None:
            self._handle.remove()
