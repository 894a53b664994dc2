"""Gradients that were there before a run, put aside and restored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from narrowcast.runtime.torch_surface.autograd import is_leaf


class GradientsAside:
    """`with GradientsAside(named):` tensors have no gradients inside but those that are made there.

    named: those whose gradients are asked for, by name; others are put aside as they are met.
    """

    def __init__(self, named: dict[str, torch.Tensor]) -> None:
        self._named = named
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def __enter__(self) -> GradientsAside:
        self.put_aside(self._named.values())
        return self

    def __exit__(self, *raised: Any) -> None:
        for tensor, gradient in self._before.values():
            tensor.grad = gradient

    def put_aside(self, tensors: Iterable[torch.Tensor]) -> None:
        """Take the gradients of these tensors away, until the end."""
        for tensor in tensors:
            if is_leaf(tensor) and id(tensor) not in self._before:
                self._before[id(tensor)] = (tensor, tensor.grad)
                tensor.grad = None

    def found(self) -> dict[str, torch.Tensor]:
        """Return the gradients that were made, by name."""
        return {name: p.grad.detach() for name, p in self._named.items() if p.is_leaf and p.grad is not None}
