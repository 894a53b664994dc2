"""One parameter as it is stored: its weight in the model, what is kept besides, and its states between steps."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from narrowcast.core.policy.storage import BF16, EIGHT_BITS, FP32, KAHAN, REMAINDER, STOCHASTIC, KeptFormats
from narrowcast.errors import RunError
from narrowcast.formats import parse_format
from narrowcast.runtime.torch_bridge import DTYPES, FORMATS, offsets_of, part_of, with_part
from narrowcast.training.storage.rounding import (
    PLAIN,
    SPREAD,
    joined,
    key_of,
    numbered,
    parted,
    rounded_state,
    way_of,
    words,
)

RESTS = {FP32: "master", REMAINDER: "remainder", KAHAN: "compensation"}
"""What is kept besides a weight, by the way it is kept."""


@dataclass(eq=False)
class StoredParameter:
    """A parameter of the model that an optimizer steps. group: its number. before: its dtype before it was stored.

    rest: what is kept besides this rank's part of the weight, flat. first_place: of its elements in the whole
    parameter; places: of all, where they do not follow it. shape, device: as the weight had them then.
    """

    name: str
    parameter: torch.Tensor
    kept: KeptFormats
    group: int
    before: torch.dtype
    way: str
    shape: torch.Size
    device: torch.device
    rest: torch.Tensor | None = None
    first_place: int = 0
    places: torch.Tensor | None = None

    @staticmethod
    def of(name: str, parameter: torch.Tensor, kept: KeptFormats, group: int) -> StoredParameter:
        """Return a slot for a parameter, which stays as it is."""
        given = parameter.dtype, way_of(kept), parameter.shape, parameter.device
        slot = StoredParameter(name, parameter, kept, group, *given)
        if slot.is_random:
            slot.first_place, slot.places = _places_of(name, parameter)
        return slot

    @property
    def is_random(self) -> bool:
        """Whether its weight, or its moments, are rounded at random."""
        return self.way == STOCHASTIC or self.kept.moments == BF16

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of the weight."""
        return DTYPES[parse_format(str(self.kept.weight))]

    @cached_property
    def dtype_of_gradient(self) -> torch.dtype:
        """The dtype that gradients are added up in."""
        return DTYPES[parse_format(self.kept.gradient or str(self.kept.weight))]

    @cached_property
    def dtype_of_moments(self) -> torch.dtype | None:
        """The dtype of moments; None of those that a library keeps in blocks."""
        if not self.parameter.dim():  # as the count of steps, which is none
            return torch.float32
        return None if self.kept.moments == EIGHT_BITS else DTYPES[parse_format(self.kept.moments)]

    @property
    def weight(self) -> torch.Tensor:
        """This rank's part of the weight, as the model has it."""
        return part_of(self.parameter.detach())

    def what_changed(self) -> str:
        """Return what somebody has changed of the parameter that is stored; empty if nothing."""
        own = self.parameter
        if own.dtype is not self.dtype:
            return f"is stored in {self.kept.weight}, and now in {FORMATS.get(own.dtype, own.dtype)}"
        if own.shape != self.shape:
            return f"has shape {tuple(own.shape)}, and had {tuple(self.shape)} when it was stored"
        if own.device != self.device and (self.rest is not None or self.places is not None):
            return f"is on {own.device}, and was on {self.device} when it was stored"
        return ""

    def rest_in_shape(self) -> torch.Tensor | None:
        """Return what is kept besides the weight, in its shape."""
        return None if self.rest is None else self.rest.view(self.weight.shape)

    def set_rest(self, rest: torch.Tensor) -> None:
        """Keep this besides the weight. rest: in the weight's shape."""
        if self.rest is None:
            dtype = {REMAINDER: torch.int16, FP32: torch.float32}.get(self.way, self.weight.dtype)
            self.rest = torch.empty(rest.numel(), dtype=dtype, device=rest.device)
        self.rest.copy_(rest.reshape(-1))

    def wide(self) -> torch.Tensor:
        """Return the numbers in fp32 that are stored, exactly; the weight itself where it is in fp32."""
        return self.weight if self.way == PLAIN else joined(self.way, self.weight, self.rest_in_shape())

    def key(self, seed: int, update: int) -> int:
        """Return what is added to the numbers of all elements, for random words of an update; it wraps."""
        place = 0 if self.places is not None else self.first_place * SPREAD[0]
        return (key_of(seed, update, self.name) + place + 2**31) % 2**32 - 2**31

    def keyed(self, seed: int, update: int) -> torch.Tensor:
        """Return what random words of an update are made of, for each element of this rank's part, flat."""
        count, device = self.weight.numel(), self.weight.device
        places = torch.arange(count, dtype=torch.int32, device=device) if self.places is None else self.places
        return numbered(places.reshape(-1)) + self.key(seed, update)

    def put(self, wide: torch.Tensor, keyed: torch.Tensor | None) -> None:
        """Write numbers in fp32 into the weight and what is kept besides it. keyed: for each, where it is random."""
        chosen = None if keyed is None or self.way != STOCHASTIC else words(keyed).view(wide.shape)
        way = self.way if chosen is not None or self.way != STOCHASTIC else "nearest"
        weight, rest = parted(way, wide, self.weight.dtype, chosen)
        self.weight.copy_(weight)
        if rest is not None:
            self.set_rest(rest)

    # -- states of the optimizer

    def is_moment(self, state: Any) -> bool:
        """Return whether a state is of the weight's shape, in numbers."""
        is_plain = isinstance(state, torch.Tensor) and state.is_floating_point() and not state.is_sparse
        return is_plain and state.dim() > 0 and state.shape == self.parameter.shape

    def narrowed(self, states: dict[str, Any], keyed: torch.Tensor | None) -> dict[str, Any]:
        """Return states as they are kept between steps; keyed: for each element, where they are rounded at random."""
        return {key: self._narrow(value, keyed, salt) for salt, (key, value) in enumerate(sorted(states.items()), 1)}

    def _narrow(self, state: Any, keyed: torch.Tensor | None, salt: int) -> Any:
        if self.kept.moments == FP32 or not self.is_moment(state):
            return state
        if self.kept.moments == EIGHT_BITS:
            return _eight_bits(state)
        part = part_of(state)
        places = None if keyed is None else keyed.view(part.shape)
        return with_part(state, rounded_state(part.float(), torch.bfloat16, places, salt))

    def widened(self, states: dict[str, Any]) -> dict[str, Any]:
        """Return states in fp32, for a step."""
        return {key: self._widen(value) for key, value in states.items()}

    def _widen(self, state: Any) -> Any:
        if self.kept.moments == EIGHT_BITS and hasattr(state, "dequantize") and type(state) is not torch.Tensor:
            return state.dequantize()
        if self.kept.moments == BF16 and self.is_moment(state):
            return with_part(state, part_of(state).float())
        return state


def _eight_bits(state: torch.Tensor) -> Any:
    """Return a state in torchao's blocks of 256 codes; as it is where it is as small as torchao leaves alone."""
    if not fits_blocks(state):
        return state
    return empty_blocks(state.shape, bool((state < 0).any()), state.device).copy_(state)


def fits_blocks(state: torch.Tensor) -> bool:
    """Return whether torchao keeps a state of this size in blocks."""
    return state.numel() >= 4096 and state.numel() % 256 == 0


def empty_blocks(shape: torch.Size, signed: bool, device: torch.device) -> Any:
    """Return a state of zeros in torchao's blocks of 256 codes."""
    library: Any = importlib.import_module("torchao.optim.subclass_8bit")
    return library.OptimState8bit.zeros(shape, signed=signed, block_size=256, device=device)


def _places_of(name: str, parameter: torch.Tensor) -> tuple[int, torch.Tensor | None]:
    """Return the place of the first element of this rank's part in the whole parameter, row by row, and, where the
    others do not follow it, all places; int32, as numbers that wrap.
    """
    part, offsets = part_of(parameter.detach()), offsets_of(parameter)
    if offsets is None:
        advice = 'Write rounding = "kahan", or a master.'
        raise RunError(f"stochastic rounding of {name}", "this rank's part is no block of it", advice=advice)
    sizes, steps = tuple(parameter.shape), [1]
    for size in reversed(sizes[1:]):
        steps.insert(0, steps[0] * size)
    first = sum(offset * step for offset, step in zip(offsets, steps, strict=False))
    if part.shape[1:] == sizes[1:]:
        return (first + 2**31) % 2**32 - 2**31, None
    place = torch.full((), first, dtype=torch.int64, device=part.device)
    for dim, step in enumerate(steps):
        along = torch.arange(part.shape[dim], dtype=torch.int64, device=part.device) * step
        place = place + along.view(-1, *[1] * (len(sizes) - dim - 1))
    return 0, place.to(torch.int32)


# -- parameters in place


def place(slot: StoredParameter) -> None:
    """Give a parameter its format, and keep what completes it."""
    dtype, parameter = slot.dtype, slot.parameter
    wide = slot.weight.float()
    if parameter.dtype is not dtype:
        convert(parameter, torch.empty_like(slot.weight, dtype=dtype), slot.dtype_of_gradient)
    elif slot.dtype_of_gradient is not dtype:
        convert(parameter, parameter.data, slot.dtype_of_gradient)
    if slot.way != PLAIN:
        slot.put(wide, None)


def convert(parameter: torch.Tensor, data: torch.Tensor, gradient: torch.dtype) -> None:
    """Give a parameter other data, and gradients of a dtype; one that is there is converted."""
    there, parameter.grad = parameter.grad, None
    parameter.data = data
    parameter.grad_dtype = gradient
    if there is not None:
        parameter.grad = there.to(gradient)
