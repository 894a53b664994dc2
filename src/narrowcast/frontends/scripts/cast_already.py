"""Parts of a script that are cast already: they stand in regions that are off.

So a script that such a part is put into, and torch's own pass, leave it as it is. What no region ruled is left open to
the caller. A region in Python around the call of a saved or frozen script casts it again all the same: TorchScript has
no means to switch that off, and a script that asks whether there is one ends the process (torch 2.13). What `nc.script`
makes of such a script runs as it should.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

from narrowcast.frontends.scripts.places import site_of
from narrowcast.frontends.scripts.region_facts import constant, region_class, remove_unused_objects
from narrowcast.frontends.scripts.runtime import graph_of
from narrowcast.runtime.torch_surface.jit import NONE, compiled_method, inserted, method_names, simplify


def enter_off(graph: Any, device_types: Iterable[str], casts: bool = True) -> list[Any]:
    """Enter regions that are off, where the graph is written to. Returns the regions.

    casts: whether the regions that they represent cast, or were off themselves; their dtype, which nobody else reads,
    says so.
    """
    instances = []
    for device_type in device_types:
        device, other = graph.insertConstant(device_type), graph.insertConstant(_WAS_OFF)
        (instance,) = graph.insertGraph(prepare_marks(), [device])
        for user in [] if casts else _setting(instance, "fast_dtype"):
            user.replaceInput(1, other)
        instances.append(instance)
    return instances


_WAS_OFF = 5  # torch.float16; prepare_marks has torch.bfloat16


def has_cast(region: Any) -> bool:
    """Return whether a mark represents a region that was on."""
    return all(constant(node.inputsAt(1)) != _WAS_OFF for node in _setting(region, "fast_dtype"))


def _setting(region: Any, name: str) -> list[Any]:
    users = [use.user for use in region.uses()]
    return [user for user in users if user.kind() == "prim::SetAttr" and user.s("name") == name]


def leave_off(graph: Any, instances: Iterable[Any]) -> None:
    """Write the ends of these regions, the last one's first, where nodes are being inserted into the graph."""
    for instance in reversed(list(instances)):
        inserted(graph, "prim::Exit", [instance], NONE)


def switch_off(graph: Any, device_types: Iterable[str]) -> None:
    """Put the whole graph in regions that are off, in place."""
    first = next(iter(graph.nodes()), None)
    if first is not None:
        graph.setInsertPoint(first)
        instances = enter_off(graph, device_types)
        graph.setInsertPoint(graph.block())
        leave_off(graph, instances)


def drop_empty(graph: Any) -> bool:
    """Take out marks around nothing that computes, in place; return whether there was any.

    A file cannot hold a with statement without a body.
    """
    dropped = _drop_empty_in(graph)
    remove_unused_objects(graph)
    return dropped


def _drop_empty_in(block: Any) -> bool:
    dropped = False
    opened: list[tuple[Any, bool]] = []  # where a mark is entered, and whether something computes since
    for node in list(block.nodes()):
        for inner in node.blocks():
            dropped |= _drop_empty_in(inner)
        if node.kind() == "prim::Enter" and region_class(node.inputsAt(0)):
            opened.append((node, False))
        elif node.kind() == "prim::Exit" and opened and region_class(node.inputsAt(0)):
            first, computes = opened.pop()
            if computes:
                opened = [(enter, True) for enter, _ in opened]
            elif is_mark(node.inputsAt(0)) and first.inputsAt(0).unique() == node.inputsAt(0).unique():
                node.destroy()
                first.destroy()
                dropped = True
        elif not all(computes for _, computes in opened) and _computes(node):
            opened = [(enter, True) for enter, _ in opened]
    return dropped


def _computes(node: Any) -> bool:
    """Return whether a node, or one in its blocks, is more than a constant, an attribute or a region."""
    if any(_computes(n) for inner in node.blocks() for n in inner.nodes()):
        return True
    plain = ("prim::Constant", "prim::GetAttr", "prim::CreateObject", "prim::SetAttr", "prim::Enter", "prim::Exit")
    return node.kind() not in plain


def cast_for(graph: Any) -> set[str]:
    """Return the device types for which a whole graph is cast already."""
    edges = [n for n in graph.nodes() if n.kind() in ("prim::Enter", "prim::Exit") and region_class(n.inputsAt(0))]
    device_types = set()
    for first, last in zip(edges, reversed(edges), strict=True):
        region = first.inputsAt(0)
        if first.kind() != "prim::Enter" or region.unique() != last.inputsAt(0).unique() or not is_mark(region):
            break
        device_types |= {constant(node.inputsAt(1)) for node in _setting(region, "device")}
    return device_types


def cast_for_all(script: Any) -> set[str]:
    """Return the device types for which all of a script is cast already; none for what is no script."""
    graphs = [script.graph] if isinstance(script, torch.jit.ScriptFunction) else []
    if isinstance(script, torch.jit.ScriptModule):
        graphs = [compiled_method(script, name).graph for name in method_names(script)]
    return set[str].intersection(*map(cast_for, graphs)) if graphs else set()


def is_mark(region: Any) -> bool:
    """Return whether a region in a script marks that what is in it is cast already."""
    return site_of(region.node())[0].replace("\\", "/").endswith("narrowcast/frontends/scripts/cast_already.py")


def _region_that_is_off(device_type: str):  # type: ignore[no-untyped-def]
    region = torch.autocast(device_type, dtype=torch.bfloat16, enabled=False)
    with region:  # not `as`: torch's own pass, which sees traces, refuses it
        pass
    return region


@cache
def prepare_marks() -> Any:
    """Return the graph of the function above, without the exit: it makes the region, enters it, and returns it.

    TorchScript compiles the class of native regions for it, as that class is when this is first called.
    """
    graph = graph_of(_region_that_is_off).copy()
    simplify(graph)
    graph.findNode("prim::Exit").destroy()
    return graph
