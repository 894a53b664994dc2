"""The attributes of an object as they are, to be restored."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from dataclasses import fields, is_dataclass
from typing import Any

_DICTS = (dict, OrderedDict, defaultdict)


class Attributes:
    """`with Attributes(owner):` it has afterwards what it had when this was made.

    The attributes of an object, and of dicts, lists and sets in them what they hold: tensors are held, not copied.
    Likewise of objects in them whose class says `restored_with_owner = True`, as scalers and optimizers keep counters.

    owner: the object, or its dict.
    """

    def __init__(self, owner: Any) -> None:
        self._held: dict[int, tuple[Any, list[Any]]] = {}
        self._keep(owner if is_dataclass(owner) or isinstance(owner, dict) else vars(owner))

    def __enter__(self) -> Attributes:
        return self

    def __exit__(self, *raised: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Fill each of them with what it held."""
        for owner, before in self._held.values():
            now = _contents(owner)
            if len(now) == len(before) and all(map(_is_same, now, before)):
                continue
            if is_dataclass(owner):
                for name, value in before:
                    setattr(owner, name, value)
            elif isinstance(owner, dict):
                kept = dict(before)
                for key in [key for key in owner if key not in kept]:  # item by item: another thread may be reading
                    del owner[key]
                if list(owner) != list(kept):  # in the order in which they were
                    owner.clear()
                owner.update(kept)
            else:
                owner.clear()
                (owner.update if isinstance(owner, set) else owner.extend)(before)

    def _keep(self, owner: Any) -> None:
        if id(owner) in self._held:
            return
        before = _contents(owner)
        self._held[id(owner)] = owner, before
        pairs = isinstance(owner, dict) or is_dataclass(owner)
        for value in (row[1] for row in before) if pairs else before:
            if type(value) in (*_DICTS, list, deque, set):
                self._keep(value)
            elif "restored_with_owner" in vars(type(value)):
                self._keep(value if is_dataclass(value) else vars(value))


def _contents(owner: Any) -> list[Any]:
    if isinstance(owner, dict):  # first: a module has some fifteen
        return list(owner.items())
    return [(field.name, getattr(owner, field.name)) for field in fields(owner)] if is_dataclass(owner) else list(owner)


def _is_same(now: Any, before: Any) -> bool:
    """Compare by identity: equality of tensors is a tensor."""
    if isinstance(now, tuple) and isinstance(before, tuple) and len(now) == len(before):
        return all(map(_is_same, now, before))
    return now is before
