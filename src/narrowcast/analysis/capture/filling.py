"""Calls that fill new parameters and buffers, as constructors and torch.nn.init do: no part of what a run computes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from narrowcast.observation.statistics.by_storage import ByStorage


@dataclass(slots=True, eq=False)
class _Memory:
    """is_new: whether the run made it. The numbers of the calls that wrote to it before any read it, and of those that
    read it. is_used: by a call that fills nothing.
    """

    is_new: bool = False
    writers: list[int] = field(default_factory=list)
    readers: list[int] = field(default_factory=list)
    is_used: bool = False

    @property
    def is_read(self) -> bool:
        """Whether a call read it, and filled nothing there."""
        return self.is_used or bool(self.readers)


class Filling:
    """Follows which calls wrote to new memory before any other call read it."""

    def __init__(self) -> None:
        self._memory: ByStorage[_Memory] = ByStorage()
        self._written: dict[int, list[_Memory]] = {}
        self._has_computed = False
        self._others = 0  # how many that are no calls

    def note(
        self, number: int | None, read: list[torch.Tensor], written: list[torch.Tensor], made: list[torch.Tensor],
        may_fill: bool,
    ) -> None:  # fmt: skip
        """Note a call by its number, and what is no call by None. may_fill: whether it may be one of those."""
        if number is None:
            self._others += 1
            number = -self._others
        memories, filled = ([self._memory.setdefault(tensor, _Memory) for tensor in of] for of in (read, written))
        filled += [self._memory.setdefault(tensor, lambda: _Memory(is_new=True)) for tensor in made]
        self._has_computed |= number >= 0 and not written
        for memory in memories:
            if memory not in filled and not memory.is_used:
                memory.is_used = not may_fill
                memory.readers.append(number)
        if may_fill:
            self._written[number] = filled
            for memory in filled:
                if memory.is_new and not memory.is_read:
                    memory.writers.append(number)

    def fills(self, tensor: torch.Tensor) -> bool:
        """Return whether what writes to a tensor now fills it: nothing read it yet, or nothing was computed."""
        memory = self._memory.get(tensor)
        return not (memory.is_read if memory is not None and memory.is_new else self._has_computed)

    def of(self, tensors: Iterable[torch.Tensor]) -> set[int]:
        """Return the numbers of the calls that filled these, and of those whose results only such calls read."""
        found = {number for tensor in tensors if (memory := self._memory.get(tensor)) for number in memory.writers}
        for number, memories in sorted(self._written.items(), reverse=True):
            if all(found.issuperset(each.readers) and each.readers and not each.is_used for each in memories):
                found.add(number)
        return {number for number in found if number >= 0}
