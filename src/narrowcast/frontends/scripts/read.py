"""read: the graph of a script as a program, with the formats that are known before it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

from narrowcast.core.decide import Plan, Region, decide
from narrowcast.core.ledger import HidingBlock
from narrowcast.core.ops import named
from narrowcast.core.policy import MODULE_CALL_OP, RESULT, Kind, Policy
from narrowcast.core.refusals import origins
from narrowcast.errors import RefusedError
from narrowcast.formats import parse_format
from narrowcast.frontends.scripts import calls
from narrowcast.frontends.scripts.callers import site_in
from narrowcast.frontends.scripts.memory import Memory
from narrowcast.frontends.scripts.region_facts import DTYPES
from narrowcast.frontends.scripts.scopes import Item, Scope, Scopes, Section, passage, policy_of
from narrowcast.programs.passes import COMPOSITE, call_of
from narrowcast.programs.program import TENSOR, Block, OpenedRegion, Operand, Program, Step, Value
from narrowcast.runtime.torch_bridge import FORMATS, OpFacts, is_random, is_weight, short_type
from narrowcast.runtime.torch_surface.dispatch import op_name, schema_of

_ANY_SHAPE = ("?",)
OTHER = "other"
"""The type of a tensor without a floating format, and of what is no tensor.

`bf16` says: bf16, unless the value is one that no cast of the region would touch (fp64, integers, another device):
casts look for that when they run. Where nothing is known the type is `tensor`.
"""


@dataclass(slots=True)
class ReadScript:
    """Reads one graph: its program, and what that was read from.

    attributes: from a value that is read off the module to the tensor that it is now.
    ids: of the script's values. items: the call of each step. operands: for each step the script's values that its
    operands are, with the position among the call's inputs and, for an element of a list, in the list. scopes: of each
    region. policies: by digest. sessions: of each the first step of the block in which it begins. hidden: calls in
    blocks in which the policy around does not rule.
    """

    attributes: Callable[[Any], Any]
    program: Program = field(init=False)
    types: dict[int, str] = field(default_factory=dict)
    known: dict[int, torch.Tensor] = field(default_factory=dict)
    ids: dict[int, int] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)
    items: dict[int, Item] = field(default_factory=dict)
    operands: dict[int, list[calls.Source]] = field(default_factory=dict)
    opened: list[OpenedRegion] = field(default_factory=list)
    scopes: list[Scope] = field(default_factory=list)
    numbers: dict[tuple[Scope, tuple[str, ...]], int] = field(default_factory=dict)
    policies: dict[str, Policy] = field(default_factory=dict)
    sessions: dict[int, int] = field(default_factory=dict)
    hidden: dict[HidingBlock, int] = field(default_factory=dict)
    memory: Memory = field(init=False)
    parts: dict[str, str] = field(default_factory=dict)  # of the call looked at: types of results that rules are about

    def read(self, section: Section, name: str) -> ReadScript:
        """Read a graph."""
        self._propagate(section)
        self.memory = Memory(self.ids, self.known)
        self.program = Program(name, self._block(section, "main"), tuple(self.opened))
        return self

    # -- regions

    def _regions(self, scopes: Scopes) -> tuple[int, ...]:
        """Return the numbers of the regions that hold, the innermost first: several for several device types."""
        several = ("device",) if len(scopes) > 1 else ()
        return tuple(self._number(scope, several) for scope in reversed(scopes.values()))

    def _number(self, scope: Scope, several: tuple[str, ...]) -> int:
        if (scope, several) not in self.numbers:
            policy = policy_of(scope)
            digest = policy.digest[:16]
            self.policies[digest] = policy
            low = scope.low if isinstance(scope.low, torch.dtype) else torch.get_autocast_dtype(scope.device_type)
            facts = Region(scope.device_type, FORMATS[low], scope.enabled is not False, scope.cached)
            opened = OpenedRegion(facts, digest, scope.session, scope.open + several)
            if opened in self.opened and scope.open:  # each instance has facts of its own
                opened = replace(opened, open=(*opened.open, f"instance{len(self.scopes)}"))
            if opened not in self.opened:
                self.opened.append(opened)
                self.scopes.append(scope)
            self.numbers[scope, several] = self.opened.index(opened)
        return self.numbers[scope, several]

    # -- formats

    def _propagate(self, section: Section) -> None:
        """Infer the types of all values; loops until nothing changes."""
        for value in section.block.inputs():
            self.types.setdefault(value.unique(), self._type(value))
        for item in section.items:
            if item.node.kind() == "prim::Loop":
                self._propagate_loop(item)
                continue
            for inner in item.blocks:
                self._propagate(inner)
            if item.node.kind() != "prim::If":
                self._propagate_call(item)
                continue
            ends = [list(inner.block.outputs()) for inner in item.blocks]
            for n, output in enumerate(item.node.outputs()):
                self.types[output.unique()] = join(self._type(end[n]) for end in ends)

    def _propagate_loop(self, item: Item) -> None:
        node, (body,) = item.node, item.blocks
        carried = list(node.inputs())[2:]
        inside = list(body.block.inputs())[1:]
        types = [self._type(value) for value in carried]
        while True:
            for value, known in zip(inside, types, strict=True):
                self.types[value.unique()] = known
            self.types.setdefault(next(iter(body.block.inputs())).unique(), OTHER)
            self._propagate(body)
            after = [join((t, self._type(end))) for t, end in zip(types, list(body.block.outputs())[1:], strict=True)]
            if after == types:
                break
            types = after
        for output, known in zip(node.outputs(), types, strict=True):
            self.types[output.unique()] = known

    def _propagate_call(self, item: Item) -> None:
        node = item.node
        outputs = list(node.outputs())
        facts = calls.facts_of(node)
        if node.kind() in ("prim::GetAttr", "prim::Constant", "prim::unchecked_cast") and self._look_up(outputs[0]):
            return
        if facts is None:
            for output in outputs:
                self.types[output.unique()] = self._type_without_schema(node, output)
            return
        self.parts = {}
        known = self._result(item, facts)
        for n, output in enumerate(outputs):
            now = self.parts.get(str(n), known) if len(outputs) > 1 else known
            self.types[output.unique()] = now if calls.holds_tensors(output) else OTHER

    def _look_up(self, value: Any) -> bool:
        """Return whether a value is a tensor that is there before the script runs."""
        tensor = value.toIValue() if value.node().kind() == "prim::Constant" else self.attributes(value)
        if not isinstance(tensor, torch.Tensor):
            return False
        self.known[value.unique()] = tensor
        self.types[value.unique()] = FORMATS[tensor.dtype].name if tensor.dtype in FORMATS else OTHER
        return True

    def _type_without_schema(self, node: Any, output: Any) -> str:
        if not calls.holds_tensors(output):
            return OTHER
        if node.kind() in ("prim::ListConstruct", "prim::TupleConstruct", "prim::ListUnpack", "prim::unchecked_cast"):
            return join(self._type(v) for v in node.inputs() if calls.holds_tensors(v)) if node.inputsSize() else TENSOR
        return TENSOR

    def _result(self, item: Item, facts: OpFacts) -> str:
        node = item.node
        name = op_name(facts.op)
        read = _sources(item, facts)
        given = [self._type(s.value) for s in read]
        if name in named("result.counts"):
            return OTHER
        dtype = calls.dtype_argument(node, facts)
        if isinstance(dtype, int):
            return FORMATS[DTYPES[dtype]].name if dtype in DTYPES else OTHER
        if dtype is not None:
            return TENSOR
        for number in self._regions(item.scopes):
            plan = self._plan(item, facts, read, number)
            passed = passage(node)
            part = next((result.part for result in plan.results if result.part), "")
            if part and passed is None and calls.is_tensor_list(next(iter(node.outputs()))):
                rule, advice = plan.rule_for(f"{RESULT}.{part}"), "Name the whole result, or what reads that part."
                asked, found = f"a rule about {RESULT}.{part} of {facts.id}", "a script, in which that returns a list"
                raise RefusedError(asked, found, origins(site_in(item.caller, node), rule), advice)
            if passed is not None:
                return self._after_passage(plan, passed, self.opened[number], given)
            after = self._after(plan, self.opened[number], given)
            if after is not None:
                return after
        if name in ("float", "double", "half", "bfloat16"):
            return parse_format(name).name
        return promoted(given) if name in named("result.keeps") else TENSOR

    def _plan(self, item: Item, facts: OpFacts, read: list[calls.Source], number: int) -> Plan:
        """Return the plan of a call; its operands are numbered by themselves, as there is no program yet."""
        step = self._step_of(item, facts, read, range(len(read)), (number,))
        opened = self.opened[number]
        values = [self._looked(s.value, n) for n, s in enumerate(read)]
        program: Any = SimpleNamespace(regions=self.opened, values=values)  # all that is read of it
        return decide(call_of(program, step), self.policies[opened.policy], opened.facts)

    def _after(self, plan: Plan, opened: OpenedRegion, given: list[str]) -> str | None:
        """Return the format of a decided call's result; None if the decision leaves it open."""
        if not opened.facts.enabled:
            return None
        self.parts = {r.part: TENSOR if opened.open or r.format is None else r.format.name for r in plan.results}
        whole = self.parts.get("")
        if whole is not None:
            return whole
        if plan.rule is None:
            return None
        kind = plan.rule.action.kind
        if opened.open and kind is not Kind.FOLLOW:
            return TENSOR
        if any(not rule.is_about_result for _, rule in plan.argument_rules):
            return plan.computes_in.name if plan.computes_in is not None else TENSOR
        if kind is Kind.LOWER:
            return opened.facts.low.name
        if kind is Kind.FULL or plan.set_dtype or plan.append_dtype:
            return "fp32"
        if kind is Kind.TO and plan.rule.action.format is not None:
            return plan.rule.action.format.name
        if plan.undecided is not None:
            return TENSOR
        if kind is Kind.PROMOTE:
            return promoted(p.name if p is not None else t for p, t in zip(plan.formats, given, strict=True))
        return None

    def _after_passage(self, plan: Plan, passed: Mapping[str, str], opened: OpenedRegion, given: list[str]) -> str:
        if "argument" in passed:
            (dst,) = plan.formats
            after = given[0] if dst is None else dst.name
        else:
            wanted = next((r for r in reversed(plan.results) if r.part in ("", *passed["result"].split())), None)
            after = given[-1] if wanted is None else TENSOR if wanted.format is None else wanted.format.name
        return TENSOR if opened.open else after

    def _type(self, value: Any) -> str:
        return self.types.get(value.unique(), TENSOR if calls.holds_tensors(value) else OTHER)

    # -- the program

    def _block(self, section: Section, name: str) -> Block:
        parameters = tuple(self._value(v) for v in section.block.inputs())
        steps: list[Step] = []
        for item in section.items:
            steps += self._steps(item)
        for session in (*section.sessions, *([0] if name == "main" else [])):
            if steps:
                self.sessions[session] = steps[0].id
        returns = tuple(self.ids[v.unique()] for v in section.block.outputs() if v.unique() in self.ids)
        return Block(name, parameters, tuple(steps), returns)

    def _value(self, value: Any) -> Value:
        model_value = self._looked(value, len(self.values))
        self.ids[value.unique()] = model_value.id
        self.values.append(model_value)
        return model_value

    def _looked(self, value: Any, number: int) -> Value:
        if calls.is_optional_tensor(value) or calls.is_tensor_list(value):
            return Value(number, TENSOR, _ANY_SHAPE, "", True)
        if not calls.is_tensor(value):
            return Value(number, "tuple" if calls.holds_tensors(value) else OTHER, gradient=calls.holds_tensors(value))
        known = self._type(value)
        tensor = self.known.get(value.unique())
        if tensor is None:
            return Value(number, known, _ANY_SHAPE, "", known != OTHER)
        return Value(number, short_type(tensor.dtype), tuple(tensor.shape), "", tensor.requires_grad, is_weight(tensor))

    def _step_of(
        self, item: Item, facts: OpFacts, read: list[calls.Source], numbers: Sequence[int], regions: tuple[int, ...]
    ) -> Step:
        """Return a call of an op as a step. numbers: of what it reads, as found."""
        node = item.node
        written = facts.written
        names = [schema_of(facts.op).arguments[s.position].name for s in read]
        operands = tuple(Operand(n, i, n in written) for n, i in zip(names, numbers, strict=True))
        given = frozenset(["dtype"]) if calls.dtype_argument(node, facts) is not None else frozenset()
        site = site_in(item.caller, node)
        passed = passage(node)
        if passed is not None:
            names = [name for name, _ in item.came] + [passed.get("argument", "")]
            operands = tuple(Operand(n, i) for n, i in zip(names, numbers, strict=True))
            what = "argument" if "argument" in passed else f"result {passed['result']}"
            return Step(
                Value(-1, OTHER), MODULE_CALL_OP, operands, what, computes=True,
                region=regions[0] if regions else None, grad_mode=item.grad_mode, site=site, others=regions[1:],
            )  # fmt: skip
        device_type = calls.device_of_regions(item.scopes.values())
        policies = [self.policies[self.opened[number].policy] for number in regions]
        op = calls.decided_as(node, facts, device_type, policies, lambda: site)
        is_itself = op == facts.id or calls.decided_as_itself(facts.id, device_type)
        return Step(
            Value(-1, OTHER), op, operands, "" if is_itself else COMPOSITE, given, facts.computes,
            regions[0] if regions else None, item.grad_mode,
            effects=("random",) if is_random(facts.op) else (), site=site, others=regions[1:], number=item.number,
        )  # fmt: skip

    def _id(self, value: Any) -> int:
        if value.unique() not in self.ids:
            self._value(value)
        return self.ids[value.unique()]

    def _steps(self, item: Item) -> list[Step]:
        """Return the steps of a node: one for the call, and one for each result if there are several."""
        node, outputs = item.node, list(item.node.outputs())
        blocks = tuple(self._block(inner, f"block{n}") for n, inner in enumerate(item.blocks))
        facts = calls.facts_of(node)
        if facts is not None:
            read = _sources(item, facts)
            step = self._step_of(item, facts, read, [self._id(s.value) for s in read], self._regions(item.scopes))
            for block in {s.hiding for s in item.scopes.values() if s.hiding is not None and facts.computes}:
                self.hidden[block] = self.hidden.get(block, 0) + 1
        else:  # what its blocks read besides has no position
            read = [calls.Source(n, None, v) for n, v in enumerate(node.inputs()) if v.unique() in self.ids]
            step = self._other(item, blocks)
        if len(outputs) == 1:
            value = self._value(outputs[0])
        else:
            value = Value(len(self.values), "tuple" if outputs else OTHER)
            self.values.append(value)
        may_share = self.memory.may_share(node, facts, step, blocks)
        aliases = tuple(n for n, operand in enumerate(step.operands) if may_share(operand))
        self.items[value.id] = item
        self.operands[value.id] = read
        steps = [replace(step, value=value, blocks=blocks, aliases=aliases)]
        if len(outputs) != 1:
            for n, output in enumerate(outputs):
                element = self._value(output)
                steps.append(Step(element, "getitem", (Operand("a0", value.id),), str(n), aliases=(0,)))
        return steps

    def _other(self, item: Item, blocks: tuple[Block, ...]) -> Step:
        """Return the step of what is no op of a library: control flow, attributes, lists, calls into Python."""
        node = item.node
        numbers = [self.ids[v.unique()] for v in node.inputs() if v.unique() in self.ids]
        inner = [o for b in blocks for _, s in b.walk() for o in s.operands]
        within = [*blocks, *[inner for b in blocks for _, s in b.walk() for inner in s.blocks]]
        made_inside = {s.id for b in within for s in b.steps} | {v.id for b in within for v in b.parameters}
        captured = dict.fromkeys(o.value for o in inner if o.value not in made_inside and o.value not in numbers)
        written = self.memory.written_in(item, blocks)
        operands = tuple(Operand(f"a{n}", v, v in written) for n, v in enumerate([*numbers, *captured]))
        name = node.kind().replace("::", ".")
        site = site_in(item.caller, node)
        effects = () if calls.changes_nothing(node) else ("order",)
        return Step(Value(-1, OTHER), name, operands, grad_mode=item.grad_mode, effects=effects, site=site)


def _sources(item: Item, facts: OpFacts) -> list[calls.Source]:
    """Return what a call reads; at a module's result, the module's arguments first, whose formats may matter."""
    return [calls.Source(0, None, value) for _, value in item.came] + calls.sources(item.node, facts)


def join(types: Iterable[str]) -> str:
    """Return what is known of a value that may be any of these."""
    distinct = set(types)
    return distinct.pop() if len(distinct) == 1 else TENSOR


def promoted(types: Iterable[str]) -> str:
    """Return the type of an op's result that keeps the format of its floating operands.

    Formats that differ may be promoted or not: a tensor without dimensions does not count.
    """
    return join(t for t in types if t != OTHER)
