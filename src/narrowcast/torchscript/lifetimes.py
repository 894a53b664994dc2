"""A fault of torch 2.13's interpreter, mended where a graph has it.

A tensor that a branch or the body of a loop makes, gives out, and reads in a loop inside is dropped by the loop inside:
"Expected Tensor but got None". The optimizer hides it from some runs with gradients; ours are run without it.
"""

from __future__ import annotations

from typing import Any

import torch


def keep_until_given_out(graph: Any) -> None:
    """In place: such tensors are given out under another name, which is made after the loop."""
    for node in list(graph.nodes()):
        for block in node.blocks():
            _keep_in(graph, block)


def _keep_in(graph: Any, block: Any) -> set[Any]:
    """Returns the values that loops in the block read."""
    made: set[Any] = set()
    in_loops: set[Any] = set()
    for node in list(block.nodes()):
        for inner in node.blocks():
            read = _keep_in(graph, inner)
            in_loops |= read | (_reads(inner) if node.kind() == "prim::Loop" else set())
        made.update(value.debugName() for value in node.outputs())
    for n, value in enumerate(list(block.outputs())):
        if value.debugName() in made & in_loops and isinstance(value.type(), torch._C.TensorType):
            other = graph.create("aten::alias", [value], 1)
            other.output().setType(value.type())
            other.insertBefore(block.returnNode())
            block.returnNode().replaceInput(n, other.output())
    return in_loops


def _reads(block: Any) -> set[Any]:
    found = {value.debugName() for value in block.outputs()}
    for node in block.nodes():
        found.update(value.debugName() for value in node.inputs())
        for inner in node.blocks():
            found |= _reads(inner)
    return found
