"""The graphs of two runs side by side: each call in all turns of its module is one box, as it is one of a pair."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from narrowcast.reports.documents.model import OUTSIDE, Edge, Graph, Node
from narrowcast.reports.documents.run_flow import flow_of
from narrowcast.reports.documents.words import split_identity

Data = Mapping[str, Any]
_Key = tuple[str, str, str, str]
LISTED = (
    "Calls stand in the order of the pairs; what flows between them is not in a saved comparison: compare the runs "
    "again for a page that shows it."
)


class SideGraph:
    """What is drawn of one run, and which calls its boxes are. side: `a` or `b`."""

    def __init__(self, data: Data, side: str) -> None:
        runs = data.get("runs") or ()
        self.graph = merged_turns(flow_of(runs["ab".index(side)]).graph()) if runs else _listed(data, side)
        self._at = {key_of(_identity(node)): n for n, node in enumerate(self.graph.nodes)}

    def numbers(self, identities: Iterable[str]) -> tuple[int, ...]:
        """The boxes of these calls; a call without a floating tensor has none."""
        return tuple(self._at[key] for key in map(key_of, identities) if key in self._at)


def key_of(identity: str) -> _Key:
    """The call whatever the turn of its module."""
    path, op, label, direction = split_identity(identity)
    return path, op, label.partition(" ")[0], direction


def _identity(node: Node) -> str:
    direction = "" if node.direction == "forward" else f" {node.direction}"
    return f"{node.path} {node.op} {node.label}{direction}".strip()


def merged_turns(graph: Graph) -> Graph:
    """The same graph with the turns of a call as one node, and edges that are alike as one."""
    first: dict[_Key, int] = {}
    nodes: list[Node] = []
    at: list[int] = []
    for node in graph.nodes:
        key = key_of(_identity(node))
        if key not in first:
            first[key] = len(nodes)
            nodes.append(replace(node, times=0, bytes=0))
        at.append(first[key])
        one = nodes[at[-1]]
        one.times += node.times
        one.bytes = (one.bytes or 0) + (node.bytes or 0)
        one.finding = one.finding or node.finding
    edges: dict[tuple[Any, ...], Edge] = {}
    for edge in graph.edges:
        start = edge.start if edge.start == OUTSIDE else at[edge.start]
        moved = replace(edge, start=start, end=at[edge.end])
        alike = (start, moved.end, edge.argument, edge.src, edge.dst, edge.kind, edge.how)
        known = edges.get(alike)
        edges[alike] = moved if known is None else replace(
            known, bytes=known.bytes + edge.bytes, times=known.times + edge.times
        )  # fmt: skip
    return replace(graph, nodes=nodes, edges=list(edges.values()))


def _listed(data: Data, side: str) -> Graph:
    """The calls that a comparison names: those with a partner in their order, each of the others after the call that
    it came after.
    """
    after: dict[str, list[Data]] = {}
    for one in data["unaligned"]:
        if one["run"] == side:
            after.setdefault(one["after"], []).append(one)
    nodes = [_alone(one) for one in after.pop("", [])]
    for row in data["rows"]:
        for identity in row[side]:
            nodes.append(_named(identity, row[f"place_{side}"], row[f"format_{side}"]))
            nodes += [_alone(one) for one in after.pop(identity, [])]
    nodes += [_alone(one) for left in after.values() for one in left]
    return Graph(nodes, [], note=LISTED)


def _alone(one: Data) -> Node:
    return _named(one["id"], one["place"], one.get("format", ""))


def _named(identity: str, place: str, computes: str) -> Node:
    path, op, label, direction = split_identity(identity)
    file, _, line = place.rpartition(":")
    return Node(path, op, label, 1, direction, computes=computes, file=file, line=int(line or 0))
