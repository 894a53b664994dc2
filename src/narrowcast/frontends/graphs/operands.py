"""The tensors of a node in the order of its op's schema, and the node's arguments with other tensors in their place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.fx import Node
from torch.fx.node import map_arg

from narrowcast.runtime.torch_surface.dispatch import OpOverload, schema_of


def operands_of(node: Node) -> list[tuple[str, Node]]:
    """Argument name and node of every operand, lists element by element."""
    found: list[tuple[str, Node]] = []
    names = _names(node)
    for site, value in _sites(node):
        name = names[site] if isinstance(site, int) else site
        map_arg(value, lambda n, name=name: found.append((name, n)) or n)  # type: ignore[misc, func-returns-value]
    return found


def replace_operands(node: Node, new: list[Node]) -> None:
    """Let the node read these nodes, in the order of `operands_of`."""
    following = iter(new)
    args, kwargs = list(node.args), dict(node.kwargs)
    for site, value in _sites(node):
        made: Any = map_arg(value, lambda _: next(following))
        if isinstance(site, int):
            args[site] = made
        else:
            kwargs[site] = made
    node.args, node.kwargs = tuple(args), kwargs


def _names(node: Node) -> list[str]:
    """The names of an op's arguments; of what is no op, those given by name."""
    op = node.target
    return [a.name for a in schema_of(op).arguments] if isinstance(op, OpOverload) else list(node.kwargs)


def _sites(node: Node) -> Iterator[tuple[int | str, Any]]:
    """Positional arguments, then those given by name, in the order of the schema."""
    yield from enumerate(node.args)
    for name in _names(node):
        if name in node.kwargs:
            yield name, node.kwargs[name]
