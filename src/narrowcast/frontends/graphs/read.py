"""read: a graph of ATen calls as a program. Forward graphs, joint graphs and exported ones alike."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from narrowcast.core.ledger import HidingBlock
from narrowcast.core.policy import NOWHERE, Policy, Site
from narrowcast.frontends.graphs.levels import Ambient, Level, Levels
from narrowcast.programs.program import CAST, ENTER, EXIT, Block, Memories, Operand, Program, Step, Value, Writes
from narrowcast.runtime.regions.marks import BOUNDARY, enter_marked, exit_marked, find_marked
from narrowcast.runtime.sites.graph_nodes import NO_OUTSIDE, node_site
from narrowcast.runtime.sites.numbering import Numbering
from narrowcast.runtime.torch_bridge import is_random, is_weight, op_facts, short_type
from narrowcast.runtime.torch_bridge.ops import alias_names
from narrowcast.runtime.torch_surface import dispatch
from narrowcast.runtime.torch_surface.autograd import SET_GRAD_ENABLED
from narrowcast.runtime.torch_surface.modules import STACK
from narrowcast.runtime.torch_surface.state import ENTER_AUTOCAST, EXIT_AUTOCAST

_TO = torch.ops.aten.to.dtype
_CASTS = (dispatch.TO_COPY, _TO, torch.ops.prims.convert_element_type.default)

Flags = Mapping[Node, tuple[bool, bool]]


@dataclass(slots=True)
class ReadGraph:
    """A program, and what it was read from.

    nodes: by step id, and ids by node. modules: the graph module of each block, in the order in which they were read.
    policies: by digest. boundaries: what is noted of casts at the boundaries of modules, by step id, as JSON.
    hidden: calls in blocks in which the policy around does not rule.
    """

    program: Program
    nodes: dict[int, Node]
    ids: dict[Node, int]
    modules: list[GraphModule]
    policies: dict[str, Policy]
    boundaries: dict[int, str] = field(default_factory=dict)
    hidden: dict[HidingBlock, int] = field(default_factory=dict)


def read_graph(
    graph: GraphModule,
    name: str,
    ambient: Ambient,
    flags: Flags | None = None,
    grad_mode: bool = True,
    joint: Mapping[Node, str] | None = None,
    places: Mapping[Node, Site] | None = None,
) -> ReadGraph:
    """Return the graph as a program; it is not changed.

    flags: of placeholders, whether they require grad and whether they are weights. joint: directions of nodes other
    than forward. places: of nodes that do not note it, where they are.
    """
    return _GraphReader(name, ambient, flags or {}, grad_mode, joint or {}, places or {}).run(graph)


class _GraphReader:
    def __init__(
        self,
        name: str,
        ambient: Ambient,
        flags: Flags,
        grad_mode: bool,
        joint: Mapping[Node, str],
        places: Mapping[Node, Site],
    ) -> None:
        self.name = name
        self.flags = flags
        self.joint, self.places = joint, places
        self.outside = ambient.outside
        self.numbering = Numbering(ambient.outside.begins)
        self.grad_mode = grad_mode
        self.levels = Levels(ambient.regions)
        self.boundaries: dict[int, str] = {}
        self.nodes: dict[int, Node] = {}
        self.ids: dict[Node, int] = {}
        self.values: dict[int, Value] = {}
        self.modules: list[GraphModule] = []
        self.memories = Memories()
        self.taken: set[int] = set()  # memory that an in-place op made part of autograd
        self.sites: dict[tuple[Any, ...], Site] = {}
        self.hidden: dict[HidingBlock, int] = {}

    def run(self, graph: GraphModule) -> ReadGraph:
        body = self._block(graph, "main")
        program, policies = Program(self.name, body, tuple(self.levels.numbers)), self.levels.policies
        return ReadGraph(program, self.nodes, self.ids, self.modules, policies, self.boundaries, self.hidden)

    # -- blocks and steps

    def _block(self, graph: GraphModule, name: str) -> Block:
        self.modules.append(graph)
        parameters: list[Value] = []
        steps: list[Step] = []
        returns: tuple[int, ...] = ()
        grad_before, regions_before = self.grad_mode, len(self.levels.stack)
        for node in graph.graph.nodes:
            if node.op == "placeholder":
                requires_grad, weight = self.flags.get(node, (False, False))
                parameters.append(self._value(node, requires_grad, weight))
            elif node.op == "output":
                returns = tuple(self.ids[n] for n in node.all_input_nodes if n in self.ids)
            elif node.op == "get_attr" and isinstance(_attribute(graph, node), GraphModule):
                continue
            else:
                steps.append(self._step(graph, node))
        self.grad_mode = grad_before
        del self.levels.stack[regions_before:]
        block = Block(name, tuple(parameters), tuple(steps), returns)
        return _with_gradients(block, self.taken) if self.taken else block

    def _value(self, node: Node, gradient: bool, weight: bool = False) -> Value:
        number = len(self.ids)
        self.ids[node] = number
        self.nodes[number] = node
        example = node.meta.get("val", node.meta.get("example_value"))
        if isinstance(example, torch.Tensor):
            shape = tuple(int(s) if isinstance(s, int) else str(s) for s in example.shape)
            gradient = gradient and (example.is_floating_point() or example.is_complex())
            value = Value(number, short_type(example.dtype), shape, example.device.type, gradient, weight)
        else:
            value = Value(number, _type_of(example), gradient=gradient and isinstance(example, (tuple, list)))
        self.values[number] = value
        return value

    def _step(self, graph: GraphModule, node: Node) -> Step:
        target = node.target
        if target is ENTER_AUTOCAST or target is enter_marked:
            return self._enter(node)
        if target is EXIT_AUTOCAST or target is exit_marked:
            self.levels.leave()
            regions = tuple(Operand("region", self.ids[n]) for n in node.all_input_nodes)
            return Step(self._value(node, False), EXIT, regions, effects=("order",))
        if target is SET_GRAD_ENABLED:
            self.grad_mode = bool(node.args[0])
            return Step(self._value(node, False), "set_grad_enabled", constants=str(node.args[0]), effects=("order",))
        if isinstance(target, dispatch.OpOverload):
            return self._call(node, target)
        return self._other(graph, node)

    def _enter(self, node: Node) -> Step:
        if node.target is enter_marked:
            self.levels.open(find_marked(str(node.args[0])).prepared, partial(self._site_from, node))
        else:
            self._open_native(node)
        constants = ", ".join(map(str, node.args))
        return Step(self._value(node, False), ENTER, constants=constants, effects=("order",))

    def _open_native(self, node: Node) -> None:
        device, dtype, enabled, cached = (*node.args, None, True, None)[:4]
        site = partial(self._site_from, node)
        self.levels.open_native(str(device), dtype, bool(enabled), cached is not False, site)

    def _call(self, node: Node, op: dispatch.OpOverload) -> Step:
        facts = op_facts(op)
        written = facts.written
        operands = tuple(Operand(name, self.ids[n], name in written) for name, n in operands_of(node))
        inputs = [self.values[o.value] for o in operands]
        gradient = self.grad_mode and op is not torch.ops.aten.detach.default and any(map(self._has_gradient, inputs))
        value = self._value(node, gradient)
        aliases = alias_names(op)
        given, constants = _constants(node, op)
        shared = tuple(n for n, o in enumerate(operands) if aliases is None or o.name in aliases)
        for n in shared:
            self._join(value.id, operands[n].value)
        if op in _CASTS and _is_cast(value, inputs, given, op, node):
            note = (node.meta.get("custom") or {}).get(BOUNDARY)
            if note is not None:
                self.boundaries[value.id] = note
            cast = Step(value, CAST, (Operand("self", operands[0].value),))
            return self._placed(node, cast)  # the user's own: no region's weight cache keeps it
        hiding = self.levels.stack[-1].hiding
        if hiding is not None and facts.computes:
            self.hidden[hiding] = self.hidden.get(hiding, 0) + 1
        if gradient and any(o.written for o in operands):
            self.taken.update(self.memories.of(o.value) for o in operands if o.written)
        region = self.levels.number_for(facts.id, [v.device for v in inputs if v.shape is not None])
        counts = self.joint.get(node, "forward") == "forward" and self.levels.is_on(region)
        effects = ("random",) if is_random(op) else ()
        known = (value, facts.id, operands, constants, given, facts.computes, region)
        step = Step(*known, aliases=shared, effects=effects)
        number = self.numbering.number(node.meta, facts.id) if counts else 1
        return self._placed(node, step, number)

    def _placed(self, node: Node, step: Step, number: int = 1) -> Step:
        direction, site = self.joint.get(node, "forward"), self.places.get(node) or self._site(node)
        return replace(step, grad_mode=self.grad_mode, direction=direction, site=site, number=number)

    # -- gradients that in-place ops bring to what shares memory with their target

    def _join(self, value: int, source: int) -> None:
        was_taken = self.memories.of(value) in self.taken
        self.memories.join(value, source)
        if was_taken:
            self.taken.add(self.memories.of(value))

    def _has_gradient(self, value: Value) -> bool:
        return value.gradient or (bool(self.taken) and self.memories.of(value.id) in self.taken)

    def _other(self, graph: GraphModule, node: Node) -> Step:
        """Return the step of a higher-order op, an attribute, or a Python function."""
        if node.op == "get_attr":
            attribute = _attribute(graph, node)
            requires_grad = isinstance(attribute, torch.Tensor) and attribute.requires_grad
            weight = isinstance(attribute, torch.Tensor) and is_weight(attribute)
            return Step(self._value(node, requires_grad, weight), "attribute", constants=str(node.target))
        bodies = [a for n in node.all_input_nodes if isinstance(a := _attribute(graph, n), GraphModule)]
        blocks = self._blocks(node, bodies)
        pure = node.target in _PURE or getattr(node.target, "__module__", "") in ("_operator", "math")
        writes = not pure and (not blocks or any(s.writes for b in blocks for _, s in b.walk()))
        inputs = [n for n in node.all_input_nodes if n in self.ids]
        operands = tuple(Operand(f"a{k}", self.ids[n], writes) for k, n in enumerate(inputs))
        gradient = self.grad_mode and any(self._has_gradient(self.values[o.value]) for o in operands)
        name = "getitem" if node.target is operator.getitem else _target_name(node)
        number = len(self.ids)
        for operand in operands:
            self._join(number, operand.value)
        constants = str(node.args[1]) if name == "getitem" else ""
        effects, aliases = () if pure else ("order",), tuple(range(len(operands)))
        value = self._value(node, gradient)
        step = Step(value, name, operands, constants, aliases=aliases, effects=effects, blocks=blocks)
        return self._placed(node, step)

    def _blocks(self, node: Node, bodies: list[GraphModule]) -> tuple[Block, ...]:
        name = _target_name(node)
        before, grad_before = len(self.levels.stack), self.grad_mode
        if name.endswith("wrap_with_autocast"):
            self._open_native(node)
        if name.endswith("wrap_with_set_grad_enabled"):
            self.grad_mode = bool(node.args[0])
        blocks = []
        for k, body in enumerate(bodies):
            written_as_backward = name.endswith("autograd_function_apply") and k == 1
            if written_as_backward or name.endswith("flex_attention"):  # eager code has no region in there
                self.levels.stack.append(Level())
                blocks.append(self._block(body, f"body{k}"))
                self.levels.stack.pop()
            else:
                with self.numbering.in_bodies(node.meta, name.rpartition(".")[2]):
                    blocks.append(self._block(body, f"body{k}"))
        del self.levels.stack[before:]
        self.grad_mode = grad_before
        return tuple(blocks)

    def _site(self, node: Node) -> Site:
        trace, stack = node.meta.get("stack_trace"), node.meta.get(STACK)
        if not trace and not stack and self.outside is NO_OUTSIDE:
            return NOWHERE
        key = (trace, tuple(stack) if stack else ())
        site = self.sites.get(key)
        if site is None:
            site = self.sites[key] = node_site(node.meta, self.outside)
        return site

    def _site_from(self, node: Node) -> Site:
        """Return the place of the first node, from this one on, with a place: where regions open, Dynamo notes none."""
        placed = node
        while placed.op != "root" and not placed.meta.get("stack_trace"):
            placed = placed.next
        return self._site(node if placed.op == "root" else placed)


def _with_gradients(block: Block, taken: set[int]) -> Block:
    """Return the block with a gradient flowing through everything that shares memory with an in-place target of one."""
    writes = Writes(block)
    memories = writes.memories(*taken)

    def marked(value: Value) -> Value:
        flows = value.format is not None and not value.gradient and writes.memories(value.id) & memories
        return replace(value, gradient=True) if flows else value

    steps = tuple(replace(step, value=marked(step.value)) for step in block.steps)
    return replace(block, parameters=tuple(map(marked, block.parameters)), steps=steps)


_PURE = (operator.getitem, torch.sym_max, torch.sym_min, torch.sym_not, torch.sym_float, torch.sym_int)


def _attribute(graph: GraphModule, node: Node) -> Any:
    if node.op != "get_attr":
        return None
    attribute: Any = graph
    for part in str(node.target).split("."):
        attribute = getattr(attribute, part, None)
    return attribute


def _target_name(node: Node) -> str:
    target = node.target
    if isinstance(target, dispatch.HigherOrderOperator):
        return f"higher_order.{dispatch.higher_order_name(target)}"
    return str(getattr(target, "__qualname__", target)).replace(" ", "_").replace("(", "[").replace(")", "]")


def _type_of(value: Any) -> str:
    if value is None:
        return "none"
    return "tuple" if isinstance(value, (tuple, list)) else type(value).__name__.lower()


def _constants(node: Node, op: dispatch.OpOverload) -> tuple[frozenset[str], str]:
    """Return names of arguments that were passed and are no tensors, and all of them as text."""
    names = (argument.name for argument in dispatch.schema_of(op).arguments)
    pairs = [*zip(names, node.args, strict=False), *node.kwargs.items()]
    arguments = {name: value for name, value in pairs if not isinstance(value, Node) and value is not None}
    return _MATTERS & arguments.keys(), ", ".join(f"{name}={value}" for name, value in arguments.items())


_MATTERS = frozenset(["dtype"])


def _is_cast(value: Value, inputs: list[Value], given: frozenset[str], op: dispatch.OpOverload, node: Node) -> bool:
    """Return whether a conversion changes the floating format, and nothing else."""
    if len(inputs) != 1 or value.format is None or inputs[0].format is None or value.device != inputs[0].device:
        return False
    if value.format is inputs[0].format:
        return False
    if op is _TO:
        return not any(a is True for a in node.args[2:])
    strided = node.kwargs.get("layout") in (None, torch.strided)
    return strided and set(node.kwargs) <= {"dtype", "layout", "device"} and len(node.args) <= 2


# -- the tensors of a node in the order of its op's schema -------------------------------------------------------------


def operands_of(node: Node) -> list[tuple[str, Node]]:
    """Return argument name and node of every operand, lists element by element."""
    operands: list[tuple[str, Node]] = []
    names = _names(node)
    for site, value in _sites(node):
        name = names[site] if isinstance(site, int) else site
        map_arg(value, lambda n, name=name: operands.append((name, n)) or n)  # type: ignore[misc, func-returns-value]
    return operands


def replace_operands(node: Node, new: list[Node]) -> None:
    """Let the node read these nodes, in the order of `operands_of`."""
    following = iter(new)
    args, kwargs = list(node.args), dict(node.kwargs)
    for site, value in _sites(node):
        changed: Any = map_arg(value, lambda _: next(following))
        if isinstance(site, int):
            args[site] = changed
        else:
            kwargs[site] = changed
    node.args, node.kwargs = tuple(args), kwargs


def _names(node: Node) -> list[str]:
    """Return the names of an op's arguments; of what is no op, those of keyword arguments."""
    if not isinstance(node.target, dispatch.OpOverload):
        return list(node.kwargs)
    return [argument.name for argument in dispatch.schema_of(node.target).arguments]


def _sites(node: Node) -> Iterator[tuple[int | str, Any]]:
    """Return positional arguments, then those given by name, in the order of the schema."""
    yield from enumerate(node.args)
    for name in _names(node):
        if name in node.kwargs:
            yield name, node.kwargs[name]
