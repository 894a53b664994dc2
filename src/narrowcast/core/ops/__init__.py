"""Facts of ops, as data: what their time depends on, what they do to formats and rounding, whose memory they give."""

from narrowcast.core.ops.facts import (
    ATTENTION as ATTENTION,
    CONV as CONV,
    COPY as COPY,
    FAMILIES as FAMILIES,
    GEMM as GEMM,
    NORM as NORM,
    POINTWISE as POINTWISE,
    SOFTMAX as SOFTMAX,
    VIEW as VIEW,
    called_by as called_by,
    called_in_python as called_in_python,
    is_named as is_named,
    named as named,
    op_kind as op_kind,
    written_as as written_as,
)
from narrowcast.core.ops.multiplications import multiplications as multiplications
