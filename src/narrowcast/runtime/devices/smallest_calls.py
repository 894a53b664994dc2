"""The smallest calls of ops that policies lower: what a device is asked, to know whether it runs them in a format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

aten = torch.ops.aten
Make = Callable[..., torch.Tensor]
"""A tensor of this shape, in the format and on the device that are asked about, that requires grad."""


def _lstm(make: Make) -> tuple[Any, ...]:
    inputs, hidden = 8, 8
    weights = (make(4 * hidden, inputs), make(4 * hidden, hidden), make(4 * hidden), make(4 * hidden))
    states = (make(2, hidden), make(2, hidden))
    mode, layers = 2, 1
    return (make(3, 2, inputs), *weights, *states, False, [], mode, hidden, layers, True, False, False, True)


def _of(*shapes: tuple[int, ...]) -> Callable[[Make], tuple[Any, ...]]:
    """A call with tensors of these shapes."""
    return lambda make: tuple(make(*shape) for shape in shapes)


_line, _image = _of((1, 4, 8), (4, 4, 3)), _of((1, 4, 8, 8), (4, 4, 3, 3))
_volume = _of((1, 4, 5, 5, 5), (4, 4, 3, 3, 3))

SMALLEST: Mapping[Any, Callable[[Make], tuple[Any, ...]]] = {
    aten.mm.default: _of((8, 8), (8, 8)),
    aten.mv.default: _of((8, 8), (8,)),
    aten.addmm.default: _of((8,), (8, 8), (8, 8)),
    aten.bmm.default: _of((2, 8, 8), (2, 8, 8)),
    aten.baddbmm.default: _of((2, 8, 8), (2, 8, 8), (2, 8, 8)),
    aten.addbmm.default: _of((8, 8), (2, 8, 8), (2, 8, 8)),
    aten.linear.default: _of((2, 8, 8), (8, 8), (8,)),
    aten.matmul.default: _of((2, 8, 8), (8, 8)),
    aten.linalg_vecdot.default: _of((2, 8), (2, 8)),
    aten.conv1d.default: _line,
    aten.conv2d.default: _image,
    aten.conv3d.default: _volume,
    aten.conv_transpose1d.default: _line,
    aten.conv_transpose2d.input: _image,
    aten.conv_transpose3d.input: _volume,
    aten.conv_tbc.default: _of((4, 2, 4), (3, 4, 4), (4,)),
    aten.prelu.default: _of((2, 4, 4), (4,)),
    aten.scaled_dot_product_attention.default: _of((1, 2, 8, 8), (1, 2, 8, 8), (1, 2, 8, 8)),
    aten.mkldnn_rnn_layer.default: _lstm,
}
"""By op, the arguments of its smallest call."""

CPU_ALONE = frozenset([aten.mkldnn_rnn_layer.default])
"""Ops that only the cpu has."""
