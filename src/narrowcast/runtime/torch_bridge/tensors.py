"""Torch's dtypes and our formats; tensors, cast as native autocast casts them, and found in nested arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from narrowcast import formats
from narrowcast.core.policy import Policy
from narrowcast.formats import Format
from narrowcast.runtime.torch_surface.dispatch import is_view
from narrowcast.runtime.torch_surface.grad_scaling import (
    dtensor_class,
    local_part,
    offsets_of_part,
    stored_values,
    with_local_part,
)

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
    """Return a dtype given as torch.dtype, Format or name (`bf16`, `bfloat16`)."""
    if isinstance(wanted, torch.dtype):
        return wanted
    return DTYPES[formats.parse_format(wanted) if isinstance(wanted, str) else wanted]


def default_dtype(policy: Policy, device_type: str) -> torch.dtype:
    """Return the low dtype of a region that names none: the policy's, or torch's for the device type."""
    low = policy.effective_low
    return torch.get_autocast_dtype(device_type) if low is None else to_dtype(low)


_SHORT = {
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8",
    torch.bool: "bool", torch.complex32: "c32", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


def short_type(dtype: torch.dtype) -> str:
    """Return the format's name, or a short name for another element type (`i64`)."""
    return FORMATS[dtype].name if dtype in FORMATS else _SHORT.get(dtype, str(dtype).removeprefix("torch."))


_to = torch.ops.aten.to.dtype


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast as native autocast does: `aten::to`, seen by autograd and by no `__torch_function__`."""
    result: torch.Tensor = tensor.to(dtype) if type(tensor) in PLAIN else _to(tensor, dtype)
    return result


PLAIN = (torch.Tensor, torch.nn.Parameter)
"""For these the method is the same call, made faster. Fake tensors, and other subclasses, may have no pointer."""


def number_as_tensor(number: complex, others: list[torch.Tensor]) -> torch.Tensor:
    """Return a tensor without dimensions that promotes as the number beside these tensors, and keeps its digits."""
    like = {torch.SymFloat: 1.0, torch.SymInt: 1, torch.SymBool: True}.get(type(number), number)
    dtype = torch.result_type(others[0], like) if others else torch.get_default_dtype()
    if dtype.is_floating_point and any(t.is_floating_point() and t.dim() for t in others):
        dtype = torch.float64
    return torch.scalar_tensor(number, dtype=dtype, device="cpu")


def tensors_in(*trees: Any) -> list[torch.Tensor]:
    """Return every tensor in nested lists, tuples and dicts of arguments, in order."""
    tensors: list[torch.Tensor] = []
    for tree in trees:
        if isinstance(tree, torch.Tensor):
            tensors.append(tree)
        elif isinstance(tree, (list, tuple)):
            tensors += tensors_in(*tree)
        elif isinstance(tree, dict):
            tensors += tensors_in(*tree.values())
    return tensors


def map_tensors(change: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Return an op's arguments with each tensor in them, in lists, tuples and dicts, changed."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if isinstance(tree, list) or type(tree) is tuple:
        changed = [map_tensors(change, value) for value in tree]
        return changed if isinstance(tree, list) else tuple(changed)
    return {name: map_tensors(change, value) for name, value in tree.items()} if type(tree) is dict else tree


def device_type_of(*trees: Any) -> str | None:
    """Return the device type of modules and nested arguments: where most elements of their floating tensors are, or
    else of other tensors; None without any, and for tensors on meta, which are yet to come to a device.
    """
    tensors: list[torch.Tensor] = []
    types: dict[str, None] = {}
    for tree in trees:
        tensors += [*tree.parameters(), *tree.buffers()] if isinstance(tree, torch.nn.Module) else tensors_in(tree)
    for tensor in tensors:
        types[tensor.device.type] = None
    types.pop("meta", None)
    if len(types) < 2:
        return next(iter(types), None)
    tensors = [t for t in tensors if t.is_floating_point() and not t.is_meta] or tensors
    types = {tensor.device.type: None for tensor in tensors if not tensor.is_meta}
    return max(types, key=lambda type_: sum(t.numel() for t in tensors if t.device.type == type_))


def part_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor; another tensor itself."""
    return local_part(tensor) if is_sharded_tensor(tensor) else tensor


def is_sharded_tensor(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor, of which each rank has a part."""
    dtensor = dtensor_class()
    return dtensor is not None and isinstance(tensor, dtensor)


def with_part(tensor: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """Return a DTensor like this one, of which this is the rank's part; for another tensor the part itself."""
    return with_local_part(tensor, part) if is_sharded_tensor(tensor) else part


def offsets_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return where this rank's part begins in the whole tensor; None where it is no block of it."""
    return offsets_of_part(tensor) if is_sharded_tensor(tensor) else (0,) * tensor.dim()


def values_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a tensor stores on this rank, of a sparse one its values; writing to it writes to the tensor."""
    part = part_of(tensor)
    return stored_values(part) if part.is_sparse else part


def evenly_spaced(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """Return a copy of some elements: of each dimension at most this number of places, evenly spaced."""
    return tensor[tuple(slice(None, None, max(1, -(-size // most))) for size in tensor.shape)].clone()


def is_weight(tensor: torch.Tensor) -> bool:
    """Return whether the weight cache keeps casts of the tensor: an fp32 leaf that requires grad and is no view.

    Source: `cached_cast` in aten/src/ATen/autocast_mode.cpp.
    """
    return tensor.requires_grad and tensor.is_leaf and tensor.dtype is torch.float32 and not is_view(tensor)
