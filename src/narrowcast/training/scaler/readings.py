"""Numbers on their way from a device: asked for when they are made, read when they are there, waited for only if asked.

On an accelerator a number is copied into pinned memory behind the work that makes it, with an event after it: looking
whether it has come waits for nothing. Memory of the host is read as it is. On a device without events the number stays
there until somebody asks.
"""

from __future__ import annotations

from typing import Any

import torch

_WITH_EVENTS = ("cuda", "xpu")


class HostNumbers:
    """The numbers of a small tensor as they are now, later on the host; or one that the host has."""

    __slots__ = ("_event", "_host", "_values")

    def __init__(self, tensor: torch.Tensor | float) -> None:
        self._values: list[float] | None = None
        self._event: Any = None
        if not isinstance(tensor, torch.Tensor):
            self._values = [tensor]
        elif tensor.device.type in _WITH_EVENTS:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.Event(tensor.device)
            self._event.record(torch.accelerator.current_stream(tensor.device))
        elif tensor.is_cpu:
            self._values = _numbers(tensor)
        else:
            self._host = tensor.clone()

    @property
    def is_here(self) -> bool:
        """Whether it can be read without waiting for the device."""
        return self._values is not None or (self._event is not None and bool(self._event.query()))

    def values(self) -> list[float]:
        """Return the numbers; wait for the device where they are not there yet."""
        if self._values is None:
            if self._event is not None:
                self._event.synchronize()
            self._values = _numbers(self._host.cpu())
            self._event = None
        return self._values


def _numbers(tensor: torch.Tensor) -> list[float]:
    """Return numbers through numpy: no op is called, which modes would see, as they are in host memory already."""
    return [float(value) for value in tensor.numpy().reshape(-1)]
