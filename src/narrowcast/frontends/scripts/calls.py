"""Calls: which op a node of a script is, what tensors it reads, and where it comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from narrowcast.core.ops import called_by, called_in_python
from narrowcast.core.policy import Policy, Site
from narrowcast.core.refusals import check_counted
from narrowcast.frontends.scripts.region_facts import constant
from narrowcast.frontends.scripts.scopes import Scope
from narrowcast.runtime.torch_bridge import OpFacts, find_registered, op_facts
from narrowcast.runtime.torch_surface.dispatch import op_name, parse_schema


@dataclass(frozen=True, slots=True)
class Source:
    """Where an operand stands in a call: the input's position, and the element's if that is a list."""

    position: int
    element: int | None
    value: Any


def device_of_regions(scopes: Iterable[Scope]) -> str:
    """Return the device type whose kernels run in these regions: the cpu, if one of several is for it."""
    devices = [scope.device_type for scope in scopes if scope.enabled is not False]
    return devices[0] if devices and "cpu" not in devices else "cpu"


def decided_as_itself(op: str, device_type: str) -> bool:
    """Return whether a policy is asked about this op itself, and not about one that it calls."""
    return called_by(op, device_type) is None


def decided_as(
    node: Any, facts: OpFacts, device_type: str, policies: Iterable[Policy], site: Callable[[], Site]
) -> str:
    """Return the op about which policies are asked: the one that a composite op, or a traced convolution, calls. A
    composite op of which a rule itself holds at this site is decided as a whole. RefusedError for a rule about its n-th
    call: the others are decided by what it calls.
    """
    called = _called(node, facts, device_type)
    if called == facts.id or op_name(facts.op) in _TRACED:
        return called
    for policy in policies:
        held = [rule for rule in policy.table.candidates(facts.id, True).whole if rule.matches_site(site())]
        if held and held[0].call is not None:
            check_counted(policy, facts.id, site())
        if held:
            return facts.id
    return called


def _called(node: Any, facts: OpFacts, device_type: str) -> str:
    name = facts.id.rpartition(".")[0]
    if name == "aten.nll_loss_nd":
        return "aten.nll_loss.default"  # lists say the same of nll_loss2d
    if name == "aten.pad":
        return padding_called(node) or facts.id
    if name == "aten.einsum" and not _sums(node):
        return facts.id
    if op_name(facts.op) in _TRACED:
        return _convolution_called(node, name) or facts.id
    return called_by(facts.id, device_type) or facts.id


_TRACED = ("_convolution", "_convolution_mode")
"""What traces have of convolutions, whose ops eager code has."""


def _sums(node: Any) -> bool:
    """Return whether an einsum sums over what two operands share; if not it multiplies, which no list names."""
    equation, count = constant(node.inputsAt(0)), list_of_values(node, 1)
    if not isinstance(equation, str) or count is None:
        return True
    inputs, arrow, output = equation.replace(" ", "").replace("...", "").partition("->")
    operands = inputs.split(",")
    labels = [label for operand in operands for label in set(operand)]
    if not arrow:
        output = "".join(label for label in labels if inputs.count(label) == 1)
    return any(label not in output and labels.count(label) > 1 for label in labels)


def padding_called(node: Any) -> str | None:
    """Return the op that pads in this mode; empty if no list could name it, None if the running script knows it."""
    mode, amounts = constant(list(node.inputs())[2]), list_of_values(node, 1)
    name = {"reflect": "reflection_pad", "replicate": "replication_pad"}.get(str(mode))
    if mode is None or (name and amounts is None):
        return None
    rank = 0 if amounts is None else len(amounts) // 2
    return f"aten.{name}{rank}d.default" if name and rank in (1, 2, 3) else ""


def _convolution_called(node: Any, name: str) -> str:
    """Return the op that a trace had in the place of this one, by its rank; empty if unknown before it runs."""
    stride, transposed = list_of_values(node, 3), name == "aten._convolution" and constant(list(node.inputs())[6])
    if stride is None or transposed is None or len(stride) not in (1, 2, 3):
        return ""
    rank = len(stride)
    if transposed:
        return f"aten.conv_transpose{rank}d.{'default' if rank == 1 else 'input'}"
    return f"aten.conv{rank}d.{'padding' if name == 'aten._convolution_mode' else 'default'}"


def list_of_values(node: Any, position: int) -> list[Any] | None:
    """Return the elements of an argument that is a list, as far as its length is known."""
    value = list(node.inputs())[position]
    maker = value.node()
    if maker.kind() == "prim::ListConstruct":
        return list(maker.inputs())
    known = constant(value)
    return known if isinstance(known, list) else None


@cache
def _facts(schema: str) -> OpFacts | None:
    name = schema.partition("(")[0]  # a script calls an op whose list of tensors has no None in it by another name
    op = find_registered(name.removesuffix(".hacked_twin").replace("Tensor_hacked_twin", "Tensor"))
    return replace(facts := op_facts(op), id=called_in_python(facts.id)) if op is not None else None


def facts_of(node: Any) -> OpFacts | None:
    """Return the facts of the op that a node calls; None if it calls none, or one without tensors."""
    schema = node.schema()
    facts = _facts(schema) if schema and not schema.startswith("(no") else None
    return facts if facts is not None and facts.slots else None


def sources(node: Any, facts: OpFacts) -> list[Source]:
    """Return the tensors that a call reads, elements of lists that are made for it one by one."""
    inputs = list(node.inputs())
    read = []
    for slot in facts.slots:
        value = inputs[slot.position]
        if slot.is_list:
            maker = value.node()
            if maker.kind() == "prim::ListConstruct" and is_only_read(value):
                read += [Source(slot.position, n, v) for n, v in enumerate(maker.inputs()) if _may_be_tensor(v)]
            elif is_tensor_list(value):
                read.append(Source(slot.position, None, value))
        elif _may_be_tensor(value):
            read.append(Source(slot.position, None, value))
    return read


def is_only_read(value: Any) -> bool:
    """Return whether a list is passed to ops that do not change it, and to nothing else."""
    for use in value.uses():
        schema = use.user.schema()
        if not schema or schema.startswith("(no"):
            return False
        arguments = parse_schema(schema).arguments
        alias = arguments[use.offset].alias_info if use.offset < len(arguments) else None
        if alias is not None and alias.is_write:
            return False
    return True


def changes_nothing(node: Any) -> bool:
    """Return whether a node, by itself, leaves everything as it is."""
    schema = node.schema()
    if node.kind() in _PURE or not node.kind().startswith("aten::") or not schema or schema.startswith("(no"):
        return node.kind() in _PURE
    return not any(a.alias_info is not None and a.alias_info.is_write for a in parse_schema(schema).arguments)


_NAMES = """Constant GetAttr ListConstruct TupleConstruct DictConstruct ListUnpack TupleUnpack TupleIndex unchecked_cast
Uninitialized If"""
_PURE = {f"prim::{name}" for name in _NAMES.split()}


def _may_be_tensor(value: Any) -> bool:
    return is_tensor(value) or is_optional_tensor(value)


def is_optional_tensor(value: Any) -> bool:
    """Return whether a value may be a tensor or None, and it is unknown which."""
    kind = value.type()
    return bool(kind.kind() == "OptionalType" and kind.getElementType().kind() == "TensorType")


def is_tensor_list(value: Any) -> bool:
    """Return whether a value is a list of tensors."""
    kind = value.type()
    return bool(kind.kind() == "ListType" and kind.getElementType().kind() == "TensorType")


def is_tensor(value: Any) -> bool:
    """Return whether a value is a tensor for sure."""
    return bool(value.type().kind() == "TensorType")


def holds_tensors(value: Any) -> bool:
    """Return whether a value is a tensor or may hold some."""
    return "Tensor" in value.type().annotation_str


def dtype_argument(node: Any, facts: OpFacts) -> Any:
    """Return the dtype that a call was given: a number, a value, or None where that is left open."""
    if facts.dtype_position is None:
        return None
    value = list(node.inputs())[facts.dtype_position]
    known = constant(value)
    if known is not None:
        return known
    return None if value.type().kind() in ("NoneType", "OptionalType") else value
