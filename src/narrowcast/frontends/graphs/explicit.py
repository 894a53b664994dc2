"""make_explicit: a Dynamo graph, captured, decided, edited and written back with explicit casts."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from narrowcast.errors import CaptureError
from narrowcast.frontends.graphs.capture import capture
from narrowcast.frontends.graphs.levels import Ambient
from narrowcast.frontends.graphs.read import ReadGraph, read_graph
from narrowcast.frontends.graphs.write import write_passes
from narrowcast.programs.passes import PassResult, before_autograd
from narrowcast.runtime.devices.device import own_saved_tensors
from narrowcast.runtime.sites.sightings import see_all
from narrowcast.runtime.torch_surface.dispatch import ASSERT_METADATA


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
    """The captured graph as a program, nothing decided, and the seconds of the capture; as `make_explicit` asks.

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
    """The graph with every format explicit; `graph` itself is left as it is.

    Must be called with the regions open that the graph is to run in.
    """
    reading, capture_seconds = read_explicit(graph, inputs)
    outcome, nodes = write_passes(reading, before_autograd(_dense(reading)))
    return Explicit(reading.modules[0], reading, outcome, capture_seconds, nodes)


def _dense(reading: ReadGraph) -> set[int]:
    """The values whose casts have their strides: without gaps and overlaps, sizes known."""
    found = set()
    for number, node in reading.nodes.items():
        value = node.meta.get("val", node.meta.get("example_value"))
        if isinstance(value, torch.Tensor) and value.layout is torch.strided:
            sizes = (*value.shape, *value.stride())
            if all(isinstance(size, int) for size in sizes) and _is_dense(value):
                found.add(number)
    return found


def _is_dense(value: torch.Tensor) -> bool:
    """Whether its elements lie side by side, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def refuse_scripts(verb: str, model: object) -> None:
    """CaptureError for a script, which has no Python code to capture."""
    if isinstance(model, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        raise CaptureError(
            asked=f"{verb} of a script or trace ({getattr(model, 'original_name', type(model).__name__)})",
            found="there is no Python code in it, which is what torch captures",
            advice="Give the module that it was made of; or narrowcast.script(script, under=...), which puts the "
            "casts into the script itself.",
        )
