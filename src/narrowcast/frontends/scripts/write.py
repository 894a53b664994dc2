"""write: the casts of a program go into the graph of the script that it was read from.

A cast whose formats are known is one op that takes the region's flags, whether they are known or not, and reads the
tensor's device: `aten::_autocast_to_reduced_precision` or `aten::_autocast_to_full_precision`. Every other one is plain
TorchScript (runtime.py). Nothing in the graph needs Narrowcast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from narrowcast.core.refusals import origins
from narrowcast.errors import RefusedError
from narrowcast.frontends.scripts import runtime
from narrowcast.frontends.scripts.calls import facts_of, is_optional_tensor, is_tensor, is_tensor_list
from narrowcast.frontends.scripts.memory import Leaves
from narrowcast.frontends.scripts.read import ReadScript
from narrowcast.frontends.scripts.region_facts import number_of
from narrowcast.frontends.scripts.scopes import ANYWHERE, Scope, Section, value_of
from narrowcast.programs.passes import cast_inside, hoist_casts
from narrowcast.programs.program import BACK, CAST, EXACTLY, TENSOR, TOGETHER, WEIGHT, Block, Edit, Program, Step
from narrowcast.runtime.torch_bridge import DTYPES
from narrowcast.runtime.torch_surface import jit

Kept = Sequence[tuple[Any, Any]]
"""Weights and their casts, as values of a script."""
CastBefore = Callable[[Any, Any, Scope], Any]
"""From a node, a value that may be a weight and a region to its cast before the node; None if the region keeps none."""


class Writer:
    """Brings the graph of a script to what its program says after the passes.

    A weight is cast once in a region. Where the script takes one out of a list, or gives it to a fork, only the running
    script knows whether it was cast before: there it looks into a list of those that were.
    """

    def __init__(self, graph: Any, section: Section, reading: ReadScript, kept: Kept) -> None:
        """kept: weights that are cast already."""
        self.kept = kept
        self.weights: set[int] = set()  # casts of what may be weights
        self.searched: set[int] = set()  # sessions in which the running script looks for them
        self.caches: dict[int, tuple[Any, Any]] = {}
        self.graph = graph
        self.section = section
        self.reading = reading
        self.program = reading.program
        self.before = reading.program.steps
        self.positions: dict[int, list[int]] = {}  # of each section: which of its outputs the program has
        self.made: dict[int, Any] = {}  # script values of the program's new steps
        self.read = {
            operand.value: source.value
            for step, sources in reading.operands.items()
            for operand, source in zip(self.before[step].operands, sources, strict=False)
        }
        self._look(section)

    def hoist(self, program: Program) -> list[Edit]:
        """Return the edits of an assigned program that cast a weight before all its uses, or search it at each."""
        self._find(program)
        written: set[int] = set()
        edits = hoist_casts(program, self._sessions(), written)
        left = {self._scope(program.steps[cast]).session for cast in written & self.weights}
        self.searched |= left
        return hoist_casts(program, self._sessions()) if left else edits

    def _sessions(self) -> dict[int, int]:
        return {session: step for session, step in self.reading.sessions.items() if session not in self.searched}

    def _find(self, program: Program) -> None:
        """Find the casts of what may be weights, and the sessions in which the running script looks for them."""
        self.program = program
        leaves, inner = Leaves(self.graph), cast_inside(program)
        for step in program.casts():
            scope, number = self._scope(step), step.operands[0].value
            first = self._first_cast(step)
            if first is not None:
                number = first.operands[0].value
            value = self.read.get(number)
            if value is None or not scope.cached or not self._is_low(step) or step.id in inner:
                continue
            known = program.values[number]
            if not known.weight:
                if known.type not in (TENSOR, "fp32") or not (is_tensor(value) and leaves.may_be(value)):
                    continue
            self.weights.add(step.id)
            if first or scope.open or not (known.weight or (leaves.is_given(value) and not self.kept)):
                self.searched.add(scope.session)
        for item in self.section.walk():
            if item.node.kind() == "prim::fork":
                self.searched |= {scope.session for scope in item.scopes.values() if scope.cached}

    def _first_cast(self, step: Step) -> Step | None:
        """Return the cast by another device's region that comes before a cast: of the two one at most casts."""
        first = self.program.steps.get(step.operands[0].value)
        if first is None or first.op != CAST or self._scope(first).device_type == self._scope(step).device_type:
            return None
        return first

    def write(self, program: Program) -> None:
        """Change the graph."""
        self.program = program
        self._block(program.body, self.section)

    def cast_before(self, node: Any, value: Any, scope: Scope) -> Any:
        """Cast as CastBefore describes."""
        if self._cache_of(scope) is None:
            return None
        self.graph.setInsertPoint(node)
        return self._cast_once(value, scope)

    def _cache_of(self, scope: Scope) -> tuple[Any, Any] | None:
        """Return the lists of weights that were cast, and of their casts, made where the outermost region begins."""
        if scope.session not in self.searched or not scope.cached:
            return None
        if scope.session not in self.caches:
            item = self.reading.items.get(self.reading.sessions.get(scope.session, -1))
            first = item.node if item is not None else next(iter(self.graph.nodes()))
            lists = []
            for values in ([weight for weight, _ in self.kept], [cast for _, cast in self.kept]):
                lists.append(self.graph.create("prim::ListConstruct", values, 1))
                lists[-1].output().setType(jit.ListType(jit.TENSOR))
                lists[-1].insertBefore(first)
            self.caches[scope.session] = lists[0].output(), lists[1].output()
        return self.caches[scope.session]

    def _look(self, section: Section) -> None:
        """Note what blocks return, before anything is changed: where, and those values that nothing else reads."""
        ids = self.reading.ids
        given = [(n, v) for n, v in enumerate(section.block.outputs()) if v.unique() in ids]
        self.positions[id(section)] = [n for n, _ in given]
        made = (value for item in section.items for value in item.node.outputs() if value.unique() in ids)
        for value in (*(v for _, v in given), *made):
            self.read.setdefault(ids[value.unique()], value)
        for item in section.items:
            for inner in item.blocks:
                self._look(inner)

    def _block(self, block: Block, section: Section) -> None:
        waiting: list[Step] = []
        for step in block.steps:
            item = self.reading.items.get(step.id)
            if item is None:
                if step.id not in self.before:
                    waiting.append(step)
                continue
            self.graph.setInsertPoint(item.node)
            for new in waiting:
                self._insert(new)
            waiting = []
            for inner, its in zip(step.blocks, item.blocks, strict=True):
                self._block(inner, its)
            if step != self.before[step.id]:
                self._change(step, item.node)
        into = section.block
        self.graph.setInsertPoint(into)
        for new in waiting:
            self._insert(new)
        for position, value in zip(self.positions[id(section)], block.returns, strict=True):
            if value in self.made:
                into.returnNode().replaceInput(position, self.made[value])

    # -- casts

    def _insert(self, step: Step) -> None:
        if step.op == CAST:
            source = step.operands[0].value
            value, cache = self._value(source), self._cache_of(self._scope(step))
            if cache is not None and step.id in self.weights:
                value = self._cast_once(value, self._scope(step))
            src = self.program.values[source].type if cache is None else TENSOR
            self.made[step.id] = self._cast(value, src, step)
        elif step.op == TOGETHER:
            self.made[step.id] = self._together(step)
        elif step.op == BACK:
            value, *like = [self._value(operand.value) for operand in step.operands]
            self.made[step.id] = self._call(runtime.back_exactly, [value, self._list(like)])
        elif step.op == WEIGHT:  # if it turns out to be one; lists and what may be None are none
            value = self._value(step.operands[0].value)
            self.made[step.id] = self._cast_once(value, self._scope(step)) if is_tensor(value) else value
        else:
            self.made[step.id] = self.made[step.operands[0].value][int(step.constants)]

    def _cast_once(self, value: Any, scope: Scope) -> Any:
        arguments = [value, self._on(scope), self._constant(scope.device_type), self._low(scope)]
        cache = self._cache_of(scope)
        if cache is None:
            return self._call(runtime.cast_weight, arguments)
        return self._call(runtime.cast_weight_once, [*arguments, *cache])

    def _value(self, number: int) -> Any:
        return self.made[number] if number in self.made else self.read[number]

    def _scope(self, step: Step) -> Scope:
        return self.reading.scopes[step.region or 0]

    def _format(self, step: Step) -> torch.dtype:
        return DTYPES[step.value.format] if step.value.format is not None else torch.float32

    def _is_low(self, step: Step) -> bool:
        dst, low = self._format(step), self._scope(step).low
        return dst is not torch.float32 and (dst is low or not isinstance(low, torch.dtype))

    def _cast(self, value: Any, src: str, step: Step) -> Any:
        scope = self._scope(step)
        dst, is_low = self._format(step), self._is_low(step)
        exactly = step.constants == EXACTLY
        if scope.device_type == ANYWHERE:
            everywhere = runtime.cast_everywhere_exactly if exactly else runtime.cast_everywhere
            return self._call(everywhere, [value, self._constant(number_of(dst))])
        plain = not exactly and value.type().kind() == "TensorType" and scope.device_type in ("cpu", "cuda")
        if plain and is_low:
            flags, low = self._flags(scope), self._low(scope)
            others = {"cuda": torch.float16, "cpu": torch.bfloat16}
            dtypes = [low if d == scope.device_type else self._constant(number_of(t)) for d, t in others.items()]
            if src == "fp32":
                op = "aten::_autocast_to_reduced_precision"
                return jit.inserted(self.graph, op, [value, *flags, *dtypes], value.type())
            if isinstance(scope.low, torch.dtype):
                other = torch.float16 if scope.low is torch.bfloat16 else torch.bfloat16
                return self._call(runtime.lower, [value, *flags, *dtypes, self._constant(number_of(other))])
        if plain and dst is torch.float32:
            inputs = [value, *self._flags(scope)]
            return jit.inserted(self.graph, "aten::_autocast_to_full_precision", inputs, value.type())
        function: Callable[..., Any] = runtime.cast_exactly if exactly else runtime.cast
        if is_optional_tensor(value):
            function = runtime.cast_optional
        elif is_tensor_list(value):
            function = runtime.cast_list
        number = self._low(scope) if is_low else self._constant(number_of(dst))
        return self._call(function, [value, self._on(scope), self._constant(scope.device_type), number])

    def _together(self, step: Step) -> list[Any]:
        """Return operands cast to the format that they turn out to have in common."""
        scope = self._scope(step)
        values = [self._value(o.value) for o in step.operands]
        function = {"promote": runtime.promote, "align": runtime.align, "inside": runtime.inside}[step.constants]
        is_list = len(values) == 1 and is_tensor_list(values[0])
        if not is_list and any(map(is_tensor_list, values)):
            asked, found = f"action {step.constants} for a call in a script", "it compares formats of lists of tensors"
            raise RefusedError(asked, found, origins(step.site, None), 'Name the format, action = "full" for example.')
        given = values[0] if is_list else self._list(values)
        optional = None
        if not is_list and any(map(is_optional_tensor, values)):
            optional = jit.inserted(
                self.graph, "prim::ListConstruct", values, jit.ListType(jit.OptionalType(jit.TENSOR))
            )
            given = self._call(runtime.those_there, [optional])
        cast = self._call(function, [given, self._on(scope), self._constant(scope.device_type), self._low(scope)])
        if is_list:
            return [cast]
        cast = cast if optional is None else self._call(runtime.at_places_of, [cast, optional])
        unpack = self.graph.create("prim::ListUnpack", [cast], len(values))
        for value, output in zip(values, unpack.outputs(), strict=True):
            output.setType(value.type() if is_optional_tensor(value) else jit.TENSOR)
        self.graph.insertNode(unpack)
        return list(unpack.outputs())

    def _list(self, values: list[Any]) -> Any:
        return jit.inserted(self.graph, "prim::ListConstruct", values, jit.ListType(jit.TENSOR))

    # -- calls that change

    def _change(self, step: Step, node: Any) -> None:
        before = self.before[step.id]
        self.graph.setInsertPoint(node)
        sources = self.reading.operands[step.id]
        lists: dict[int, list[Any]] = {}
        for source, old, new in zip(sources, before.operands, step.operands, strict=False):
            if old.value == new.value:
                continue
            value = self._value(new.value)
            if source.element is None:
                node.replaceInput(source.position, value)
            else:
                elements = list(list(node.inputs())[source.position].node().inputs())
                lists.setdefault(source.position, elements)[source.element] = value
        for position, elements in lists.items():
            kind = list(node.inputs())[position].type()
            node.replaceInput(position, jit.inserted(self.graph, "prim::ListConstruct", elements, kind))
        if step.given != before.given:
            self._set_dtype(step, node)
        if any(self._came_from(o.value) == "inside" for o in step.operands):
            self._give_back(step, node)

    def _came_from(self, number: int) -> str:
        """Return the action for which the operand was cast together with others, if it was."""
        taken = self.program.steps.get(number)
        if taken is None or taken.op != "getitem":
            return ""
        maker = self.program.steps[taken.operands[0].value]
        return maker.constants if maker.op == TOGETHER else ""

    def _set_dtype(self, step: Step, node: Any) -> None:
        """Set dtype=fp32, where the first operand turns out to be eligible and the script set none."""
        scope = self._scope(step)
        facts = facts_of(node)
        on, device = self._on(scope), self._constant(scope.device_type)
        first = next(iter(node.inputs()))
        if facts is not None and step.op == self.before[step.id].op:  # not another overload
            position = facts.dtype_position or 0
            chosen = self._call(runtime.chosen_dtype, [first, list(node.inputs())[position], on, device])
            chosen.setType(jit.OptionalType(jit.INT))
            node.replaceInput(position, chosen)
            return
        whether = self._call(runtime.is_eligible, [first, on, device])
        branch = self.graph.create("prim::If", [whether], node.outputsSize())
        self.graph.insertNode(branch)
        for appended in (True, False):
            block = branch.addBlock()
            self.graph.setInsertPoint(block)
            inputs = [*node.inputs(), *([self._constant(number_of(torch.float32))] if appended else [])]
            again = self.graph.create(node.kind(), inputs, node.outputsSize())
            self.graph.insertNode(again)
            for old, new in zip(node.outputs(), again.outputs(), strict=True):
                new.setType(old.type())
                block.registerOutput(new)
        for old, new in zip(list(node.outputs()), list(branch.outputs()), strict=True):
            new.setType(old.type())
            old.replaceAllUsesWith(new)
        node.destroy()

    def _give_back(self, step: Step, node: Any) -> None:
        """Cast the result to the input format of the first operand."""
        scope = self._scope(step)
        sources, ids = [source.value for source in self.reading.operands[step.id]], self.reading.ids
        operands = [self._value(ids[value.unique()]) if value.unique() in ids else value for value in sources]
        operands = [value for value in operands if not is_optional_tensor(value)]  # they are further arguments
        like = operands[0] if operands and is_tensor_list(operands[0]) else self._list(operands)
        for output in list(node.outputs()):
            if output.type().kind() != "TensorType":
                continue
            users = [(use.user, use.offset) for use in output.uses()]
            with jit.inserting_after(self.graph, node):
                arguments = [output, like, self._on(scope), self._constant(scope.device_type)]
                given = self._call(runtime.back, arguments)
            for user, offset in users:
                user.replaceInput(offset, given)
            if output.unique() in self.reading.ids:  # casts that come later read it, too
                self.read[self.reading.ids[output.unique()]] = given

    # -- nodes

    def _call(self, function: Callable[..., Any], inputs: list[Any]) -> Any:
        (output,) = self.graph.insertGraph(runtime.graph_of(function), inputs)
        return output

    def _constant(self, value: Any) -> Any:
        return self.graph.insertConstant(value)

    def _on(self, scope: Scope) -> Any:
        return value_of(self.graph, scope.enabled)

    def _low(self, scope: Scope) -> Any:
        return value_of(self.graph, scope.low)

    def _flags(self, scope: Scope) -> list[Any]:
        """Return the flags for cuda and for cpu, in the order of the two ops."""
        return [self._on(scope) if d == scope.device_type else self._constant(False) for d in ("cuda", "cpu")]
