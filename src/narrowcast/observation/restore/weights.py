"""Weights that a model writes to while it runs: copied before they are written to first, and restored after the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from narrowcast.frontends.eager.caching import forget_casts
from narrowcast.observation.statistics.by_storage import has_storage, where_it_lies
from narrowcast.runtime.torch_bridge import OpFacts, written_tensors
from narrowcast.runtime.torch_surface.dispatch import quietly, storage_key

if TYPE_CHECKING:
    from narrowcast.observation.restore.process import Process


class Weights:
    """`with weights:` the weights of models, by name, have the values afterwards that they had when this was made.

    They are copied as an observer says that they are about to be written to (`before_write`): a run that nobody
    observes may write to what an earlier one wrote to, and to nothing else. changed: the names of those that had other
    values at the last end.
    """

    def __init__(self, *weights: Mapping[str, torch.Tensor], processes: Sequence[Process] = ()) -> None:
        """processes: which restore weights by themselves, and what else is written to."""
        self._processes = processes
        self.changed: list[str] = []
        self._noted: list[str] = []
        named = [(name, w) for each in weights for name, w in each.items() if has_storage(w)]
        self._weights = [(name, w, w.detach()) for name, w in named]  # what lies there is held: `.data` may be replaced
        self._copies: dict[int, torch.Tensor] = {}
        self._lying_in: dict[int, list[int]] = {}
        for number, (_, w) in enumerate(named):
            self._lying_in.setdefault(storage_key(w), []).append(number)

    def before_write(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Copy what the op is about to write to; what regions have cast of it is out of date."""
        for process in self._processes:
            process.before_op(facts, args, kwargs)
        for tensor in written_tensors(facts, args, kwargs) if self._lying_in else ():
            if has_storage(tensor):
                numbers = self._lying_in.get(storage_key(tensor), ())
                if numbers:
                    forget_casts()
                for number in numbers:
                    if number not in self._copies:
                        self._copies[number] = self._weights[number][2].clone()

    @property
    def are_written(self) -> bool:
        """Whether a run has written to any, whatever they held at its end."""
        return bool(self._copies)

    def __enter__(self) -> Weights:
        for process in self._processes:
            process.restoring.append(self._restore)
        return self

    def __exit__(self, *raised: object) -> None:
        for process in self._processes:
            process.restoring.remove(self._restore)
        with quietly():
            self._restore()
            self.changed, self._noted = self._noted, []

    def _restore(self) -> None:
        """Restore the weights that have other values, and note their names."""
        changed = self._noted
        for number, (name, weight, before) in enumerate(self._weights):
            is_replaced = where_it_lies(weight) != where_it_lies(before)
            if is_replaced:
                weight.data = before
            copy = self._copies.get(number)
            is_written = copy is not None and not torch.equal(copy, before)
            if copy is not None and is_written:
                before.copy_(copy)
            if (is_replaced or is_written) and name not in changed:
                changed.append(name)
