"""Calls: which op a node of a script is, what tensors it reads, and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from narrowcast.torch_bridge import OpFacts, find_op, op_facts
from narrowcast.torch_surface.dispatch import parse_schema
from narrowcast.torchscript.scopes import constant


@dataclass(frozen=True, slots=True)
class Source:
    """Where an operand stands in a call: the input's position, and the element's if that is a list."""

    position: int
    element: int | None
    value: Any


# Ops that no list names, whose kernels call one op that lists do: eager autocast casts there, a script before them.
CALLING = {
    "aten.einsum.default": "aten.bmm.default",
    "aten.lstm.input": "aten.mkldnn_rnn_layer.default",
    "aten.gru.input": "aten.linear.default",
    "aten.rnn_tanh.input": "aten.linear.default",
    "aten.rnn_relu.input": "aten.linear.default",
}


def decided_as(op: str) -> str:
    """The op about which policies are asked: the one that a composite op calls."""
    return CALLING.get(op, op)


@cache
def _facts(schema: str) -> OpFacts | None:
    name, _, _ = schema.partition("(")
    identity = name.replace("::", ".")
    op = find_op(identity if "." in name else f"{identity}.default")
    return op_facts(op) if op is not None else None


def facts_of(node: Any) -> OpFacts | None:
    """The facts of the op that a node calls; None if it calls none, or one without tensors."""
    schema = node.schema()
    facts = _facts(schema) if schema and not schema.startswith("(no") else None
    return facts if facts is not None and facts.slots else None


def sources(node: Any, facts: OpFacts) -> list[Source]:
    """The tensors that a call reads, elements of lists that are made for it one by one."""
    inputs = list(node.inputs())
    found = []
    for slot in facts.slots:
        value = inputs[slot.position]
        if slot.is_list:
            maker = value.node()
            if maker.kind() == "prim::ListConstruct" and is_only_read(value):
                found += [Source(slot.position, n, v) for n, v in enumerate(maker.inputs()) if _may_be_tensor(v)]
            elif is_tensor_list(value):
                found.append(Source(slot.position, None, value))
        elif _may_be_tensor(value):
            found.append(Source(slot.position, None, value))
    return found


def is_only_read(value: Any) -> bool:
    """Whether a list is passed to ops that do not change it, and to nothing else."""
    for use in value.uses():
        schema = use.user.schema()
        if not schema or schema.startswith("(no"):
            return False
        arguments = parse_schema(schema).arguments
        alias = arguments[use.offset].alias_info if use.offset < len(arguments) else None
        if alias is not None and alias.is_write:
            return False
    return True


def _may_be_tensor(value: Any) -> bool:
    return is_tensor(value) or (is_optional_tensor(value))


def is_optional_tensor(value: Any) -> bool:
    """Whether a value may be a tensor or None, and nobody knows which."""
    kind = value.type()
    return bool(kind.kind() == "OptionalType" and kind.getElementType().kind() == "TensorType")


def is_tensor_list(value: Any) -> bool:
    """Whether a value is a list of tensors."""
    kind = value.type()
    return bool(kind.kind() == "ListType" and kind.getElementType().kind() == "TensorType")


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor for sure."""
    return bool(value.type().kind() == "TensorType")


def holds_tensors(value: Any) -> bool:
    """Whether a value is a tensor or may hold some."""
    return "Tensor" in value.type().annotation_str


def dtype_argument(node: Any, facts: OpFacts) -> Any:
    """What a call was given as dtype: a number, a value, or None where that is left open."""
    if facts.dtype_position is None:
        return None
    value = list(node.inputs())[facts.dtype_position]
    known = constant(value)
    if known is not None:
        return known
    kind = value.type().kind()
    return None if kind in ("NoneType", "OptionalType") else value
