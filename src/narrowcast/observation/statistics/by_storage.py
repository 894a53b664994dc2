"""Facts about tensors, kept by the memory they lie in: a view has those of its base, and freed memory has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch

from narrowcast.runtime.torch_surface.dispatch import StorageWeakRef, holds_others, storage_key
from narrowcast.runtime.torch_surface.fx import is_functorch_wrapped_tensor

T = TypeVar("T")
_CHECKED_AT = 4096
"""With this many entries the first sweep is made; each later one when there are twice as many as the last has left."""


def has_storage(tensor: torch.Tensor) -> bool:
    """Return whether the tensor lies in memory that is known from others: no sparse, nested, meta or wrapped one,
    and none of a class that holds others (a DTensor, a quantized weight).
    """
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested or holds_others(type(tensor)):
        return False
    return not is_functorch_wrapped_tensor(tensor)


def where_it_lies(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return where values lie and how they are read."""
    place = (storage_key(tensor), tensor.storage_offset(), tensor.stride()) if has_storage(tensor) else ()
    return (*place, tensor.shape, tensor.dtype, tensor.device)


class ByStorage(Generic[T]):
    """A mapping from tensors' memory, which it does not keep alive. freed: called with each value whose memory was
    freed, some time after that.
    """

    def __init__(self, freed: Callable[[T], None] | None = None) -> None:
        self._entries: dict[int, tuple[Any, T]] = {}
        self._freed = freed
        self._check_at = _CHECKED_AT

    def get(self, tensor: torch.Tensor) -> T | None:
        """Return what is known of the memory that the tensor lies in."""
        entry = self._entries.get(storage_key(tensor)) if has_storage(tensor) else None
        return entry[1] if entry is not None and not entry[0].expired() else None

    def put(self, tensor: torch.Tensor, value: T) -> None:
        """Keep a value; a tensor without memory of its own is left out."""
        if not has_storage(tensor):
            return
        if len(self._entries) >= self._check_at:
            self.sweep()
            self._check_at = max(_CHECKED_AT, 2 * len(self._entries))
        key = storage_key(tensor)
        if self._freed is not None:
            self._gone(self._entries.get(key))
        self._entries[key] = (StorageWeakRef(tensor.untyped_storage()), value)

    def setdefault(self, tensor: torch.Tensor, make: Callable[[], T]) -> T:
        """Return what is known of the memory of a tensor, made and kept where nothing is."""
        value = self.get(tensor)
        if value is None:
            self.put(tensor, value := make())
        return value

    def drop(self, tensor: torch.Tensor) -> None:
        """Forget what is known."""
        if has_storage(tensor):
            self._gone(self._entries.pop(storage_key(tensor), None))

    def _gone(self, entry: tuple[Any, T] | None) -> None:
        """Report a value whose memory was freed, as another tensor lies there."""
        if entry is not None and self._freed is not None and entry[0].expired():
            self._freed(entry[1])

    def sweep(self) -> None:
        """Forget what lies in memory that was freed."""
        gone = [key for key, (reference, _) in self._entries.items() if reference.expired()]
        for value in [self._entries.pop(key)[1] for key in gone]:
            if self._freed is not None:
                self._freed(value)

    def living(self) -> Iterator[T]:
        """Yield the values whose memory is still in use."""
        for reference, value in list(self._entries.values()):
            if not reference.expired():
                yield value

    def __bool__(self) -> bool:
        return bool(self._entries)
