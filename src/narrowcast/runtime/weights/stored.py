"""What `nc.store` keeps parameters in, known by parameter and by optimizer to everything that looks at either."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch.nn import Module
from torch.utils.weak import WeakTensorKeyDictionary

from narrowcast.runtime.torch_bridge import LOW

STORED = "_stored_by"
"""The attribute of an optimizer that has what stores its parameters (`nc.store`); copies and pickles have none."""
_stored: Any = WeakTensorKeyDictionary()


def stored_by(optimizer: Any) -> Any:
    """Return what stores the parameters of an optimizer; None if nothing does."""
    return getattr(optimizer, "__dict__", {}).get(STORED)


def note_stored(parameter: torch.Tensor, holder: Any) -> None:
    """Note what stores a parameter; None: nothing any longer."""
    _stored.pop(parameter, None)
    if holder is not None:
        _stored[parameter] = ref(holder)


def holder_of(parameter: torch.Tensor) -> Any:
    """Return what stores a parameter; None if nothing does."""
    holder = _stored.get(parameter)
    return None if holder is None else holder()


def loses_nothing(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is stored with what completes it, or rounded with care."""
    holder = holder_of(parameter)
    return holder is not None and bool(holder.loses_nothing(parameter))


def is_stored_low(model: Any) -> bool:
    """Return whether a model has weights in low formats that are trained, and all of them lose nothing."""
    parameters = [one for one in model.parameters() if one.requires_grad] if isinstance(model, Module) else []
    low = [one for one in parameters if one.dtype in LOW]
    return bool(low) and all(map(loses_nothing, low))


def bytes_stored(model: Any) -> dict[str, tuple[int, int]]:
    """Return the bytes of what is stored of a model's parameters, before and now, by kind; empty if nothing is."""
    parameters = model.parameters() if isinstance(model, Module) else ()
    holders = {id(holder): holder for one in parameters if (holder := holder_of(one)) is not None}
    found: dict[str, tuple[int, int]] = {}
    for holder in holders.values():
        for kind, (before, now) in holder.sizes().items():
            a, b = found.get(kind, (0, 0))
            found[kind] = a + before, b + now
    return found
