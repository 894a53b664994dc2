"""Memory that a program writes to: copied before the first write, and restored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from narrowcast.observation.statistics.by_storage import has_storage
from narrowcast.runtime.torch_bridge import tensors_in, values_of
from narrowcast.runtime.torch_surface.dispatch import storage_key


class CopiedMemory:
    """Copies of whole storages, by their keys."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def copy(self, tensor: torch.Tensor) -> None:
        """Copy the memory in which a tensor lies, unless that is done."""
        key = storage_key(tensor)
        if key not in self._copies:
            whole = _whole(tensor)
            self._copies[key] = whole, whole.clone()

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return storage_key(tensor) in self._copies

    def items(self) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield the key of each storage that was copied, the whole of it as it is now, and the copy."""
        return ((key, now, before) for key, (now, before) in self._copies.items())

    def restore(self) -> None:
        """Write the copies back; what was resized since is left."""
        for whole, before in self._copies.values():
            if whole.untyped_storage().nbytes() == before.untyped_storage().nbytes():
                with torch.inference_mode(whole.is_inference()):
                    whole.copy_(before)


def in_memory(*trees: Any) -> list[torch.Tensor]:
    """Return the tensors in nested arguments as they lie in memory: this rank's part of a DTensor, sparse values."""
    tensors = tensors_in(*trees)
    return [t for t in (values_of(t) if t.layout is not torch.jagged else t for t in tensors) if has_storage(t)]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole memory of a tensor as a vector; both share a version counter."""
    elements = tensor.untyped_storage().nbytes() // tensor.itemsize
    return tensor.detach().as_strided((elements,), (1,), 0)
