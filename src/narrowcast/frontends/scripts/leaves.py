"""Which values of a script may be weights: leaves that a caller gives, or an attribute, whichever way they came."""

from __future__ import annotations

from typing import Any

from narrowcast.frontends.scripts.callers import path_of, set_names
from narrowcast.frontends.scripts.calls import facts_of, holds_tensors

_NAMES = """to type_as contiguous flatten real conj resolve_conj resolve_neg atleast_1d atleast_2d atleast_3d
dropout feature_dropout alpha_dropout feature_alpha_dropout"""
_ITSELF = {f"aten::{name}" for name in _NAMES.split()}  # they give what they are given, where it is so already
_ADDING = ("aten::append", "aten::insert", "aten::_set_item")


class Leaves:
    """Remembers what it has found out about the values of one graph, before that is changed."""

    def __init__(self, graph: Any) -> None:
        self.changed = set_names(graph)
        self.known: dict[int, bool] = {}

    def is_given(self, value: Any) -> bool:
        """Whether a value is itself an argument of the graph, or an attribute, and has no other name."""
        node = value.node()
        if node.kind() == "prim::GetAttr":
            path = path_of(node)  # off the module, and then it is read once
            return path is not None and not self.changed & set(path)
        return bool(node.kind() == "prim::Param" and _owner(node) is None)

    def may_be(self, value: Any) -> bool:
        """Whether a value may be one that was given, or hold one. What an op computes is none."""
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
    """The loop whose body takes what a parameter node gives; None for the graph's own."""
    return node.owningBlock().owningNode()
