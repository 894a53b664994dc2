"""The verifier: what must hold of a program at each stage. Run between all passes in tests."""

from __future__ import annotations

from collections.abc import Set

from narrowcast.errors import ProgramError
from narrowcast.programs.program.model import ENTER, EXIT, TENSOR, Block, Program, Step


def verify(program: Program, assigned: bool = False) -> None:
    """Raise ProgramError for the first thing that is wrong.

    Ids are unique, values are made before they are read, regions exist, casts have one floating operand. assigned:
    besides, no region's edge is left.
    """
    _block(program, program.body, assigned, set(), frozenset())


def _block(program: Program, block: Block, assigned: bool, seen: set[int], around: Set[int]) -> None:
    here = set(around)
    for value in block.parameters:
        if value.id in seen:
            raise ProgramError(f"%{value.id}", f"a parameter of block {block.name} has an id that is taken")
        seen.add(value.id)
        here.add(value.id)
    for step in block.steps:
        for operand in step.operands:
            if operand.value not in here:
                where = f"in block {block.name} or around it"
                raise _wrong(step, f"reads %{operand.value}, which is not made before it {where}")
        if step.id in seen:
            raise _wrong(step, "its id is taken")
        if step.region is not None and step.region >= len(program.regions):
            raise _wrong(step, f"region {step.region} does not exist")
        if any(n >= len(step.operands) for n in step.aliases):
            raise _wrong(step, "it aliases an operand that it does not have")
        for inner in step.blocks:
            _block(program, inner, assigned, seen, here)
        if step.is_cast:
            _cast(program, step)
        elif assigned and step.op in (ENTER, EXIT):
            raise _wrong(step, "a region's edge is left")
        seen.add(step.id)
        here.add(step.id)
    for returned in block.returns:
        if returned not in here:
            raise ProgramError(f"block {block.name}", f"returns %{returned}, which it does not make")


def _cast(program: Program, step: Step) -> None:
    if len(step.operands) != 1 or step.blocks:
        raise _wrong(step, "a cast reads exactly one value")
    src = program.values[step.operands[0].value]
    if (src.format is None and src.type != TENSOR) or step.value.format is None:
        raise _wrong(step, f"casts {src.type} to {step.value.type}; both must be floating tensors")
    if src.shape != step.value.shape or src.device != step.value.device:
        raise _wrong(step, "a cast changes nothing but the format")


def _wrong(step: Step, found: str) -> ProgramError:
    asked, advice = f"%{step.id} = {step.op}", "This is a fault of the pass that ran last."
    return ProgramError(asked, found, step.site.origins, advice)
