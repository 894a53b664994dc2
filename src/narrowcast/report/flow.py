"""What flows between the calls of a captured graph, as rows that JSON can have."""

from __future__ import annotations

from typing import Any

from narrowcast.program import Program, Step, Value
from narrowcast.report.graphs import CompiledGraph, floating_formats

OUTSIDE = -1
"""Where a value begins that no step of the graph makes."""
_LEARNED = ("weight", "bias", "running_mean", "running_var")


def graph_flow(graph: CompiledGraph) -> dict[str, Any]:
    """Steps and edges of a graph as it was written.

    steps: module path, op, file, line, number, direction, formats that came, were read and were given, bytes. edges:
    from which step to which (OUTSIDE: from none), argument, format before and after a cast between them, bytes that the
    cast (or the value) has, `activation`, `weight` or `input`, and how: `copied`, or `shared` with an earlier edge.
    Casts, views and what takes a tuple apart are on the edges; factories and edges of regions are left out.
    """
    if graph.before is None or graph.after is None:
        return {"steps": [], "edges": []}
    return _Flow(graph.before, graph.after).rows()


class _Flow:
    """Walks one program."""

    def __init__(self, before: Program, after: Program) -> None:
        self.before, self.after = before, after
        self.numbers: dict[int, int] = {}
        self.casts: set[int] = set()
        self.elements: dict[int, Value] = {}
        for step in after.steps.values():
            if step.op == "getitem":
                self.elements.setdefault(step.operands[0].value, step.value)

    def rows(self) -> dict[str, Any]:
        steps: list[list[Any]] = []
        edges: list[list[Any]] = []
        for step in self.after.steps.values():
            if step.is_cast or _passes(step) or not step.operands or step.op.startswith(("cast.", "region.", "prim.")):
                continue
            self.numbers[step.id] = len(steps)
            steps.append(self._step(step))
            edges += [self._edge(len(steps) - 1, operand.name, operand.value) for operand in step.operands]
        return {"steps": steps, "edges": [edge for edge in edges if edge]}

    def _step(self, step: Step) -> list[Any]:
        known = self.before.steps.get(step.id, step)
        came = floating_formats([self.before.values[o.value] for o in known.operands if o.value in self.before.values])
        read = [self.after.values[o.value] for o in step.operands]
        computes = floating_formats(read) if step.given == known.given else "fp32"
        result = floating_formats([self.elements.get(step.id, step.value)])
        moved = sum(v.bytes for v in read) + step.value.bytes
        place = [step.site.module_path, step.op, step.site.file, step.site.line, step.number, step.direction]
        return [*place, came, computes, result, moved]

    def _edge(self, end: int, argument: str, value: int) -> list[Any]:
        """The way back from an operand to what made it; empty for what is no floating tensor."""
        read = self.after.values[value]
        if read.format is None:
            return []
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
        start = self.numbers.get(value, OUTSIDE)
        is_learned = self.after.values[value].weight or argument in _LEARNED
        kind = "activation" if step is not None else "weight" if is_learned else "input"
        return [start, end, argument, src, read.type, 0 if how == "shared" else moved, kind, how]


def _passes(step: Step) -> bool:
    """Whether it only names what is there: a view, or a part of a tuple."""
    views = step.aliases and not step.computes and not step.writes
    return bool(step.operands) and bool(step.op == "getitem" or views)
