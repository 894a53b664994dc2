"""Overloads of ops: their ids, and what their schemas say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch

from narrowcast.core.ops import named
from narrowcast.core.policy import DEVICE_TYPES, Kind, Policy, Rule, known_ops
from narrowcast.errors import Origin, PolicyError, UnknownOpError
from narrowcast.output.words import did_you_mean
from narrowcast.runtime.torch_bridge.tensors import tensors_in
from narrowcast.runtime.torch_surface.dispatch import (
    OpOverload,
    OpOverloadPacket,
    all_op_names,
    can_decompose,
    is_dispatched,
    op_name,
    overload_name,
    schema_of,
)


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
    """What the schema of an overload says. `overwrites`: one of its slots is written to, whether declared or not."""

    op: OpOverload
    id: str
    slots: tuple[Slot, ...]
    dtype_position: int | None
    computes: bool
    is_view: bool
    writes: bool
    overwrites: bool
    has_lists: bool

    @property
    def written(self) -> frozenset[str]:
        """The names of the slots that it writes to."""
        return frozenset(slot.name for slot in self.slots if slot.written)


def op_id(op: OpOverload) -> str:
    """Return the id under which policies name the overload: `aten.mm.default`."""
    return f"{op.namespace}.{op_name(op)}.{overload_name(op)}"


def op_facts(op: OpOverload) -> OpFacts:
    """Return the facts of an overload, read from its schema once."""
    return _facts.get(id(op)) or _facts.setdefault(id(op), _read_facts(op))


_facts: dict[int, OpFacts] = {}  # by the id of the overload, which stays: torch hashes overloads in Python


def _read_facts(op: OpOverload) -> OpFacts:
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
    overwrites = any(slot.written for slot in slots)
    return OpFacts(op, op_id(op), tuple(slots), dtype_position, computes, is_view, writes, overwrites, has_lists)


def written_tensors(facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that a call writes to."""
    if not facts.overwrites:
        return []
    written = [slot for slot in facts.slots if slot.written]
    return tensors_in([args[s.position] if s.position < len(args) else kwargs.get(s.name) for s in written])


def find_op(identity: str) -> OpOverload | None:
    """Return the overload with that op id, or None if nothing registers it."""
    namespace, _, rest = identity.partition(".")
    name, _, overload = rest.partition(".")
    packet: Any = getattr(getattr(torch.ops, namespace), name, None)
    if not isinstance(packet, OpOverloadPacket):
        return None
    op: OpOverload | None = getattr(packet, overload, None)
    return op


def find_registered(name: str) -> OpOverload | None:
    """Return the overload with that name in torch's registry: `aten::mm`, `aten::add.Tensor`."""
    identity = name.replace("::", ".")
    return find_op(identity if "." in name else f"{identity}.default")


def overloads_in(namespace: str) -> Iterator[OpOverload]:
    """Yield every overload of a namespace."""
    names = sorted(name for name in all_op_names() if name.startswith(f"{namespace}::"))
    return filter(None, map(find_registered, names))


def ops_in(namespace: str) -> tuple[OpOverload, ...]:
    """Return every overload of a namespace that computes. Remembered for aten; other libraries may add more later."""
    return _aten_ops() if namespace == "aten" else tuple(op for op in overloads_in(namespace) if op_facts(op).computes)


@lru_cache(maxsize=1)
def _aten_ops() -> tuple[OpOverload, ...]:
    return tuple(op for op in overloads_in("aten") if op_facts(op).computes)


def overloads_of(identity: str) -> tuple[OpOverload, ...]:
    """Return the overloads of the op `aten.mm` that compute."""
    namespace, _, name = identity.partition(".")
    packet: Any = getattr(getattr(torch.ops, namespace), name, None)
    if not isinstance(packet, OpOverloadPacket):
        return ()
    overloads = (getattr(packet, overload) for overload in sorted(packet.overloads()))
    return tuple(op for op in overloads if op_facts(op).computes)


@cache
def overload_with_dtype(op: OpOverload) -> OpOverload | None:
    """Return the overload of the same op that takes the same arguments and a dtype (norm.Scalar -> ScalarOpt_dtype)."""
    names = [*(a.name for a in schema_of(op).arguments), "dtype"]
    others: Any = (getattr(op.overloadpacket, overload) for overload in op.overloadpacket.overloads())
    fitting = (o for o in others if [a.name for a in schema_of(o).arguments] == names)
    return next((o for o in fitting if not op_facts(o).writes), None)


def id_with_dtype(identity: str) -> str:
    """Return the id of the overload that takes a dtype besides; the same id where there is none."""
    op = find_op(identity)
    other = overload_with_dtype(op) if op is not None else None
    return op_id(other) if other is not None else identity


def defaults_after(op: OpOverload, given: int) -> tuple[Any, ...]:
    """Return the default values of the positional arguments from number `given` on (trailing ones are left out)."""
    return tuple(a.default_value for a in schema_of(op).arguments[given:] if not a.kwarg_only)


def is_random(op: OpOverload) -> bool:
    """Return whether the op draws random numbers."""
    return torch.Tag.nondeterministic_seeded in op.tags


def is_pointwise(op: OpOverload) -> bool:
    """Return whether each element of the result is computed from one of each argument, as torch tags the op."""
    return torch.Tag.pointwise in op.tags


@cache
def alias_names(op: OpOverload) -> frozenset[str] | None:
    """Return the arguments whose memory the result may share; None if that may be any."""
    schema = schema_of(op)
    if any(r.alias_info is not None for r in schema.returns):
        return frozenset(a.name for a in schema.arguments if a.alias_info is not None)
    if (
        op_name(op) in named("memory.fresh")
        or not _has_composite_kernel(op)
        or any(Policy.native(device).table.candidates(op_facts(op).id, True).whole for device in DEVICE_TYPES)
    ):
        return frozenset()  # what autocast lists computes something new
    return None  # einsum may give a view, dropout what it was given; their schemas do not say so


def _has_composite_kernel(op: OpOverload) -> bool:
    try:
        return can_decompose(op)
    except RuntimeError:  # an op that only TorchScript has
        return any("Tensor" in str(r.type) for r in schema_of(op).returns)


# -- which overloads a rule is about, and whether they can do what it says ---------------------------------------------


def ops_of(rule: Rule) -> tuple[OpOverload, ...]:
    """Return the overloads that a rule names: none if it is about modules. UnknownOpError if none exists."""
    if rule.is_module_call:
        return ()
    namespace, name = rule.target.split(".")[:2]
    if namespace == "aten" and name in named("computation.converts"):  # a kernel of ours for it would call itself
        raise UnknownOpError(
            asked=f"a rule about {rule.op}",
            found="a conversion, whose format the code asks for",
            where=_where(rule),
            advice="Name the op that makes its input, or one that reads its result; or change the code there.",
        )
    if not rule.is_pattern:
        op = find_op(rule.target)
        overloads: tuple[OpOverload, ...] = (op,) if op is not None else ()
    elif rule.is_glob:
        overloads = tuple(op for op in ops_in(namespace) if rule.matches_op(op_id(op)))
    else:
        overloads = overloads_of(rule.target)
    overloads = tuple(filter(is_dispatched, overloads))
    _check_fit(rule, overloads)
    if not overloads and rule.is_pattern and any(rule.matches_op(op) for op in known_ops()):
        raise UnknownOpError(
            asked=f"op {rule.op!r}",
            found="it names only views, copies, conversions, in-place or out= forms, which patterns pass by",
            where=_where(rule),
            advice="Name the overload exactly, aten.add_.Tensor for example, if you mean it.",
        )
    if not overloads and not any(ch in rule.target for ch in "*?["):
        packets = {n.replace("::", ".").rpartition(".")[0] for n in all_op_names() if "." in n}
        raise UnknownOpError(
            asked=f"op {rule.op!r}",
            found=f"this torch has no such op that a rule can change{did_you_mean(rule.target, sorted(packets))}",
            where=_where(rule),
            advice="Correct the name, import the library that registers it, or delete the rule.",
        )
    return overloads


_CASTING = (Kind.LOWER, Kind.FULL, Kind.TO, Kind.INSIDE, Kind.ALIGN, Kind.PROMOTE)


def _check_fit(rule: Rule, ops: tuple[OpOverload, ...]) -> None:
    """Raise PolicyError for a rule whose argument none of the ops has, or whose action does not fit one of them."""
    if rule.is_about_result:
        _check_result(rule, ops)
    elif rule.argument is not None and ops:
        _check_argument(rule, ops)
    unfit, lack = None, ""
    if rule.action.kind in _CASTING and not rule.is_pattern:
        unfit = next((op for op in ops if all(slot.written for slot in op_facts(op).slots)), None)
        if unfit is not None:
            found = f"{op_id(unfit)} has no tensor argument that it only reads: nothing to cast"
            raise PolicyError(f"action {rule.action} for {rule.op}", found, _where(rule), "Delete the rule.")
    elif rule.action.kind is Kind.FULL_SET_DTYPE:
        unfit, lack = next((op for op in ops if op_facts(op).dtype_position is None), None), "takes no dtype"
    elif rule.action.kind is Kind.FULL_APPEND_DTYPE:
        unfit = next((op for op in ops if overload_with_dtype(op) is None), None)
        lack = "has no overload with a dtype besides"
    if unfit is not None:
        asked = f"action {rule.action} for {rule.op}"
        raise PolicyError(asked, f"{op_id(unfit)} {lack}", _where(rule), 'Use "full".')


def _check_result(rule: Rule, ops: tuple[OpOverload, ...]) -> None:
    unfit = next((op for op in ops if op_facts(op).writes), None)
    if unfit is not None:
        asked, found = f"a rule about the result of {rule.op}", f"{op_id(unfit)} returns what it writes to"
        raise PolicyError(asked, found, _where(rule), "Write a rule about what reads it.")
    part = (rule.argument or "").partition(".")[2]
    counts = [len(schema_of(op).returns) for op in ops if not any("List" in str(r.type) for r in schema_of(op).returns)]
    if part and counts and not (part.isdigit() and int(part) < min(counts)):
        found = f"{rule.op} has no result of that position"
        raise PolicyError(f"{rule.argument} of {rule.op}", found, _where(rule), "Count from 0: result.0, result.1.")


def _check_argument(rule: Rule, ops: tuple[OpOverload, ...]) -> None:
    slots = [slot for op in ops for slot in op_facts(op).slots]
    names, read = sorted({slot.name for slot in slots}), sorted({slot.name for slot in slots if not slot.written})
    if rule.argument in read:
        return
    found = f"it has no tensor argument of that name{did_you_mean(rule.argument or '', read)}"
    if rule.argument in names:
        found = "the op writes to it, and what a cast makes is a copy"
    advice = f"Write one of: {', '.join(read)}." if read else "Delete the rule: none of its arguments can be cast."
    raise PolicyError(f"argument {rule.argument!r} of {rule.op}", found, _where(rule), advice)


def _where(rule: Rule) -> tuple[Origin, ...]:
    return (rule.origin,) if rule.origin else ()


def check_ops(policy: Policy) -> None:
    """Raise UnknownOpError for the first rule of the policy's own layers that names an op this torch does not have."""
    for rule in policy.rules:
        if rule.torch is None:
            ops_of(rule)
