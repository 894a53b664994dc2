"""check: run an explicit graph on fake tensors, without autocast, and compare every format with what was captured.

The capture ran the region's own kernels; the graph has what `decide` said. Two ways to the same formats: where they
differ, one of them is wrong, and the graph is not used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from narrowcast.errors import CaptureError, Origin
from narrowcast.frontends.graphs.capture import detached
from narrowcast.runtime.sites.graph_nodes import node_site
from narrowcast.runtime.torch_surface.autograd import SET_GRAD_ENABLED
from narrowcast.runtime.torch_surface.dispatch import HigherOrderOperator, OpOverload, enable_python_dispatcher
from narrowcast.runtime.torch_surface.fx import same_random_numbers
from narrowcast.runtime.torch_surface.state import autocast_off


def check_formats(graph: GraphModule, inputs: Sequence[Any]) -> None:
    """CaptureError if a call gives another element type than it was captured with, or cannot be called at all.

    With the Python dispatcher, as tracing has it: some ops take symbolic sizes there alone.
    """
    runner = _Checker(graph)
    with (
        torch.no_grad(), autocast_off(), same_random_numbers(),
        enable_python_dispatcher(),
    ):  # fmt: skip
        runner.run(*[detached(v) if isinstance(v, torch.Tensor) else v for v in inputs])


class _Checker(torch.fx.Interpreter):
    def run_node(self, n: Node) -> Any:
        expected = n.meta.get("val")
        if isinstance(n.target, HigherOrderOperator):
            return expected  # taken at its word
        if n.target is SET_GRAD_ENABLED:  # grad mode is of no interest here
            return None
        if not isinstance(n.target, OpOverload):
            return super().run_node(n)
        try:
            found = super().run_node(n)
        except Exception as error:
            raise _difference(n, f"{type(error).__name__}: {str(error).splitlines()[0]}") from error
        if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor) and expected.dtype != found.dtype:
            raise _difference(n, f"gives {found.dtype} where the region's own kernels return {expected.dtype}")
        return found


def _difference(node: Node, found: str) -> CaptureError:
    site = node_site(node.meta)
    return CaptureError(
        asked=f"{node.target} with explicit casts",
        found=found,
        where=(Origin(site.file, site.line),) if site.file else (),
        advice="The graph runs as eager would run it instead. Please report this with the model.",
    )
