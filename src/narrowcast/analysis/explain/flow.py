"""What an explanation says of a captured graph: its line, what flows between its calls, the casts of its results.

Pure: read off its programs.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from narrowcast.analysis.record.graph_ledger import passes, read_of
from narrowcast.core.ledger.identity import FORWARD
from narrowcast.output.words import sizes
from narrowcast.programs.program import Program, Step
from narrowcast.reports.results.graphs import OUTSIDE, CompiledGraph, FlowEdge, FlowStep, GraphFlow, GraphRow, parts_of

_LEARNED = ("weight", "bias", "running_mean", "running_var")


def with_row_and_flow(graph: CompiledGraph) -> CompiledGraph:
    """Return the graph, with its row, its flow and its casts of results."""
    graph.row, graph.flow, graph.returned = graph_row(graph), graph_flow(graph), returned_casts(graph)
    return graph


def graph_row(graph: CompiledGraph) -> GraphRow:
    """Return the line about one graph."""
    kinds = Counter((e.kind, e.by) for e in graph.edits)
    calls = len(graph.before.steps) if graph.before else 0
    return GraphRow(
        number=graph.number,
        site=str(graph.site),
        calls=calls,
        assigned=kinds["insert", "assign"],
        shared=kinds["share", "share"],
        folded=kinds["fold", "fold"],
        dropped=kinds["remove", "drop"],
        casts=len(graph.after.casts()) if graph.after else 0,
        joint_before=len(graph.joint_before.casts()) if graph.joint_before else 0,
        joint_after=len(graph.joint_after.casts()) if graph.joint_after else 0,
        backward=sum(c.direction != "forward" for c in graph.joint_after.casts()) if graph.joint_after else 0,
        fallback=graph.fallback,
        broken_by=graph.broken_by,
        broken_at=graph.broken_at,
    )


def returned_casts(graph: CompiledGraph) -> tuple[int, int]:
    """Return the casts that were put on what the graph returns: how many, and the bytes that they write."""
    if graph.before is None or graph.after is None:
        return 0, 0
    steps = [graph.after.steps[value] for value in graph.after.body.returns if value in graph.after.steps]
    casts = [step for step in steps if step.is_cast and step.id not in graph.before.steps]
    return len(casts), sum(cast.value.bytes for cast in casts)


def graph_flow(graph: CompiledGraph) -> GraphFlow:
    """Return steps and edges of a graph as it was written, its backward after its forward, if autograd made one.

    A step of the backward has the place of the forward step whose gradients it makes. Casts, views and what takes a
    tuple apart are on the edges; factories and edges of regions are left out.
    """
    flow = GraphFlow()
    if graph.before is not None and graph.after is not None:
        forward = _FlowWalk(graph.before, graph.after, flow, is_placed=graph.placement is not None)
        if graph.joint_before is not None and graph.joint_after is not None:
            _FlowWalk(graph.joint_before, graph.joint_after, flow, forward, graph.forward_steps)
    return flow


class _FlowWalk:
    """Walks one program, and appends to a flow that may have rows already.

    forward: where the backward of a joint graph is walked, the walk of its forward; what is read of that was made by
    the forward's own steps. origins: of a step of the joint graph the forward step that it was, or whose gradients it
    makes.
    """

    def __init__(
        self, before: Program, after: Program, flow: GraphFlow, forward: _FlowWalk | None = None, origins: Any = None,
        is_placed: bool = False,
    ) -> None:  # fmt: skip
        self.before, self.after, self.forward, self.origins = before, after, forward, origins
        self._is_placed = is_placed
        self.numbers: dict[int, int] = {}
        self.casts: set[int] = set()
        self.parts = parts_of(after)
        for step in filter(self._is_drawn, after.steps.values()):
            number = self.numbers[step.id] = len(flow.steps)
            flow.steps.append(self._step(step))
            ends = [self._edge(number, operand.name, operand.value) for operand in step.operands]
            flow.edges.extend(edge for edge in ends if edge)

    def _is_drawn(self, step: Step) -> bool:
        """Return whether it is a call, and of a joint graph one of the backward."""
        if step.is_cast or passes(step) or not step.operands or step.op.startswith(("cast.", "region.", "prim.")):
            return False
        return self.forward is None or step.direction != FORWARD

    def _origin(self, step: int) -> Step | None:
        return None if self.forward is None else self.forward.after.steps.get(self.origins.get(step, OUTSIDE))

    def _maker(self, value: int) -> int:
        """Return the row of the step that makes a value which no cast and no view makes."""
        known, step = self.numbers.get(value, OUTSIDE), self._origin(value)
        if known != OUTSIDE or step is None or self.after.steps[value].direction != FORWARD:
            return known
        while self.forward is not None and step is not None:
            if not (step.is_cast or passes(step)):
                return self.forward._maker(step.id)
            step = self.forward.after.steps.get(step.operands[0].value)
        return OUTSIDE

    def _step(self, step: Step) -> FlowStep:
        outputs = self.parts.get(step.id, [step.value])
        inputs, computes, result, read, done = read_of(step, self.before, self.after, outputs, self._is_placed)
        moved = sum(v.bytes for v in (*read, *outputs))
        at = self._origin(step.id) or step
        return FlowStep(
            at.site.module_path, step.op, at.site.file, at.site.line, at.number, step.direction, inputs, computes,
            result, moved, done,
        )  # fmt: skip

    def _edge(self, end: int, argument: str, value: int) -> FlowEdge | None:
        """Return the way back from an operand to what made it; None for what is no floating tensor."""
        read = self.after.values[value]
        if read.format is None:
            return None
        src, moved, how = read.type, read.bytes, ""
        step = self.after.steps.get(value)
        while step is not None and (step.is_cast or passes(step)):
            source = self.after.values[step.operands[0].value]
            if step.is_cast:
                src = source.type
                moved = source.bytes + step.value.bytes
                how = "shared" if step.id in self.casts else "copied"
                self.casts.add(step.id)
            value = source.id
            step = self.after.steps.get(value)
        is_learned = self.after.values[value].weight or argument in _LEARNED
        kind = "activation" if step is not None else "weight" if is_learned else "input"
        moved = 0 if how == "shared" else moved
        return FlowEdge(self._maker(value), end, argument, src, read.type, moved, kind, how, sizes(read.shape))
