"""Gradients of an optimizer: unscaled and checked by device and dtype, on all ranks alike; which are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed
from torch.nn import Parameter

from narrowcast.observation.trial.output_errors import as_real
from narrowcast.runtime.torch_bridge import values_of
from narrowcast.runtime.torch_surface.grad_scaling import check_and_unscale, dtensor_class, norms_of
from narrowcast.runtime.torch_surface.modules import optimized_by
from narrowcast.training.scaler.readings import HostNumbers

Flags = dict[torch.device, torch.Tensor]
"""By device a tensor that holds 0.0, or 1.0 where a gradient is not finite."""


def check(optimizer: Any, inverse: torch.Tensor, initial: torch.Tensor, group: Any = None) -> Flags:
    """Multiply all gradients in place by `inverse`, and flag by device where one is not finite; group: of the processes
    that hold parts of the gradients, besides those that DTensors name. Nothing is read from a device.
    """
    dtensor = dtensor_class()
    sorted_out: dict[torch.device, dict[torch.dtype, list[torch.Tensor]]] = {}
    meshes: dict[Any, None] = {}
    for group_of in optimizer.param_groups:  # a loop for every parameter of every step: nothing is called in it
        for parameter in group_of["params"]:
            if type(parameter) is not Parameter and dtensor is not None and isinstance(parameter, dtensor):
                meshes[parameter.device_mesh] = None
            part = parameter.grad
            if part is None:
                continue
            dtype = part.dtype
            if dtype.is_complex and part.is_conj():
                parameter.grad = part = part.resolve_conj()
            if part.is_sparse and dtype is torch.float16:
                parameter.grad = part = part.coalesce()  # equal indices may overflow when they are added
            if type(part) is not torch.Tensor or part.is_sparse or dtype.is_complex:
                part = as_real(values_of(part))
                dtype = part.dtype
            by_dtype = sorted_out.get(part.device)
            if by_dtype is None:
                by_dtype = sorted_out[part.device] = {}
            parts = by_dtype.get(dtype)
            if parts is None:
                by_dtype[dtype] = [part]
            else:
                parts.append(part)
    flags: Flags = {}
    with torch.no_grad():
        for device, by_dtype in sorted_out.items():
            flag = flags[device] = initial.to(device, copy=True, non_blocking=True)
            factor = inverse.to(device, non_blocking=True)
            for parts in by_dtype.values():
                check_and_unscale(parts, flag, factor)
        groups = _groups(meshes, group)
        if groups:
            _agree(flags, initial, groups)
    return flags


def _groups(meshes: dict[Any, None], group: Any) -> list[Any]:
    """Return the groups that have to agree, the largest last: it gets what the smaller ones have found."""
    groups = {id(g): g for mesh in meshes for g in mesh.get_all_groups()}
    if group is not None:
        groups[id(group)] = group
    return sorted(groups.values(), key=lambda g: int(g.size()))


def _agree(flags: Flags, initial: torch.Tensor, groups: list[Any]) -> None:
    """Set all flags if one is, on any rank. A rank without gradients takes part."""
    flag = initial.clone()
    for other in flags.values():
        flag = torch.maximum(flag, other.to(flag.device))
    for group in groups:
        sent = flag.view(1).to(_device_of(group, flag.device))
        torch.distributed.all_reduce(sent, op=torch.distributed.ReduceOp.MAX, group=group)
        flag = sent.to(flag.device).view(())
    if not flags:
        flags[initial.device] = flag
    for other in flags.values():
        other.copy_(flag)


def _device_of(group: Any, device: torch.device) -> torch.device:
    """Return where the group's backend takes tensors: NCCL none of the host, gloo these."""
    if device.type == "cpu" and torch.distributed.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return device


def in_one(flags: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return one flag for several, at least one, on a device; it may be one of them."""
    parts = [flag.to(device, non_blocking=True) for flag in flags]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum()


def inverse_of(scale: torch.Tensor) -> torch.Tensor:
    """Return what gradients are multiplied by: as torch's scaler does, by way of fp64 where the device knows that."""
    return scale.reciprocal() if scale.device.type == "mps" else scale.double().reciprocal().float()


class Culprits:
    """Which gradients are not finite: inspected now, on their devices, and read on request."""

    __slots__ = ("_readings",)

    def __init__(self, optimizer: Any) -> None:
        self._readings: list[tuple[list[tuple[int, torch.Tensor]], HostNumbers]] = []
        by_kind: dict[tuple[Any, ...], list[tuple[int, torch.Tensor, torch.Tensor]]] = {}
        for number, parameter in enumerate(optimized_by(optimizer)):
            if parameter.grad is not None:
                part = as_real(values_of(parameter.grad))
                if part.numel():
                    by_kind.setdefault((part.device, part.dtype), []).append((number, parameter, part))
        for rows in by_kind.values():
            largest = norms_of([part for _, _, part in rows], float("inf"))
            parameters = [(number, parameter) for number, parameter, _ in rows]
            self._readings.append((parameters, HostNumbers(torch.stack(largest).float())))

    @property
    def has_gradients(self) -> bool:
        """Whether there were gradients to inspect."""
        return bool(self._readings)

    @property
    def is_here(self) -> bool:
        """Whether it can be read without waiting for a device."""
        return all(reading.is_here for _, reading in self._readings)

    def read(self) -> list[tuple[int, torch.Tensor, str]]:
        """Return number in the optimizer, parameter, and `NaN` or `infinite`, in the optimizer's order."""
        culprits = []
        for rows, reading in self._readings:
            for (number, parameter), largest in zip(rows, reading.values(), strict=True):
                if not math.isfinite(largest):
                    culprits.append((number, parameter, "NaN" if math.isnan(largest) else "infinite"))
        return sorted(culprits, key=lambda row: row[0])
