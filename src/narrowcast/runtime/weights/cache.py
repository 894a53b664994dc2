"""The weight cache of our own kernels: casts of weights, never older than the weights.

A cast is kept under the weight's identity, and is good while the weight's version counter, memory, shape, strides and
format are those that it was made of. That sees every in-place op and every `weight.data = other`; fused optimizers,
which count no version, are counted besides. What no counter sees (`weight.data.copy_(...)` counts another tensor's
version) `frontends.eager.invalidate` tells, and checksums find.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from narrowcast.core.policy import NOWHERE, Site
from narrowcast.errors import CacheError, Origin
from narrowcast.runtime.sites.python_stack import find_site
from narrowcast.runtime.torch_bridge import PLAIN, cast
from narrowcast.runtime.torch_surface.dispatch import storage_key, version_of, without_modes
from narrowcast.runtime.torch_surface.jit import not_traced, tracing_state
from narrowcast.runtime.torch_surface.patches import stay
from narrowcast.runtime.torch_surface.state import autocast_off


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
class _CachedCast:
    """A cast, and what it was made of.

    storage: tells whether the weight's memory is gone; other memory may have its address then.
    checksum: None unless the region asks for them. site: of the first use.
    """

    weight: weakref.ref[torch.Tensor]
    storage: StorageWeakRef
    made_of: tuple[Any, ...]
    result: torch.Tensor
    checksum: int | None
    site: Site

    def is_of(self, weight: torch.Tensor, made_of: tuple[Any, ...]) -> bool:
        """Return whether it is the cast of this weight as it is now, as far as counters and addresses tell."""
        return self.made_of == made_of and self.weight() is weight and not self.storage.expired()

    def is_as_it_was(self, weight: torch.Tensor) -> bool:
        """Return whether the weight's bits are those that were cast: CacheError if not. False if never checked."""
        if self.checksum is None:
            return False
        if checksum(weight) == self.checksum:
            return True
        here, first = find_site(with_names=False), self.site
        raise CacheError(
            asked=f"the cast of a weight of shape {tuple(weight.shape)}",
            found="the weight was changed and its version counter was not: something wrote to weight.data",
            where=(Origin(here.file, here.line, "used here"), Origin(first.file, first.line, "cast here first")),
            advice="Write with torch.no_grad(): weight.copy_(...), or call "
            "narrowcast.frontends.eager.invalidate(weight) after it.",
        )


def _made_of(weight: torch.Tensor, address: Any) -> tuple[Any, ...]:
    return version_of(weight), mutations.count, address, weight.shape, weight.stride(), weight.is_neg()


_SWEEP_ENTRIES, _SWEEP_BYTES = 64, 2**26


def _references(weight: weakref.ref[torch.Tensor]) -> int:
    return sys.getrefcount(weight())


@cache
def _unused() -> int:
    """Return the reference count of a weight that only a graph in C++ holds; -1 where torch does not let one tell."""
    with torch.inference_mode(False), torch.enable_grad():
        weight = torch.ones(1, device="cpu", requires_grad=True)
        graph = weight.to(torch.bfloat16)
        reference = weakref.ref(weight)
        used = _references(reference)
        del weight
        unused = _references(reference)
        del graph
    return unused if unused < used else -1


class WeightCache:
    """The casts of one outermost region. limit_bytes: what they may take; None if there is no limit."""

    __slots__ = ("__weakref__", "_dead", "_next_sweep", "bytes", "entries", "hits", "limit_bytes", "misses")

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.entries: dict[tuple[Any, ...], _CachedCast] = {}
        self.hits = self.misses = self.bytes = 0
        self._next_sweep = (_SWEEP_ENTRIES, _SWEEP_BYTES)
        self._dead: deque[tuple[Any, ...]] = deque()  # keys whose weights have gone: any thread may add to it

    def cast(
        self, weight: torch.Tensor, dtype: torch.dtype, limit_bytes: int | None = None, checks: bool = False
    ) -> torch.Tensor:
        """Return the weight in another format. Kept by grad mode, too: a cast made under no_grad carries no gradient.

        limit_bytes: casts that were used longest ago go when more would be held. checks: compare checksums; CacheError
        if the weight was changed behind its version counter.
        """
        try:
            address = weight.data_ptr() if type(weight) in PLAIN else storage_key(weight)
        except (NotImplementedError, RuntimeError):  # without memory of its own: wrappers of torch.func, sparse tensors
            return cast(weight, dtype)
        trace = tracing_state()
        checks = checks and trace is None and type(weight) in PLAIN  # what is fake has no bits
        key = (id(weight), dtype, torch.is_grad_enabled(), trace)
        made_of = _made_of(weight, address) if trace is None else not_traced()(_made_of)(weight, address)
        limit = min((each for each in (limit_bytes, self.limit_bytes) if each is not None), default=None)
        entry = self.entries.get(key)
        if entry is not None and entry.is_of(weight, made_of) and (not checks or entry.is_as_it_was(weight)):
            if limit is not None:
                self.entries[key] = self.entries.pop(key)  # the last one is the one used last
            self.hits += 1
            return entry.result
        self.misses += 1
        self._drop(key)
        self._drop_dead()
        result = cast(weight, dtype)
        if limit is None or self._make_room(result.nbytes, limit):
            self._keep(key, weight, made_of, result, checks)
        return result

    def _make_room(self, nbytes: int, limit: int) -> bool:
        """Drop what was used longest ago, until this many bytes more are within the limit; False if they never are."""
        if nbytes > limit:
            return False
        while self.entries and self.bytes + nbytes > limit:
            self._drop(next(iter(self.entries)))
        return True

    def _keep(
        self, key: tuple[Any, ...], weight: torch.Tensor, made_of: tuple[Any, ...], result: torch.Tensor, checks: bool
    ) -> None:
        known = checksum(weight) if checks else None
        site = find_site(with_names=False) if checks else NOWHERE
        dead = self._dead
        reference = weakref.ref(weight, lambda _: dead.append(key))
        self.entries[key] = _CachedCast(
            reference, StorageWeakRef(weight.untyped_storage()), made_of, result, known, site
        )
        self.bytes += result.nbytes
        if len(self.entries) > self._next_sweep[0] or self.bytes > self._next_sweep[1]:
            self._sweep()

    def _sweep(self) -> None:
        """Drop the casts of weights that are alive only because the autograd graph of their cast holds them."""
        for key, entry in list(self.entries.items()):
            if entry.weight() is None or _references(entry.weight) <= _unused():
                self._drop(key)
        self._next_sweep = (max(_SWEEP_ENTRIES, 2 * len(self.entries)), max(_SWEEP_BYTES, 2 * self.bytes))

    def forget(self, weight: torch.Tensor) -> None:
        """Drop the casts of a weight, and of whatever shares its memory."""
        address = storage_key(weight) if weight.layout is torch.strided else None
        for key, entry in list(self.entries.items()):
            if entry.weight() is weight or entry.storage.cdata == address:
                self._drop(key)

    def clear(self) -> None:
        """Drop all casts."""
        self.entries.clear()
        self.bytes = 0

    def held(self) -> int:
        """Return how many casts there are, of weights that are alive."""
        self._drop_dead()
        return len(self.entries)

    def _drop_dead(self) -> None:
        while self._dead:
            key = self._dead.popleft()
            entry = self.entries.get(key)
            if entry is not None and entry.weight() is None:
                self._drop(key)

    def _drop(self, key: tuple[Any, ...]) -> None:
        entry = self.entries.pop(key, None)
        if entry is not None:
            self.bytes -= entry.result.nbytes


mutations = SimpleNamespace(count=0)
"""How often weights were changed by what does not always bump version counters, on any thread: fused optimizers."""
_CHUNK = 2**20


@cache
def _multipliers(device: torch.device) -> torch.Tensor:
    """Return odd 64-bit numbers, one for each place in a chunk, that have nothing to do with each other."""
    numbers = torch.arange(_CHUNK, dtype=torch.int64, device=device) * -7046029254386353131  # 2^64 / golden ratio
    numbers = (numbers ^ (numbers >> 29)) * -4658895280553007687
    return (numbers ^ (numbers >> 32)) | 1


def checksum(tensor: torch.Tensor) -> int:
    """Return a weighted sum, modulo 2^64, that almost surely changes when any element does, or two change places."""
    with torch.no_grad(), autocast_off(), without_modes():
        bits = tensor.detach().contiguous().view(torch.int32 if tensor.itemsize == 4 else torch.uint8).reshape(-1)
        total = torch.zeros((), dtype=torch.int64, device=bits.device)
        for chunk in bits.split(_CHUNK):
            total = (
                total * 6364136223846793005 + (chunk.to(torch.int64) * _multipliers(bits.device)[: len(chunk)]).sum()
            )
        return int(total)


# -- torch's own cache, for native regions whose ops pass through kernels of ours --------------------------------------
#
# torch's own cannot be reached from Python without risking a deadlock (see kernels.py), so its rules are repeated here:
# one cast per weight, whatever its version and whatever the format, until an outermost region closes and torch clears
# its cache. That is one function, which is wrapped once so that ours is cleared with it.


class _Casts(threading.local):
    """Per thread: a weight's id and the trace, the weight (so that the id stays its own), and its cast."""

    def __init__(self) -> None:
        self.mutations = mutations.count
        self.by_id: dict[tuple[int, Any], tuple[torch.Tensor, torch.Tensor]] = {}


_casts = _Casts()


def native_cast(weight: torch.Tensor, dtype: torch.dtype, low: torch.dtype) -> torch.Tensor:
    """Return the cast of a cacheable weight in a native region: casts to the low format are kept, others made again."""
    if dtype is not low:
        return cast(weight, dtype)
    if _casts.mutations != mutations.count:  # of another thread, whose step cannot reach this one's casts
        _casts.by_id.clear()
        _casts.mutations = mutations.count
    key = (id(weight), tracing_state())
    entry = _casts.by_id.get(key)
    if entry is not None:
        return entry[1]
    stay(torch, "clear_autocast_cache", _clearing_ours, "casts in native regions go with torch's own")
    with torch.enable_grad():  # as torch does: a cast made under no_grad carries the gradient of a later use
        low_weight = cast(weight, dtype)
    _casts.by_id[key] = (weight, low_weight)
    return low_weight


def native_cache_size() -> tuple[int, int]:
    """Return how many casts of native regions our kernels keep on this thread, and their bytes."""
    casts = [cast for _, cast in _casts.by_id.values()]
    return len(casts), sum(cast.nbytes for cast in casts)


def _clearing_ours(original: Callable[[], None]) -> Callable[[], None]:
    def clear_autocast_cache() -> None:
        _casts.by_id.clear()
        original()

    return clear_autocast_cache
