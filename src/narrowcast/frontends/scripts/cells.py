"""Recurrent ops whose kernels call ops that lists name, with other work between them: what the kernels do.

In a region eager autocast casts inside them. The formulas are those of aten/src/ATen/native/RNN.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from narrowcast.frontends.scripts.region_facts import constant
from narrowcast.frontends.scripts.runtime import graph_of
from narrowcast.runtime.torch_surface.jit import TENSOR, ListType, inserted


def lstm_cell(
    input: Tensor, hx: list[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None
) -> tuple[Tensor, Tensor]:
    """One step of an LSTM: the hidden and the cell state."""
    gates = linear(hx[0], w_hh, b_hh).add_(linear(input, w_ih, b_ih))
    chunks = gates.unsafe_chunk(4, 1)
    into, forget, cell, out = chunks[0].sigmoid_(), chunks[1].sigmoid_(), chunks[2].tanh_(), chunks[3].sigmoid_()
    state = (forget * hx[1]).add_(into * cell)
    return out * state.tanh(), state


def gru_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """One step of a GRU."""
    return _gru_step(linear(input, w_ih, b_ih), hx, w_hh, b_hh)


def _gru_step(inputs: Tensor, hx: Tensor, w_hh: Tensor, b_hh: Tensor | None) -> Tensor:
    from_input = inputs.unsafe_chunk(3, 1)
    from_hidden = linear(hx, w_hh, b_hh).unsafe_chunk(3, 1)
    reset = from_hidden[0].add_(from_input[0]).sigmoid_()
    update = from_hidden[1].add_(from_input[1]).sigmoid_()
    new = from_input[2].add(from_hidden[2].mul_(reset)).tanh_()
    return (hx - new).mul_(update).add_(new)


def rnn_tanh_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """One step of a plain recurrent net."""
    return linear(hx, w_hh, b_hh).add_(linear(input, w_ih, b_ih)).tanh()


def rnn_relu_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """The same with another activation."""
    return linear(hx, w_hh, b_hh).add_(linear(input, w_ih, b_ih)).relu()


def _gru_steps(
    inputs: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None, b_hh: Tensor | None, backwards: bool
) -> tuple[Tensor, Tensor]:
    """One direction of one layer: all steps' states, and the last one."""
    from_inputs = linear(inputs, w_ih, b_ih).unbind(0)
    states: list[Tensor] = []
    count = len(from_inputs)
    for step in range(count):
        hx = _gru_step(from_inputs[count - 1 - step if backwards else step], hx, w_hh, b_hh)
        states.append(hx)
    if backwards:
        states.reverse()
    return torch.stack(states, 0), hx


def _rows_first(x: Tensor, batch_first: bool) -> Tensor:
    return x.transpose(0, 1) if batch_first else x


def _between(x: Tensor, dropout: float, train: bool) -> Tensor:
    """What a layer gives to the next."""
    return torch.dropout(x, dropout, True) if dropout != 0.0 and train else x


def insert_gru(graph: Any, node: Any) -> list[Any] | None:
    """All layers of a GRU as on the cpu, before its node: products are cast, the state is kept as it came.

    Layer by layer, so that each weight is one value, which is cast once. None if the number of layers is not known.
    """
    x, hx, params, has_biases, layers, dropout, train, both_ways, batch_first = node.inputs()
    known = [constant(value) for value in (has_biases, layers, both_ways)]
    if None in known:
        return None

    def call(function: Callable[..., Any], *inputs: Any) -> list[Any]:
        return list(graph.insertGraph(graph_of(function), list(inputs)))

    def joined(op: str, values: list[Any], dimension: int) -> Any:
        listed = inserted(graph, "prim::ListConstruct", values, ListType(TENSOR))
        return inserted(graph, op, [listed, graph.insertConstant(dimension)], TENSOR)

    def element(values: Any, number: int) -> Any:
        if values.node().kind() == "prim::ListConstruct":
            return values.node().inputsAt(number)
        return inserted(graph, "aten::__getitem__", [values, graph.insertConstant(number)], TENSOR)

    directions, each = 2 if known[2] else 1, 4 if known[0] else 2
    (x,) = call(_rows_first, x, batch_first)
    before = inserted(graph, "aten::unbind", [hx, graph.insertConstant(0)], ListType(TENSOR))
    last = []
    for layer in range(known[1]):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            weights = [element(params, number * each + n) for n in range(each)]
            weights += [graph.insertConstant(None) for _ in range(4 - each)]
            backwards = graph.insertConstant(direction == 1)
            (pair,) = call(_gru_steps, x, element(before, number), *weights, backwards)
            unpack = graph.insertNode(graph.create("prim::TupleUnpack", [pair], 2))
            output, state = unpack.outputs()
            outputs.append(output)
            last.append(state)
        x = joined("aten::cat", outputs, -1) if directions == 2 else outputs[0]
        if layer < known[1] - 1:
            (x,) = call(_between, x, dropout, train)
    return [*call(_rows_first, x, batch_first), joined("aten::stack", last, 0)]
