"""What became of captured graphs, as data: their programs before and after, what flows in them, and what differs.

Pure: the compile backend and the exporter fill in `CompiledGraph`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from narrowcast.core.ledger import EditRecord, HidingBlock
from narrowcast.core.ops import multiplications
from narrowcast.core.policy import NOWHERE, Policy, Site
from narrowcast.programs.placement.peak import Peak
from narrowcast.programs.placement.place import Placement
from narrowcast.programs.program import Program, Step, Value

OUTSIDE = -1
"""Where a value begins that no step of the graph makes."""


@dataclass(slots=True)
class CompiledGraph:
    """One graph that was captured.

    before, after: its program as read and as written, None if it was not captured. joint_before, joint_after: the same
    of the joint graph of forward and backward, if autograd made one. forward_steps: of a step of that graph the step of
    `after` that it was, or whose gradients it makes, as far as that is known. edits, joint_edits: what the passes did.
    policies: of its regions, by digest. boundaries: what is known of casts that were captured at the boundaries of
    modules' calls, by step, as JSON. hidden: calls in blocks in which the policy around does not rule.
    fallback: why it runs as eager would run it; empty if it does not.
    place: its first line. broken_by, broken_at: why the graph ends where it ends, if a graph break is the cause.
    goal: what was asked of the formats. placement: which formats were chosen and what they cost, if any were.
    candidates: what was timed to keep the best, which is `chosen`. candidates_seconds: what making and timing them
    took, compiling included; from_disk: the choice was made earlier.
    seconds: spent on all of it, the inner compiler apart; capture_seconds: of these, in the capture and the check of
    the written graph; the rest went into reading, passes and writing.
    names: of an exported program's nodes, by step of `after`. costs: if times were asked for, predicted nanoseconds of
    its calls and casts by step, and of what kind the prediction is: measured, interpolated or assumed.
    row, flow, returned: of an explained graph, what is known of its programs, which no file has: its line, what flows
    between its calls, and how many casts of results write how many bytes.
    """

    number: int
    site: Site = field(default=NOWHERE, compare=False)
    before: Program | None = field(default=None, compare=False)
    after: Program | None = field(default=None, compare=False)
    joint_before: Program | None = field(default=None, compare=False)
    joint_after: Program | None = field(default=None, compare=False)
    forward_steps: Mapping[int, int] = field(default_factory=dict, compare=False)
    edits: tuple[EditRecord, ...] = field(default=(), compare=False)
    joint_edits: tuple[EditRecord, ...] = field(default=(), compare=False)
    policies: Mapping[str, Policy] = field(default_factory=dict, compare=False)
    boundaries: Mapping[int, str] = field(default_factory=dict, compare=False)
    hidden: Mapping[HidingBlock, int] = field(default_factory=dict, compare=False)
    fallback: str = field(default="", compare=False)
    broken_by: str = field(default="", compare=False)
    broken_at: str = field(default="", compare=False)
    goal: str = "exact"
    placement: Placement | None = None
    candidates: tuple[CandidateTime, ...] = ()
    chosen: str = ""
    candidates_seconds: float = 0.0
    from_disk: bool = False
    seconds: float = field(default=0.0, compare=False)
    capture_seconds: float = field(default=0.0, compare=False)
    names: Mapping[int, str] = field(default_factory=dict, compare=False)
    costs: Mapping[int, tuple[float, str]] = field(default_factory=dict, compare=False)
    row: GraphRow | None = None
    flow: GraphFlow = field(default_factory=lambda: GraphFlow())
    returned: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class CandidateTime:
    """One way to run a graph: nanoseconds as predicted and, if it was timed, as measured with their spread.

    casts: None for what the prediction has ruled out. sure: the part of the predicted time that was measured, call by
    call, rather than interpolated. dropped: what it raises, if it does not run here. peak: the most bytes that it is
    predicted to hold at once, where memory is what counts.
    """

    name: str
    casts: int | None
    predicted_ns: float
    sure: float = 0.0
    measured_ns: float | None = None
    spread: float = 0.0
    dropped: str = ""
    peak: Peak | None = None


@dataclass(frozen=True, slots=True)
class GraphRow:
    """One line about a graph: calls, casts after `assign` and after all passes, and what each pass did.

    joint_before, joint_after: casts of the joint graph as autograd made it and after the passes, forward and backward
    together; backward: those of the backward that are left. 0 where there is no joint graph.
    """

    number: int
    site: str
    calls: int
    assigned: int
    shared: int
    folded: int
    dropped: int
    casts: int
    joint_before: int
    joint_after: int
    backward: int
    fallback: str
    broken_by: str
    broken_at: str


@dataclass(frozen=True, slots=True)
class DecisionDifference:
    """Calls of one op in one module that eager code and the graph decide differently: a fault of one of them."""

    op: str
    module_path: str
    computes: str
    eager: int
    graph: int


class FlowStep(NamedTuple):
    """A call of a graph: formats of inputs, compute and outputs. direction: forward, backward; dgrad and wgrad, where a
    gradient of an input or of a weight is made. multiplications: None where they are not known.
    """

    module_path: str
    op: str
    file: str
    line: int
    number: int
    direction: str
    input_formats: str
    computes: str
    result: str
    moved_bytes: int
    multiplications: int | None


class FlowEdge(NamedTuple):
    """A value, from which step to which (OUTSIDE: from none), with its format before and after a cast between them.

    moved_bytes: of the cast, or the value. kind: `activation`, `weight` or `input`. how: `copied`, or `shared` with an
    earlier edge. shape: of the value, `[2, 16]`; older files have none.
    """

    start: int
    end: int
    argument: str
    src: str
    dst: str
    moved_bytes: int
    kind: str
    how: str
    shape: str = ""


@dataclass(frozen=True, slots=True)
class GraphFlow:
    """What flows between the calls of one graph."""

    steps: list[FlowStep] = field(default_factory=list)
    edges: list[FlowEdge] = field(default_factory=list)

    def data(self) -> dict[str, Any]:
        """Return rows under their columns."""
        return {
            "step_columns": FlowStep._fields, "steps": self.steps, "edge_columns": FlowEdge._fields,
            "edges": self.edges,
        }  # fmt: skip

    @staticmethod
    def of_data(data: Mapping[str, Any]) -> GraphFlow:
        """Return the flow of such rows."""
        return GraphFlow([FlowStep(*row) for row in data["steps"]], [FlowEdge(*row) for row in data["edges"]])


def floating_formats(values: Sequence[Value]) -> str:
    """Return the floating formats among the values, in order, each once."""
    return ",".join(dict.fromkeys(v.type for v in values if v.format is not None))


def parts_of(program: Program) -> dict[int, list[Value]]:
    """Return what is taken out of the tuple that a step returns, by the step, in the order in which it is taken."""
    parts: dict[int, list[Value]] = {}
    for step in program.steps.values():
        if step.op == "getitem":
            parts.setdefault(step.operands[0].value, []).append(step.value)
    return parts


def step_multiplications(step: Step, read: Sequence[Value], outputs: Sequence[Value]) -> int | None:
    """Return how many multiplications a step makes; None where sizes are symbolic. read, outputs: of the step."""
    shapes, results = ([v.shape for v in values if v.shape is not None] for values in (read, outputs))
    return multiplications(step.op, shapes, results, "transposed=True" in step.constants)
