"""A sample alone and in batches: which elements of results are its own, by what changes with it, and with others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from narrowcast.core.ledger.identity import CallId
from narrowcast.observation.observer.observer import Observer
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.trial.finiteness import is_floating
from narrowcast.runtime.torch_bridge import OpFacts
from narrowcast.runtime.torch_surface.dispatch import quietly, tree_flatten, tree_unflatten

_LIMIT_BYTES = 1 << 30
"""Results of calls that are kept of a run, at most."""


@dataclass(slots=True)
class Results:
    """The results of the calls of a run, in order: the first floating tensor of each, and its line."""

    tensors: dict[CallId, torch.Tensor] = field(default_factory=dict)
    places: dict[CallId, str] = field(default_factory=dict)
    is_cut: bool = False


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
            self.kept.is_cut = True
            return
        with quietly():
            self.kept.tensors[call.id] = tensor.detach().clone()
            self.kept.places[call.id] = f"{call.site.file}:{call.site.line}"


@dataclass(frozen=True, slots=True)
class Own:
    """Which elements of a result are a sample's: they change with it, and with no other. shared: those that change with
    both.
    """

    values: torch.Tensor
    shared: int
    count: int


def own_elements(base: torch.Tensor, with_another: torch.Tensor, with_other_mates: torch.Tensor | None) -> Own | None:
    """Return the elements of a result that are a sample's; None of results whose shapes depend on values.

    with_another: where the sample is another; with_other_mates: where all others are.
    """
    if with_another.shape != base.shape or (with_other_mates is not None and with_other_mates.shape != base.shape):
        return None
    by_sample = _changed(base, with_another)
    by_others = torch.zeros_like(by_sample) if with_other_mates is None else _changed(base, with_other_mates)
    both = int((by_sample & by_others).sum())
    return Own(base[by_sample & ~by_others], both, int(by_sample.sum()))


def _changed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a != b) & ~(a.isnan() & b.isnan())


class Samples:
    """Which tensors of a model's inputs hold samples: all that have as many along one dimension as the first does."""

    def __init__(self, inputs: Any, dim: int) -> None:
        self._leaves, self._spec = tree_flatten(inputs)
        self._dim = dim
        sized = [leaf.shape[dim] for leaf in self._leaves if isinstance(leaf, torch.Tensor) and leaf.dim() > dim]
        self.count = sized[0] if sized else 0
        self._has = [isinstance(x, torch.Tensor) and x.dim() > dim and x.shape[dim] == self.count for x in self._leaves]

    def first(self) -> Any:
        """Return the inputs of the first sample."""
        return self._each(lambda leaf: leaf.narrow(self._dim, 0, 1), self._leaves)

    def another_like(self, sample: Any, seed: int) -> Any:
        """Return another sample with the same values in another order, so that it is a legal one, and floats three
        quarters as large; masks of zeros and ones, and what holds no samples, as they are.
        """
        generator = torch.Generator().manual_seed(seed)

        def other(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dtype == torch.bool or bool(((tensor == 0) | (tensor == 1)).all()):
                return tensor
            order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
            found = tensor.flatten()[order].view(tensor.shape)
            if is_floating(tensor):
                return found * (0.75 - seed / 1024)
            low, high = int(tensor.min()), int(tensor.max())
            return found if not torch.equal(found, tensor) else (tensor - low + 1 + seed) % (high - low + 1) + low

        return self._each(other, tree_flatten(sample)[0])

    def together(self, samples: list[Any]) -> Any:
        """Return inputs that hold these samples, one after the other."""
        flat = [tree_flatten(sample)[0] for sample in samples]
        joined = zip(zip(*flat, strict=True), self._has, strict=True)
        leaves = [torch.cat(parts, self._dim) if has else parts[0] for parts, has in joined]
        return tree_unflatten(leaves, self._spec)

    def _each(self, of_tensor: Callable[[torch.Tensor], torch.Tensor], leaves: list[Any]) -> Any:
        made = [of_tensor(leaf) if has else leaf for leaf, has in zip(leaves, self._has, strict=True)]
        return tree_unflatten(made, self._spec)
