"""Graphs that Dynamo shares between modules, under policies with rules about modules."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.fx import GraphModule

from narrowcast.fx.explicit import Explicit
from narrowcast.regions.graph_place import NO_OUTSIDE, Outside, node_place, placed_at
from narrowcast.regions.place import called_modules, module_path


class Elsewhere(torch.fx.Interpreter):
    """A graph that was compiled for calls in one module, and may be called in another.

    Dynamo shares the code of modules that are alike; a rule about one of them must not reach the other. Such calls run
    uncompiled, with the region's own kernels.
    """

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.compiled_for = module_path(called_modules())
        self.outside = NO_OUTSIDE
        self.warned = False

    def is_here(self) -> bool:
        """Whether this call is made in another module than that the graph was compiled in."""
        return module_path(called_modules()) != self.compiled_for

    def run(self, *args: Any, **_: Any) -> Any:
        """The graph's results, computed call by call at the places where this call makes them."""
        self.outside = Outside.now()
        if not self.warned:
            self.warned = True
            warnings.warn(
                f"narrowcast: a graph compiled for module {self.compiled_for or '(root)'!r} is called in "
                f"{self.outside.place.module_path!r}, for which the policy's rules may differ: it runs uncompiled. "
                "A graph break between the modules is the cause (narrowcast.explain lists them).",
                stacklevel=3,
            )
        return super().run(*args)

    def run_node(self, n: torch.fx.Node) -> Any:
        """One call, at its place."""
        with placed_at(node_place(n.meta, self.outside)):
            return super().run_node(n)


def find_elsewhere(graph: GraphModule, explicit: Explicit) -> Elsewhere | None:
    """What checks where the graph is called, if the policy asks for that and there is a module around it."""
    rules = [rule for policy in explicit.reading.policies.values() for rule in policy.rules]
    if all(rule.is_unconditional for rule in rules) or len(called_modules()) < 2:
        return None
    return Elsewhere(graph)
