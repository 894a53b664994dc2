"""A sample alone and in batches: which elements of results are its own, by what changes with it, and with others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from narrowcast.core.ledger.identity import CallId
from narrowcast.observation.observer.observer import Observer
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.trial.finiteness import is_floating
from narrowcast.runtime.torch_bridge import OpFacts, tensors_in
from narrowcast.runtime.torch_surface.dispatch import quietly, tree_flatten, tree_unflatten

_LIMIT_BYTES = 1 << 30
"""Results of calls that are kept of a run, at most."""


@dataclass(slots=True)
class Results:
    """The results of the calls of a run, in order: the first floating tensor of each, and its line."""

    tensors: dict[CallId, torch.Tensor] = field(default_factory=dict)
    places: dict[CallId, str] = field(default_factory=dict)


class ResultsOfCalls(Observer):
    """Keeps what calls give, until that is too much."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = Results()
        self._bytes = 0

    def looks_before(self, facts: OpFacts) -> bool:
        """Return False: nothing is inspected before a call."""
        return False

    def after(self, call: SeenCall) -> None:
        """Keep the first floating tensor that a call gives."""
        tensor = next(filter(is_floating, call.results), None)
        if tensor is None or call.is_cast:
            return
        self._bytes += tensor.nbytes
        if self._bytes > _LIMIT_BYTES:
            return
        with quietly():
            self.kept.tensors[call.id] = tensor.detach().clone()
            self.kept.places[call.id] = f"{call.site.file}:{call.site.line}"


@dataclass(frozen=True, slots=True)
class Own:
    """Which elements of a result are a sample's: they change with it, and less with others. shared: how many change
    with both, by more than rounding; count: how many change with the sample.
    """

    values: torch.Tensor
    shared: int
    count: int


def own_elements(
    base: torch.Tensor, with_others: Sequence[torch.Tensor], with_other_mates: Sequence[torch.Tensor], bound: float
) -> Own | None:
    """Return the elements of a result that are a sample's; None of results whose shapes depend on values.

    with_others: the results where the sample is another; with_other_mates: where all others are. bound: what rounding
    may make of a result, relatively (L2).
    """
    if any(other.shape != base.shape for other in (*with_others, *with_other_mates)):
        return None
    by_sample, by_mates = _changed(base, with_others), _changed(base, with_other_mates)
    own = (by_sample > 0) & (by_sample > by_mates)
    theirs = (by_mates > 0) & ~own
    size = base.double().nan_to_num(0, 0, 0).abs()
    is_shared = any(bool(by[of].norm() > bound * size[of].norm()) for by, of in ((by_mates, own), (by_sample, theirs)))
    both = int(((by_sample > 0) & (by_mates > 0)).sum()) if is_shared else 0
    return Own(base[own], both, int((by_sample > 0).sum()))


def _changed(base: torch.Tensor, others: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return by how much each element changes at most; NaN that stays is no change."""
    found = torch.zeros(base.shape, dtype=torch.float64, device=base.device)
    for other in others:
        far = (other.double() - base.double()).abs().nan_to_num(math.inf, math.inf)
        is_same = (other == base) | (other.isnan() & base.isnan())
        found = torch.maximum(found, far.masked_fill(is_same, 0.0))
    return found


class Samples:
    """Which tensors of a model's inputs hold samples: all that have as many along one dimension as the first does."""

    def __init__(self, inputs: Any, dim: int) -> None:
        self._leaves, self._spec = tree_flatten(inputs)
        self._dim = dim
        self.keeps_columns = False
        sized = [leaf.shape[dim] for leaf in self._leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > dim]
        self.count = sized[0] if sized else 0
        self._has = [isinstance(x, torch.Tensor) and x.dim() > dim and x.shape[dim] == self.count for x in self._leaves]

    def first(self) -> Any:
        """Return the inputs of the first sample."""
        return self._each(lambda leaf, _: leaf.narrow(self._dim, 0, 1), self._leaves)

    def another_like(self, sample: Any, seed: int, is_given: bool = False) -> Any:
        """Return another sample with the same values in another order, so that it is a legal one, and floats three
        quarters as large; masks of zeros and ones, and what holds no samples, as they are. is_given: in its place
        another sample that was given, if there is one: it may have other whole numbers, and another length. Where
        keeps_columns, whole numbers are those that samples have in the same place.
        """
        if is_given and self.count > 1:
            given = self._each(lambda _, whole: whole.narrow(self._dim, 1 + seed % (self.count - 1), 1), self._leaves)
            if any(not torch.equal(x, y) for x, y in zip(tensors_in(given), tensors_in(sample), strict=True)):
                return given

        generator = torch.Generator().manual_seed(seed)

        def other(tensor: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
            if tensor.dtype == torch.bool or bool(((tensor == 0) | (tensor == 1)).all()):
                return tensor
            order = torch.randperm(tensor.numel(), generator=generator, device="cpu").to(tensor.device)
            found = tensor.flatten()[order].view(tensor.shape)
            if is_floating(tensor):
                return found * (0.75 - seed / 1024)
            if tensor.numel() == 1:  # a length, a class: one that another sample has
                return whole.narrow(self._dim, seed % self.count, 1)
            if self.keeps_columns:
                rows = whole.movedim(self._dim, 0).reshape(self.count, -1)
                chosen = torch.randint(self.count, (1, rows.shape[1]), generator=generator, device="cpu")
                picked = rows.gather(0, chosen.to(rows.device))
                return picked.view(tensor.movedim(self._dim, 0).shape).movedim(0, self._dim)
            low, high = int(tensor.min()), int(tensor.max())
            return found if not torch.equal(found, tensor) else (tensor - low + 1 + seed) % (high - low + 1) + low

        return self._each(other, tree_flatten(sample)[0])

    def together(self, samples: list[Any]) -> Any:
        """Return inputs that hold these samples, one after the other."""
        flat = [tree_flatten(sample)[0] for sample in samples]
        joined = zip(zip(*flat, strict=True), self._has, strict=True)
        leaves = [torch.cat(parts, self._dim) if has else parts[0] for parts, has in joined]
        return tree_unflatten(leaves, self._spec)

    def _each(self, of_tensor: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], leaves: list[Any]) -> Any:
        together = zip(leaves, self._leaves, self._has, strict=True)
        made = [of_tensor(leaf, whole) if has else leaf for leaf, whole, has in together]
        return tree_unflatten(made, self._spec)
