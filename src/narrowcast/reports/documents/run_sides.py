"""The graphs of two runs side by side: each call in all turns of its module is one box, as it is one of a pair."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from narrowcast.core.ledger.identity import CallId
from narrowcast.reports.documents.model import OUTSIDE, Edge, Graph, Node, node_at
from narrowcast.reports.documents.run_flow import flow_of
from narrowcast.reports.results.run_differences import RunDifferences, Unaligned

_Key = tuple[str, str, str, str]
LISTED = (
    "Calls are in the order of the pairs; what flows between them is not in a saved comparison: compare the runs "
    "again for a page that shows it."
)


class SideGraph:
    """What is drawn of one run, and which calls its boxes are. side: `a` or `b`."""

    def __init__(self, found: RunDifferences, side: str) -> None:
        runs = found.compared_runs
        self.graph = merged_turns(flow_of(runs["ab".index(side)]).graph()) if runs else _listed(found, side)
        self._at = {_key(node): n for n, node in enumerate(self.graph.nodes)}

    def numbers(self, calls: Iterable[CallId]) -> tuple[int, ...]:
        """The boxes of these calls; a call without a floating tensor has none."""
        return tuple(self._at[key] for key in map(key_of, calls) if key in self._at)


def key_of(call: CallId) -> _Key:
    """The call whatever the turn of its module."""
    return call.module_path, call.op, f"#{call.number}", call.direction


def _key(node: Node) -> _Key:
    return node.path, node.op, node.label.partition(" ")[0], node.direction


def merged_turns(graph: Graph) -> Graph:
    """The same graph with the turns of a call as one node, and edges that are alike as one."""
    first: dict[_Key, int] = {}
    nodes: list[Node] = []
    at: list[int] = []
    for node in graph.nodes:
        key = _key(node)
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


def _listed(found: RunDifferences, side: str) -> Graph:
    """The calls that a comparison names: those with a partner in their order, each of the others after the call that
    it came after.
    """
    after: dict[str, list[Unaligned]] = {}
    for one in found.unaligned:
        if one.run == side:
            after.setdefault(one.after, []).append(one)
    nodes = [_alone(one) for one in after.pop("", [])]
    for row in found.rows:
        calls, at, computes = (row.a, row.place_a, row.format_a) if side == "a" else (row.b, row.place_b, row.format_b)
        for call in calls:
            nodes.append(node_at(call, at, computes))
            nodes += [_alone(one) for one in after.pop(str(call), [])]
    nodes += [_alone(one) for left in after.values() for one in left]
    return Graph(nodes, [], note=LISTED)


def _alone(one: Unaligned) -> Node:
    return node_at(one.id, one.place, one.format)
