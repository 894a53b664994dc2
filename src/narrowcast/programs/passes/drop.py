"""drop: casts that nobody reads, and casts from a format to itself.

Before, and after:

    %4: fp32[4, 8] cpu = cast(self=%0)         # no reader       %6: fp32[2, 8] cpu = aten.mm.default(%1, %0)
    %5: fp32[4, 8] cpu = cast(self=%0)         # %0 is fp32
    %6: fp32[2, 8] cpu = aten.mm.default(%1, %5)

Exact. While autograd is still to come, a cast to itself goes only where no gradient flows, or where it is its source's
one reader, so that gradients add up where they did. Refuses: a cast to itself whose copy is written to or outlives a
write to the original, or leaves its block while the original comes from outside it or leaves it too. Each block by
itself; repeated until nothing is left to drop.
"""

from __future__ import annotations

from narrowcast.programs.passes.readers import count_readers
from narrowcast.programs.program import Block, Edit, Program, Remove, Step, Why, Writes

NAME = "drop"


def drop_casts(program: Program, after_autograd: bool = False) -> list[Edit]:
    """Return the edits after which every cast is read and changes the format."""
    readers = count_readers(program)
    blocks = {id(block): block for block, _ in program.body.walk()}.values()
    return [edit for block in blocks for edit in _drop_in(program, block, readers, after_autograd)]


def _drop_in(program: Program, block: Block, readers: dict[int, int], after_autograd: bool) -> list[Edit]:
    writes = Writes(block)
    edits: list[Edit] = []
    left = dict(readers)
    unread = Why(NAME, "nothing reads it")
    for step in reversed(block.steps):
        if step.is_cast and left.get(step.id, 0) == 0:
            edits.append(Remove(step.id, unread))
            left[step.operands[0].value] -= 1
    dropped = {edit.step for edit in edits}
    returns = list(block.returns)
    for step in block.steps:
        if not step.is_cast or step.id in dropped or not _is_idle(program, step, writes, left, after_autograd):
            continue
        source = step.operands[0].value
        if step.id in returns:
            others = [*(v.id for v in block.parameters), *(r for r in returns if r != step.id)]
            if any(writes.share_memory(source, other) for other in others):
                continue  # two results, or a result and what came in, would be one
            returns = [source if r == step.id else r for r in returns]
        edits.append(Remove(step.id, Why(NAME, "it changes nothing"), instead=source))
    return edits


def _is_idle(program: Program, step: Step, writes: Writes, readers: dict[int, int], after_autograd: bool) -> bool:
    source = step.operands[0].value
    if program.open_region(step) is not None or program.values[source].format is not step.value.format:
        return False
    if not after_autograd and step.value.gradient and readers[source] != 1:
        return False
    return not writes.is_written_after(source, step.id) and not writes.is_written_after(step.id, step.id)
