"""What an explanation says of a captured graph: its line, what flows between its calls, the casts of its results.

Pure: read off its programs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from narrowcast.core.ledger.identity import FORWARD
from narrowcast.core.policy import Site
from narrowcast.programs.program import Program, Step
from narrowcast.reports.results.graphs import (
    OUTSIDE,
    CompiledGraph,
    FlowEdge,
    FlowStep,
    GraphFlow,
    GraphRow,
    floating_formats,
    parts_of,
    step_multiplications,
)

_LEARNED = ("weight", "bias", "running_mean", "running_var")


def with_row_and_flow(graph: CompiledGraph) -> CompiledGraph:
    """The graph, with what is said of its programs."""
    graph.row, graph.flow, graph.returned = graph_row(graph), graph_flow(graph), returned_casts(graph)
    return graph


def graph_row(graph: CompiledGraph) -> GraphRow:
    """The line about one graph."""
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
    """The casts that were put on what the graph returns: how many, and the bytes that they write."""
    if graph.before is None or graph.after is None:
        return 0, 0
    steps = [graph.after.steps[value] for value in graph.after.body.returns if value in graph.after.steps]
    casts = [step for step in steps if step.is_cast and step.id not in graph.before.steps]
    return len(casts), sum(cast.value.bytes for cast in casts)


def graph_flow(graph: CompiledGraph) -> GraphFlow:
    """Steps and edges of a graph as it was written, its backward after its forward, if autograd made one.

    A step of the backward has the place of the forward step whose gradients it makes. Casts, views and what takes a
    tuple apart are on the edges; factories and edges of regions are left out.
    """
    steps: list[FlowStep] = []
    edges: list[FlowEdge] = []
    if graph.before is not None and graph.after is not None:
        forward = _FlowWalk(graph.before, graph.after, steps, edges)
        forward.add_steps()
        if graph.joint_before is not None and graph.joint_after is not None:
            _BackwardWalk(graph.joint_before, graph.joint_after, steps, edges, forward, graph.forward_steps).add_steps()
    return GraphFlow(steps, edges)


class _FlowWalk:
    """Walks one program, and appends to rows that may have others already."""

    def __init__(self, before: Program, after: Program, steps: list[FlowStep], edges: list[FlowEdge]) -> None:
        self.before, self.after, self.steps, self.edges = before, after, steps, edges
        self.numbers: dict[int, int] = {}
        self.casts: set[int] = set()
        self.parts = parts_of(after)

    def add_steps(self) -> None:
        """A row for each step that is drawn, and one for each floating tensor that it reads."""
        for step in self.drawn():
            self.numbers[step.id] = len(self.steps)
            self.steps.append(self._step(step))
            found = [self._edge(self.numbers[step.id], operand.name, operand.value) for operand in step.operands]
            self.edges += [edge for edge in found if edge]

    def drawn(self) -> Iterator[Step]:
        """The steps that are calls."""
        for step in self.after.steps.values():
            hidden = step.is_cast or _passes(step) or not step.operands
            if not hidden and not step.op.startswith(("cast.", "region.", "prim.")):
                yield step

    def place(self, step: Step) -> tuple[Site, int]:
        """Where a step is called, and which call of its op it is."""
        return step.site, step.number

    def maker(self, value: int) -> int:
        """The row of the step that makes a value which no cast and no view makes."""
        return self.numbers.get(value, OUTSIDE)

    def _step(self, step: Step) -> FlowStep:
        known = self.before.steps.get(step.id, step)
        came = floating_formats([self.before.values[o.value] for o in known.operands if o.value in self.before.values])
        read = [self.after.values[o.value] for o in step.operands]
        computes = floating_formats(read) if step.given == known.given else "fp32"
        gave = self.parts.get(step.id, [step.value])
        moved = sum(v.bytes for v in (*read, *gave))
        site, number = self.place(step)
        return FlowStep(
            site.module_path, step.op, site.file, site.line, number, step.direction, came, computes,
            floating_formats(gave[:1]), moved, step_multiplications(step, read, gave),
        )  # fmt: skip

    def _edge(self, end: int, argument: str, value: int) -> FlowEdge | None:
        """The way back from an operand to what made it; None for what is no floating tensor."""
        read = self.after.values[value]
        if read.format is None:
            return None
        src, moved, how = read.type, read.bytes, ""
        step = self.after.steps.get(value)
        while step is not None and (step.is_cast or _passes(step)):
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
        return FlowEdge(self.maker(value), end, argument, src, read.type, moved, kind, how)


class _BackwardWalk(_FlowWalk):
    """Walks the backward of a joint graph; what that reads of its forward was made by the forward's own steps.

    origins: of a step of the joint graph the forward step that it was, or whose gradients it makes.
    """

    def __init__(
        self, before: Program, after: Program, steps: list[FlowStep], edges: list[FlowEdge], forward: _FlowWalk,
        origins: Mapping[int, int],
    ) -> None:  # fmt: skip
        super().__init__(before, after, steps, edges)
        self.forward, self.origins = forward, origins

    def drawn(self) -> Iterator[Step]:
        return (step for step in super().drawn() if step.direction != FORWARD)

    def place(self, step: Step) -> tuple[Site, int]:
        origin = self.forward.after.steps.get(self.origins.get(step.id, OUTSIDE))
        return super().place(step) if origin is None else (origin.site, origin.number)

    def maker(self, value: int) -> int:
        known = super().maker(value)
        step = self.forward.after.steps.get(self.origins.get(value, OUTSIDE))
        if known != OUTSIDE or step is None or self.after.steps[value].direction != FORWARD:
            return known
        while step is not None and (step.is_cast or _passes(step)):
            step = self.forward.after.steps.get(step.operands[0].value)
        return OUTSIDE if step is None else self.forward.maker(step.id)


def _passes(step: Step) -> bool:
    """Whether it only names what is there: a view, or a part of a tuple."""
    views = step.aliases and not step.computes and not step.writes
    return bool(step.operands) and bool(step.op == "getitem" or views)
