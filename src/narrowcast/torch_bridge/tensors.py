"""Tensors: cast as native autocast casts them, and found in nested arguments."""

from __future__ import annotations

from typing import Any

import torch

_to = torch.ops.aten.to.dtype


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What native autocast's cast does: `aten::to`, seen by autograd and by no `__torch_function__`."""
    result: torch.Tensor = tensor.to(dtype) if type(tensor) in _PLAIN else _to(tensor, dtype)
    return result


_PLAIN = (torch.Tensor, torch.nn.Parameter)  # for these the method is the same call, made faster


def number_as_tensor(number: complex, others: list[torch.Tensor]) -> torch.Tensor:
    """A tensor without dimensions that promotes as the number would beside these tensors, and keeps its digits."""
    like = {torch.SymFloat: 1.0, torch.SymInt: 1, torch.SymBool: True}.get(type(number), number)
    dtype = torch.result_type(others[0], like) if others else torch.get_default_dtype()
    if dtype.is_floating_point and any(t.is_floating_point() and t.dim() for t in others):
        dtype = torch.float64
    return torch.scalar_tensor(number, dtype=dtype)


def tensors_in(*trees: Any) -> list[torch.Tensor]:
    """Every tensor in nested lists, tuples and dicts of arguments, in order."""
    found: list[torch.Tensor] = []
    for tree in trees:
        if isinstance(tree, torch.Tensor):
            found.append(tree)
        elif isinstance(tree, (list, tuple)):
            found += tensors_in(*tree)
        elif isinstance(tree, dict):
            found += tensors_in(*tree.values())
    return found
