"""Which overloads a rule is about, and whether they can do what it says."""

from __future__ import annotations

from narrowcast.core.policy import Kind, Policy, Rule, did_you_mean, known_ops
from narrowcast.errors import Origin, PolicyError, UnknownOpError
from narrowcast.runtime.torch_bridge.ops import find_op, op_facts, op_id, ops_in, overload_with_dtype, overloads_of
from narrowcast.runtime.torch_surface.dispatch import OpOverload, all_op_names, schema_of


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
        found = overloads_of(rule.target)
    _check_fit(rule, found)
    if not found and rule.is_pattern and any(rule.matches_op(op) for op in known_ops()):
        raise UnknownOpError(
            asked=f"op {rule.op!r}",
            found="it names only views, copies, conversions, in-place or out= forms, which patterns pass by",
            where=_where(rule),
            advice="Name the overload exactly, aten.add_.Tensor for example, if you mean it.",
        )
    if not found and not any(ch in rule.target for ch in "*?["):
        packets = {n.replace("::", ".").rpartition(".")[0] for n in all_op_names() if "." in n}
        raise UnknownOpError(
            asked=f"op {rule.op!r}",
            found=f"this torch has no such op that a rule can change{did_you_mean(rule.target, sorted(packets))}",
            where=_where(rule),
            advice="Correct the name, import the library that registers it, or delete the rule.",
        )
    return found


def _check_fit(rule: Rule, ops: tuple[OpOverload, ...]) -> None:
    """PolicyError for a rule whose argument none of the ops has, or whose action an op that it names cannot take."""
    if rule.is_about_result:
        _check_result(rule, ops)
    elif rule.argument is not None and ops:
        _check_argument(rule, ops)
    unfit, found = None, ""
    if rule.action.kind is Kind.FULL_SET_DTYPE:
        unfit, found = next((op for op in ops if op_facts(op).dtype_position is None), None), "takes no dtype"
    elif rule.action.kind is Kind.FULL_APPEND_DTYPE:
        unfit = next((op for op in ops if overload_with_dtype(op) is None), None)
        found = "has no overload with a dtype besides"
    if unfit is not None:
        asked = f"action {rule.action} for {rule.op}"
        raise PolicyError(asked, f"{op_id(unfit)} {found}", _where(rule), 'Use "full".')


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
    names = sorted({slot.name for op in ops for slot in op_facts(op).slots})
    if rule.argument not in names:
        raise PolicyError(
            asked=f"argument {rule.argument!r} of {rule.op}",
            found=f"it has no tensor argument of that name{did_you_mean(rule.argument or '', names)}",
            where=_where(rule),
            advice=f"Write one of: {', '.join(names)}.",
        )


def _where(rule: Rule) -> tuple[Origin, ...]:
    return (rule.origin,) if rule.origin else ()


def check_ops(policy: Policy) -> None:
    """UnknownOpError for the first rule of the policy's own layers that names an op this torch does not have."""
    for rule in policy.rules:
        if rule.torch is None:
            ops_of(rule)
