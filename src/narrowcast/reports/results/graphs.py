"""What became of captured graphs, as data: their programs before and after, a ledger of their casts, and what differs.

Pure: the compile backend and the exporter fill in `CompiledGraph`; everything here is read off its programs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from narrowcast.core.decide import Plan, decide
from narrowcast.core.ledger import CallKind, Cast, EditRecord, HidingBlock
from narrowcast.core.ops import multiplications, named
from narrowcast.core.policy import MODULE_CALL_OP, NOWHERE, RESULT, Policy, Rule, Site
from narrowcast.programs.passes import call_of
from narrowcast.programs.placement.peak import Peak
from narrowcast.programs.placement.place import Placement
from narrowcast.programs.program import Program, Step, Value
from narrowcast.reports.results.ledger import Ledger


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
    the written graph; the rest went into reading, passes and writing. saved, saved_returned: of a saved
    explanation, which has no programs, what it says of them.
    names: of an exported program's nodes, by step of `after`. costs: if times were asked for, predicted nanoseconds of
    its calls and casts by step, and of what kind the prediction is: measured, interpolated or assumed.
    """

    number: int
    site: Site = NOWHERE
    before: Program | None = None
    after: Program | None = None
    joint_before: Program | None = None
    joint_after: Program | None = None
    forward_steps: Mapping[int, int] = field(default_factory=dict)
    edits: tuple[EditRecord, ...] = ()
    joint_edits: tuple[EditRecord, ...] = ()
    policies: Mapping[str, Policy] = field(default_factory=dict)
    boundaries: Mapping[int, str] = field(default_factory=dict)
    hidden: Mapping[HidingBlock, int] = field(default_factory=dict)
    fallback: str = ""
    broken_by: str = ""
    broken_at: str = ""
    goal: str = "exact"
    placement: Placement | None = None
    candidates: tuple[CandidateTime, ...] = ()
    chosen: str = ""
    candidates_seconds: float = 0.0
    from_disk: bool = False
    seconds: float = 0.0
    capture_seconds: float = 0.0
    names: Mapping[int, str] = field(default_factory=dict)
    costs: Mapping[int, tuple[float, str]] = field(default_factory=dict)
    saved: GraphRow | None = None
    saved_returned: tuple[int, int] = (0, 0)

    @property
    def is_captured(self) -> bool:
        """Whether there is a program with explicit casts, here or where the explanation was saved."""
        return self.after is not None or (self.saved is not None and self.saved.calls > 0)


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


def graph_row(graph: CompiledGraph) -> GraphRow:
    """The line about one graph."""
    if graph.saved is not None:
        return graph.saved
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
        return graph.saved_returned
    steps = [graph.after.steps[value] for value in graph.after.body.returns if value in graph.after.steps]
    casts = [step for step in steps if step.is_cast and step.id not in graph.before.steps]
    return len(casts), sum(cast.value.bytes for cast in casts)


def placement_data(graph: CompiledGraph) -> dict[str, object]:
    """What was placed in a graph, for JSON: candidates, totals, and each call with its formats and costs."""
    placement = graph.placement
    if placement is None:
        return {}
    calls = [
        {
            "op": call.op, "module": call.site.module_path, "file": call.site.file, "line": call.site.line,
            "shape": call.shape, "costs_ns": dict(zip((f.name for f in call.formats), call.costs, strict=True)),
            "policy": call.formats[0].name, "chosen": call.chosen.name, "saved_ns": call.saved, "step": call.step,
        }
        for call in placement.calls
    ]  # fmt: skip
    return {
        "graph": graph.number, "goal": graph.goal, "chosen": graph.chosen, "unit": placement.unit,
        "cost": placement.cost, "policy_cost": placement.policy_cost, "bound": placement.bound, "gap": placement.gap,
        "method": placement.method, "fixed": placement.fixed, "kept_bytes": placement.kept_bytes,
        "policy_kept_bytes": placement.policy_kept_bytes, "candidates_seconds": graph.candidates_seconds,
        "from_disk": graph.from_disk, "returned_casts": list(returned_casts(graph)),
        "candidates": [asdict(c) for c in graph.candidates], "calls": calls,
    }  # fmt: skip


def graph_ledger(graphs: Sequence[CompiledGraph]) -> Ledger:
    """Calls and casts of the graphs as a ledger, alike that of an eager run; the user's own casts are not in it."""
    ledger = Ledger()
    for graph in graphs:
        ledger.edits += [*graph.edits, *graph.joint_edits]
        ledger.advice.update({block.advice(calls): 1 for block, calls in graph.hidden.items()})
        if graph.before is not None and graph.after is not None:
            _Walker(ledger, graph, graph.before, graph.after).run(graph.boundaries)
    return ledger


def decision_differences(eager: Ledger, graph: Ledger) -> tuple[DecisionDifference, ...]:
    """Decided calls of which eager and graph have different numbers in some formats; none if they agree."""
    counts: tuple[Counter[tuple[str, str, str]], ...] = (Counter(), Counter())
    for ledger, count in zip((eager, graph), counts, strict=True):
        for kind, tally in ledger.calls.items():
            if kind.action != "unlisted" and kind.direction == "forward" and kind.op != MODULE_CALL_OP:
                count[kind.op, kind.module_path, kind.computes] += tally.calls
    keys = list(dict.fromkeys([*counts[0], *counts[1]]))
    found = [DecisionDifference(*k, counts[0][k], counts[1][k]) for k in keys if counts[0][k] != counts[1][k]]
    others = [f"{path}." if path else "" for path in other_paths(eager, graph)]
    return tuple(d for d in found if not any(f"{d.module_path}.".startswith(path) for path in others))


def other_paths(eager: Ledger, graph: Ledger) -> list[str]:
    """The modules that are one fused op in eager code, and several calls where torch traces them: that is torch's own
    choice, and no fault of what is decided.
    """
    ops = {f"aten.{name}.default" for name in named("inside.fused_in_eager_code")}
    fused, kept = ({k.module_path for k in ledger.calls if k.op in ops} for ledger in (eager, graph))
    return sorted(fused - kept)


PLACED = "placed"
"""The action of a call whose format a goal chose."""


class _Walker:
    """Reads one graph's programs into the ledger."""

    def __init__(self, ledger: Ledger, graph: CompiledGraph, before: Program, after: Program) -> None:
        self.ledger = ledger
        self.before = before
        self.after = after
        self.policies = graph.policies
        placed = graph.placement.calls if graph.placement is not None else ()
        self.raised = {call.step: call for call in placed if call.chosen is not call.formats[0]}
        self.goal = graph.goal
        self.inputs = {v.id for v in before.body.parameters}
        self.seen: set[tuple[int, str]] = set()
        self.read: set[int] = set()
        self.parts = parts_of(before)

    def run(self, boundaries: Mapping[int, str]) -> None:
        """Every call, in order; what only moves or shapes is passed by, as in a recording."""
        for step in self.after.steps.values():
            known = self.before.steps.get(step.id)
            if step.id in boundaries:
                self._at_boundary(step, json.loads(boundaries[step.id]))
            elif known is None and step.operands and step.operands[0].name == RESULT:
                self._cast_of_result(step)
            moves = step.op == "getitem" or (step.aliases and not step.computes and not step.writes)
            moves = moves or step.op.startswith("prim.")  # a question about a tensor, or about an object
            if known is not None and not known.is_cast and not step.blocks and step.operands and not moves:
                self._call(known, step)

    def _call(self, known: Step, step: Step) -> None:
        plan, policy = self._plan(known)
        for decided in plan.rules:
            self.ledger.count_match(decided.label, known.site.module_path)
        read = [self.after.values[o.value] for o in step.operands]
        came = [self.before.values[o.value] for o in known.operands]
        gave = self.parts.get(step.id, [step.value])
        computes = floating_formats(read) if step.given == known.given else "fp32"  # the call was given dtype=fp32
        rule = plan.rule
        action, reason = self._why(step, rule)
        kind = CallKind(
            known.op, *step.site.at, floating_formats(came), computes, floating_formats(gave[:1]), action or "unlisted",
            reason or "runs as its inputs are", policy,
        )  # fmt: skip
        done = step_multiplications(step, read, gave)
        self.ledger.count_call(kind, sum(v.bytes for v in read) + step.value.bytes, known.number, done)
        for old, new in zip(known.operands, step.operands, strict=True):
            made = self.after.steps.get(new.value)
            is_new = old.value != new.value and new.value not in self.before.steps
            if made is not None and is_new and made.value.type != self.before.values[old.value].type:
                self._cast(known, plan, policy, old.name, self.before.values[old.value], made)

    def _why(self, step: Step, rule: Rule | None) -> tuple[str, str]:
        """The action and the reason of a call: its rule's, or the goal's where that chose another format."""
        placed = self.raised.get(step.id)
        if placed is not None:
            instead = f"; the policy says {rule.action}" if rule else ""
            return PLACED, f"goal {self.goal}: {placed.chosen} costs least here, with the casts around it{instead}"
        return (str(rule.action), rule.reason or str(rule)) if rule else ("", "")

    def _cast_of_result(self, cast: Step) -> None:
        """A cast that follows a call, as a rule about its result asks."""
        made = self.before.steps[cast.operands[0].value]
        if made.op == "getitem":
            made = self.before.steps[made.operands[0].value]
        plan, policy = self._plan(made)
        source = self.after.values[cast.operands[0].value]
        facts = _copied(source, cast) | {"kind": "activation", "policy": policy, "number": made.number}
        self.ledger.add(Cast.of(made.op, RESULT, made.site, plan.rule_about(RESULT), **facts))

    def _at_boundary(self, step: Step, facts: Mapping[str, str]) -> None:
        """A cast that the graph was captured with, which a rule about the module's call, or a pin, asked for."""
        source = self.after.values[step.operands[0].value]
        self.ledger.count_match(facts.get("label", ""), step.site.module_path)
        words = {name: facts.get(name, "") for name in ("action", "rule", "reason", "source", "policy")}
        words |= _copied(source, step) | {"kind": self._kind(source)}
        self.ledger.add(Cast.of(MODULE_CALL_OP, facts["argument"], step.site, None, **words))

    def _kind(self, source: Value) -> str:
        return "weight" if source.weight else "input" if source.id in self.inputs else "activation"

    def _plan(self, step: Step) -> tuple[Plan, str]:
        """What was decided about a call, by the one function that decides."""
        if step.region is None or not self.before.regions[step.region].facts.enabled:
            return Plan(()), ""
        region = self.before.regions[step.region]
        policy = self.policies[region.policy]
        return decide(call_of(self.before, step), policy, region.facts), policy.name

    def _cast(self, step: Step, plan: Plan, policy: str, argument: str, source: Value, cast: Step) -> None:
        shared = cast.id in self.read
        repeated = not shared and (source.id, cast.value.type) in self.seen
        self.read.add(cast.id)
        self.seen.add((source.id, cast.value.type))
        rule = plan.rule_for(argument)
        action, reason = self._why(step, rule)
        facts = _copied(source, cast) | ({"moved_bytes": 0, "how": "shared"} if shared else {})
        facts |= {
            "kind": self._kind(source),
            "policy": policy,
            "repeated": repeated,
            "action": action,
            "reason": reason,
            "number": step.number,
        }
        self.ledger.add(Cast.of(step.op, argument, step.site, rule, **facts))


def _copied(source: Value, cast: Step) -> dict[str, Any]:
    """What the ledger says of a cast of this value."""
    moved = source.bytes + cast.value.bytes
    sizes = {"elements": source.elements, "moved_bytes": moved}
    return {"src": source.type, "dst": cast.value.type, "how": "copied", "direction": "forward", **sizes}


def floating_formats(values: Sequence[Value]) -> str:
    """The floating formats among the values, in order, each once."""
    return ",".join(dict.fromkeys(v.type for v in values if v.format is not None))


def parts_of(program: Program) -> dict[int, list[Value]]:
    """What is taken out of the tuple that a step gives, by the step, in the order in which it is taken."""
    found: dict[int, list[Value]] = {}
    for step in program.steps.values():
        if step.op == "getitem":
            found.setdefault(step.operands[0].value, []).append(step.value)
    return found


def step_multiplications(step: Step, read: Sequence[Value], made: Sequence[Value]) -> int | None:
    """How many multiplications a step makes; None where sizes are symbolic. read, made: what it reads and gives."""
    shapes, results = ([v.shape for v in values if v.shape is not None] for values in (read, made))
    return multiplications(step.op, shapes, results, "transposed=True" in step.constants)
