"""Facts of ops, as data: what their time depends on, what they do to formats and rounding, whose memory they give."""

from narrowcast.core.ops.facts import (
    ATTENTION,
    CONV,
    COPY,
    FAMILIES,
    GEMM,
    NORM,
    POINTWISE,
    SOFTMAX,
    VIEW,
    called_by,
    named,
    op_kind,
)
from narrowcast.core.ops.multiplications import multiplications

__all__ = [
    "ATTENTION", "CONV", "COPY", "FAMILIES", "GEMM", "NORM", "POINTWISE", "SOFTMAX", "VIEW", "called_by",
    "multiplications", "named", "op_kind",
]  # fmt: skip
