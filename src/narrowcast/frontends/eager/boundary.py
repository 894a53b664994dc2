"""The boundary of a module's call: what goes in is cast, what comes out is cast, and what regions hold between.

Which formats, `decide` says: a module's call is a call, whose arguments have the names that `forward` gives them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch.nn import Module

from narrowcast.core.decide import Plan, Region
from narrowcast.core.module_calls import Inside, ModuleCall
from narrowcast.core.policy import DEVICE_TYPES, MODULE_CALL_OP, NOWHERE, Policy, Site
from narrowcast.core.refusals import refusal
from narrowcast.formats import bf16
from narrowcast.runtime.regions.marks import boundary_note
from narrowcast.runtime.regions.pinned import Pin, pin_of
from narrowcast.runtime.regions.ruling import active_region, carried_region
from narrowcast.runtime.regions.stack import OpenRegion, stack
from narrowcast.runtime.sites.graph_nodes import traced_site
from narrowcast.runtime.sites.python_stack import called_modules, find_site, module_path, path_around
from narrowcast.runtime.torch_bridge import DTYPES
from narrowcast.runtime.torch_surface.autograd import current_graph_task


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a function's arguments: positional ones in order, and what collects any more of them."""

    positional: tuple[str, ...]
    more: str
    known: frozenset[str]
    open: bool

    def of(self, position: int) -> str:
        """Return the name of a positional argument."""
        return self.positional[position] if position < len(self.positional) else self.more


def names_of(function: Callable[..., Any], bound: bool) -> Names:
    """Return the names of a function's arguments; `bound`: without the first, which is the module."""
    schema = getattr(function, "schema", None)
    if schema is not None and not callable(schema):  # a script's
        scripted = tuple(a.name for a in schema.arguments if a.name != "self")
        return Names(scripted, "args", frozenset(scripted), False)
    try:
        parameters = list(inspect.signature(function).parameters.values())[bound:]
    except (TypeError, ValueError):  # written in C
        return Names((), "args", frozenset(), True)
    positional = tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    more = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    is_open = any(p.kind is p.VAR_KEYWORD for p in parameters)
    return Names(positional, more, frozenset(p.name for p in parameters if p.kind is not p.VAR_KEYWORD), is_open)


def names_of_forward(module: torch.nn.Module) -> Names:
    """Return the names of the arguments of a module's `forward`, its class's or its own."""
    forward = module.forward
    function = getattr(forward, "__func__", forward)
    return names_of(function, function is not forward)


ArgumentCast = tuple[torch.dtype | None, bool]
"""What happens to one argument: the dtype that its floating tensors are cast to, and whether fp64 ones are, too."""


@dataclass(eq=False)
class Boundary:
    """The boundary of alike calls: what was asked about, and what was decided, as eager code uses it.

    plan: what holds for the call as a whole.
    """

    names: Names
    call: ModuleCall
    plan: Plan
    entries: dict[str, ArgumentCast] = field(default_factory=dict)

    def entry(self, name: str) -> ArgumentCast:
        """Return the cast of the argument of that name."""
        entry = self.entries.get(name)
        if entry is None:
            dst, exactly = self.call.cast_of(name)
            entry = self.entries[name] = (None if dst is None else DTYPES[dst], exactly)
        return entry

    @cached_property
    def positional(self) -> tuple[ArgumentCast, ...]:
        """What happens to the positional arguments that have names."""
        return tuple(map(self.entry, self.names.positional))

    @cached_property
    def inside(self) -> Inside:
        """What regions hold inside."""
        return self.call.inside(self.plan)

    @cached_property
    def follows(self) -> bool:
        """Whether a result is to have the format of an input."""
        return any(r.format is None for r in self.plan.results)

    def note(self, name: str) -> str:
        """Return the rule about an argument or `result`, as JSON for the ledger of a graph."""
        return boundary_note(MODULE_CALL_OP, name, self.call.rule_about(name), self.call.policy)

    def check(self) -> None:
        """Raise RefusedError if the call must not run."""
        if self.plan.refused is not None:
            raise refusal(self.plan, MODULE_CALL_OP, self.call.site)


def make_boundary(names: Names, policy: Policy, region: Region, site: Site) -> Boundary:
    """Return the boundary of a call under a policy, which may do nothing."""
    call = ModuleCall(policy, region, site)
    return Boundary(names, call, call.plan())


# -- which boundary a call has, here and now ---------------------------------------------------------------------------


ANYWHERE = Region("cpu", bf16)  # pins name their formats: they hold in any region, and in none


def ruling_region() -> OpenRegion | None:
    """Return the innermost region of ours whose policy has rules about modules, and which rules its device type now."""
    region = stack.innermost
    if region is None or not region.is_innermost:
        recomputed = map(carried_region, DEVICE_TYPES) if current_graph_task() != -1 else ()
        carried = next((r for r in recomputed if r is not None and r.prepared.policy.has_module_rules), None)
        if carried is not None:
            return carried
    passed: list[str] = []
    while region is not None:
        device_type = region.prepared.facts.device_type
        if device_type not in passed and torch.is_autocast_enabled(device_type):
            ruling = active_region(device_type)
            if ruling is not None and ruling.prepared.policy.has_module_rules:
                return ruling
        passed.append(device_type)
        region = region.outer
    return None


def find_boundary(module: Module, traced: bool = False) -> Boundary | None:
    """Return the boundary of a module's call; None if no pin or rule is about it."""
    pin: Pin | None = pin_of(module)
    ruling = ruling_region()
    if "forward" in module.__dict__:  # its arguments are its own: nothing that is known of the class holds
        return _made(module, pin, ruling, _site(module, ruling, traced))
    if ruling is None:
        if pin is None or not pin.policy.has_module_rules:
            return None
        if type(module) not in pin.boundaries:
            pin.boundaries[type(module)] = _made(module, pin, None, NOWHERE)
        pinned: Boundary | None = pin.boundaries[type(module)]
        return pinned
    site = _site(module, ruling, traced)
    if ruling.prepared.sightings is not None:
        ruling.prepared.sightings.see(site, MODULE_CALL_OP, 0)
    key = (type(module), pin.tag if pin is not None else None, site.module_path, site.functions, site.around)
    boundaries: dict[Any, Boundary | None] = ruling.prepared.boundaries
    if key not in boundaries:
        boundaries[key] = _made(module, pin, ruling, site)
    return boundaries[key]


def _site(module: Module, ruling: OpenRegion | None, traced: bool) -> Site:
    """Return as much of the place as the policy's rules ask for."""
    asked = ruling.prepared.policy.asked_of_modules if ruling is not None else frozenset()
    if not asked:
        return NOWHERE
    if traced:
        site = traced_site() or NOWHERE
    else:
        called = [module, *called_modules()]
        functions = find_site().functions if "function" in asked else ()
        site = Site(module_path(called), (), functions, around=path_around(called) if "module" in asked else "")
    path, around = (site.module_path, site.around) if "module" in asked else ("", "")
    return Site(path, (), site.functions if "function" in asked else (), around=around)


def _made(module: Module, pin: Pin | None, ruling: OpenRegion | None, site: Site) -> Boundary | None:
    policy = ruling.prepared.policy if ruling is not None else Policy("none", extends=())
    if pin is not None:
        policy = policy.with_rules(pin.policy.rules)
    facts = ANYWHERE if ruling is None else ruling.prepared.facts
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    bound = make_boundary(names_of_forward(module), policy, facts, replace(site, classes=(name,)))
    says = bound.plan.rule is not None or bound.plan.results or any(map(bound.call.names, bound.names.known))
    return bound if says else None
