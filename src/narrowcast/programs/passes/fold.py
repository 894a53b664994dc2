"""fold: a chain of casts a -> b -> c becomes a -> c.

Before, and after:

    %4: fp32[4, 8] cpu = cast(self=%0)      # %0 is bf16         %4: fp32[4, 8] cpu = cast(self=%0)
    %5: fp16[4, 8] cpu = cast(self=%4)                           %5: fp16[4, 8] cpu = cast(self=%0)

Exact: only where a -> b loses nothing. While autograd is still to come, besides only where the gradient's way back,
c -> b, loses nothing either and nothing else reads b, so that gradients add up where they did. Refuses: a value written
to in between. Each block by itself. Idempotent; `drop` removes what then has no reader.
"""

from __future__ import annotations

from narrowcast.formats import is_exact
from narrowcast.programs.passes.readers import count_readers
from narrowcast.programs.program import Block, Edit, Program, Retarget, Step, Why, Writes

NAME = "fold"


def fold_casts(program: Program, after_autograd: bool = False) -> list[Edit]:
    """Return the edits after which no exact cast is the source of another cast."""
    readers = count_readers(program)
    blocks = {id(block): block for block, _ in program.body.walk()}.values()
    return [edit for block in blocks for edit in _fold_in(program, block, readers, after_autograd)]


def _fold_in(program: Program, block: Block, readers: dict[int, int], after_autograd: bool) -> list[Edit]:
    writes = Writes(block)
    here = {step.id: step for step in block.steps if step.is_cast}
    edits: list[Edit] = []
    source: dict[int, int] = {}
    for step in here.values():
        middle = here.get(step.operands[0].value)
        if middle is None:
            continue
        first = source.get(middle.id, middle.operands[0].value)
        if not _exact(program, first, middle, step):
            continue
        if not after_autograd and step.value.gradient and not _exact_back(step, middle, readers):
            continue
        if writes.is_written(first, middle.id, step.id) or writes.is_written(middle.id, middle.id, step.id):
            continue
        source[step.id] = first
        edits.append(Retarget(step.id, first, Why(NAME, f"{middle.value.type} holds every input value")))
    return edits


def _exact(program: Program, first: int, middle: Step, last: Step) -> bool:
    if any(program.open_region(s) is not None for s in (middle, last)):
        return False
    a, b, c = program.values[first].format, middle.value.format, last.value.format
    return a is not None and b is not None and c is not None and is_exact(a, b)


def _exact_back(last: Step, middle: Step, readers: dict[int, int]) -> bool:
    b, c = middle.value.format, last.value.format
    return b is not None and c is not None and is_exact(c, b) and readers[middle.id] == 1
