"""The ledger of captured graphs, alike that of an eager run, and what eager code decides otherwise.

Pure: read off the graphs' programs.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

from narrowcast.core.decide import Plan, decide
from narrowcast.core.ledger import CallKind, Cast
from narrowcast.core.ledger.pairing import other_counts
from narrowcast.core.ops import named
from narrowcast.core.policy import MODULE_CALL_OP, RESULT, Rule, Site
from narrowcast.programs.passes import call_of
from narrowcast.programs.program import Operand, Program, Step, Value
from narrowcast.reports.results.graphs import (
    CompiledGraph,
    DecisionDifference,
    floating_formats,
    parts_of,
    step_multiplications,
)
from narrowcast.reports.results.ledger import Ledger


def graph_ledger(graphs: Sequence[CompiledGraph]) -> Ledger:
    """Return calls and casts of the graphs as a ledger, as of an eager run; the user's own casts are not in it."""
    ledger = Ledger()
    for graph in graphs:
        ledger.edits += [*graph.edits, *graph.joint_edits]
        ledger.advice.update({block.advice(calls): 1 for block, calls in graph.hidden.items()})
        if graph.before is not None and graph.after is not None:
            _Walker(ledger, graph, graph.before, graph.after).run()
    return ledger


def compare_with_eager(
    eager: Ledger, graph: Ledger, graphs: Sequence[CompiledGraph], names: Mapping[str, str]
) -> tuple[tuple[DecisionDifference, ...], str]:
    """Return what eager code decides otherwise than the graphs, and a sentence about what differs by torch's choice."""
    others = ", ".join(path or "the model itself" for path in other_paths(eager, graph))
    other = f"{_OTHER_PATH}: {others}" if others else ""
    if not graphs or any(g.fallback or g.broken_by for g in graphs):
        return (), other
    ops = {step.op for g in graphs if g.after is not None for step in g.after.steps.values()}
    if ops & named("inside.branches"):
        return (), f"{other}. {_BRANCHES}" if other else _BRANCHES
    notes = [json.loads(note) for g in graphs for note in g.boundaries.values()]
    return decision_differences(eager, graph, names, {note["op"] for note in notes}), other


_OTHER_PATH = (
    "One fused op in eager code, in evaluation and without gradients, and torch's unfused path where it is traced, "
    "whose last bits differ"
)
_BRANCHES = "Eager code runs one branch of torch.cond and its like, and a graph holds all: the two are not compared"


def decision_differences(
    eager: Ledger, graph: Ledger, names: Mapping[str, str] = MappingProxyType({}), apart: Set[str] = frozenset()
) -> tuple[DecisionDifference, ...]:
    """Return decided calls of which eager and graph have different numbers in some formats; none if they agree. Not
    those that only move values, and do so in another format since a cast of what they move stands before them.

    names: of modules that have several, the first. apart: composite ops with casts around the calls inside of them.
    """
    counts: tuple[Counter[tuple[str, str, str]], ...] = (Counter(), Counter())
    for ledger, count in zip((eager, graph), counts, strict=True):
        for kind, tally in ledger.calls.items():
            if kind.action != "no rule" and kind.direction == "forward" and kind.op != MODULE_CALL_OP:
                count[kind.op, names.get(kind.module_path, kind.module_path), kind.computes] += tally.calls
    differences = [DecisionDifference(*key, *both) for key, both in other_counts(*counts).items()]
    others = tuple(f"{path}." if path else "" for path in other_paths(eager, graph))
    moving = {(edit.op, edit.module_path) for edit in graph.edits if edit.kind == "follow"}
    differences = [x for x in differences if (x.op, x.module_path) not in moving and x.op not in apart]
    return tuple(d for d in differences if not f"{d.module_path}.".startswith(others))


def other_paths(eager: Ledger, graph: Ledger) -> list[str]:
    """Return the modules that are one fused op in eager code, and several calls where torch traces them: that is
    torch's own choice, and no fault of what is decided.
    """
    ops = {f"aten.{name}.default" for name in named("inside.fused_in_eager_code")}
    fused, kept = ({k.module_path for k in ledger.calls if k.op in ops} for ledger in (eager, graph))
    return sorted(fused - kept)


def passes(step: Step) -> bool:
    """Return whether it only names what is there: a view, or a part of a tuple."""
    views = step.aliases and not step.computes and not step.writes
    return bool(step.operands) and bool(step.op == "getitem" or views)


def read_of(
    step: Step, before: Program, after: Program, outputs: list[Value], is_placed: bool
) -> tuple[str, str, str, list[Value], int | None]:
    """Return the formats of a step's inputs, compute and outputs; what it reads; how often it multiplies. is_placed: a
    goal has chosen formats, also of what makes the inputs.
    """
    known = before.steps.get(step.id, step)
    pairs = zip(known.operands, step.operands, strict=True)
    inputs = [came_in(*pair, before, after, is_placed) for pair in pairs if pair[0].value in before.values]
    read = [after.values[o.value] for o in step.operands]
    computes = floating_formats(read) if step.given == known.given else "fp32"  # the call was given dtype=fp32
    done = step_multiplications(step, read, outputs)
    return floating_formats(inputs), computes, floating_formats(outputs[:1]), read, done


def came_in(old: Operand, new: Operand, before: Program, after: Program, is_placed: bool) -> Value:
    """Return what an operand is, old before the passes and new after them, before it is cast for its step."""
    cast = after.steps.get(new.value)
    if is_placed and cast is not None and cast.is_cast and new.value not in before.steps:
        return after.values[cast.operands[0].value] if cast.operands[0].name != RESULT else cast.value
    return after.values[new.value] if is_placed and new.value in before.values else before.values[old.value]


PLACED = "placed"
"""The action of a call whose format a goal chose."""


class _Walker:
    def __init__(self, ledger: Ledger, graph: CompiledGraph, before: Program, after: Program) -> None:
        self.ledger, self.graph, self.before, self.after = ledger, graph, before, after
        placed = graph.placement.calls if graph.placement is not None else ()
        self.raised = {call.step: call for call in placed if call.chosen is not call.formats[0]}
        self.inputs = {v.id for v in before.body.parameters}
        self.seen: set[tuple[int, str]] = set()
        self.read: set[int] = set()
        self.parts = parts_of(before)
        self.is_placed, self.returned = bool(placed), set(after.body.returns)
        functions = (step for step in after.steps.values() if step.op == "higher_order.autograd_function_apply")
        self.backward = {s.id for step in functions for block in step.blocks[1:] for _, s in block.walk()}

    def run(self) -> None:
        """Add every call, in order; what only moves or shapes is passed by, as in a recording."""
        for number, note in self.graph.boundaries.items():  # those that have moved since, too
            self.ledger.count_match(json.loads(note).get("label", ""), self.before.steps[number].site.module_path)
        for step in self.after.steps.values():
            known = self.before.steps.get(step.id)
            if step.id in self.graph.boundaries:
                self._at_boundary(step, json.loads(self.graph.boundaries[step.id]))
            elif known is None and step.operands and step.operands[0].name == RESULT:
                self._cast_of_result(step)
            elif known is None and self.is_placed and step.is_cast and step.id in self.returned:
                self._cast_returned(step)
            is_call = known is not None and not known.is_cast and not step.blocks and step.operands
            if known is None or not is_call or step.op.startswith("prim."):  # that asks about a tensor, or an object
                continue
            if not passes(step) or self._plan(known)[0].rules:
                self._call(known, step)

    def _call(self, known: Step, step: Step) -> None:
        plan, policy = self._plan(known)
        for decided in plan.rules:
            self.ledger.count_match(decided.label, known.site.module_path)
        outputs = self.parts.get(step.id, [step.value])
        inputs, computes, result, read, done = read_of(step, self.before, self.after, outputs, self.is_placed)
        action, reason = self._why(step, plan.rule)
        about = action or "no rule", reason or "follows input dtype", policy
        kind = CallKind(known.op, *step.site.at, inputs, computes, result, *about, self._direction(step))
        self.ledger.count_call(kind, sum(v.bytes for v in read) + step.value.bytes, known.number, done)
        for old, new in zip(known.operands, step.operands, strict=True):
            cast = self.after.steps.get(new.value)
            is_new = old.value != new.value and new.value not in self.before.steps
            came = came_in(old, new, self.before, self.after, self.is_placed)
            if cast is not None and is_new and cast.value.type != came.type:
                self._cast(known, plan, policy, old.name, came, cast)

    def _direction(self, step: Step) -> str:
        return "backward" if step.id in self.backward else "forward"

    def _why(self, step: Step, rule: Rule | None) -> tuple[str, str]:
        """Return the action and the reason of a call: its rule's, or the goal's where that chose another format."""
        placed = self.raised.get(step.id)
        if placed is not None:
            instead = f"; the policy says {rule.action}" if rule else ""
            return (
                PLACED,
                f"goal {self.graph.goal}: {placed.chosen} costs least here, with the casts around it{instead}",
            )
        return (str(rule.action), rule.reason or str(rule)) if rule else ("", "")

    def _cast_of_result(self, cast: Step) -> None:
        """Add a cast that follows a call, as a rule about its result asks."""
        maker = self.before.steps[cast.operands[0].value]
        if maker.op == "getitem":
            maker = self.before.steps[maker.operands[0].value]
        plan, policy = self._plan(maker)
        source, facts = self.after.values[cast.operands[0].value], {"kind": "activation", "number": maker.number}
        self._add(maker.op, RESULT, maker.site, plan.rule_about(RESULT), source, cast, policy=policy, **facts)

    def _cast_returned(self, cast: Step) -> None:
        """Add a cast to the policy's format of what the graph returns, where a goal has computed it in another."""
        maker, source = self.before.steps[cast.operands[0].value], self.after.values[cast.operands[0].value]
        reason = f"goal {self.graph.goal}: it is returned in the format that the policy gives it"
        facts = {"kind": "activation", "number": maker.number, "action": PLACED, "reason": reason}
        self._add(maker.op, "returned", maker.site, None, source, cast, policy=self._plan(maker)[1], **facts)

    def _at_boundary(self, step: Step, facts: Mapping[str, str]) -> None:
        """Add a cast that the graph was captured with: a pin, or a rule about a module's call or a part of an op's."""
        source = self.after.values[step.operands[0].value]
        words = {name: facts.get(name, "") for name in ("action", "rule", "reason", "source", "policy")}
        self._add(facts["op"], facts["argument"], step.site, None, source, step, **words)

    def _add(
        self, op: str, argument: str, site: Site, rule: Rule | None, source: Value, cast: Step, /, **facts: Any
    ) -> None:
        """Add a cast of this value, as the ledger has it; facts: what is not read off it."""
        kind = "weight" if source.weight else "input" if source.id in self.inputs else "activation"
        known = {"src": source.type, "dst": cast.value.type, "elements": source.elements, "kind": kind}
        known |= {"moved_bytes": source.bytes + cast.value.bytes, "how": "copied", "direction": self._direction(cast)}
        self.ledger.add(Cast.of(op, argument, site, rule, **{**known, **facts}))

    def _plan(self, step: Step) -> tuple[Plan, str]:
        """Return what was decided about a call, by the one function that decides."""
        if step.region is None or not self.before.regions[step.region].facts.enabled:
            return Plan(()), ""
        region = self.before.regions[step.region]
        policy = self.graph.policies[region.policy]
        return decide(call_of(self.before, step), policy, region.facts), policy.name

    def _cast(self, step: Step, plan: Plan, policy: str, argument: str, source: Value, cast: Step) -> None:
        shared = cast.id in self.read
        repeated = not shared and (source.id, cast.value.type) in self.seen
        self.read.add(cast.id)
        self.seen.add((source.id, cast.value.type))
        rule = plan.rule_for(argument)
        action, reason = self._why(step, rule)
        facts = {"policy": policy, "repeated": repeated, "action": action, "reason": reason, "number": step.number}
        facts |= {"moved_bytes": 0, "how": "shared"} if shared else {}
        self._add(step.op, argument, step.site, rule, source, cast, **facts)
