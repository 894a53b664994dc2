"""Which ops may give back the memory that they were given, for the programs of all front ends."""

from __future__ import annotations

from functools import cache

from narrowcast.policy import DEVICE_TYPES, Policy
from narrowcast.torch_bridge import op_facts
from narrowcast.torch_surface.dispatch import OpOverload, can_decompose, op_name, schema_of

_MAKES_NEW = frozenset(
    """
    _batch_norm_impl_index _fused_rms_norm absolute adaptive_avg_pool2d arccos arccosh arcsin arcsinh arctan arctan2
    arctanh avg_pool1d batch_norm cdist concatenate cosine_similarity
    cov cumulative_trapezoid diff div divide eq floor_divide gradient greater greater_equal group_norm inner
    instance_norm isclose layer_norm less less_equal log_sigmoid log_softmax logical_xor logsumexp max max_pool1d
    max_pool2d max_pool3d min mul multiply native_batch_norm ne negative norm not_equal outer pairwise_distance pow
    relu6 remainder rms_norm rsub selu silu softmax special_log_softmax special_softmax square std std_mean sub subtract
    tensordot trapezoid true_divide upsample_nearest2d var var_mean vander where xlogy
    """.split()  # noqa: SIM905
)
"""Ops that torch composes of others, whose result is surely new memory."""


@cache
def alias_names(op: OpOverload) -> frozenset[str] | None:
    """The arguments whose memory the result may share; None if that may be any."""
    schema = schema_of(op)
    if any(r.alias_info is not None for r in schema.returns):
        return frozenset(a.name for a in schema.arguments if a.alias_info is not None)
    if (
        op_name(op) in _MAKES_NEW
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
