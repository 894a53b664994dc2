"""Regions of ours inside a graph: a pair of calls that name the region by a key.

torch's own regions are `_enter_autocast` and `_exit_autocast` in a graph; ours carry a policy, which no graph can hold.
The calls exist only between Dynamo and a backend: ours reads them, others run them while they trace.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.fx.node import _side_effectful_functions

from narrowcast.dynamo_bridge import on_dynamo_cleanup
from narrowcast.regions.state import Prepared
from narrowcast.torch_bridge import autocast_nesting


class Markable(Protocol):
    """A region that can be entered and left: `narrowcast.autocast`."""

    _prepared: Prepared

    def __enter__(self) -> Any: ...

    def __exit__(self, *exc: Any) -> None: ...


class _Open(threading.local):
    """The keys of the marked regions that are open on this thread."""

    def __init__(self) -> None:
        self.keys: list[str] = []


_marked: dict[str, Markable] = {}
_open = _Open()


def mark(key: str, region: Markable) -> None:
    """Keep a region under a key, so that a graph may name it. Equal keys mean equal regions: the first stays."""
    _marked.setdefault(key, region)


def marked_region(key: str) -> Prepared:
    """The facts of the region with that key."""
    return _marked[key]._prepared


def enter_marked(key: str) -> None:
    """In a graph: open the region. While Dynamo traces, it is closed at the latest when that ends."""
    _marked[key].__enter__()
    _open.keys.append(key)
    depth = len(_open.keys)
    on_dynamo_cleanup(lambda: _close_down_to(depth - 1))


def exit_marked(key: str) -> None:
    """In a graph: close the region."""
    _open.keys.remove(key)
    _marked[key].__exit__(None, None, None)


@contextmanager
def closing_marked() -> Iterator[None]:
    """Regions that a graph opens inside are closed when it raises before it has closed them itself."""
    depth = len(_open.keys)
    try:
        yield
    finally:
        _close_down_to(depth)


def _close_down_to(depth: int) -> None:
    while len(_open.keys) > depth:
        _marked[_open.keys.pop()].__exit__(None, None, None)


MARKS = (enter_marked, exit_marked)
_NOTE = "narrowcast_region"
BOUNDARY = "narrowcast_boundary"
"""What is noted beside the casts at a module's boundary, so that the graph's ledger knows them from the user's own."""


def note_exported(key: str, depth: int) -> Any:
    """A context in which torch.export notes, beside each node, that a region of ours is the innermost one."""
    return torch.fx.traceback.annotate({_NOTE: f"{depth} {key}"})


def exported_key(body: torch.fx.GraphModule) -> str | None:
    """The key of the region of ours that torch.export made this body of; None if it was a region of torch's.

    A region of torch's inside one of ours has our note, too, but one level deeper than the note says.
    """
    depth = autocast_nesting() + 1
    for node in body.graph.nodes:
        note = (node.meta.get("custom") or {}).get(_NOTE)
        if node.op == "call_function" and note is not None:
            noted, _, key = note.partition(" ")
            return key if int(noted) == depth and key in _marked else None
    return None


_side_effectful_functions.update(MARKS)


def allow_marks() -> None:
    """Have Dynamo put the marks into its graphs. It runs this while it traces; before, it may not be loaded."""
    for function in MARKS:
        torch._dynamo.allow_in_graph(function)


allow_marks._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch._dynamo.assume_constant_result
