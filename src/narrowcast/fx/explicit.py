"""make_explicit: a Dynamo graph, captured, decided, edited and written back with explicit casts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from narrowcast.fx.capture import capture
from narrowcast.fx.read import Ambient, Reading, read_graph
from narrowcast.fx.write import write_graph
from narrowcast.passes import BEFORE_AUTOGRAD, Outcome, run_passes
from narrowcast.torch_bridge import find_op, op_id, overload_with_dtype


@dataclass(frozen=True, slots=True)
class Explicit:
    """A graph without regions, the program that was read, and what the passes made of it."""

    graph: GraphModule
    reading: Reading
    outcome: Outcome


def make_explicit(graph: GraphModule, inputs: Sequence[Any]) -> Explicit:
    """The graph with every format explicit; `graph` itself is left as it is.

    Must be called with the regions open that the graph is to run in.
    """
    devices = tuple(dict.fromkeys(v.device.type for v in _values(graph, inputs)))
    ambient = Ambient.now(devices)
    grad_mode = torch.is_grad_enabled()
    captured = capture(graph, inputs, ambient.outside)
    reading = read_graph(captured.graph, "forward", ambient, captured.flags, grad_mode)
    outcome = run_passes(reading.program, BEFORE_AUTOGRAD, reading.policies, with_dtype)
    write_graph(reading, outcome.program)
    return Explicit(captured.graph, reading, outcome)


def with_dtype(identity: str) -> str:
    """The id of the overload that takes a dtype besides."""
    op = find_op(identity)
    other = overload_with_dtype(op) if op is not None else None
    return op_id(other) if other is not None else identity


def _values(graph: GraphModule, inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Every tensor that the graph knows of before it runs."""
    found = [v for v in inputs if isinstance(v, torch.Tensor)]
    found += [v for n in graph.graph.nodes if isinstance(v := n.meta.get("example_value"), torch.Tensor)]
    return found
