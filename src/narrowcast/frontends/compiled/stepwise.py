"""Graphs run call by call, for watchers that are notified of each call: observers of runs."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypeGuard

import torch
from torch.fx import GraphModule, Node

from narrowcast.core.decide import Plan
from narrowcast.core.policy import Policy, Site
from narrowcast.frontends.eager.watch import Arguments, DecidedCall, Keywords, Watcher, stepping, told
from narrowcast.frontends.graphs.explicit import Explicit
from narrowcast.runtime.regions.ruling import ruling_regions
from narrowcast.runtime.regions.stack import stack
from narrowcast.runtime.sites.graph_nodes import NO_OUTSIDE, Outside, at_site, graph_call, node_site
from narrowcast.runtime.sites.numbering import Numbering
from narrowcast.runtime.sites.python_stack import called_modules, module_path
from narrowcast.runtime.torch_bridge import device_type_of, op_facts
from narrowcast.runtime.torch_bridge.calls import gather, slots_of
from narrowcast.runtime.torch_surface.dispatch import OpOverload
from narrowcast.runtime.torch_surface.fx import Interpreter
from narrowcast.runtime.torch_surface.state import autocast_nesting

_NO_POLICY = Policy("graph", extends=())


class Stepwise(Interpreter):
    """One run of a graph: each node at its site, and watchers notified of the calls that a policy decides."""

    def __init__(self, graph: GraphModule, watching: tuple[Watcher, ...]) -> None:
        super().__init__(graph)
        self._watching = watching
        self._outside = Outside.now()
        self._site = Site()

    def run_node(self, n: Node) -> Any:
        """Run one call, at its place."""
        self._site = node_site(n.meta, self._outside)
        with at_site(self._site, graph_call(n.meta, self)):
            return super().run_node(n)

    def call_function(self, target: Any, args: Arguments, kwargs: Keywords) -> Any:
        """Run one call of an op, of which watchers that want it whole are notified: its casts are in the graph."""
        if not isinstance(target, OpOverload):
            return super().call_function(target, args, kwargs)
        facts = op_facts(target)
        device_type = device_type_of(args, kwargs) or "cpu"
        watching = [watcher for watcher in self._watching if watcher.wants_whole(facts.id, device_type)]
        if not watching or torch.is_autocast_enabled(device_type):  # then kernels cast, and report it
            return super().call_function(target, args, kwargs)
        slots = slots_of(facts, args, kwargs)
        tensors = list(zip(slots, gather(facts, args, kwargs), strict=True))
        plan = Plan((None,) * len(tensors))
        call = DecidedCall(facts, plan, self._site, tensors, _NO_POLICY, False, args, kwargs)
        return told(watching, call, lambda: super(Stepwise, self).call_function(target, args, kwargs))


def steppable(graph: GraphModule, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled graph; while a watcher wants every call, the graph itself, call by call."""

    def run(*args: Any) -> Any:
        watching = stepping()
        return Stepwise(graph, watching).run(*args) if watching else compiled(*args)

    return run


def is_program(module: torch.nn.Module) -> TypeGuard[GraphModule]:
    """Return whether a module is a graph of torch.export's, as `program.module()` makes it, that can run in steps."""
    return isinstance(module, GraphModule) and "_in_spec" in vars(module) and "_out_spec" in vars(module)


def run_program(program: GraphModule, watching: tuple[Watcher, ...], args: Arguments, kwargs: Keywords) -> Any:
    """Return the program's result, computed call by call."""
    values = inspect.signature(program.forward).bind(*args, **kwargs)
    values.apply_defaults()
    return Stepwise(program, watching).run(*values.args, *values.kwargs.values())


# -- graphs that Dynamo shares between modules or regions that it cannot tell apart, and must not share ----------------


class Elsewhere(Interpreter):
    """A graph that was compiled for calls in one module and under one policy, and may be called in another.

    Dynamo shares the code of modules that are alike; a rule about one of them must not reach the other. And it does not
    see that torch's own region, inside one of ours of the same format, rules instead. Such calls run uncompiled, with
    the region's own kernels.
    """

    def __init__(self, graph: GraphModule, modules_matter: bool) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.compiled_for = module_path(called_modules()) if modules_matter else None
        self.policies = _policies()
        region = stack.innermost
        is_alone = region is not None and region.outer is None and region.is_innermost
        self.alone = region.prepared.for_graphs if region is not None and is_alone else None
        self.outside = NO_OUTSIDE
        self.numbering = Numbering()
        self.warned = False

    def is_elsewhere(self) -> bool:
        """Return whether this call is made in another module, or under another policy, than the graph was compiled for.

        torch's own state is the same, or Dynamo would not have come here; so where one region of ours is all, and the
        same, no policy needs to be inspected. This is asked at every call.
        """
        region = stack.innermost
        if region is not None:
            is_alone = region.outer is None and region.depth == autocast_nesting()
            if not (is_alone and region.prepared.for_graphs is self.alone) and _policies() != self.policies:
                return True
        return self.compiled_for is not None and module_path(called_modules()) != self.compiled_for

    def run(self, *args: Any, **_: Any) -> Any:
        """Return the graph's results, computed call by call at the places where this call makes them."""
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
        """Run one call, at its place."""
        with at_site(node_site(n.meta, self.outside), number=partial(self.numbering.number, n.meta)):
            return super().run_node(n)


def find_elsewhere(graph: GraphModule, explicit: Explicit) -> Elsewhere | None:
    """Return a check of where the graph is called, if a region of ours is open, or the policy asks for modules."""
    rules = [rule for policy in explicit.reading.policies.values() for rule in policy.rules]
    modules_matter = not all(rule.is_unconditional for rule in rules) and len(called_modules()) >= 2
    return Elsewhere(graph, modules_matter) if modules_matter or stack.innermost is not None else None


def _policies() -> tuple[tuple[str, str], ...]:
    """Return the policies in force, by device type."""
    return tuple((device, r.prepared.for_graphs.policy.digest) for device, r in ruling_regions().items())
