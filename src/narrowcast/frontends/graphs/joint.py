"""The joint graph of forward and backward, after autograd: equal casts are made once; the backward has its rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.fx import GraphModule, Node

from narrowcast.core.decide import Region
from narrowcast.core.policy import Policy
from narrowcast.frontends.graphs.levels import Ambient
from narrowcast.frontends.graphs.read import ReadGraph, read_graph
from narrowcast.frontends.graphs.write import write_passes
from narrowcast.output.collector import collector_paused
from narrowcast.programs.passes import AFTER_AUTOGRAD, PassResult
from narrowcast.runtime.regions.stack import Prepared
from narrowcast.runtime.torch_bridge import op_facts
from narrowcast.runtime.torch_surface.dispatch import OpOverload, op_name


def edit_joint(
    graph: GraphModule, regions: Mapping[str, Region], rules: Policy | None, weights: frozenset[int]
) -> tuple[ReadGraph, PassResult]:
    """Change a joint graph in place.

    regions: by device type, for the low format that rules about the backward mean. rules: those rules alone.
    weights: numbers of the primals that are weights.
    """
    ambient = Ambient()
    if rules is not None:
        ambient = Ambient({d: Prepared(facts, rules.resolve(d)) for d, facts in regions.items()})
    with collector_paused():
        reading = read_graph(graph, "joint", ambient, joint=directions(graph, weights))
        outcome, _ = write_passes(reading, AFTER_AUTOGRAD, assigns=rules is not None, lowered=True)
    return reading, outcome


def directions(graph: GraphModule, weights: frozenset[int]) -> dict[Node, str]:
    """For each node of the backward whether it makes a weight's gradient, an input's, or neither of them by itself.

    A call that computes makes a weight's gradient (wgrad) if its result becomes that gradient by views, casts and
    additions alone; other calls that compute make gradients that flow on (dgrad).
    """
    found = {
        node: "dgrad" if _computes(node) else "backward"
        for node in graph.graph.nodes
        if node.meta.get("partitioner_tag") == "is_backward"
    }
    outputs = graph.graph.output_node().args[0]
    primals = [n for n in graph.graph.find_nodes(op="placeholder") if not n.name.startswith("tangents")]
    gradients = list(outputs)[-len(primals) :] if isinstance(outputs, (list, tuple)) and primals else []
    waiting = [g for k, g in enumerate(gradients) if k in weights and isinstance(g, Node)]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node not in found:
            continue
        if _computes(node):
            found[node] = "wgrad"
            if op_name(node.target) not in _SUMS:  # type: ignore[arg-type]  # it is an overload
                continue
        for source in node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                waiting.append(source)
    return found


def forward_steps(joint: ReadGraph, written: Mapping[int, Node]) -> dict[int, int]:
    """For each step of a joint graph the step of the forward graph that it was, or whose gradients it makes.

    written: the nodes of that graph by step. AOTAutograd notes on each node which one it came from, and numbers what
    autograd recorded: a node of the backward has the number of the forward's. Nothing for nodes without such notes.
    """
    by_name = {node.name: step for step, node in written.items()}
    by_number: dict[Any, int] = {}
    found: dict[int, int] = {}
    for step, node in joint.nodes.items():
        sources, number = node.meta.get("from_node"), node.meta.get("seq_nr")
        if node.meta.get("partitioner_tag") == "is_backward":
            origin = by_number.get(number)
        else:
            origin = by_name.get(sources[0].name) if sources else None
            if origin is not None and number is not None:
                by_number[number] = origin
        if origin is not None:
            found[step] = origin
    return found


def _computes(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and op_facts(node.target).computes


_SUMS = ("add", "neg", "_unsafe_view", "convert_element_type")
