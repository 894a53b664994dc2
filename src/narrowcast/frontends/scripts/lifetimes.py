"""A fault of torch 2.13's interpreter, fixed where a graph has it.

A tensor that a branch or the body of a loop makes, that a loop inside reads, and that is given out or put into a list
after that, is dropped by the loop inside: "Expected Tensor but got None". The optimizer hides it from some runs with
gradients; ours are run without it. The op in between gives the very tensor that it takes: a weight stays one.
"""

from __future__ import annotations

from typing import Any

from narrowcast.runtime.torch_surface.jit import TensorType


def keep_until_last_use(graph: Any) -> None:
    """In place: what follows the loop reads such tensors under another name, which is made after it."""
    for node in list(graph.nodes()):
        for block in node.blocks():
            _keep_in(graph, block)


def _keep_in(graph: Any, block: Any) -> set[str]:
    """Returns the names of what loops in the block read."""
    made: dict[str, Any] = {}
    in_loops: set[str] = set()
    for node in list(block.nodes()):
        read: set[str] = set()
        for inner in node.blocks():
            read |= _keep_in(graph, inner) | (_reads(inner) if node.kind() == "prim::Loop" else set())
        for name in sorted(read & made.keys()):
            other = graph.create("aten::resolve_conj", [made[name]], 1)
            other.output().setType(made[name].type())
            other.insertAfter(node)
            made[name].replaceAllUsesAfterNodeWith(other, other.output())
            if not other.output().uses():
                other.destroy()
        in_loops |= read
        made.update((v.debugName(), v) for v in node.outputs() if isinstance(v.type(), TensorType))
    return in_loops


def _reads(block: Any) -> set[str]:
    found = {value.debugName() for value in block.outputs()}
    for node in block.nodes():
        found.update(value.debugName() for value in node.inputs())
        for inner in node.blocks():
            found |= _reads(inner)
    return found
