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
from narrowcast.runtime.torch_surface.dispatch import quietly, tree_map_only

_LIMIT_BYTES = 1 << 30
"""Results of calls that are kept of a run, at most."""


@dataclass(slots=True)
class Results:
    """What the calls of a run gave, in order: the first floating tensor of each, and its line."""

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
        """Nothing is inspected before a call."""
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


def another_like(tree: Any, seed: int, dim: int) -> Any:
    """Return another sample with the same values in another order, so that it is a legal one, and floats three quarters
    as large; masks of zeros and ones, and what has no dimension of samples, as they are.
    """
    generator = torch.Generator().manual_seed(seed)

    def other(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() <= dim or tensor.dtype == torch.bool or bool(((tensor == 0) | (tensor == 1)).all()):
            return tensor
        order = torch.randperm(tensor.numel(), generator=generator).to(tensor.device)
        found = tensor.flatten()[order].view(tensor.shape)
        if is_floating(tensor):
            return found * (0.75 - seed / 1024)
        low, high = int(tensor.min()), int(tensor.max())
        return found if not torch.equal(found, tensor) else (tensor - low + 1 + seed) % (high - low + 1) + low

    return tree_map_only(torch.Tensor, other, tree)


def batch_of(samples: list[Any], dim: int, is_of_samples: Callable[[torch.Tensor], bool]) -> Any:
    """Return one tree of inputs whose tensors hold these samples one after the other; those that hold none once."""
    from torch.utils._pytree import tree_flatten, tree_unflatten

    flat = [tree_flatten(sample) for sample in samples]
    leaves = []
    for together in zip(*(one for one, _ in flat), strict=True):
        first = together[0]
        joins = isinstance(first, torch.Tensor) and is_of_samples(first)
        leaves.append(torch.cat(together, dim) if joins else first)
    return tree_unflatten(leaves, flat[0][1])
