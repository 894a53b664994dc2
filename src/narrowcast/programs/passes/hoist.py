"""hoist: what eager's weight cache shares through loops and branches, where blocks read what is around them.

Before, and after:

    %5: other = prim.Loop(%1) {                            %9: bf16[4, 8] cpu = cast(self=%0)      # %0 is a weight
      %6: bf16[4, 8] cpu = cast(self=%0)                   %5: other = prim.Loop(%1) {
      %7: bf16[2, 8] cpu = aten.mm.default(%4, %6)           %7: bf16[2, 8] cpu = aten.mm.default(%4, %9)

A weight is cast once in an outermost region, so that its gradients add up in the low format. Of an input nobody
knows whether it is a weight before the program runs: `cast.weight` casts it then if it is one, and the casts that were
there find nothing left to do. Exact, in the backward too. Refuses: regions that do not cache, values that are made
inside, and values that something writes to. Recurses into all blocks. Idempotent: a hoisted cast is one, and stands
where it should.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from narrowcast.formats import fp32
from narrowcast.programs.passes.readers import cast_inside
from narrowcast.programs.program import TENSOR, WEIGHT, Block, Edit, Hoist, Program, Step, Why, Writes

NAME = "hoist"


def hoist_casts(program: Program, sessions: Mapping[int, int], written: set[int] | None = None) -> list[Edit]:
    """Return the edits after which each weight is cast once where its outermost region begins.

    sessions: for each session, a step of the block in which its outermost region is entered. written: is extended by
    the casts that are left where they are, as something may write to what they read.
    """
    homes = {step.id: block for block, step in program.body.walk()}
    groups: dict[tuple[int, str, int, tuple[str, int | None]], list[Step]] = {}
    inner = cast_inside(program)
    left = _left_early(program)
    for step in program.steps.values():
        cached_in = _session(program, step, left)
        if cached_in is not None and cached_in in sessions and step.id not in inner:
            key = (step.operands[0].value, step.value.type, cached_in, program.casting(step))
            groups.setdefault(key, []).append(step)
    edits: list[Edit] = []
    known: dict[int, _Home] = {}
    for (value, _, session, (_, alone)), casts in groups.items():
        block = homes.get(sessions[session])
        if block is None:
            continue
        if id(block) not in known:
            known[id(block)] = _Home(block)
        home = known[id(block)]
        before = home.first_with(casts)
        if before is not None and not before.grad_mode:  # a cast that is made there carries no gradient
            casts = [cast for cast in casts if not cast.grad_mode]
            before = home.first_with(casts) if casts else None
        if before is None or value in home.inner or (len(casts) == 1 and before.id == casts[0].id):
            continue
        if alone is not None and any(cast.id in home.inner for cast in casts):
            continue  # what it needs to know may not be there yet
        if home.writes.is_written_after(value, -1):
            if written is not None:
                written.update(cast.id for cast in casts)
            continue
        why = Why(NAME, "the weight cache")
        edits.append(Hoist(casts[0].id, before.id, tuple(cast.id for cast in casts), why))
    return edits


class _Home:
    def __init__(self, block: Block) -> None:
        self.block = block
        self.position: dict[int, int] = {}  # of each step in it, or of the step around that
        self.inner: set[int] = set()  # what is made in blocks inside it, and not there for every step of it
        self.writes = Writes(block)
        for n, step in enumerate(block.steps):
            self.position[step.id] = n
            for inner in step.blocks:
                self._enter(inner, n)

    def _enter(self, block: Block, position: int) -> None:
        self.inner.update(v.id for v in block.parameters)
        for step in block.steps:
            self.inner.add(step.id)
            self.position[step.id] = position
            for inner in step.blocks:
                self._enter(inner, position)

    def first_with(self, casts: list[Step]) -> Step | None:
        known = [self.position[cast.id] for cast in casts if cast.id in self.position]
        return self.block.steps[min(known)] if len(known) == len(casts) else None


def _session(program: Program, step: Step, left: Set[int]) -> int | None:
    """Return the session in whose cache eager execution would keep this cast of a weight; None if in none."""
    if not step.is_cast or step.region is None:
        return None
    region, source = program.regions[step.region], program.values[step.operands[0].value]
    kept = region.facts.cache and step.value.format is not fp32  # a weight is in fp32; a rule may name any other format
    maker = program.steps.get(source.id)
    if maker is not None and maker.op == WEIGHT:
        return None
    if maker is not None and maker.op == "getitem":
        maker = program.steps.get(maker.operands[0].value, maker)
    passed_on = maker is None or not (maker.computes or maker.id in left)
    may_be = source.weight or (source.type == TENSOR and passed_on)
    return region.session if kept and may_be else None


def _left_early(program: Program) -> set[int]:
    """Return the values that TorchScript leaves undefined where a branch was left early: not to be read there."""
    undefined: set[int] = set()
    for step in program.steps.values():  # those of inner blocks first
        given = [v for block in step.blocks for v in block.returns]
        given += [step.operands[0].value] if step.op == "getitem" else []
        if step.op == "prim.Uninitialized" or not undefined.isdisjoint(given):
            undefined.add(step.id)
    return undefined
