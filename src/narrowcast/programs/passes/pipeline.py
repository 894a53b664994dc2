"""The pipelines: which passes run when, each on what the one before it left, verified and recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from functools import partial

from narrowcast.core.ledger import EditRecord
from narrowcast.core.policy import Policy
from narrowcast.programs.passes.assign import Overload, assign_casts
from narrowcast.programs.passes.drop import drop_casts
from narrowcast.programs.passes.fold import fold_casts
from narrowcast.programs.passes.share import share_casts
from narrowcast.programs.placement.place import move_casts
from narrowcast.programs.program import Edit, Program, apply_edits, edit_records, verify

Pass = Callable[[Program], list[Edit]]

BEFORE_AUTOGRAD: tuple[Pass, ...] = (share_casts, fold_casts, drop_casts)
"""While gradients are still to be derived from the program: nothing that changes how they add up."""


def before_autograd(dense: Set[int]) -> tuple[Pass, ...]:
    """Return the passes before autograd, with casts moved. dense: values whose strides a cast keeps."""
    return (*BEFORE_AUTOGRAD, lambda program: move_casts(program, dense=dense), share_casts, drop_casts)


AFTER_AUTOGRAD: tuple[Pass, ...] = tuple(
    partial(one, after_autograd=True) for one in (share_casts, fold_casts, drop_casts, share_casts)
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
    """Assign formats, if policies are given, and run the passes; verify the program before, between and after."""
    verify(program)
    records: list[EditRecord] = []
    if policies is not None:
        passes = (partial(assign_casts, policies=policies, overload_with_dtype=overload_with_dtype), *passes)
    for one in passes:
        edits = one(program)
        if edits:
            records += edit_records(program, edits)
            program = apply_edits(program, edits)
            verify(program)
    if policies is not None:
        verify(program, assigned=True)
    return PassResult(program, tuple(records))
