"""fold_weights: weights stored in the format in which they are used, so that they are cast once, when exported."""

from __future__ import annotations

from typing import Any

import torch
from torch.export.graph_signature import ExportGraphSignature, InputKind
from torch.fx import GraphModule, Node

from narrowcast.frontends.graphs.capture import detached
from narrowcast.runtime.torch_surface.dispatch import TO_COPY


def fold_weights(graph: GraphModule, signature: ExportGraphSignature, state: dict[str, Any]) -> list[str]:
    """Store each weight in the one format that all its readers cast it to; the casts go. Gives the names of those.

    graph and state are changed in place. Exact: the stored values are those that the casts would make. A weight that is
    read in more than one format, or returned, or written to, stays as it is; tied weights stay tied, or all stay.
    """
    placeholders = {node.name: node for node in graph.graph.find_nodes(op="placeholder")}
    kept_back = {spec.target for spec in signature.output_specs if spec.target is not None}
    wanted: dict[Memory, set[Any]] = {}
    named: list[tuple[str, Node, torch.Tensor]] = []
    for spec in signature.input_specs:
        if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER) or spec.target not in state:
            continue
        node, tensor = placeholders[spec.arg.name], state[spec.target]
        found = {user.kwargs.get("dtype") if user.target is TO_COPY else None for user in node.users}  # None: as it is
        if spec.target in kept_back:
            found.add(None)
        wanted.setdefault(_memory(tensor), set()).update(found)
        if found:
            named.append((spec.target, node, tensor))
    made: dict[Memory, torch.Tensor] = {}
    folded = []
    for target, node, tensor in named:
        dtypes = wanted[_memory(tensor)]
        if len(dtypes) != 1 or None in dtypes:
            continue
        dtype = next(iter(dtypes))
        if _memory(tensor) not in made:
            stored = tensor.detach().to(dtype)
            made[_memory(tensor)] = (
                torch.nn.Parameter(stored, requires_grad=False) if isinstance(tensor, torch.nn.Parameter) else stored
            )
        _read_directly(graph, node, dtype)
        folded.append(target)
    for target, tensor in list(state.items()):  # also names of tied weights that the graph does not read by
        if isinstance(tensor, torch.Tensor) and _memory(tensor) in made:
            state[target] = made[_memory(tensor)]
    return folded


Memory = tuple[object, ...]


def _memory(tensor: torch.Tensor) -> Memory:
    """The same for tied weights: one memory, seen alike."""
    start = tensor.untyped_storage().data_ptr() or id(tensor)
    return start, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _read_directly(graph: GraphModule, node: Node, dtype: torch.dtype | None) -> None:
    for user in list(node.users):
        user.replace_all_uses_with(node)
        graph.graph.erase_node(user)
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and dtype is not None:
        node.meta["val"] = detached(value).to(dtype)
