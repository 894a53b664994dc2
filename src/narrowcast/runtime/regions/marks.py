"""Regions of ours inside a graph: a pair of calls that name the region by a key.

torch's own regions are `_enter_autocast` and `_exit_autocast` in a graph; ours carry a policy, which no graph can hold.
The calls exist only between Dynamo and a backend: ours reads them, others run them while they trace.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from narrowcast.core.policy import Policy, Rule
from narrowcast.runtime.torch_surface.dispatch import ASSERT_METADATA
from narrowcast.runtime.torch_surface.dynamo import allow_in_graph, constant_for_dynamo, on_dynamo_cleanup
from narrowcast.runtime.torch_surface.fx import keep_calls
from narrowcast.runtime.torch_surface.patches import held, note_staying, once
from narrowcast.runtime.torch_surface.state import autocast_nesting


class _OpenMarks(threading.local):
    """The keys of the marked regions that are open on this thread."""

    def __init__(self) -> None:
        self.keys: list[str] = []


_in_graphs: dict[str, Any] = {}  # of narrowcast.autocast, by key: equal keys mean equal regions, so any of them will do
_open = _OpenMarks()


def hold(key: str, region: Any) -> None:
    """Hold a region from here on: a graph is about to name it by this key."""
    _keep_marks()
    _in_graphs.setdefault(key, region)


@once
def _keep_marks() -> None:
    keep_calls(*MARKS)
    note_staying("torch.fx.node: calls that stay in graphs", "regions of ours are calls in graphs")


def find_marked(key: str) -> Any:
    """Return the region that graphs name by that key."""
    return _in_graphs[key]


def enter_marked(key: str) -> None:
    """Open the region from a graph. While Dynamo traces, it is closed at the latest when that ends."""
    find_marked(key).__enter__()
    _open.keys.append(key)
    depth = len(_open.keys)
    on_dynamo_cleanup(lambda: _close_down_to(depth - 1))


def exit_marked(key: str) -> None:
    """Close the region from a graph."""
    _open.keys.remove(key)
    find_marked(key).__exit__(None, None, None)


@contextmanager
def closing_marked() -> Iterator[None]:
    """Close regions that a graph opens inside, when it raises before it has closed them itself."""
    depth = len(_open.keys)
    try:
        yield
    finally:
        _close_down_to(depth)


def _close_down_to(depth: int) -> None:
    while len(_open.keys) > depth:
        find_marked(_open.keys.pop()).__exit__(None, None, None)


MARKS = (enter_marked, exit_marked)
_NOTE = "narrowcast_region"
BOUNDARY = "narrowcast_boundary"
"""Noted beside casts at the boundary of a module's call, or of a composite op: these are none of the user's own."""


def boundary_note(op: str, argument: str, rule: Rule | None, policy: Policy) -> str:
    """Return what is noted of a cast that a graph is captured with, for its ledger, as JSON. op: the call it is for;
    argument: what of it, or `result`; rule: the one behind the cast.
    """
    facts = {"op": op, "argument": argument, "policy": policy.name}
    if rule is not None:
        facts |= {"action": str(rule.action), "rule": str(rule), "reason": rule.reason, "source": rule.source}
        facts["label"] = rule.label
    return json.dumps(facts)


def note_exported(key: str, depth: int) -> Any:
    """Return a context in which torch.export notes, beside each node, that a region of ours is the innermost one."""
    return torch.fx.traceback.annotate({_NOTE: f"{depth} {key}"})


@contextmanager
def caches_as_in_eager_code() -> Iterator[None]:
    """Give regions that leave the weight cache open the one of eager execution while torch.export traces.

    torch.export switches the cache off meanwhile, and such a region, torch's or ours, would be one without.
    """
    thread, depth, before = threading.get_ident(), autocast_nesting(), torch.is_autocast_cache_enabled()

    def with_cache(make: Callable[..., None]) -> Callable[..., None]:
        def make_with_cache(
            region: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
        ) -> None:
            if cache_enabled is None and threading.get_ident() == thread and autocast_nesting() == depth:
                cache_enabled = before  # inside another region torch asks that one's
            make(region, device_type, dtype, enabled, cache_enabled)

        return make_with_cache

    with held(torch.autocast, "exported regions keep their weight cache", __init__=with_cache):
        yield


def exported_key(body: torch.fx.GraphModule) -> str | None:
    """Return the key of the region of ours that torch.export made this body of; None if it was a region of torch's.
    A region of torch's inside one of ours has our note, too, but one level deeper than the note says; and what stands
    in a further region inside, perhaps at the very beginning, has a note that is deeper than the body.
    """
    depth = autocast_nesting() + 1
    for node in body.graph.nodes:
        note = (node.meta.get("custom") or {}).get(_NOTE)
        if node.op != "call_function" or note is None or node.target is ASSERT_METADATA:  # that has others' notes
            continue
        noted, _, key = note.partition(" ")
        if int(noted) <= depth:
            return key if int(noted) == depth and key in _in_graphs else None
    return None


def allow_marks(key: str) -> None:
    """Have Dynamo put the marks of this region, which is held, into its graphs. It runs this while it traces."""
    find_marked(key)
    allow_in_graph(*MARKS)


constant_for_dynamo(allow_marks)
