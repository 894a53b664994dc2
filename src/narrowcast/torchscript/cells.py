"""Ops whose kernels call ops that lists name, with other work between them: scripts get what the kernels do.

In a region eager autocast casts inside them. The formulas are those of aten/src/ATen/native/RNN.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, List, Optional, Tuple  # noqa: UP035  # what TorchScript reads

from torch import Tensor
from torch.nn.functional import linear

from narrowcast.policy import Policy
from narrowcast.torchscript.runtime import graph_of
from narrowcast.torchscript.scopes import Scope, Section


def lstm_cell(
    input: Tensor, hx: List[Tensor], w_ih: Tensor, w_hh: Tensor,  # noqa: UP006
    b_ih: Optional[Tensor], b_hh: Optional[Tensor],  # noqa: UP045
) -> Tuple[Tensor, Tensor]:  # noqa: UP006  # fmt: skip
    """One step of an LSTM: the hidden and the cell state."""
    gates = linear(hx[0], w_hh, b_hh).add_(linear(input, w_ih, b_ih))
    chunks = gates.unsafe_chunk(4, 1)
    into, forget, cell, out = chunks[0].sigmoid_(), chunks[1].sigmoid_(), chunks[2].tanh_(), chunks[3].sigmoid_()
    state = (forget * hx[1]).add_(into * cell)
    return out * state.tanh(), state


def gru_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor,
    b_ih: Optional[Tensor] = None, b_hh: Optional[Tensor] = None,  # noqa: UP045
) -> Tensor:  # fmt: skip
    """One step of a GRU."""
    from_input = linear(input, w_ih, b_ih).unsafe_chunk(3, 1)
    from_hidden = linear(hx, w_hh, b_hh).unsafe_chunk(3, 1)
    reset = from_hidden[0].add_(from_input[0]).sigmoid_()
    update = from_hidden[1].add_(from_input[1]).sigmoid_()
    new = from_input[2].add(from_hidden[2].mul_(reset)).tanh_()
    return (hx - new).mul_(update).add_(new)


def rnn_tanh_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor,
    b_ih: Optional[Tensor] = None, b_hh: Optional[Tensor] = None,  # noqa: UP045
) -> Tensor:  # fmt: skip
    """One step of a plain recurrent net."""
    return linear(hx, w_hh, b_hh).add_(linear(input, w_ih, b_ih)).tanh()


def rnn_relu_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor,
    b_ih: Optional[Tensor] = None, b_hh: Optional[Tensor] = None,  # noqa: UP045
) -> Tensor:  # fmt: skip
    """The same with another activation."""
    return linear(hx, w_hh, b_hh).add_(linear(input, w_ih, b_ih)).relu()


_CELLS: dict[str, Callable[..., Any]] = {
    f"aten::{cell.__name__}": cell for cell in (lstm_cell, gru_cell, rnn_tanh_cell, rnn_relu_cell)
}


def open_cells(graph: Any, section: Section, policy_of: Callable[[Scope], Policy]) -> bool:
    """Put what the kernels do in the place of these ops, in regions whose policies do not name them. True if any is."""
    found = False
    for item in section.items:
        for inner in item.blocks:
            found = open_cells(graph, inner, policy_of) or found
        node = item.node
        cell = _CELLS.get(node.kind())
        on = [scope for scope in item.scopes.values() if scope.enabled is not False]
        if cell is None or not on or any(_is_named(policy_of(scope), node.kind()) for scope in on):
            continue
        graph.setInsertPoint(node)
        made = graph.insertGraph(graph_of(cell), list(node.inputs()))
        if node.outputsSize() > 1:
            unpack = graph.create("prim::TupleUnpack", made, node.outputsSize())
            graph.insertNode(unpack)
            made = list(unpack.outputs())
        for old, new in zip(node.outputs(), made, strict=True):
            new.setType(old.type())
            old.replaceAllUsesWith(new)
        node.destroy()
        found = True
    return found


def _is_named(policy: Policy, kind: str) -> bool:
    name = kind.replace("::", ".")
    overloads = (f"{name}.default", f"{name}.input")
    return any(policy.table.candidates(op, True).whole for op in overloads)
