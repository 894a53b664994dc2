"""The arguments of a call by name: tensors, and as text whatever else was given."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch

from narrowcast.runtime.torch_bridge import OpFacts, is_random, op_facts
from narrowcast.runtime.torch_bridge.calls import gather, slots_of
from narrowcast.runtime.torch_surface.dispatch import OpOverload, schema_of

Named = list[tuple[str, torch.Tensor]]


def tensors_by_name(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Named:
    """Return the tensors of a call: `mat1`, `tensors.0`; what is absent or a number is left out."""
    pairs = zip(slots_of(facts, args, kwargs), gather(facts, args, kwargs), strict=True)
    named: Named = []
    numbers: dict[str, int] = {}
    for slot, tensor in pairs:
        number = numbers[slot.name] = numbers.get(slot.name, -1) + 1
        if isinstance(tensor, torch.Tensor):
            named.append((f"{slot.name}.{number}" if slot.is_list else slot.name, tensor))
    return named


def results_by_name(results: list[torch.Tensor]) -> Named:
    """Return the output of a call by name: `result`, or `result.0`, `result.1`."""
    if len(results) == 1:
        return [("result", results[0])]
    return [(f"result.{number}", tensor) for number, tensor in enumerate(results)]


def largest_number(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Return the largest finite magnitude of the numbers that a call computes with; not of sizes or dimensions."""
    given = [*enumerate(args), *kwargs.items()]
    numbers = [abs(value) for key, value in given if type(value) in (int, float) and key in _scalars(facts.op)]
    return max((number for number in numbers if number < math.inf), default=0.0)


@cache
def _scalars(op: OpOverload) -> frozenset[int | str]:
    """Return positions and names of arguments that are numbers of any kind: torch's Scalar."""
    rows = [(n, a.name) for n, a in enumerate(schema_of(op).arguments) if "number" in str(a.type)]
    return frozenset(key for row in rows for key in row)


def draws_numbers(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call draws random numbers: attention and recurrent layers without dropout draw none."""
    if not is_random(facts.op):
        return False
    given = dict(others_as_text(facts, args, kwargs))
    return "0.0" not in (given.get("dropout_p"), given.get("dropout")) and given.get("train") != "False"


def others_as_text(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Return arguments that are no tensors, those that were left open with their defaults. Numbers have all digits."""
    texts = []
    for position, name, default, is_tensor in _parameters(facts.op):
        if position < len(args):
            value = args[position]
        else:
            value = kwargs.get(name, default)
        if value is None or (is_tensor and not isinstance(value, int | float | complex)):
            continue
        texts.append((name, repr(value) if not isinstance(value, torch.dtype) else str(value)))
    return tuple(texts)


@cache
def _parameters(op: OpOverload) -> tuple[tuple[int, str, Any, bool], ...]:
    """Return position, name, default, and whether it is a tensor, of arguments that matter: torch makes rows again."""
    tensors = {slot.name for slot in op_facts(op).slots}
    rows = enumerate(schema_of(op).arguments)
    return tuple((n, a.name, a.default_value, a.name in tensors) for n, a in rows if a.name not in _PLACES)


_PLACES = (
    "device", "layout", "pin_memory", "generator", "memory_format", "non_blocking", "implicit",
    "cudnn_enable", "cudnn_enabled", "benchmark", "deterministic",
)  # fmt: skip
"""Arguments that say where and how, not what."""
