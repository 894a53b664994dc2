"""Correctly rounded conversion from fp64. torch goes through fp32 and rounds twice."""

from __future__ import annotations

import torch

from narrowcast.formats import Format, fp32, fp64
from narrowcast.runtime.torch_bridge import DTYPES


def round_to(values: torch.Tensor, dst: Format) -> torch.Tensor:
    """Return the fp64 tensor in format `dst`, rounded once, to nearest, ties to even (IEEE 754-2019, 4.3.1).

    values: float64, any shape; the result has the same shape and dst's dtype (tf32 values come as float32).
    Above the largest finite value by half a step or more: infinity where the format has it, else NaN, as torch casts
    to fp8. Subnormals are kept; negative zero becomes zero where the format has none.

    Raises TypeError for a tensor that is not float64.
    """
    if values.dtype is not torch.float64:
        raise TypeError(f"round_to expects float64, found {values.dtype}: convert with .double(), which is exact")
    if dst is fp64:
        return values.clone()
    if dst is fp32:
        return values.to(torch.float32)  # one step: the hardware rounds once
    _, exponents = torch.frexp(values)  # |value| = m * 2**e with 0.5 <= m < 1
    # The step between neighbours at this magnitude; below the smallest normal value it stays the subnormal step.
    steps = (exponents.to(torch.int64) - 1).clamp(min=dst.min_exponent) - dst.mantissa_bits
    rounded = torch.ldexp(torch.round(torch.ldexp(values, -steps)), steps)
    overflow = torch.isfinite(values) & (rounded.abs() > dst.max) | torch.isinf(values)
    beyond = torch.full_like(values, torch.inf if dst.has_inf else torch.nan).copysign(values)
    rounded = torch.where(overflow, beyond, rounded)
    rounded = torch.where(torch.isnan(values), values, rounded)
    if not dst.has_negative_zero:
        rounded = rounded + 0.0
    return rounded.to(DTYPES[dst])  # exact: every value is one of dst's


def units_in_last_place(reference: torch.Tensor, format: Format) -> torch.Tensor:
    """Return the distance between neighbours of a format at each value."""
    _, exponents = torch.frexp(reference)
    steps = (exponents.to(torch.int64) - 1).clamp(min=format.min_exponent, max=format.max_exponent)
    return torch.ldexp(torch.ones_like(reference), steps - format.mantissa_bits)
