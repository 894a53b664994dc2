"""Recurrent layers on fake cpu tensors that stand in for cuda's: as there, one call of cuDNN's kernel, which the cpu
does not have. Its arguments are made of those of `torch.lstm`, `torch.gru`, `torch.rnn_tanh` and `torch.rnn_relu`.

Source: `_cudnn_impl` in aten/src/ATen/native/cudnn/RNN.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from narrowcast.runtime.torch_surface.dispatch import cudnn_rnn

_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
_ARGUMENTS = 9


class RecurrentLayers(TorchFunctionMode):
    """While it is open: recurrent layers call what they call on cuda. What they call on other devices is not known, and
    real tensors on the cpu have no such kernel.

    unlike: whether one was called as on the cpu.
    """

    def __init__(self, device_type: str, is_fake: bool) -> None:
        super().__init__()
        self._replaces = device_type == "cuda" and is_fake
        self.unlike = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the call of a recurrent layer."""
        name = getattr(func, "__name__", "")
        if name not in _MODES or func is not getattr(torch, name):
            return func(*args, **(kwargs or {}))
        is_packed = len(args) < _ARGUMENTS or isinstance(args[3], (list, tuple))
        if not self._replaces or kwargs or is_packed:
            self.unlike = True
            return func(*args, **(kwargs or {}))
        return _as_cudnn(name, *args)


def _as_cudnn(
    name: str, x: torch.Tensor, hx: Sequence[torch.Tensor] | torch.Tensor, weights: Sequence[torch.Tensor],
    has_biases: bool, layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    states = [hx] if isinstance(hx, torch.Tensor) else list(hx)
    h, c = states[0], states[1] if name == "lstm" else None
    hidden = h.shape[-1] if c is None else c.shape[-1]
    projected = h.shape[-1] if h.shape[-1] != hidden else 0
    per_layer = (4 if has_biases else 2) + bool(projected)
    y, h_n, c_n, _, _ = cudnn_rnn(
        x.transpose(0, 1) if batch_first else x, list(weights), per_layer, None, h, c, _MODES[name], hidden, projected,
        layers, False, dropout, train, bidirectional, [], None,
    )  # fmt: skip
    y = y.transpose(0, 1) if batch_first else y
    return (y, h_n, c_n) if name == "lstm" else (y, h_n)
