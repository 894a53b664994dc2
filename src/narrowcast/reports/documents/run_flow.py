"""What flows between the calls of a captured run, read off its table of tensors; and the graphs of two runs side by
side: each call in all turns of its module is one box, as it is one of a pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from narrowcast.core.ledger.identity import CallId
from narrowcast.core.ops import multiplications
from narrowcast.formats import FORMATS
from narrowcast.output.words import sizes
from narrowcast.reports.documents.model import OUTSIDE, Edge, Graph, Node, node_at, node_of
from narrowcast.reports.documents.words import number
from narrowcast.reports.results.run import Run
from narrowcast.reports.results.run_differences import RunDifferences, Unaligned
from narrowcast.reports.results.run_records import CallRecord, TensorFacts

FLOW = (
    "A view or a slice comes from the call that made its memory; a copy that has the format, the number of "
    "elements and the range of an earlier result is taken for that. Calls without a floating tensor are left out."
)


def flow_of(run: Run) -> RunFlow:
    """Return the flow of a run."""
    flow = RunFlow(run.tensors)
    for call in run.calls:
        flow.add(call)
    return flow


class RunFlow:
    """Calls one after the other become nodes; casts, and calls without floating tensors, do not."""

    def __init__(self, tensors: Sequence[TensorFacts]) -> None:
        self.tensors = tensors
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
        self.results: list[tuple[int, str, TensorFacts]] = []
        self.overflowing: list[Node] = []
        """Those that give infinities of finite inputs, and neither NaN nor what an input of zero explains."""
        self._made: dict[int, int] = {}
        self._like: dict[tuple[Any, ...], int] = {}

    def graph(self) -> Graph:
        """Return the nodes and edges so far."""
        return Graph(self.nodes, self.edges, flow=True, note=FLOW)

    def add(self, call: CallRecord) -> None:
        """Add the next call in order."""
        if call.is_cast:
            self._pass_on(call)
            return
        outputs = [(name, n) for name, n in call.outputs if self.tensors[n].fits()]
        read = [(name, n) for name, n in call.inputs if self.tensors[n].fits()]
        if not outputs and not read:
            return
        number_of = len(self.nodes)
        for argument, n in read:
            self._edge(argument, n, number_of, call.computes)
        self.nodes.append(self._node(call, [self.tensors[n] for _, n in read], outputs))
        for name, n in outputs:
            self._made[n] = number_of
            self._like[_figures(self.tensors[n])] = number_of
            self.results.append((number_of, name, self.tensors[n]))

    def _pass_on(self, call: CallRecord) -> None:
        """Note that a cast's output was made by the maker of its input."""
        maker = next((self._maker(n) for _, n in call.inputs), OUTSIDE)
        if maker != OUTSIDE:
            self._made.update((n, maker) for _, n in call.outputs)

    def _maker(self, tensor: int) -> int:
        """Return the call that made a tensor, or the one in whose memory it lies; or else one with a like output."""
        at = tensor
        while at not in self._made and 0 <= self.tensors[at].lies_in < at:
            at = self.tensors[at].lies_in
        known = self._made.get(at)
        return self._like.get(_figures(self.tensors[tensor]), OUTSIDE) if known is None else known

    def _edge(self, argument: str, tensor: int, end: int, computes: str) -> None:
        facts = self.tensors[tensor]
        src = facts.format
        dst = computes if computes in FORMATS else src  # of several formats nobody knows which it is
        moved = facts.elements * (FORMATS[src].bits + (FORMATS[dst].bits if src != dst else 0)) // 8
        start = self._maker(tensor)
        named_weight = argument.rpartition(".")[2] in ("weight", "bias", "running_mean", "running_var")
        kind = "activation" if start != OUTSIDE else "weight" if named_weight else "input"
        self.edges.append(
            Edge(start, end, argument, src, dst, moved, kind, "copied" if src != dst else "", sizes(facts.shape))
        )

    def _node(self, call: CallRecord, read: list[TensorFacts], outputs: list[tuple[str, int]]) -> Node:
        results = [(name, self.tensors[n]) for name, n in outputs]
        gives = ",".join(dict.fromkeys(facts.format for _, facts in results))
        node = node_of(call.id, call.computes, call.file, call.line)
        node.input_formats, node.result, node.rule, node.reason = call.input_formats, gives, call.rule, call.reason
        moved = (*read, *(facts for _, facts in results))
        node.bytes = sum(facts.elements * FORMATS[facts.format].bits // 8 for facts in moved)
        shapes, out_shapes = ([self.tensors[n].shape for _, n in named] for named in (call.inputs, call.outputs))
        node.multiplications = multiplications(call.id.op, shapes, out_shapes, ("transposed", "True") in call.given)
        node.facts = tuple((name, tensor_words(facts)) for name, facts in results)
        bad = {name: self.tensors[n] for name, n in call.returned if not self.tensors[n].is_finite}
        if bad:
            node.verdict = "not finite"
            clean = all(facts.is_finite for facts in read)
            inputs = ", and its inputs are" if clean else "; nor are its inputs"
            node.finding = f"{next(iter(bad))} is not finite{inputs}"
            has_nan = any(facts.nan for facts in bad.values())
            overflows = not (has_nan or call.may_be_at_pole(read) or call.is_given_infinities(read))
            self.overflowing += [node] * (clean and overflows)
        return node


def _figures(tensor: TensorFacts) -> tuple[Any, ...]:
    """Return what a view has in common with its tensor; a constant one has nothing to be known by."""
    low, high = tensor.low, tensor.high
    return ("constant", id(tensor)) if low == high else (tensor.format, tensor.elements, low, high)


def tensor_words(tensor: TensorFacts) -> str:
    """Return a tensor in words: `bf16 [2, 8] from -3.1 to 4.2, rms 0.9`."""
    low, high, rms = number(tensor.low), number(tensor.high), number(tensor.rms)
    known = low is not None and high is not None and rms is not None
    values = f" from {low:.3g} to {high:.3g}, rms {rms:.3g}" if known else ""
    return f"{tensor.format} {list(tensor.shape)}{values}"


_Key = tuple[str, str, str, str]
LISTED = (
    "Calls are in the order of the pairs; what flows between them is not in a saved comparison: compare the runs "
    "again for a page that shows it."
)


class SideGraph:
    """What is drawn of one run, and which calls its boxes are. side: `a` or `b`."""

    def __init__(self, result: RunDifferences, side: str) -> None:
        runs = result.compared_runs
        self.graph = merged_turns(flow_of(runs["ab".index(side)]).graph()) if runs else _listed(result, side)
        self._at = {_key(node): n for n, node in enumerate(self.graph.nodes)}

    def numbers(self, calls: Iterable[CallId]) -> tuple[int, ...]:
        """Return the boxes of these calls; a call without a floating tensor has none."""
        return tuple(self._at[key] for key in map(key_of, calls) if key in self._at)


def key_of(call: CallId) -> _Key:
    """Return the key of a call, without the module call index."""
    return call.module_path, call.op, f"#{call.number}", call.direction


def _key(node: Node) -> _Key:
    return node.path, node.op, node.label.partition(" ")[0], node.direction


def merged_turns(graph: Graph) -> Graph:
    """Return the same graph with a call in all calls of its module as one node, and like edges as one."""
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


def _listed(result: RunDifferences, side: str) -> Graph:
    """Return the calls that a comparison names: those with a partner in their order, each of the others after the call
    that it follows in its run.
    """
    after: dict[str, list[Unaligned]] = {}
    for one in result.unaligned:
        if one.run == side:
            after.setdefault(one.after, []).append(one)
    nodes = [_alone(one) for one in after.pop("", [])]
    for row in result.rows:
        calls, at, computes = (row.a, row.place_a, row.format_a) if side == "a" else (row.b, row.place_b, row.format_b)
        for call in calls:
            nodes.append(node_at(call, at, computes))
            nodes += [_alone(one) for one in after.pop(str(call), [])]
    nodes += [_alone(one) for left in after.values() for one in left]
    return Graph(nodes, [], note=LISTED)


def _alone(one: Unaligned) -> Node:
    return node_at(one.id, one.place, one.format)
