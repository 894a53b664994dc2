"""make_explicit: a Dynamo graph, captured, decided, edited and written back with explicit casts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from narrowcast.fx.capture import capture
from narrowcast.fx.edit import edit_graph
from narrowcast.fx.read import Ambient, Reading
from narrowcast.passes import BEFORE_AUTOGRAD, Outcome


@dataclass(frozen=True, slots=True)
class Explicit:
    """A graph without regions, the program that was read, and what the passes made of it.

    capture_seconds: how long the capture took, before reading, passes and writing.
    """

    graph: GraphModule
    reading: Reading
    outcome: Outcome
    capture_seconds: float


def make_explicit(graph: GraphModule, inputs: Sequence[Any]) -> Explicit:
    """The graph with every format explicit; `graph` itself is left as it is.

    Must be called with the regions open that the graph is to run in.
    """
    devices = tuple(dict.fromkeys(v.device.type for v in _values(graph, inputs)))
    ambient = Ambient.now(devices)
    grad_mode = torch.is_grad_enabled()
    start = time.perf_counter()
    captured = capture(graph, inputs, ambient.outside)
    capture_seconds = time.perf_counter() - start
    reading, outcome = edit_graph(
        captured.graph, BEFORE_AUTOGRAD, ambient=ambient, flags=captured.flags, grad_mode=grad_mode
    )
    return Explicit(captured.graph, reading, outcome, capture_seconds)


def _values(graph: GraphModule, inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Every tensor that the graph knows of before it runs."""
    found = [v for v in inputs if isinstance(v, torch.Tensor)]
    found += [v for n in graph.graph.nodes if isinstance(v := n.meta.get("example_value"), torch.Tensor)]
    return found
