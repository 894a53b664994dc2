"""edit: run passes on the program of a graph, and write that back."""

from __future__ import annotations

from torch.fx import Node

from narrowcast.frontends.graphs.read import ReadGraph
from narrowcast.frontends.graphs.write import write_graph
from narrowcast.output.collector import collector_paused
from narrowcast.programs.passes import Pass, PassResult, run_passes
from narrowcast.runtime.torch_bridge import id_with_dtype


def write_passes(
    reading: ReadGraph, passes: tuple[Pass, ...], assigns: bool = True, lowered: bool = False
) -> tuple[PassResult, dict[int, Node]]:
    """Run passes on what was read and write the outcome into its graph; with the nodes of its steps. Linear in size.

    assigns: decide first. lowered: as for `write_graph`.
    """
    with collector_paused():
        outcome = run_passes(reading.program, passes, reading.policies if assigns else None, id_with_dtype)
        return outcome, write_graph(reading, outcome.program, lowered)
