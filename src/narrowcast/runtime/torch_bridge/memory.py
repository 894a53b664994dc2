"""Which ops may give back the memory that they were given, for the programs of all front ends."""

from __future__ import annotations

from functools import cache

from narrowcast.core.ops import named
from narrowcast.core.policy import DEVICE_TYPES, Policy
from narrowcast.runtime.torch_bridge import op_facts
from narrowcast.runtime.torch_surface.dispatch import OpOverload, can_decompose, op_name, schema_of


@cache
def alias_names(op: OpOverload) -> frozenset[str] | None:
    """The arguments whose memory the result may share; None if that may be any."""
    schema = schema_of(op)
    if any(r.alias_info is not None for r in schema.returns):
        return frozenset(a.name for a in schema.arguments if a.alias_info is not None)
    if (
        op_name(op) in named("memory.fresh")
        or not _has_composite_kernel(op)
        or any(Policy.native(device).table.candidates(op_facts(op).id, True).whole for device in DEVICE_TYPES)
    ):
        return frozenset()  # what autocast lists computes something new
    return None  # einsum may give a view, dropout what it was given; their schemas do not say so


def _has_composite_kernel(op: OpOverload) -> bool:
    try:
        return can_decompose(op)
    except RuntimeError:  # an op that only TorchScript has
        return any("Tensor" in str(r.type) for r in schema_of(op).returns)
