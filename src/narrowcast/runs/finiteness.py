"""Whether tensors are finite, asked with one sum each; and which infinities are meant."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from narrowcast.runs.arguments import Named, tensors_by_name
from narrowcast.runs.by_storage import ByStorage, has_storage
from narrowcast.runs.seen_call import SeenCall
from narrowcast.torch_bridge import FORMATS
from narrowcast.torch_surface.dispatch import tree_leaves, version_of

Key = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]


def is_floating(tensor: torch.Tensor) -> bool:
    """Whether the tensor has floating values that can be looked at."""
    return tensor.dtype in FORMATS and has_storage(tensor)


def inputs_of(call: SeenCall) -> Named:
    """The floating arguments of a call by name; where it writes to some and was told of before, their copies."""
    return [(name, t) for name, t in tensors_by_name(call.facts, call.args, call.kwargs) if is_floating(t)]


def came_in(call: SeenCall) -> list[torch.Tensor]:
    """The same arguments themselves, also those that it writes to."""
    came: list[torch.Tensor] | None = call.notes.get("came")
    return [t for _, t in inputs_of(call)] if came is None else came


class Flags:
    """For each tensor as it is now one number: whether it is finite; read of accelerators when it is asked for."""

    def __init__(self) -> None:
        self._known: ByStorage[dict[Key, int]] = ByStorage()
        self._values: list[bool | torch.Tensor] = []

    def number(self, tensor: torch.Tensor) -> int:
        """The tensor's number."""
        version = -1 if tensor.is_inference() else version_of(tensor)
        key = (version, int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype)
        numbers = self._known.get(tensor)
        if numbers is None:
            numbers = {}
            self._known.put(tensor, numbers)
        found = numbers.get(key)
        if found is None:
            numbers[key] = found = len(self._values)
            self._values.append(_finite(tensor))
        return found

    def written(self, tensor: torch.Tensor) -> None:
        """The tensor was written to."""
        self._known.drop(tensor)

    def is_finite(self, number: int) -> bool:
        """The flag, read now."""
        value = self._values[number]
        if isinstance(value, torch.Tensor):
            value = self._values[number] = math.isfinite(float(value))
        return value

    def read(self) -> Callable[[int], bool]:
        """All flags, in one transfer for each device; those that were read are forgotten."""
        waiting: dict[torch.device, list[int]] = {}
        for number, value in enumerate(self._values):
            if isinstance(value, torch.Tensor):
                waiting.setdefault(value.device, []).append(number)
        values = dict(enumerate(self._values))
        for numbers in waiting.values():
            together = torch.stack([self._values[n] for n in numbers])  # type: ignore[misc]
            for number, value in zip(numbers, together.isfinite().tolist(), strict=True):
                values[number] = value
        self._values.clear()
        self._known = ByStorage()
        return lambda number: bool(values[number])


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all elements are finite, looked at now."""
    found = _finite(tensor)
    return math.isfinite(float(found)) if isinstance(found, torch.Tensor) else found


def _finite(tensor: torch.Tensor) -> bool | torch.Tensor:
    """A sum in at least fp32, which is not finite if an element is not; the opposite is looked into on the cpu.

    There fp32 is multiplied by itself: BLAS takes less time for that than torch for a sum, the more so for what lies
    in no cache and is shared among threads.
    """
    x = tensor.detach() if tensor.requires_grad else tensor
    if not x.numel():
        return True
    if x.dtype is torch.float32 and x.is_cpu and x.is_contiguous():
        flat = x.view(-1)
        total = torch.dot(flat, flat)
    elif x.dtype is torch.float16:
        total = x.sum(dtype=torch.float32)
    else:
        total = (x if FORMATS[x.dtype].bits >= 16 else x.float()).sum()
    if not x.is_cpu:
        return total.float()
    return math.isfinite(total.item()) or bool(torch.isfinite(x).all())


# -- infinities that are meant -----------------------------------------------------------------------------------------


def numbers_not_finite(call: SeenCall) -> str:
    """Why an infinite result is meant: the call was given an infinite number, as masks are filled with one."""
    numbers = [v for v in tree_leaves((call.args, call.kwargs)) if isinstance(v, float)]
    return "filled in as a number" if any(math.isinf(v) for v in numbers) else ""


def mask_like(call: SeenCall, results: list[torch.Tensor]) -> str:
    """Why an infinite result is meant: all of it is -inf, where an argument has the lowest value of its format."""
    if any(bool(torch.isnan(t).any()) or bool((t == math.inf).any()) for t in results):
        return ""
    for name, tensor in inputs_of(call):
        if tensor.numel() and is_lowest(float(tensor.detach().min()), tensor):
            return f"a mask of the lowest value of {FORMATS[tensor.dtype]} ({name})"
    return ""


def is_lowest(value: float, tensor: torch.Tensor) -> bool:
    """Whether a value is, within a hundredth, the lowest that the tensor's format holds: what masks are filled with."""
    return value <= -0.99 * FORMATS[tensor.dtype].max
