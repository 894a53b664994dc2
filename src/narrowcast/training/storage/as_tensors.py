"""States, settings and weights as plain tensors by name, and made of them again."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from narrowcast.errors import RunError
from narrowcast.runtime.torch_bridge import FORMATS, part_of
from narrowcast.runtime.torch_surface.grad_scaling import stored_indices, stored_values
from narrowcast.training.storage.slots import StoredParameter, empty_blocks

ASKED = "load_state_dict of what is stored"


def only_one(path: Path, names: list[str], key: str | None) -> str:
    """Return the name under which a file has what is asked for."""
    if key is not None and key in names:
        return key
    if key is not None or len(names) > 1:
        found = f"what was stored is there under {', '.join(map(repr, names)) or 'no name'}"
        raise RunError(f"load_state_dict({str(path)!r}, key={key!r})", found, advice="Name one of them as key=.")
    return names[0] if names else ""


def is_no_tensor(what: str) -> RunError:
    """Return the error for what tensors cannot hold."""
    advice = "Save optimizer.state_dict(), which has it, with torch.save."
    return RunError("state_dict() as tensors", f"{what} is none", advice=advice)


def is_number(value: Any) -> bool:
    """Return whether it is a number of Python."""
    return isinstance(value, int | float)


def copied(value: Any, slot: StoredParameter) -> Any:
    """Return a copy of a saved state, on the device of its parameter; a number of one element stays where it is."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if hasattr(value, "__tensor_flatten__") and not hasattr(value, "device_mesh"):  # of a library: blocks have no clone
        names, context = value.__tensor_flatten__()
        parts = {name: copied(getattr(value, name), slot) for name in names}
        kind: Any = type(value)
        return kind.__tensor_unflatten__(parts, context, value.shape, value.stride())
    return value.detach().to(slot.weight.device if value.dim() else value.device).clone()


def uncast(slot: StoredParameter, loaded: Any, saved: Any) -> Any:
    """Return a state as it was saved, if torch has only rounded it to its weight's format since; else as a hook on
    loading has made it, in the format that it is kept in.
    """
    if not isinstance(loaded, torch.Tensor) or not isinstance(saved, torch.Tensor):
        return loaded
    if type(part_of(saved)) is not torch.Tensor:  # a library's
        return copied(saved, slot)
    before, after = part_of(saved), part_of(loaded)
    is_same = before.shape == after.shape and same_numbers(before.to(after.device, after.dtype), after)
    if is_same:
        return copied(saved, slot)
    return loaded.to(slot.dtype_of_moments) if slot.is_moment(loaded) and slot.dtype_of_moments else loaded


def same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of a shape hold the same numbers, NaN where the other does."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


def check_number(saved: Mapping[str, Any], name: str) -> None:
    """Raise RunError unless a finite number was saved under a name."""
    value = saved.get(name)
    if not isinstance(value, torch.Tensor) or value.numel() != 1 or value.is_meta or not bool(value.isfinite()):
        found = "is not there" if value is None else "is no finite number"
        raise RunError(ASKED, f"{name} {found}", advice=_WHOLE)


def check_bytes(saved: Mapping[str, Any], name: str, count: int) -> bytes:
    """Return the bytes that were saved under a name; RunError for anything else."""
    value = saved.get(name)
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.uint8 or tuple(value.shape) != (count,):
        raise RunError(ASKED, f"{name} is not what was saved", advice=_WHOLE)
    return bytes(value.tolist())


def check_tensor(what: str, value: Any, slot: StoredParameter, dtype: torch.dtype | None = None) -> None:
    """Raise RunError for what is no tensor of its parameter's shape, or is in another dtype than it is kept in."""
    if not isinstance(value, torch.Tensor) or value.is_meta:
        raise RunError(ASKED, f"{what} is no tensor with values", advice=_WHOLE)
    if tuple(value.shape) != tuple(slot.parameter.shape):
        found = f"{what} has shape {tuple(value.shape)}, the parameter {tuple(slot.parameter.shape)}"
        raise RunError(ASKED, found, advice="Load it into the model that it was saved of.")
    if dtype is not None and value.dtype is not dtype:
        found = f"{what} is in {FORMATS.get(value.dtype, value.dtype)}, not in {FORMATS.get(dtype, dtype)}"
        raise RunError(ASKED, f"{found}: it was converted since", advice=_WHOLE)


def under(saved: Mapping[str, Any], start: str, whole: bool = False) -> dict[str, Any]:
    """Return the entries whose names start so, without that; whole: with a slash next, or nothing."""
    found = {name[len(start) :]: value for name, value in saved.items() if name.startswith(start)}
    return {name: value for name, value in found.items() if not whole or not name or name[0] == "/"}


def states_in(saved: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the states among what was saved: by parameter, and by what follows in their names."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in saved.items():
        parameter, is_state, key = name.partition("/state/")
        if is_state:
            found.setdefault(parameter, {})[key] = value
    return found


def leaves(value: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a group's setting, by place: of a tuple each."""
    if isinstance(value, tuple | list):
        yield from ((f"/{place}{part}", one) for place, row in enumerate(value) for part, one in leaves(row))
    elif isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        yield "", float(value)


def with_leaves(value: Any, numbers: Mapping[str, Any]) -> Any:
    """Return a setting with other numbers, of the types that are there."""
    if isinstance(value, tuple | list):
        return type(value)(with_leaves(one, under(numbers, f"/{place}", whole=True)) for place, one in enumerate(value))
    if "" not in numbers:
        return value
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, float(numbers[""]))
    number = float(numbers[""])
    if isinstance(value, bool) or not isinstance(value, int | float):
        return bool(number) if isinstance(value, bool) else value
    return int(number) if isinstance(value, int) and number.is_integer() else number


def blocks_of(value: Any) -> dict[str, torch.Tensor]:
    """Return a state as plain tensors by the ends of their names; a library's blocks as what they are made of."""
    if type(value) is torch.Tensor or hasattr(value, "device_mesh"):
        if value.layout is torch.sparse_coo:
            return {"/indices": stored_indices(value).clone(), "/values": stored_values(value).clone()}
        return {"": value.detach().clone(memory_format=torch.contiguous_format)}
    if isinstance(value, bool | int | float):
        return {f"/{type(value).__name__}": torch.tensor(value, dtype=_NUMBERS[type(value)], device="cpu")}
    if type(value).__name__ == "OptimState8bit":
        signed = torch.full((), bool(value.signed), dtype=torch.bool, device="cpu")
        return {"/codes": value.codes.clone(), "/scale": value.scale.clone(), "/signed": signed}
    return {}


def made_of(parts: Mapping[str, Any], slot: StoredParameter) -> Any:
    """Return a state of the tensors that `blocks_of` made of it, or as it is."""
    if "/codes" in parts:
        made = empty_blocks(slot.parameter.shape, bool(parts["/signed"]), slot.weight.device)
        made.codes.copy_(parts["/codes"])
        made.scale.copy_(parts["/scale"])
        return made
    if "/indices" in parts:
        indices, values = (copied(parts[name], slot) for name in ("/indices", "/values"))
        return torch.sparse_coo_tensor(indices, values, slot.parameter.shape, device=values.device)
    for kind in _NUMBERS:
        if f"/{kind.__name__}" in parts:
            return kind(parts[f"/{kind.__name__}"])
    return copied(parts[""], slot)


_WHOLE = "Give what stored.state_dict() or optimizer.state_dict() returned, all of it and as it was."
_NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""Numbers of Python among states, and the dtypes that hold them."""
