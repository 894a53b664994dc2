"""How often each value is read."""

from __future__ import annotations

from narrowcast.program import Program


def count_readers(program: Program) -> dict[int, int]:
    """For each value id, how many operands and block returns name it."""
    counts: dict[int, int] = {}
    blocks = {id(program.body): program.body}
    for block, step in program.body.walk():
        blocks[id(block)] = block
        for operand in step.operands:
            counts[operand.value] = counts.get(operand.value, 0) + 1
    for block in blocks.values():
        for value in block.returns:
            counts[value] = counts.get(value, 0) + 1
    return counts
