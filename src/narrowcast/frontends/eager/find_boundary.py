"""Which boundary a module's call has, here and now: what its pin says, and the rules of the region that holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.nn import Module

from narrowcast.core.decide import Region
from narrowcast.core.policy import DEVICE_TYPES, MODULE_CALL_OP, NOWHERE, Policy, Site
from narrowcast.formats import bf16
from narrowcast.frontends.eager.boundary import Boundary, boundary_of, names_of_forward
from narrowcast.runtime.regions.pinned import Pin, pin_of
from narrowcast.runtime.regions.recomputation import carried_region
from narrowcast.runtime.regions.ruling import active_region
from narrowcast.runtime.regions.stack import OpenRegion, innermost
from narrowcast.runtime.sites.graph_nodes import traced_site
from narrowcast.runtime.sites.python_stack import called_modules, find_site, module_path, path_around
from narrowcast.runtime.torch_surface.autograd import current_graph_task

ANYWHERE = Region("cpu", bf16)  # pins name their formats: they hold in any region, and in none


def ruling_region() -> OpenRegion | None:
    """The innermost region of ours whose policy has rules about modules, and which rules its device type now."""
    region = innermost()
    if region is None or not region.is_innermost:
        found = map(carried_region, DEVICE_TYPES) if current_graph_task() != -1 else ()
        carried = next((r for r in found if r is not None and r.prepared.policy.has_module_rules), None)
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
    """The boundary of a module's call; None if nothing is said about it."""
    pin: Pin | None = pin_of(module)
    ruling = ruling_region()
    if "forward" in module.__dict__:  # its arguments are its own: nothing that is known of the class holds
        return _made(module, pin, ruling, _site(module, ruling, traced))
    if ruling is None:
        if pin is None or not pin.policy.has_module_rules:
            return None
        if type(module) not in pin.boundaries:
            pin.boundaries[type(module)] = _made(module, pin, None, NOWHERE)
        found: Boundary | None = pin.boundaries[type(module)]
        return found
    site = _site(module, ruling, traced)
    if ruling.prepared.sightings is not None:
        ruling.prepared.sightings.see(site, MODULE_CALL_OP, 0)
    key = (type(module), pin.tag if pin is not None else None, site.module_path, site.functions, site.around)
    made: dict[Any, Boundary | None] = ruling.prepared.boundaries
    if key not in made:
        made[key] = _made(module, pin, ruling, site)
    return made[key]


def _site(module: Module, ruling: OpenRegion | None, traced: bool) -> Site:
    """As much of the place as the policy's rules ask for."""
    asked = ruling.prepared.policy.asked_of_modules if ruling is not None else frozenset()
    if not asked:
        return NOWHERE
    if traced:
        found = traced_site() or NOWHERE
    else:
        called = [module, *called_modules()]
        functions = find_site().functions if "function" in asked else ()
        found = Site(module_path(called), (), functions, around=path_around(called) if "module" in asked else "")
    path, around = (found.module_path, found.around) if "module" in asked else ("", "")
    return Site(path, (), found.functions if "function" in asked else (), around=around)


def _made(module: Module, pin: Pin | None, ruling: OpenRegion | None, site: Site) -> Boundary | None:
    policy = ruling.prepared.policy if ruling is not None else Policy("none", extends=())
    if pin is not None:
        policy = policy.with_rules(pin.policy.rules)
    facts = ANYWHERE if ruling is None else ruling.prepared.facts
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    return boundary_of(names_of_forward(module), policy, facts, replace(site, classes=(name,)))
