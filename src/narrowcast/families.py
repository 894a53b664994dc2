"""Facts of ops that cost and placement ask for: what their time depends on, and whether their format may be another.

An allow list: an op that is not here keeps the format that the policy gave it. Whether a policy lowers an op is not
said here; `decide` does that.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

GEMM, CONV, ATTENTION = "gemm", "conv", "attention"
NORM, SOFTMAX, REDUCTION, POINTWISE = "norm", "softmax", "reduction", "pointwise"
MOVEMENT, VIEW, COPY = "movement", "view", "copy"
FAMILIES = (GEMM, CONV, ATTENTION, NORM, SOFTMAX, REDUCTION, POINTWISE, MOVEMENT, VIEW, COPY)
FUSED = frozenset([NORM, SOFTMAX, REDUCTION, POINTWISE, MOVEMENT, VIEW, COPY])
"""What a fusing compiler generates code for. The others are calls of a library, whose operands lie in memory."""

_OPS = {
    GEMM: "mm bmm addmm baddbmm addbmm linear matmul mv addmv dot vdot inner outer chain_matmul _addmm_activation",
    CONV: "conv1d conv2d conv3d convolution _convolution conv_transpose1d conv_transpose2d conv_transpose3d conv_tbc",
    ATTENTION: "scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention",
    NORM: "layer_norm native_layer_norm batch_norm native_batch_norm _native_batch_norm_legit cudnn_batch_norm "
    "_native_batch_norm_legit_functional _native_batch_norm_legit_no_training _batch_norm_impl_index group_norm "
    "native_group_norm instance_norm rms_norm _fused_rms_norm",
    SOFTMAX: "softmax _softmax log_softmax _log_softmax special_softmax special_log_softmax _safe_softmax",
    REDUCTION: "sum mean amax amin max min var std var_mean std_mean norm linalg_vector_norm logsumexp cumsum prod "
    "argmax argmin all any avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d",
    POINTWISE: "add sub rsub mul div true_divide neg abs exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square pow "
    "reciprocal sin cos tan tanh sigmoid erf erfc relu relu6 leaky_relu prelu elu selu celu gelu silu mish hardswish "
    "hardsigmoid hardtanh softplus threshold clamp clamp_min clamp_max maximum minimum where masked_fill "
    "eq ne lt le gt ge isnan isinf isfinite logical_not sign floor ceil round trunc lerp addcmul addcdiv "
    "log_sigmoid logit glu tril triu fmod remainder atan2 sgn native_dropout dropout",
    MOVEMENT: "cat stack concat concatenate index_select gather take_along_dim embedding index roll flip repeat "
    "repeat_interleave tile constant_pad_nd pad reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d "
    "pixel_shuffle pixel_unshuffle clone contiguous upsample_nearest2d max_pool1d max_pool2d max_pool3d "
    "max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d channel_shuffle",
    VIEW: "view _unsafe_view reshape permute transpose t mT adjoint expand expand_as view_as slice select squeeze "
    "unsqueeze split split_with_sizes chunk unbind flatten unflatten narrow alias detach diagonal unfold movedim "
    "swapaxes numpy_T unsafe_chunk unsafe_split tensor_split",
}  # fmt: skip

# Monotone or sign-symmetric, or a choice among values that come: rounding before and after gives the same bits. Of
# those with a constant (a padding, a bound) only where the constant is 0.
_COMMUTES = frozenset(["relu", "neg", "abs"])
_CONSTANT = frozenset(["constant_pad_nd", "pad", "masked_fill"])
# Rounded values tie more often, and then another index is given.
_INDEXED = frozenset(["max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d"])


@dataclass(frozen=True, slots=True)
class OpKind:
    """What an op is like.

    family:   what its time depends on; empty for an op that nothing is known of.
    commutes: rounding what goes in and rounding what comes out give the same bits.
    in_place: it is the in-place form, whose result is its first operand.
    """

    family: str
    commutes: bool = False
    in_place: bool = False

    @property
    def follows(self) -> bool:
        """Whether its result has the format that its operands have: then it may run in another one."""
        return bool(self.family)

    @property
    def is_fused(self) -> bool:
        """Whether a fusing compiler makes it part of its neighbours' loops."""
        return self.family in FUSED


_UNKNOWN = OpKind("")
_FAMILY = {name: family for family, names in _OPS.items() for name in names.split()}


@cache
def op_kind(op: str) -> OpKind:
    """What the op with this id (`aten.mm.default`) is like."""
    namespace, _, rest = op.partition(".")
    name = rest.partition(".")[0]
    if namespace != "aten":
        return _UNKNOWN
    in_place = name.endswith("_") and not name.startswith("__")
    base = name.removesuffix("_") if in_place else name
    family = _FAMILY.get(base)
    if family is None:
        return _UNKNOWN
    moves = family in (MOVEMENT, VIEW) and base not in _CONSTANT | _INDEXED
    return OpKind(family, moves or base in _COMMUTES, in_place)
