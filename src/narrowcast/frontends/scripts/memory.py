"""Memory in scripts: which values may share it, and which of them blocks write to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from narrowcast.core.ops import named
from narrowcast.frontends.scripts.callers import path_of, set_names
from narrowcast.frontends.scripts.calls import facts_of, holds_tensors
from narrowcast.frontends.scripts.scopes import Item, passage
from narrowcast.programs.program import Block, Operand, Step, reaching
from narrowcast.runtime.torch_bridge import OpFacts
from narrowcast.runtime.torch_bridge.ops import alias_names
from narrowcast.runtime.torch_surface.dispatch import storage_key

_PLAIN = ("IntType", "FloatType", "BoolType", "NumberType", "StringType", "NoneType", "DeviceObjType")


class Memory:
    """ids: of the script's values in the program, as far as it is read. known: tensors that are there before it runs,
    all of them.
    """

    def __init__(self, ids: Mapping[int, int], known: Mapping[int, torch.Tensor]) -> None:
        self.ids, self.known = ids, known
        self.views: Counter[int] = Counter()  # how many known tensors are views of each memory

    def may_share(
        self, node: Any, facts: OpFacts | None, step: Step, blocks: tuple[Block, ...]
    ) -> Callable[[Operand], bool]:
        """Return a test of which operands may share memory with the result of a node."""
        if passage(node) is not None:
            return lambda operand: operand.name == step.operands[-1].name
        if facts is not None:
            names = alias_names(facts.op)
            return lambda operand: names is None or operand.name in names
        if node.kind() == "prim::GetAttr" and self._is_alone(node.output()):
            return lambda operand: False
        through = reaching(blocks) if node.kind() in ("prim::If", "prim::Loop") else None
        if through is None:
            return lambda operand: True
        # a loop that does not run gives what it was given
        given = [v for v in node.inputs() if v.unique() in self.ids and not _is_plain(v)]
        passed = {*through, *(self.ids[v.unique()] for v in given)}
        return lambda operand: operand.value in passed

    def _is_alone(self, attribute: Any) -> bool:
        """Return whether an attribute is no tensor, or one whose memory no other attribute that is read has."""
        tensor = self.known.get(attribute.unique())
        if tensor is None or tensor.layout is not torch.strided:
            return _is_plain(attribute)
        if not self.views:
            dense = {id(t): t for t in self.known.values() if t.layout is torch.strided}
            self.views = Counter(storage_key(t) for t in dense.values())
        return self.views[storage_key(tensor)] == 1

    def written_in(self, item: Item, blocks: tuple[Block, ...]) -> set[int]:
        """Return the values that the blocks of a node may write to, views of them included."""
        passed_on = self._passed_on(item)
        written = {o.value for block in blocks for step in block.steps for o in step.operands if o.written}
        before = -1
        while len(written) > before:
            before = len(written)
            for block in blocks:
                for step in reversed(block.steps):
                    if step.id in written:
                        written.update(step.operands[n].value for n in step.aliases)
            written.update(value for parameter, value in passed_on if parameter in written)
        return written

    def _passed_on(self, item: Item) -> list[tuple[int, int]]:
        """Return what the body of a loop takes: each parameter, with its value before the loop and after each step."""
        if item.node.kind() != "prim::Loop":
            return []
        (body,) = item.blocks
        taken = list(body.block.inputs())[1:] * 2
        passed = [*list(item.node.inputs())[2:], *list(body.block.outputs())[1:]]
        pairs = zip(taken, passed, strict=True)
        return [(self.ids[t.unique()], self.ids[v.unique()]) for t, v in pairs if v.unique() in self.ids]


def _is_plain(value: Any) -> bool:
    """Return whether a value is a number, a text or the like, which shares memory with nothing."""
    return value.type().kind() in _PLAIN


# -- which values may be weights: leaves that a caller gives, or an attribute, whichever way they came -----------------


_ITSELF = {f"aten::{name}" for name in named("memory.itself")}
_ADDING = ("aten::append", "aten::insert", "aten::_set_item")


class Leaves:
    """Remembers what it has found out about the values of one graph, before that is changed."""

    def __init__(self, graph: Any) -> None:
        self.changed = set_names(graph)
        self.known: dict[int, bool] = {}

    def is_given(self, value: Any) -> bool:
        """Return whether a value is itself an argument of the graph, or an attribute, and has no other name."""
        node = value.node()
        if node.kind() == "prim::GetAttr":
            path = path_of(node)  # off the module, and then it is read once
            return path is not None and not self.changed & set(path)
        return bool(node.kind() == "prim::Param" and _owner(node) is None)

    def may_be(self, value: Any) -> bool:
        """Return whether a value may be one of the inputs, or hold one. What an op computes is none."""
        if value.unique() not in self.known:
            self.known[value.unique()] = False  # a loop that gives itself what it takes adds nothing
            self.known[value.unique()] = holds_tensors(value) and (
                self.is_given(value)
                or value.node().kind() == "prim::GetAttr"
                or any(self.may_be(source) for source in self._sources(value))
            )
        return self.known[value.unique()]

    def _sources(self, value: Any) -> list[Any]:
        node = value.node()
        facts = facts_of(node)
        if node.kind() in _ITSELF:
            return [node.inputsAt(0)]
        if facts is not None and (facts.computes or node.kind() != "aten::alias"):
            return []
        position = [output.unique() for output in node.outputs()].index(value.unique())
        blocks = list(node.blocks())
        if node.kind() == "prim::Param":  # of the body of a loop
            if not position:
                return []  # the number of the step
            loop = _owner(node)
            (body,) = loop.blocks()
            return [list(loop.inputs())[position + 1], list(body.outputs())[position]]
        if node.kind() == "prim::Loop":
            return [list(node.inputs())[position + 2], list(blocks[0].outputs())[position + 1]]
        if node.kind() == "prim::If":
            return [list(block.outputs())[position] for block in blocks]
        added = [use.user for use in value.uses() if use.user.kind() in _ADDING]
        return [*node.inputs(), *[v for user in added for v in list(user.inputs())[1:]]]


def _owner(node: Any) -> Any:
    """Return the loop whose body takes a parameter node's values; None for the graph's own."""
    return node.owningBlock().owningNode()
