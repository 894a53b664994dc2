"""The pipelines: which passes run when, each on what the one before it left, verified and recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial

from narrowcast.core.ledger import EditRecord
from narrowcast.core.policy import RESULT, Policy
from narrowcast.formats import FORMATS
from narrowcast.programs.passes.assign import Overload, assign_casts
from narrowcast.programs.passes.drop import drop_casts
from narrowcast.programs.passes.fold import fold_casts
from narrowcast.programs.passes.share import share_casts
from narrowcast.programs.placement.place import move_casts
from narrowcast.programs.program import (
    TENSOR,
    CastResult,
    CastReturn,
    CastTogether,
    Edit,
    Follow,
    Hoist,
    InsertCast,
    Program,
    Remove,
    Reread,
    Retarget,
    SetDtype,
    Share,
    Step,
    Value,
    Why,
    apply_edits,
    verify,
)

Pass = Callable[[Program], list[Edit]]

BEFORE_AUTOGRAD: tuple[Pass, ...] = (share_casts, fold_casts, drop_casts)
"""While gradients are still to be derived from the program: nothing that changes how they add up."""


def before_autograd(dense: Set[int]) -> tuple[Pass, ...]:
    """The same, with casts moved. dense: values that a cast gives with the strides that they have."""
    return (*BEFORE_AUTOGRAD, lambda program: move_casts(program, dense=dense), share_casts, drop_casts)


AFTER_AUTOGRAD: tuple[Pass, ...] = (
    lambda program: share_casts(program, after_autograd=True),
    lambda program: fold_casts(program, after_autograd=True),
    lambda program: drop_casts(program, after_autograd=True),
    lambda program: share_casts(program, after_autograd=True),
)
"""Forward and backward are both there: whatever keeps every value. Folding makes casts equal: so share twice."""


@dataclass(frozen=True, slots=True)
class PassResult:
    """A program with every format explicit, and what was done to get there."""

    program: Program
    edits: tuple[EditRecord, ...]


def run_passes(
    program: Program,
    passes: tuple[Pass, ...],
    policies: Mapping[str, Policy] | None = None,
    overload_with_dtype: Overload = lambda op: op,
) -> PassResult:
    """Assign, if policies are given, and then the passes; the program is verified before, between and after."""
    verify(program)
    records: list[EditRecord] = []
    if policies is not None:
        passes = (partial(assign_casts, policies=policies, overload_with_dtype=overload_with_dtype), *passes)
    for one in passes:
        edits = one(program)
        if edits:
            records += [_record(program, edit) for edit in edits]
            program = apply_edits(program, edits)
            verify(program)
    if policies is not None:
        verify(program, assigned=True)
    return PassResult(program, tuple(records))


_KINDS: dict[type, str] = {
    InsertCast: "insert", CastResult: "insert", CastTogether: "insert", SetDtype: "set dtype", Follow: "follow",
    Remove: "remove", Share: "share", Retarget: "fold", Hoist: "share", Reread: "remove",
    CastReturn: "insert",
}  # fmt: skip


def _record(program: Program, edit: Edit) -> EditRecord:
    step = program.steps[edit.step]
    value, argument, dst = _subject(program, step, edit)
    why: Why = edit.why
    src = value.type if value is not None and value.shape is not None else ""
    moved = value.bytes + value.elements * FORMATS[dst].bits // 8 if value is not None and dst in FORMATS else 0
    about = _KINDS[type(edit)], why.by, step.op, argument, *step.site.at
    action, rule = (str(why.rule.action), str(why.rule)) if why.rule else ("", "")
    return EditRecord(*about, src, dst, moved, step.direction, action, rule, why.reason, why.policy)


def _subject(program: Program, step: Step, edit: Edit) -> tuple[Value | None, str, str]:
    """The value that a cast of this edit reads, the argument that it is for, and the format that it gives."""
    if isinstance(edit, InsertCast):
        operand = step.operands[edit.operand]
        return program.values[operand.value], operand.name, edit.dst.name
    if isinstance(edit, CastResult):
        src = edit.src.name if edit.src is not None else TENSOR
        return replace(step.value, type=src), RESULT, edit.dst.name if edit.dst is not None else TENSOR
    if isinstance(edit, SetDtype | Follow):
        return None, "", (edit.dst if isinstance(edit, SetDtype) else edit.format).name
    if isinstance(edit, CastReturn):
        return step.value, "returned", edit.dst.name
    if isinstance(edit, Reread):
        return program.values[edit.source], step.operands[edit.operand].name, ""
    if isinstance(edit, CastTogether):
        return None, ", ".join(dict.fromkeys(step.operands[p].name for p in edit.operands)), ""
    if step.is_cast:
        return program.values[step.operands[0].value], "", step.value.type
    return None, "", ""
