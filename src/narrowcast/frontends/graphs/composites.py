"""Composite ops: in a region, those that no rule is about are captured as the calls inside them.

Eager autocast works so by itself: such an op has no autocast kernel, and the ops that it calls have theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from narrowcast.core.decide import Argument, Call, decide
from narrowcast.core.policy import NOWHERE, Site
from narrowcast.frontends.graphs.fused import INSIDE
from narrowcast.runtime.regions.ruling import region_on
from narrowcast.runtime.regions.stack import OpenRegion
from narrowcast.runtime.sites.graph_nodes import traced_site
from narrowcast.runtime.torch_bridge import FORMATS, op_facts, overloads_in, tensors_in
from narrowcast.runtime.torch_surface import dispatch as surface
from narrowcast.runtime.torch_surface.dispatch import OpOverload, can_decompose, has_kernel
from narrowcast.runtime.torch_surface.state import any_autocast


def decompositions(graph: torch.fx.GraphModule) -> dict[OpOverload, Callable[..., Any]]:
    """For each composite op: run the calls inside it where a region is on and no rule is about the op itself."""
    called = dict.fromkeys(node.target for node in graph.graph.nodes if isinstance(node.target, OpOverload))
    others = [op for op in called if op.namespace != "aten" and can_decompose(op)]
    return _aten_decompositions() | {op: _decomposed_if_undecided(op) for op in others}


@cache
def _aten_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Those of torch's own composite ops, which are the same for all graphs."""
    return {op: _decomposed_if_undecided(op) for op in (*filter(can_decompose, overloads_in("aten")), *INSIDE)}


def _decomposed_if_undecided(op: OpOverload) -> Callable[..., Any]:
    facts = op_facts(op)
    inside = _dropout if op is torch.ops.aten.dropout.default else INSIDE.get(op) or composite_kernel(op)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not any_autocast():
            return NotImplemented
        for device in dict.fromkeys(t.device.type for t in tensors_in(args, kwargs)):
            region = region_on(device)
            if region is None or not is_composite(op, device):
                continue
            found = region.prepared.for_graphs.policy.table.candidates(facts.id, facts.computes)
            depends = region.prepared.for_graphs.policy.asks_where(facts.id, facts.computes)
            site = (traced_site() or NOWHERE) if depends else NOWHERE
            if _is_repaired(facts.id, region, site, tensors_in(args, kwargs)):
                return NotImplemented
            if any(rule.matches_site(site) for rule in (*found.whole, *found.per_argument)):
                return NotImplemented
            return inside(*args, **kwargs)
        return NotImplemented

    return run


def _is_repaired(op: str, region: OpenRegion, site: Site, tensors: list[torch.Tensor]) -> bool:
    """Whether the device lacks what is inside the op, so that it runs as a whole, in fp32."""
    prepared = region.prepared.for_graphs
    if op not in prepared.policy.lacking:
        return False
    arguments = tuple(Argument("", FORMATS.get(t.dtype), t.device.type) for t in tensors)
    return decide(Call(op, arguments, site), prepared.policy, prepared.facts).rule is not None


def _dropout(value: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """What eager code computes in dropout, without its in-place ops.

    On the cpu it divides a mask of the value's own format by 1 - p, which rounds; made functional, its in-place
    `bernoulli_` would draw other numbers for a tensor that is not contiguous. native_dropout draws the same ones.
    """
    aten = torch.ops.aten
    result: torch.Tensor
    if value.device.type != "cpu" or not train or not 0 < p < 1 or value.numel() == 0:
        result = composite_kernel(aten.dropout.default)(value, p, train)
        return result
    mask = aten.native_dropout.default(value.detach(), p, True)[1]
    result = value * aten.div.Scalar(mask.to(value.dtype), 1 - p)
    return result


@cache
def is_composite(op: OpOverload, device_type: str) -> bool:
    """Whether the op, on this device type, is nothing but calls of other ops, which autocast sees."""
    if op in INSIDE:
        return True
    if not can_decompose(op):
        return False
    own = (device_type.upper(), f"Autograd{device_type.upper()}")
    return not any(has_kernel(op, key) for key in own)


def composite_kernel(op: OpOverload) -> Callable[..., Any]:
    """What runs the calls inside a composite op: those of eager code, not of the Python version that compilers prefer.

    Those two differ: dropout on the cpu, for example, rounds its scale to the input's format in eager code alone. But
    eager code's istft looks at the values of its window, which a capture does not know.
    """
    found = surface.composite_kernel(op) if op is not torch.ops.aten.istft.default else None
    return found or op.decompose
