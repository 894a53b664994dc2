"""Between torch and the pure half: dtypes and formats, overloads and op ids, schemas and facts.

Every branch on the torch version, and every use of a private torch name that has changed before, belongs here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch

from narrowcast import formats
from narrowcast.errors import PolicyError, UnknownOpError
from narrowcast.formats import Format
from narrowcast.ops import named
from narrowcast.policy import Kind, Policy, Rule, did_you_mean, known_ops
from narrowcast.torch_surface.dispatch import (
    OpOverload,
    OpOverloadPacket,
    all_op_names,
    op_name,
    overload_name,
    schema_of,
)

OpOverload = OpOverload

DTYPES: dict[Format, torch.dtype] = {
    formats.fp64: torch.float64,
    formats.fp32: torch.float32,
    formats.tf32: torch.float32,
    formats.bf16: torch.bfloat16,
    formats.fp16: torch.float16,
    formats.e4m3fn: torch.float8_e4m3fn,
    formats.e5m2: torch.float8_e5m2,
    formats.e4m3fnuz: torch.float8_e4m3fnuz,
    formats.e5m2fnuz: torch.float8_e5m2fnuz,
}
FORMATS: dict[torch.dtype, Format] = {dtype: f for f, dtype in DTYPES.items() if f is not formats.tf32}


def to_dtype(wanted: torch.dtype | Format | str) -> torch.dtype:
    """A dtype given as torch.dtype, Format or name (`bf16`, `bfloat16`)."""
    if isinstance(wanted, torch.dtype):
        return wanted
    return DTYPES[formats.parse_format(wanted) if isinstance(wanted, str) else wanted]


def default_dtype(policy: Policy, device_type: str) -> torch.dtype:
    """The low dtype of a region that names none: the policy's, or torch's for the device type."""
    low = policy.effective_low
    return torch.get_autocast_dtype(device_type) if low is None else to_dtype(low)


_SHORT = {
    torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8",
    torch.bool: "bool", torch.complex32: "c32", torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


def short_type(dtype: torch.dtype) -> str:
    """The format's name, or a short name for another element type (`i64`)."""
    return FORMATS[dtype].name if dtype in FORMATS else _SHORT.get(dtype, str(dtype).removeprefix("torch."))


# -- ops ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor or tensor list in an op's schema; `position` is its place in args, `name` its key in kwargs.

    `written`: the op writes to it, as its schema says or (running statistics of norms) does not say.
    """

    position: int
    name: str
    is_list: bool
    written: bool


@dataclass(frozen=True, slots=True)
class OpFacts:
    """What the schema of an overload says."""

    op: OpOverload
    id: str
    slots: tuple[Slot, ...]
    dtype_position: int | None
    computes: bool
    is_view: bool
    writes: bool
    has_lists: bool


def op_id(op: OpOverload) -> str:
    """`aten.mm.default`: the id under which policies name the overload."""
    return f"{op.namespace}.{op_name(op)}.{overload_name(op)}"


@cache
def op_facts(op: OpOverload) -> OpFacts:
    """The facts of an overload, read from its schema once."""
    schema = schema_of(op)
    slots = []
    dtype_position = None
    writes = False
    for position, argument in enumerate(schema.arguments):
        kind = str(argument.type)
        if kind in ("Tensor", "Optional[Tensor]", "List[Tensor]", "List[Optional[Tensor]]", "Optional[List[Tensor]]"):
            declared = argument.alias_info is not None and argument.alias_info.is_write
            writes = writes or declared
            hidden = argument.name in ("running_mean", "running_var") and "norm" in op_name(op)
            slots.append(Slot(position, argument.name, "List" in kind, declared or hidden))
        elif argument.name == "dtype":
            dtype_position = position
    aliases = any(r.alias_info is not None for r in schema.returns)
    makes_tensor = any("Tensor" in str(r.type) for r in schema.returns)
    computes = (
        bool(slots) and makes_tensor and not writes and not aliases and op_name(op) not in named("computation.none")
        and not op_name(op).endswith("_copy")
    )  # fmt: skip
    has_lists = any(slot.is_list for slot in slots)
    is_view = aliases and not writes
    return OpFacts(op, op_id(op), tuple(slots), dtype_position, computes, is_view, writes, has_lists)


def find_op(identity: str) -> OpOverload | None:
    """The overload with that op id, or None if nothing registers it."""
    namespace, _, rest = identity.partition(".")
    name, _, overload = rest.partition(".")
    packet: Any = getattr(getattr(torch.ops, namespace), name, None)
    if not isinstance(packet, OpOverloadPacket):
        return None
    found: OpOverload | None = getattr(packet, overload, None)
    return found


def ops_in(namespace: str) -> tuple[OpOverload, ...]:
    """Every overload of a namespace that computes. Remembered for aten; other libraries may register more later."""
    return _aten_ops() if namespace == "aten" else _ops_in(namespace)


@lru_cache(maxsize=1)
def _aten_ops() -> tuple[OpOverload, ...]:
    return _ops_in("aten")


def _ops_in(namespace: str) -> tuple[OpOverload, ...]:
    found = []
    for name in sorted(all_op_names()):
        space, _, rest = name.partition("::")
        if space == namespace:
            op = find_op(f"{space}.{rest if '.' in rest else rest + '.default'}")
            if op is not None and op_facts(op).computes:
                found.append(op)
    return tuple(found)


def _overloads_of(identity: str) -> tuple[OpOverload, ...]:
    """The overloads of the op `aten.mm` that compute."""
    namespace, _, name = identity.partition(".")
    packet: Any = getattr(getattr(torch.ops, namespace), name, None)
    if not isinstance(packet, OpOverloadPacket):
        return ()
    found = (getattr(packet, overload) for overload in sorted(packet.overloads()))
    return tuple(op for op in found if op_facts(op).computes)


def ops_of(rule: Rule) -> tuple[OpOverload, ...]:
    """The overloads that a rule names: none if it is about modules. UnknownOpError, with file:line, if none exists."""
    if rule.is_module_call:
        return ()
    if not rule.is_pattern:
        op = find_op(rule.target)
        found: tuple[OpOverload, ...] = (op,) if op is not None else ()
    elif rule.is_glob:
        namespace = rule.target.partition(".")[0]
        found = tuple(op for op in ops_in(namespace) if rule.matches_op(op_id(op)))
    else:
        found = _overloads_of(rule.target)
    _check_fit(rule, found)
    if not found and rule.is_pattern and any(rule.matches_op(op) for op in known_ops()):
        raise UnknownOpError(
            asked=f"op {rule.op!r}",
            found="it names only views, copies, conversions, in-place or out= forms, which patterns pass by",
            where=(rule.origin,) if rule.origin else (),
            advice="Name the overload exactly, aten.add_.Tensor for example, if you mean it.",
        )
    if not found and not any(ch in rule.target for ch in "*?["):
        packets = {n.replace("::", ".").rpartition(".")[0] for n in all_op_names() if "." in n}
        raise UnknownOpError(
            asked=f"op {rule.op!r}",
            found=f"this torch has no such op that a rule can change{did_you_mean(rule.target, sorted(packets))}",
            where=(rule.origin,) if rule.origin else (),
            advice="Correct the name, import the library that registers it, or delete the rule.",
        )
    return found


def _check_fit(rule: Rule, ops: tuple[OpOverload, ...]) -> None:
    """PolicyError for a rule whose argument none of the ops has, or whose action an op that it names cannot take."""
    where = (rule.origin,) if rule.origin else ()
    names = sorted({slot.name for op in ops for slot in op_facts(op).slots})
    if rule.is_about_result and any(op_facts(op).writes for op in ops):
        unfit = next(op_id(op) for op in ops if op_facts(op).writes)
        found = f"{unfit} returns what it writes to"
        raise PolicyError(f"a rule about the result of {rule.op}", found, where, "Write a rule about what reads it.")
    part = (rule.argument or "").partition(".")[2] if rule.is_about_result else ""
    counts = [len(schema_of(op).returns) for op in ops if not any("List" in str(r.type) for r in schema_of(op).returns)]
    if part and counts and not (part.isdigit() and int(part) < min(counts)):
        found = f"{rule.op} has no result of that position"
        raise PolicyError(f"{rule.argument} of {rule.op}", found, where, "Count from 0: result.0, result.1.")
    if rule.argument is not None and ops and rule.argument not in names and not rule.is_about_result:
        raise PolicyError(
            asked=f"argument {rule.argument!r} of {rule.op}",
            found=f"it has no tensor argument of that name{did_you_mean(rule.argument, names)}",
            where=where,
            advice=f"Write one of: {', '.join(names)}.",
        )
    if rule.action.kind is Kind.FULL_SET_DTYPE and any(op_facts(op).dtype_position is None for op in ops):
        unfit = next(op_id(op) for op in ops if op_facts(op).dtype_position is None)
        raise PolicyError(f"action {rule.action} for {rule.op}", f"{unfit} takes no dtype", where, 'Use "full".')
    if rule.action.kind is Kind.FULL_APPEND_DTYPE and any(overload_with_dtype(op) is None for op in ops):
        unfit = next(op_id(op) for op in ops if overload_with_dtype(op) is None)
        found = f"{unfit} has no overload with a dtype besides"
        raise PolicyError(f"action {rule.action} for {rule.op}", found, where, 'Use "full".')


def check_ops(policy: Policy) -> None:
    """UnknownOpError for the first rule of the policy's own layers that names an op this torch does not have."""
    for rule in policy.rules:
        if rule.torch is None:
            ops_of(rule)


@cache
def overload_with_dtype(op: OpOverload) -> OpOverload | None:
    """The overload of the same op that takes the same arguments and a dtype (norm.Scalar -> ScalarOpt_dtype)."""
    names = [a.name for a in schema_of(op).arguments]
    packet = op.overloadpacket
    for overload in packet.overloads():
        other = getattr(packet, overload)
        arguments = schema_of(other).arguments
        if [a.name for a in arguments] == [*names, "dtype"] and not op_facts(other).writes:
            found: OpOverload = other
            return found
    return None


def defaults_after(op: OpOverload, given: int) -> tuple[Any, ...]:
    """The default values of the positional arguments from number `given` on (trailing ones are left out)."""
    return tuple(a.default_value for a in schema_of(op).arguments[given:] if not a.kwarg_only)


def is_random(op: OpOverload) -> bool:
    """Whether the op draws random numbers."""
    return torch.Tag.nondeterministic_seeded in op.tags


# -- tensors -----------------------------------------------------------------------------------------------------------


_to = torch.ops.aten.to.dtype


def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What native autocast's cast does: `aten::to`, seen by autograd and by no `__torch_function__`."""
    result: torch.Tensor = tensor.to(dtype) if type(tensor) in _PLAIN else _to(tensor, dtype)
    return result


_PLAIN = (torch.Tensor, torch.nn.Parameter)  # for these the method is the same call, made faster


def number_as_tensor(number: complex, others: list[torch.Tensor]) -> torch.Tensor:
    """A tensor without dimensions that promotes as the number would beside these tensors, and keeps its digits."""
    like = {torch.SymFloat: 1.0, torch.SymInt: 1, torch.SymBool: True}.get(type(number), number)
    dtype = torch.result_type(others[0], like) if others else torch.get_default_dtype()
    if dtype.is_floating_point and any(t.is_floating_point() and t.dim() for t in others):
        dtype = torch.float64
    return torch.scalar_tensor(number, dtype=dtype)


def tensors_in(*trees: Any) -> list[torch.Tensor]:
    """Every tensor in nested lists, tuples and dicts of arguments, in order."""
    found: list[torch.Tensor] = []
    for tree in trees:
        if isinstance(tree, torch.Tensor):
            found.append(tree)
        elif isinstance(tree, (list, tuple)):
            found += tensors_in(*tree)
        elif isinstance(tree, dict):
            found += tensors_in(*tree.values())
    return found
