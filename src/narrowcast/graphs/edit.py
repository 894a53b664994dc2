"""edit: read a graph, run passes on its program, write the program back."""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import GraphModule, Node

from narrowcast.graphs.read import Ambient, Flags, Reading, read_graph
from narrowcast.graphs.write import write_graph
from narrowcast.passes import Outcome, Pass, run_passes
from narrowcast.program.collector import collector_paused
from narrowcast.torch_bridge import find_op, op_id, overload_with_dtype


def edit_graph(
    graph: GraphModule,
    passes: tuple[Pass, ...],
    *,
    name: str = "forward",
    ambient: Ambient | None = None,
    flags: Flags | None = None,
    grad_mode: bool = True,
    joint: Mapping[Node, str] | None = None,
    assigns: bool = True,
    lowered: bool = False,
) -> tuple[Reading, Outcome]:
    """Change a graph in place; linear in its size. assigns: decide first. lowered: as for
    `write_graph`, the rest as for `read_graph`.
    """
    with collector_paused():
        reading = read_graph(graph, name, ambient, flags, grad_mode, joint)
        outcome, _ = write_passes(reading, passes, assigns, lowered)
    return reading, outcome


def write_passes(
    reading: Reading, passes: tuple[Pass, ...], assigns: bool = True, lowered: bool = False
) -> tuple[Outcome, dict[int, Node]]:
    """Run passes on what was read and write the outcome into its graph; with the nodes of its steps."""
    with collector_paused():
        outcome = run_passes(reading.program, passes, reading.policies if assigns else None, with_dtype)
        return outcome, write_graph(reading, outcome.program, lowered)


def with_dtype(identity: str) -> str:
    """The id of the overload that takes a dtype besides."""
    op = find_op(identity)
    other = overload_with_dtype(op) if op is not None else None
    return op_id(other) if other is not None else identity
