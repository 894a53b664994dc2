"""What scripts do where formats are known only when they run: plain TorchScript, which goes into their graphs.

Each function is compiled once; its graph is copied to where it is needed, so scripts run without Narrowcast. Eligible
are, as everywhere, floating tensors on the region's device type that are not fp64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from narrowcast.runtime.torch_surface.jit import deprecations_unsaid, own_pass_off
from narrowcast.runtime.torch_surface.state import autocast_off


def is_eligible(x: Tensor, on: bool, device: str) -> bool:
    """Return whether a region casts it."""
    return on and x.is_floating_point() and x.dtype != torch.float64 and x.device.type == device


def cast(x: Tensor, on: bool, device: str, dtype: int) -> Tensor:
    """Cast to a dtype, if it is eligible."""
    return x.to(dtype) if is_eligible(x, on, device) and x.dtype != dtype else x


def cast_everywhere(x: Tensor, dtype: int) -> Tensor:
    """Cast to a dtype, on any device, if it floats and is not fp64."""
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 and x.dtype != dtype else x


def cast_everywhere_exactly(x: Tensor, dtype: int) -> Tensor:
    """Cast a floating tensor on any device, fp64 as well."""
    return x.to(dtype) if x.is_floating_point() and x.dtype != dtype else x


def cast_exactly(x: Tensor, on: bool, device: str, dtype: int) -> Tensor:
    """Cast to exactly this dtype, fp64 as well."""
    return x.to(dtype) if on and x.is_floating_point() and x.device.type == device and x.dtype != dtype else x


def lower(x: Tensor, cuda: bool, cpu: bool, cuda_low: int, cpu_low: int, other: int) -> Tensor:
    """Cast to the low format, from any other one."""
    y = x._autocast_to_reduced_precision(cuda, cpu, cuda_low, cpu_low)
    if y.dtype == other:  # the op knows fp32 only
        up = y._autocast_to_full_precision(cuda, cpu)
        y = up._autocast_to_reduced_precision(cuda, cpu, cuda_low, cpu_low)
    return y


def is_weight(x: Tensor, on: bool, device: str) -> bool:
    """Return whether a tensor is a weight that a region casts, as torch_bridge's is_weight where Python runs."""
    return on and x.requires_grad and x.is_leaf and x.dtype == torch.float32 and x.device.type == device


def cast_weight(x: Tensor, on: bool, device: str, low: int) -> Tensor:
    """Cast to the low format, if it is a weight."""
    return x.to(low) if is_weight(x, on, device) else x


def cast_weight_once(x: Tensor, on: bool, device: str, low: int, weights: list[Tensor], casts: list[Tensor]) -> Tensor:
    """Cast a weight, or return the cast that was made of this very weight before."""
    if not torch.is_grad_enabled() or not is_weight(x, on, device):
        return x
    position = -1
    for i in range(len(weights)):
        if weights[i] is x and casts[i].dtype == low:
            position = i
    if position < 0:
        position = len(weights)
        weights.append(x)
        casts.append(x.to(low))
    return casts[position]


def cast_optional(x: Tensor | None, on: bool, device: str, dtype: int) -> Tensor | None:
    """Cast a tensor that may be None."""
    return cast(x, on, device, dtype) if x is not None else x


def cast_list(xs: list[Tensor], on: bool, device: str, dtype: int) -> list[Tensor]:
    """Cast each tensor of a list."""
    return [cast(x, on, device, dtype) for x in xs]


def promote(xs: list[Tensor], on: bool, device: str, low: int) -> list[Tensor]:
    """Cast to the widest of fp32 and the low format; eager code, too, knows no third."""
    dst = low
    for x in xs:
        if is_eligible(x, on, device) and dst != 6:
            if x.dtype == torch.float32:
                dst = 6
            elif x.dtype != low:
                raise RuntimeError("native promotion met a format that is neither fp32 nor the region's")
    return [cast(x, on, device, dst) for x in xs]


def align(xs: list[Tensor], on: bool, device: str, low: int) -> list[Tensor]:
    """Cast to the narrowest format that holds those of all."""
    dst = -1
    for x in xs:
        if x.is_floating_point():
            dtype: int = x.dtype
            if dst == -1 or dtype == 7 or (dtype == 6 and dst != 7):
                dst = dtype
            elif dtype != dst and dst != 7 and dst != 6:
                if dtype > 15 or dst > 15:
                    raise RuntimeError("no format holds all of the arguments, one of which is in fp8")
                dst = 6  # fp16 and bf16
    return [cast(x, on, device, dst) for x in xs]


def inside(xs: list[Tensor], on: bool, device: str, low: int) -> list[Tensor]:
    """Cast to fp32, for the time of one call."""
    return [cast(x, on, device, 6) for x in xs]


def those_there(xs: list[Tensor | None]) -> list[Tensor]:
    """Leave out what is None."""
    there: list[Tensor] = []
    for x in xs:
        if x is not None:
            there.append(x)
    return there


def at_places_of(casts: list[Tensor], xs: list[Tensor | None]) -> list[Tensor | None]:
    """Put them where those were that are not None."""
    all_of_them: list[Tensor | None] = []
    at = 0
    for x in xs:
        if x is None:
            all_of_them.append(None)
        else:
            all_of_them.append(casts[at])
            at += 1
    return all_of_them


def back(x: Tensor, firsts: list[Tensor], on: bool, device: str) -> Tensor:
    """Cast a result to the input format of the first eligible operand."""
    for first in firsts:
        if is_eligible(first, on, device):
            return cast(x, on, device, first.dtype)
    return x


def back_exactly(x: Tensor, firsts: list[Tensor]) -> Tensor:
    """Cast a result to the input format of the first floating argument, fp64 as well."""
    for first in firsts:
        if first.is_floating_point() and x.is_floating_point():
            return x.to(first.dtype)
    return x


def chosen_dtype(x: Tensor, dtype: int | None, on: bool, device: str) -> int | None:
    """Return fp32, where the script leaves a dtype open."""
    return 6 if dtype is None and is_eligible(x, on, device) else dtype


def keep(x: Tensor) -> None:
    """Read a tensor, and do nothing: what makes it is not dropped."""
    if x.dim() < 0:
        raise RuntimeError("a tensor without dimensions")


@cache
def graph_of(function: Callable[..., Any]) -> Any:
    """Return the function's graph, with what it calls inside it, and without the casts of torch's own pass."""
    with deprecations_unsaid(), own_pass_off(), autocast_off():
        return torch.jit.script(function).inlined_graph
