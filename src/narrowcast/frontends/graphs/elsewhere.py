"""Graphs that Dynamo shares between modules or regions that it cannot tell apart, and must not share."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule

from narrowcast.frontends.graphs.explicit import Explicit
from narrowcast.runtime.regions.ruling import region_on, ruled_device_types
from narrowcast.runtime.regions.stack import innermost, stack
from narrowcast.runtime.sites.graph_nodes import NO_OUTSIDE, Outside, at_site, node_site
from narrowcast.runtime.sites.graph_numbering import Numbering
from narrowcast.runtime.sites.python_stack import called_modules, module_path
from narrowcast.runtime.torch_surface.state import autocast_nesting


class Elsewhere(torch.fx.Interpreter):
    """A graph that was compiled for calls in one module and under one policy, and may be called in another.

    Dynamo shares the code of modules that are alike; a rule about one of them must not reach the other. And it does not
    see that torch's own region, inside one of ours of the same format, rules instead. Such calls run uncompiled, with
    the region's own kernels.
    """

    def __init__(self, graph: GraphModule, modules_matter: bool) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.compiled_for = module_path(called_modules()) if modules_matter else None
        self.policies = _policies()
        region = innermost()
        is_alone = region is not None and region.outer is None and region.is_innermost
        self.alone = region.prepared.for_graphs if region is not None and is_alone else None
        self.outside = NO_OUTSIDE
        self.numbering = Numbering()
        self.warned = False

    def is_elsewhere(self) -> bool:
        """Whether this call is made in another module, or under another policy, than the graph was compiled for.

        torch's own state is as it was, or Dynamo would not have come here; so where one region of ours is all, and the
        same, no policy needs to be looked at. This is asked at every call.
        """
        region = stack.innermost
        if region is not None:
            is_alone = region.outer is None and region.depth == autocast_nesting()
            if not (is_alone and region.prepared.for_graphs is self.alone) and _policies() != self.policies:
                return True
        return self.compiled_for is not None and module_path(called_modules()) != self.compiled_for

    def run(self, *args: Any, **_: Any) -> Any:
        """The graph's results, computed call by call at the places where this call makes them."""
        self.outside = Outside.now()
        self.numbering = Numbering(self.outside.begins)
        if not self.warned and self.compiled_for is not None and self.outside.site.module_path != self.compiled_for:
            self.warned = True
            warnings.warn(
                f"narrowcast: a graph compiled for module {self.compiled_for or '(root)'!r} is called in "
                f"{self.outside.site.module_path!r}, for which the policy's rules may differ: it runs uncompiled. "
                "A graph break between the modules is the cause (narrowcast.explain lists them).",
                stacklevel=3,
            )
        return super().run(*args)

    def run_node(self, n: torch.fx.Node) -> Any:
        """One call, at its place."""
        with at_site(node_site(n.meta, self.outside), number=partial(self.numbering.number, n.meta)):
            return super().run_node(n)


def find_elsewhere(graph: GraphModule, explicit: Explicit) -> Elsewhere | None:
    """What checks where the graph is called: if a region of ours is open, or the policy asks for modules."""
    rules = [rule for policy in explicit.reading.policies.values() for rule in policy.rules]
    modules_matter = not all(rule.is_unconditional for rule in rules) and len(called_modules()) >= 2
    return Elsewhere(graph, modules_matter) if modules_matter or innermost() is not None else None


def _policies() -> tuple[tuple[str, str], ...]:
    """The policies in force, by device type."""
    found = ((device_type, region_on(device_type)) for device_type in ruled_device_types())
    return tuple((device, r.prepared.for_graphs.policy.digest) for device, r in found if r is not None)
