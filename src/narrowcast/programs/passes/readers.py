"""Who reads each value, and how often."""

from __future__ import annotations

from collections import Counter

from narrowcast.programs.program import Program, Step

COMPOSITE = "cast by what it calls"
"""The constants of a call that is cast as the op that it calls."""
Readers = dict[int, list[tuple[Step, int]]]


def count_readers(program: Program) -> dict[int, int]:
    """Return for each value id how many operands and block returns name it."""
    blocks = {id(block): block for block in (program.body, *(block for block, _ in program.body.walk()))}
    read = Counter(operand.value for step in program.steps.values() for operand in step.operands)
    return read + Counter(value for block in blocks.values() for value in block.returns)


def cast_inside(program: Program) -> set[int]:
    """Return the values that a composite op reads and casts itself: views of a weight, which no cache keeps."""
    return {o.value for step in program.steps.values() if step.constants == COMPOSITE for o in step.operands}


def find_readers(program: Program) -> Readers:
    """Return for each value id the steps that read it, each with the operand's position."""
    readers: Readers = {}
    for step in program.steps.values():
        for position, operand in enumerate(step.operands):
            readers.setdefault(operand.value, []).append((step, position))
    return readers
