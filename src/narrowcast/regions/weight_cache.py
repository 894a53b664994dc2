"""The weight cache of our own kernels: casts of weights, never older than the weights.

A cast is kept under the weight's identity, and is good while the weight's version counter, memory, shape, strides and
format are those that it was made of. That sees every in-place op and every `weight.data = other`. What no counter sees
(`weight.data.copy_(...)` counts another tensor's version) `narrowcast.invalidate` tells, and checksums find.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from narrowcast.errors import CacheError, Origin
from narrowcast.regions.place import find_place
from narrowcast.torch_bridge import cast


@dataclass(frozen=True, slots=True)
class CacheInfo:
    """What the weight cache of the outermost region that is open on this thread holds.

    grade:  `native` (torch's own: what it holds cannot be seen, the counts are of what passed through our kernels),
            `checked`, `checksum`, or `off`; empty if no region is open.
    entries, bytes: casts that are held, and their size. hits, misses: since that region was opened.
    limit_bytes: the most that it may hold; None if there is no limit.
    """

    grade: str = ""
    entries: int = 0
    bytes: int = 0
    hits: int = 0
    misses: int = 0
    limit_bytes: int | None = None


@dataclass(slots=True)
class _Entry:
    """A cast, and what it was made of. checksum: None unless the region asks for them. place: of the first use."""

    weight: weakref.ref[torch.Tensor]
    made_of: tuple[Any, ...]
    result: torch.Tensor
    checksum: int | None
    place: str


_SWEEP_ENTRIES, _SWEEP_BYTES = 64, 2**26


def _references(weight: weakref.ref[torch.Tensor]) -> int:
    return sys.getrefcount(weight())


@cache
def _unused() -> int:
    """What `_references` gives for a weight that only a graph in C++ holds; -1 where torch does not let one tell."""
    with torch.inference_mode(False), torch.enable_grad():
        weight = torch.ones(1, requires_grad=True)
        graph = weight.to(torch.bfloat16)
        found = weakref.ref(weight)
        used = _references(found)
        del weight
        unused = _references(found)
        del graph
    return unused if unused < used else -1


class WeightCache:
    """The casts of one outermost region."""

    __slots__ = ("__weakref__", "_next_sweep", "bytes", "entries", "hits", "misses")

    def __init__(self) -> None:
        self.entries: dict[tuple[Any, ...], _Entry] = {}
        self.hits = self.misses = self.bytes = 0
        self._next_sweep = (_SWEEP_ENTRIES, _SWEEP_BYTES)

    def cast(
        self, weight: torch.Tensor, dtype: torch.dtype, limit_bytes: int | None = None, checks: bool = False
    ) -> torch.Tensor:
        """The weight in another format. Kept by grad mode, too: a cast made under no_grad carries no gradient.

        limit_bytes: casts that were used longest ago go when more would be held. checks: compare checksums; CacheError
        if the weight was changed behind its version counter.
        """
        trace = torch._C._get_tracing_state()
        checks = checks and trace is None
        key = (id(weight), dtype, torch.is_grad_enabled(), trace)
        made_of = (weight._version, weight.data_ptr() if _has_memory(weight) else 0, weight.shape, weight.stride())
        entry = self.entries.get(key)
        if entry is not None and entry.weight() is weight and entry.made_of == made_of:
            if checks:
                _check(weight, entry)
            if limit_bytes is not None:
                self.entries[key] = self.entries.pop(key)  # the last one is the one used last
            self.hits += 1
            return entry.result
        self.misses += 1
        self._drop(key)
        result = cast(weight, dtype)
        size = result.nbytes
        if limit_bytes is not None:
            if size > limit_bytes:
                return result
            while self.entries and self.bytes + size > limit_bytes:
                self._drop(next(iter(self.entries)))
        known, place = None, ""
        if checks:
            known, place = checksum(weight), str(find_place(with_names=False))
        itself = weakref.ref(self)

        def gone(_: Any) -> None:
            cache = itself()
            if cache is not None:
                cache._drop(key)

        self.entries[key] = _Entry(weakref.ref(weight, gone), made_of, result, known, place)
        self.bytes += size
        if len(self.entries) > self._next_sweep[0] or self.bytes > self._next_sweep[1]:
            self._sweep()
        return result

    def _sweep(self) -> None:
        """Drop the casts of weights that are alive only because the autograd graph of their cast holds them."""
        for key, entry in list(self.entries.items()):
            if entry.weight() is None or _references(entry.weight) <= _unused():
                self._drop(key)
        self._next_sweep = (max(_SWEEP_ENTRIES, 2 * len(self.entries)), max(_SWEEP_BYTES, 2 * self.bytes))

    def forget(self, weight: torch.Tensor) -> int:
        """Drop the casts of a weight; how many there were."""
        keys = [key for key, entry in self.entries.items() if entry.weight() is weight]
        for key in keys:
            self._drop(key)
        return len(keys)

    def clear(self) -> int:
        """Drop all casts; how many there were."""
        count = len(self.entries)
        self.entries.clear()
        self.bytes = 0
        return count

    def _drop(self, key: tuple[Any, ...]) -> None:
        entry = self.entries.pop(key, None)
        if entry is not None:
            self.bytes -= entry.result.nbytes


def checksum(tensor: torch.Tensor) -> int:
    """A number that almost surely changes when any element does, or two change places: a weighted sum of the bits."""
    with torch.no_grad(), torch._C._DisableAutocast():
        bits = tensor.detach().contiguous().view(torch.uint8).reshape(-1).to(torch.int64)
        weights = torch.arange(bits.numel(), device=bits.device) % 8191 + 1
        return int((bits * weights).sum())


def _has_memory(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


def _check(weight: torch.Tensor, entry: _Entry) -> None:
    if checksum(weight) == entry.checksum:
        return
    here = find_place(with_names=False)
    raise CacheError(
        asked=f"the cast of a weight of shape {tuple(weight.shape)}",
        found="the weight was changed and its version counter was not: something wrote to weight.data",
        where=(Origin(here.file, here.line, "used here"), Origin(entry.place, 0, "cast here first")),
        advice="Write with torch.no_grad(): weight.copy_(...), or call narrowcast.invalidate(weight) after it.",
    )
