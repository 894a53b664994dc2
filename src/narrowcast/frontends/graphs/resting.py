"""Cached low-precision weights of a compiled graph: casts of weights become inputs of it, made once outside.

Before, and after:

    %4: bf16[4, 8] cpu = cast(self=%0)                   %3: bf16[2, 8] cpu = aten.mm.default(%1, %10)
    %3: bf16[2, 8] cpu = aten.mm.default(%1, %4)         # %10, a new input, is %0 in bf16

By value and by need: a weight that is read in two formats has both, one that is read as it is stays. Exact: the cast
that is kept has the bits of the one in the graph. Where gradients flow each cast is an input of its own, for the
gradients of two casts meet in the weight's format. Only parameters and buffers are weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from narrowcast.core.goals import CAST, WORKING, Goal
from narrowcast.formats import parse_format
from narrowcast.frontends.graphs.capture import detached, noted
from narrowcast.programs.program import Program, Writes
from narrowcast.runtime.torch_bridge import DTYPES
from narrowcast.runtime.torch_surface.fx import FakeTensor
from narrowcast.runtime.weights.at_rest import Copy, at_rest, connected, lows_of


@dataclass(slots=True)
class Resting:
    """The casts that a graph takes as inputs: the weight's position among its inputs, and the dtype.

    gradients: numbers of those through which gradients flow. removed: how many casts of the graph they represent.
    copies: what was kept of them at the last call.
    """

    casts: tuple[tuple[int, torch.dtype], ...] = ()
    gradients: tuple[int, ...] = ()
    removed: int = 0
    copies: list[Copy] = field(default_factory=list)

    def inputs(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """Return the weights in their compute formats, in the order of the graph's new inputs."""
        weights = [args[position] for position, _ in self.casts]
        copies = self.copies  # other threads replace the list, and change none
        lows = lows_of(copies, weights) if len(copies) == len(weights) else None
        if lows is None:
            kept = [at_rest.find(w, dtype) for w, (_, dtype) in zip(weights, self.casts, strict=True)]
            lows = [low for low, _ in kept]
            self.copies = [copy for _, copy in kept if copy is not None]
        for n in self.gradients:
            lows[n] = connected(weights[n], lows[n])
        return lows


def with_stand_ins(graph: GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """Return the inputs to compile with: fake tensors for the new ones, with the sizes of weights and no others."""
    return [*inputs, *(node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")[len(inputs) :])]


def weight_positions(graph: GraphModule, inputs: Sequence[Any]) -> frozenset[int]:
    """Return which inputs of a Dynamo graph are parameters, or buffers, of modules.

    inputs: the real ones; a weight that shares memory with another of them may be written to through that, and is none.
    """
    memory = [_memory(value) for value in inputs]
    often = Counter(memory)
    shared = {n for n, where in enumerate(memory) if where is not None and often[where] > 1}
    positions = frozenset(
        n
        for n, node in enumerate(graph.graph.find_nodes(op="placeholder"))
        if (node.meta.get("tensor_dict") or {}).get("_dynamo_static_input_type")
        or isinstance(noted(node), torch.nn.Parameter)
    )
    return positions - shared


def _memory(value: Any) -> int | None:
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return None
    try:
        return value.untyped_storage().data_ptr() or None
    except (NotImplementedError, RuntimeError):
        return None


def rest_weights(
    graph: GraphModule, program: Program, nodes: Mapping[int, Node], weights: frozenset[int], goal: Goal
) -> Resting:
    """Change a graph with explicit casts so that it takes the casts of weights as inputs, as the goal asks.

    program: what the graph says. nodes: of its steps. weights: positions of inputs.
    """
    if goal.weights == CAST:
        return Resting()
    inputs = graph.graph.find_nodes(op="placeholder")
    position = {v.id: n for n, v in enumerate(program.body.parameters)}
    writes = Writes(program.body)
    kept_out = writes.memories(*program.body.returns)
    lows: dict[tuple[int, torch.dtype, int | None], Node] = {}  # apart by the cast, where gradients flow through it
    removed = 0
    for step in program.body.steps:
        source = position.get(step.operands[0].value, -1) if step.is_cast else -1
        if source not in weights or (step.value.gradient and goal.weights != WORKING):
            continue
        if writes.memories(step.id) & kept_out:
            continue
        if writes.is_written_after(step.operands[0].value, -1) or writes.is_written_after(step.id, -1):
            continue
        node, weight = nodes[step.id], inputs[source]
        key = (source, DTYPES[parse_format(step.value.type)], step.id if step.value.gradient else None)
        if key not in lows:
            lows[key] = _input(graph, [*inputs, *lows.values()][-1], weight, key[1], step.value.gradient)
        node.replace_all_uses_with(lows[key])
        graph.graph.erase_node(node)
        removed += 1
    if lows:
        graph.graph.lint()
        graph.recompile()
    gradients = tuple(n for n, (_, _, cast) in enumerate(lows) if cast is not None)
    return Resting(tuple((source, dtype) for source, dtype, _ in lows), gradients, removed)


def _input(graph: GraphModule, after: Node, weight: Node, dtype: torch.dtype, gradient: bool) -> Node:
    with graph.graph.inserting_after(after):
        node = graph.graph.placeholder(f"{weight.name}_{str(dtype).removeprefix('torch.')}")
    source = weight.meta.get("val")
    if isinstance(source, torch.Tensor):
        node.meta["val"] = detached(source).to(dtype).requires_grad_(gradient)
    node.meta["tensor_dict"] = weight.meta.get("tensor_dict", {})
    return node
