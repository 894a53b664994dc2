"""make_explicit: a Dynamo graph, captured, decided, edited and written back with explicit casts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from narrowcast.core.decide import Region
from narrowcast.core.ops import named
from narrowcast.core.policy import Policy, Site
from narrowcast.errors import CaptureError
from narrowcast.frontends.graphs.capture import capture
from narrowcast.frontends.graphs.levels import Ambient
from narrowcast.frontends.graphs.read import ReadGraph, read_graph
from narrowcast.frontends.graphs.write import write_passes
from narrowcast.output.collector import collector_paused
from narrowcast.programs.passes import AFTER_AUTOGRAD, PassResult, before_autograd
from narrowcast.runtime.devices.device import own_saved_tensors
from narrowcast.runtime.regions.stack import Prepared
from narrowcast.runtime.sites.sightings import see_all
from narrowcast.runtime.torch_bridge import op_facts
from narrowcast.runtime.torch_surface.dispatch import ASSERT_METADATA, OpOverload, op_name


@dataclass(frozen=True, slots=True)
class Explicit:
    """A graph without regions, the program that was read, and what the passes made of it.

    capture_seconds: how long the capture took, before passes and writing. nodes: of the outcome's steps.
    """

    graph: GraphModule
    reading: ReadGraph
    outcome: PassResult
    capture_seconds: float
    nodes: Mapping[int, Node] = field(default_factory=dict)


def read_explicit(graph: GraphModule, inputs: Sequence[Any], asserts: bool = True) -> tuple[ReadGraph, float]:
    """Return the captured graph as a program, nothing decided, and the seconds of the capture, for `make_explicit`.

    asserts: keep torch.export's assertions about the formats of values.
    """
    values = [*inputs, *(n.meta.get("example_value") for n in graph.graph.nodes)]
    devices = tuple(dict.fromkeys(v.device.type for v in values if isinstance(v, torch.Tensor)))
    ambient, grad_mode = Ambient.now(devices), torch.is_grad_enabled()
    start = time.perf_counter()
    with own_saved_tensors():  # a checkpoint around the call is not to count what the capture saves
        captured = capture(graph, inputs, ambient.outside)
    seconds = time.perf_counter() - start
    for node in () if asserts else captured.graph.graph.find_nodes(op="call_function", target=ASSERT_METADATA):
        captured.graph.graph.erase_node(node)
    reading = read_graph(captured.graph, "forward", ambient, captured.flags, grad_mode)
    see_all(reading.program, reading.policies)
    return reading, seconds


def make_explicit(graph: GraphModule, inputs: Sequence[Any]) -> Explicit:
    """Return the graph with every format explicit; `graph` itself is left as it is.

    Must be called with the regions open that the graph is to run in.
    """
    reading, capture_seconds = read_explicit(graph, inputs)
    outcome, nodes = write_passes(reading, before_autograd(_dense(reading)))
    return Explicit(reading.modules[0], reading, outcome, capture_seconds, nodes)


def _dense(reading: ReadGraph) -> set[int]:
    """Return the values whose casts have their strides: without gaps and overlaps, sizes known."""
    dense = set()
    for number, node in reading.nodes.items():
        value = node.meta.get("val", node.meta.get("example_value"))
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            sizes = (*value.shape, *value.stride())
            if all(isinstance(size, int) for size in sizes) and _is_dense(value):
                dense.add(number)
    return dense


def _is_dense(value: torch.Tensor) -> bool:
    """Return whether its elements lie side by side, in any order."""
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def refuse_scripts(verb: str, model: object, path: str = "") -> None:
    """Raise CaptureError for a script, which has no Python code to capture. path: of one that is part of a model."""
    if isinstance(model, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        asked = f"{verb} of a script or trace ({path or getattr(model, 'original_name', type(model).__name__)})"
        found = "there is no Python code in it, which is what torch captures"
        advice = "Give the module that it was made of; or narrowcast.script(script, under=...), which puts the "
        raise CaptureError(asked, found, advice=f"{advice}casts into the script itself.")


# -- the joint graph of forward and backward, after autograd: equal casts are made once; the backward has its rules ----


def edit_joint(
    graph: GraphModule, regions: Mapping[str, Region], rules: Policy | None, weights: frozenset[int], forward: Explicit
) -> tuple[ReadGraph, PassResult]:
    """Change a joint graph in place.

    regions: by device type, for the low format that rules about the backward mean. rules: those rules alone.
    weights: numbers of the primals that are weights. forward: its graph; a call of the backward is where the call is
    whose gradients it makes.
    """
    ambient, places = Ambient(), dict[Node, Site]()
    if rules is not None:
        ambient = Ambient({d: Prepared(facts, rules.resolve(d)) for d, facts in regions.items()})
        steps, origins = forward.outcome.program.steps, forward_nodes(graph.graph.nodes, forward.nodes)
        places = {node: steps[origin].site for node, origin in origins.items() if origin in steps}
    with collector_paused():
        reading = read_graph(graph, "joint", ambient, joint=directions(graph, weights), places=places)
        outcome, _ = write_passes(reading, AFTER_AUTOGRAD, assigns=rules is not None, lowered=True)
    return reading, outcome


def directions(graph: GraphModule, weights: frozenset[int]) -> dict[Node, str]:
    """Return for each node of the backward whether it makes a weight's gradient, an input's, or neither by itself.

    A call that computes makes a weight's gradient (wgrad) if its result becomes that gradient by views, casts and
    additions alone; other calls that compute make gradients that flow on (dgrad).
    """
    ours = [node for node in graph.graph.nodes if node.meta.get("partitioner_tag") == "is_backward"]
    kinds = {node: "dgrad" if _computes(node) else "backward" for node in ours}
    outputs = graph.graph.output_node().args[0]
    primals = [n for n in graph.graph.find_nodes(op="placeholder") if not n.name.startswith("tangents")]
    gradients = list(outputs)[-len(primals) :] if isinstance(outputs, (list, tuple)) and primals else []
    waiting = [g for k, g in enumerate(gradients) if k in weights and isinstance(g, Node)]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node not in kinds:
            continue
        if _computes(node):
            kinds[node] = "wgrad"
            name = op_name(node.target)  # type: ignore[arg-type]  # it is an overload
            if name not in named("gradients.pass_on") and name != "convert_element_type":
                continue
        for source in node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                waiting.append(source)
    return kinds


def forward_steps(joint: ReadGraph, written: Mapping[int, Node]) -> dict[int, int]:
    """Return for each step of a joint graph the step of the forward graph that it was, or whose gradients it makes.
    written: the nodes of that graph by step.
    """
    origins = forward_nodes(joint.nodes.values(), written)
    return {step: origins[node] for step, node in joint.nodes.items() if node in origins}


def forward_nodes(nodes: Iterable[Node], written: Mapping[int, Node]) -> dict[Node, int]:
    """Return for each node of a joint graph the step of the forward graph that it was, or whose gradients it makes.

    AOTAutograd notes on each node which one it came from, and numbers what autograd recorded: a node of the backward
    has the number of the forward's. Nothing for nodes without such notes.
    """
    by_name = {node.name: step for step, node in written.items()}
    by_number: dict[Any, int] = {}
    origins: dict[Node, int] = {}
    for node in nodes:
        sources, number = node.meta.get("from_node"), node.meta.get("seq_nr")
        if node.meta.get("partitioner_tag") == "is_backward":
            origin = by_number.get(number)
        else:
            origin = by_name.get(sources[0].name) if sources else None
            if origin is not None and number is not None:
                by_number[number] = origin
        if origin is not None:
            origins[node] = origin
    return origins


def _computes(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and op_facts(node.target).computes
