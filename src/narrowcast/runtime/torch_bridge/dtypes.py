"""Torch's dtypes and our formats."""

from __future__ import annotations

import torch

from narrowcast import formats
from narrowcast.core.policy import Policy
from narrowcast.formats import Format

DTYPES: dict[Format, torch.dtype] = {
    formats.fp64: torch.float64,
    formats.fp32: torch.float32,
    formats.tf32: torch.float32,
    formats.bf16: torch.bfloat16,
    formats.fp16: torch.float16,
    formats.e4m3fn: torch.float8_e4m3fn,
    formats.e5m2: torch.float8_e5m2,
    formats.e4m3fnuz: torch.float8_e4m3fnuz,
    formats.e5m2fnuz: torch.float8_e5m2fnuz,
}
FORMATS: dict[torch.dtype, Format] = {dtype: f for f, dtype in DTYPES.items() if f is not formats.tf32}

LOW = (torch.float16, torch.bfloat16)


def to_dtype(wanted: torch.dtype | Format | str) -> torch.dtype:
    """A dtype given as torch.dtype, Format or name (`bf16`, `bfloat16`)."""
    if isinstance(wanted, torch.dtype):
        return wanted
    return DTYPES[formats.parse_format(wanted) if isinstance(wanted, str) else wanted]


def default_dtype(policy: Policy, device_type: str) -> torch.dtype:
    """The low dtype of a region that names none: the policy's, or torch's for the device type."""
    low = policy.effective_low
    return torch.get_autocast_dtype(device_type) if low is None else to_dtype(low)


_SHORT = {
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8",
    torch.bool: "bool", torch.complex32: "c32", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


def short_type(dtype: torch.dtype) -> str:
    """The format's name, or a short name for another element type (`i64`)."""
    return FORMATS[dtype].name if dtype in FORMATS else _SHORT.get(dtype, str(dtype).removeprefix("torch."))
