"""share: one cast per value and format.

Before, and after:

    %4: bf16[4, 8] cpu = cast(self=%0)                   %4: bf16[4, 8] cpu = cast(self=%0)
    %5: bf16[2, 8] cpu = aten.mm.default(%1, %4)         %5: bf16[2, 8] cpu = aten.mm.default(%1, %4)
    %6: bf16[4, 8] cpu = cast(self=%0)                   %7: bf16[2, 8] cpu = aten.mm.default(%2, %4)
    %7: bf16[2, 8] cpu = aten.mm.default(%2, %6)

Exact, in the backward too: while autograd is still to come, a shared cast would add its readers' gradients up in the
low format. So before autograd it shares what eager's weight cache shares (weights, in regions that cache, within one
outermost region) and casts that no gradient flows through; after autograd everything. Refuses: a value written to in
between, and a cast that leaves its block. Each block by itself. Idempotent.
"""

from __future__ import annotations

from narrowcast.programs.passes.readers import cast_inside
from narrowcast.programs.program import Block, Edit, Program, Share, Step, Why, Writes

NAME = "share"


def share_casts(program: Program, after_autograd: bool = False) -> list[Edit]:
    """Return the edits after which equal casts are made once."""
    blocks = {id(block): block for block, _ in program.body.walk()}.values()
    return [edit for block in blocks for edit in _share_in(program, block, after_autograd)]


def _share_in(program: Program, block: Block, after_autograd: bool) -> list[Edit]:
    writes = Writes(block)
    kept: dict[tuple[object, ...], Step] = {}
    leaving = set(writes.memories(*block.returns))
    edits: list[Edit] = []
    inner = cast_inside(program)
    shared: dict[int, int] = {}  # casts of a shared cast are casts of the one that stays
    for step in block.steps:
        if not step.is_cast:
            continue
        source = shared.get(step.operands[0].value, step.operands[0].value)
        reason, session = _may_share(program, step, after_autograd, inner)
        if not reason:
            continue
        key = (source, step.value.type, step.constants, session, program.casting(step))
        first = kept.get(key)
        fits = first is not None and (first.grad_mode or not step.grad_mode or not step.value.gradient)
        if first is None or not fits or writes.is_written(source, first.id, step.id):
            kept[key] = step
        elif writes.is_written_after(first.id, first.id) or writes.is_written_after(step.id, step.id):
            kept[key] = step  # what writes to one would change the other; a later one may share with this
        else:
            if not leaving.isdisjoint(writes.memories(step.id)):
                if not leaving.isdisjoint(writes.memories(first.id)):
                    continue  # two results that share memory would be one
                leaving |= writes.memories(first.id)
            if step.id not in block.returns:
                shared[step.id] = first.id
                edits.append(Share(step.id, first.id, Why(NAME, reason)))
    return edits


def _may_share(program: Program, cast: Step, after_autograd: bool, inner: set[int]) -> tuple[str, int | None]:
    """Return why this cast may be shared (empty: it may not), and the session that it may be shared in."""
    if after_autograd:
        return "after autograd equal casts are equal values", None
    value = program.values[cast.operands[0].value]
    if not value.gradient or not cast.grad_mode:
        return "no gradient flows through it", None
    region = program.regions[cast.region] if cast.region is not None else None
    if value.weight and region is not None and region.facts.cache and cast.id not in inner:
        return "the weight cache", region.session
    return "", None
