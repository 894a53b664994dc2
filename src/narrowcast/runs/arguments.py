"""The arguments of a call by name: tensors, and as text whatever else was given."""

from __future__ import annotations

from typing import Any

import torch

from narrowcast.eager.kernels import gather, slots_of
from narrowcast.torch_bridge import OpFacts
from narrowcast.torch_surface.dispatch import schema_of

Named = list[tuple[str, torch.Tensor]]


def tensors_by_name(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Named:
    """The tensors of a call: `mat1`, `tensors.0`; what is absent or a number is left out."""
    pairs = zip(slots_of(facts, args, kwargs), gather(facts, args, kwargs), strict=True)
    found: Named = []
    numbers: dict[str, int] = {}
    for slot, tensor in pairs:
        number = numbers[slot.name] = numbers.get(slot.name, -1) + 1
        if isinstance(tensor, torch.Tensor):
            found.append((f"{slot.name}.{number}" if slot.is_list else slot.name, tensor))
    return found


def results_by_name(results: list[torch.Tensor]) -> Named:
    """What a call returned: `result`, or `result.0`, `result.1`."""
    if len(results) == 1:
        return [("result", results[0])]
    return [(f"result.{number}", tensor) for number, tensor in enumerate(results)]


def others_as_text(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Arguments that are no tensors, those that were left open with their defaults. Numbers have all their digits."""
    tensors = {slot.name for slot in facts.slots}
    found = []
    for position, argument in enumerate(schema_of(facts.op).arguments):
        name = argument.name
        if position < len(args):
            value = args[position]
        elif name in kwargs:
            value = kwargs[name]
        else:
            value = argument.default_value
        is_number = name in tensors and isinstance(value, int | float | complex)
        if value is None or (name in tensors and not is_number) or name in _PLACES:
            continue
        found.append((name, repr(value) if not isinstance(value, torch.dtype) else str(value)))
    return tuple(found)


_PLACES = ("device", "layout", "pin_memory", "generator", "memory_format", "non_blocking", "implicit")
"""Arguments that say where and how, not what."""
