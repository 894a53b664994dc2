"""Formats of a script's values, as far as they are known before it runs.

In a script `bf16` says: bf16, unless the value is one that no cast of the region would touch (fp64, integers, another
device). Casts look for that when they run, so it does no harm. Where nothing is known the type is `tensor`.
"""

from __future__ import annotations

from collections.abc import Iterable

from narrowcast.program import TENSOR

OTHER = "other"
"""The type of a tensor without a floating format, and of what is no tensor."""


def join(types: Iterable[str]) -> str:
    """What is known of a value that may be any of these."""
    found = set(types)
    return found.pop() if len(found) == 1 else TENSOR


def promoted(types: Iterable[str]) -> str:
    """What an op gives that keeps the format of its floating operands.

    Formats that differ may be promoted or not: a tensor without dimensions does not count.
    """
    floats = {t for t in types if t != OTHER}
    return floats.pop() if len(floats) == 1 else TENSOR


# Ops whose floating results have the format of their floating operands. Others give what nobody knows.
KEEPING = frozenset(
    """
    abs add addcdiv addcmul adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool2d alias alpha_dropout avg_pool1d
    avg_pool2d baddbmm batch_norm broadcast_to cat celu channel_shuffle chunk clamp clamp_max clamp_min clone
    constant_pad_nd contiguous copy cos cummax cumsum detach diagonal div dropout elu embedding erf exp expand
    expand_as feature_dropout flatten flip floor floor_divide fmod frac gather gelu glu group_norm hardsigmoid hardswish
    hardtanh index index_select instance_norm layer_norm leaky_relu lerp log log1p log_sigmoid log_softmax masked_fill
    masked_select max max_pool1d max_pool2d max_pool3d maximum mean min minimum mish movedim mul narrow neg nan_to_num
    pad permute pixel_shuffle pixel_unshuffle pow reciprocal reflection_pad1d reflection_pad2d relu relu6 remainder
    repeat repeat_interleave replication_pad1d reshape rms_norm roll round rrelu rsqrt rsub select selu sigmoid silu sin
    slice softmax softplus split split_with_sizes sqrt square squeeze stack sub sum swapaxes swapdims t take tanh
    threshold tile transpose trapezoid tril triu unbind unflatten unfold unsafe_chunk unsafe_split unsqueeze
    upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d var view view_as
    where zeros_like ones_like empty_like new_zeros new_ones linear conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d mm
    bmm matmul addmm einsum norm prelu scaled_dot_product_attention _convolution
    add_ sub_ mul_ div_ relu_ sigmoid_ tanh_ clamp_ dropout_ copy_ zero_ fill_ exp_ sqrt_ neg_ silu_ hardtanh_ relu6_
    leaky_relu_ elu_ masked_fill_ index_put_ scatter_ scatter_add_ index_add_ squeeze_ unsqueeze_ transpose_ t_
    """.split()  # noqa: SIM905
)
# Ops whose results have no floating format.
COUNTING = frozenset(
    """
    eq ne lt le gt ge logical_and logical_or logical_not logical_xor isnan isinf isfinite argmax argmin argsort any all
    nonzero bitwise_and bitwise_or bitwise_not searchsorted bucketize
    """.split()  # noqa: SIM905
)
