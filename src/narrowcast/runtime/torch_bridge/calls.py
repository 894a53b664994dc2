"""The tensors of an op's call, by the names of its arguments; and a plan's casts of them, and of results."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from narrowcast.core.decide import Argument, Call, Output, Plan
from narrowcast.core.policy import Site
from narrowcast.errors import RegionError
from narrowcast.runtime.torch_bridge.ops import OpFacts, Slot
from narrowcast.runtime.torch_bridge.tensors import DTYPES, FORMATS, cast
from narrowcast.runtime.torch_surface.dispatch import tree_flatten, tree_leaves, tree_unflatten

NUMBERS = (float, int, bool, complex, torch.SymFloat, torch.SymInt, torch.SymBool)
"""`x * 2` reaches us as mul.Tensor with a number in the place of a tensor; where Dynamo traces, with a symbol."""
Place = tuple[int, str, int | None, torch.dtype]
"""Where a cast is made: the argument's position, its name, the number in its list, if it is one, and the dtype."""
_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)


def gather(facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor | None]:
    """Return the tensors of a call in the order of its slots, lists element by element; None where there is none."""
    values = _values(facts, args, kwargs)
    if facts.has_lists:
        flat: list[torch.Tensor | None] = []
        for slot, value in zip(facts.slots, values, strict=True):
            flat += [value] if value is None or not slot.is_list else value
        values = flat
    return [None if type(value) in NUMBERS else value for value in values]


def _values(facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the caller's value for each slot; None if there is none."""
    given = len(args)
    return [args[slot.position] if slot.position < given else kwargs.get(slot.name) for slot in facts.slots]


def slots_of(facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Slot]:
    """Return the slot of each tensor that `gather` returns."""
    if not facts.has_lists:
        return list(facts.slots)
    lengths = list_lengths(facts, args, kwargs)
    return [slot for slot, length in zip(facts.slots, lengths, strict=True) for _ in range(length)]


def list_lengths(facts: OpFacts, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
    """Return for each slot how many tensors it holds: 1 for what is no list or absent."""
    pairs = zip(facts.slots, _values(facts, args, kwargs), strict=True)
    return tuple(len(value) if slot.is_list and value is not None else 1 for slot, value in pairs)


def call_of(
    facts: OpFacts,
    slots: Sequence[Slot],
    tensors: Sequence[torch.Tensor | None],
    site: Site,
    given: bool = False,
    number: int = 0,
) -> Call:
    """Return a call as `decide` takes it. given: whether the caller passed a dtype."""
    arguments = tuple(
        Argument(slot.name, None, "", slot.written)
        if t is None
        else Argument(slot.name, FORMATS.get(t.dtype), t.device.type, slot.written)
        for slot, t in zip(slots, tensors, strict=True)
    )
    names = frozenset(["dtype"]) if given else frozenset[str]()
    return Call(facts.id, arguments, site, names, facts.computes, number=number)


def places_of(slots: Sequence[Slot], plan: Plan) -> tuple[Place, ...]:
    """Return the plan's casts of arguments, by where these are."""
    places: list[Place] = []
    seen: dict[str, int] = {}
    for slot, dst in zip(slots, plan.formats, strict=True):
        index = seen[slot.name] = seen.get(slot.name, -1) + 1
        if dst is not None:
            places.append((slot.position, slot.name, index if slot.is_list else None, DTYPES[dst]))
    return tuple(places)


def cast_arguments(
    places: tuple[Place, ...],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    cast_weight: Callable[..., torch.Tensor] = lambda tensor, dtype, _: cast(tensor, dtype),
    region: Any = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments with the casts made; the caller's own lists and dict are left alone.

    cast_weight: from what requires grad, a dtype and `region` to its cast.
    """
    new_args = list(args)
    given = len(new_args)
    copied: dict[str, list[Any]] = {}
    for position, name, index, dtype in places:
        value = new_args[position] if position < given else kwargs[name]
        if index is None:
            value = cast_weight(value, dtype, region) if value.requires_grad else cast(value, dtype)
        else:
            if name not in copied:
                copied[name] = list(value)
            value = copied[name]
            value[index] = cast_weight(value[index], dtype, region)
        if position < given:
            new_args[position] = value
        else:
            kwargs = {**kwargs, name: value}
    return tuple(new_args), kwargs


def cast_tree(value: Any, dtype: torch.dtype, exactly: bool) -> Any:
    """Return nested tuples, dicts and other pytrees with every floating tensor cast; fp64 ones only if `exactly`."""
    if isinstance(value, torch.Tensor):
        if value.dtype is dtype or not value.is_floating_point() or (value.dtype is torch.float64 and not exactly):
            return value
        return cast(value, dtype)
    if isinstance(value, _PLAIN):
        return value
    if type(value) in (tuple, list):  # the same as below, in two thirds of the time
        items = [cast_tree(item, dtype, exactly) for item in value]
        return value if all(a is b for a, b in zip(value, items, strict=True)) else type(value)(items)
    leaves, structure = tree_flatten(value)
    cast_leaves = [cast_tree(leaf, dtype, exactly) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    if all(a is b for a, b in zip(leaves, cast_leaves, strict=True)):
        return value  # the caller's own: what is written to it is not lost
    return tree_unflatten(cast_leaves, structure)


def first_floating(value: Any) -> torch.dtype | None:
    """Return the dtype of the first floating tensor in nested containers."""
    if isinstance(value, torch.Tensor):
        return value.dtype if value.is_floating_point() else None
    if isinstance(value, _PLAIN):
        return None
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), None)


def cast_parts(result: Any, results: tuple[Output, ...], came: torch.dtype | None) -> Any:
    """Return a module's output, cast: as a whole, or single parts by position, key or attribute, each of them once.

    came: the dtype of the first floating argument that the boundary casts, which results may follow.
    RegionError for a part that is not there.
    """
    given = result
    for wanted in results:
        dtype = came if wanted.format is None else DTYPES[wanted.format]
        if dtype is not None:
            result = cast_part(result, given, wanted.part, dtype, wanted.exactly or wanted.format is None)
    return result


def cast_results(result: Any, plan: Plan) -> Any:
    """Return an op's output with the plan's casts."""
    parts = {"", *map(str, range(len(result)))} if isinstance(result, (tuple, list)) else {""}
    return cast_parts(result, tuple(r for r in plan.results if r.part in parts), None)


def cast_part(result: Any, given: Any, part: str, dtype: torch.dtype, exactly: bool) -> Any:
    """Return a module's output with one part cast; the whole, if `part` is empty. given: what the module returned."""
    if not part:
        return cast_tree(result, dtype, exactly)
    if type(result) is dict and part in result:  # as Dynamo follows it
        return {**result, part: cast_tree(given[part], dtype, exactly)}
    if isinstance(result, Mapping) and part in result:
        changed: Any = copy.copy(result)
        changed[part] = cast_tree(given[part], dtype, exactly)
        return changed
    if isinstance(result, (list, tuple)) and part.isdigit() and int(part) < len(result):
        position = int(part)
        items = [cast_tree(given[n], dtype, exactly) if n == position else item for n, item in enumerate(result)]
        return result._make(items) if hasattr(result, "_make") else type(result)(items)
    if not part.isdigit() and hasattr(result, part):
        low = cast_tree(getattr(given, part), dtype, exactly)
        if hasattr(result, "_replace"):
            return result._replace(**{part: low})
        if dataclasses.is_dataclass(result):
            return dataclasses.replace(result, **{part: low})  # type: ignore[type-var]
        if hasattr(result, "__dict__"):
            changed = copy.copy(result)
            setattr(changed, part, low)
            return changed
    raise RegionError(
        asked=f"result.{part} in another format",
        found=f"what is returned is a {type(result).__name__} without that part",
        advice="Name a position (result.1), a key or an attribute (result.logits), or the whole (result).",
    )
