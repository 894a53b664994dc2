"""Graphs run call by call, for those who want to be told of each call: observers of runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch.fx import GraphModule, Node

from narrowcast.core.decide import Plan
from narrowcast.core.policy import Policy, Site
from narrowcast.frontends.eager.kernels import gather, slots_of
from narrowcast.frontends.eager.watch import DecidedCall, Watcher, stepping, told
from narrowcast.runtime.sites.graph_nodes import Outside, at_site, graph_call, node_site
from narrowcast.runtime.torch_bridge import device_type_of, op_facts
from narrowcast.runtime.torch_surface.dispatch import OpOverload

_NO_POLICY = Policy("graph", extends=())


class Stepwise(torch.fx.Interpreter):
    """One run of a graph: each node at its site, and those who watch told of the calls that a policy decides."""

    def __init__(self, graph: GraphModule, watching: tuple[Watcher, ...]) -> None:
        super().__init__(graph)
        self._watching = watching
        self._outside = Outside.now()
        self._site = Site()

    def run_node(self, n: Node) -> Any:
        """One call, at its place."""
        self._site = node_site(n.meta, self._outside)
        with at_site(self._site, graph_call(n.meta, self)):
            return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of an op, of which those who want it whole are told."""
        if not isinstance(target, OpOverload):
            return super().call_function(target, args, kwargs)
        facts = op_facts(target)
        device_type = device_type_of(args, kwargs) or "cpu"
        watching = [watcher for watcher in self._watching if watcher.wants_whole(facts.id, device_type)]
        if not watching:
            return super().call_function(target, args, kwargs)
        slots = slots_of(facts, args, kwargs)
        tensors = list(zip(slots, gather(facts, args, kwargs), strict=True))
        plan = Plan((None,) * len(tensors))
        call = DecidedCall(facts, plan, self._site, tensors, _NO_POLICY, False, args, kwargs)
        return told(watching, call, lambda: super(Stepwise, self).call_function(target, args, kwargs))


def steppable(graph: GraphModule, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled graph; while somebody wants to be told of every call, the graph itself, call by call."""

    def run(*args: Any) -> Any:
        watching = stepping()
        return Stepwise(graph, watching).run(*args) if watching else compiled(*args)

    return run


def is_program(module: torch.nn.Module) -> TypeGuard[GraphModule]:
    """Whether a module is a graph of torch.export's, as `program.module()` gives it, that can run step by step."""
    return isinstance(module, GraphModule) and "_in_spec" in vars(module) and "_out_spec" in vars(module)


def run_program(
    program: GraphModule, watching: tuple[Watcher, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The program's result, computed call by call."""
    values = inspect.signature(program.forward).bind(*args, **kwargs)
    values.apply_defaults()
    return Stepwise(program, watching).run(*values.args, *values.kwargs.values())
