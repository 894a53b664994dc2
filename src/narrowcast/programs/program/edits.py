"""Edits: the only ways in which a pass may change a program. Each says why, and lands in the ledger.

insert, remove, retarget, share and move a cast, or insert one cast of several values together; besides, a region's edge
may be removed, a call may be given the dtype that a policy sets, the format of a result may follow from that of an
operand, and an operand may read what the cast before it reads. Nothing else of a program can change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from narrowcast.core.ledger import EditRecord
from narrowcast.core.policy import RESULT, Rule
from narrowcast.errors import ProgramError
from narrowcast.formats import FORMATS, Format
from narrowcast.programs.program.model import (
    BACK,
    CAST,
    EXACTLY,
    TENSOR,
    TOGETHER,
    WEIGHT,
    Block,
    Operand,
    Program,
    Step,
    Value,
)


@dataclass(frozen=True, slots=True)
class Why:
    """Which pass wants an edit, its reason, and the rule and policy behind it, if any."""

    by: str
    reason: str
    rule: Rule | None = None
    policy: str = ""


@dataclass(frozen=True, slots=True)
class InsertCast:
    """Cast operand number `operand` of a step to `dst`, just before the step.

    region: number of the region that asks for it, if it is not the step's own. exactly: fp64, too, where only the
    running program knows what comes.
    """

    step: int
    operand: int
    dst: Format
    why: Why
    region: int | None = None
    exactly: bool = False


@dataclass(frozen=True, slots=True)
class CastResult:
    """Cast the result of a step to `dst`, just after it; everything that read it reads the cast.

    The step itself then gives `src`: what it was read with was the format after the cast. None: nobody knows yet. A
    `dst` of None: the format in which the first floating one of the values `like` comes.
    """

    step: int
    src: Format | None
    dst: Format | None
    why: Why
    exactly: bool = False
    like: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CastTogether:
    """Cast operands of a step to the format that they turn out to have in common when it runs, just before the step."""

    step: int
    operands: tuple[int, ...]
    why: Why


@dataclass(frozen=True, slots=True)
class Follow:
    """Say that a step gives `format` now, because what it reads has another one: the step itself stays as it is."""

    step: int
    format: Format
    why: Why


@dataclass(frozen=True, slots=True)
class SetDtype:
    """Give a call the argument dtype=`dst`; `op` is the overload that takes it, if it is another."""

    step: int
    dst: Format
    why: Why
    op: str = ""


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove a step: a region's edge, a cast without readers, or one whose readers then read `instead`."""

    step: int
    why: Why
    instead: int | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """Remove a cast; its readers read the earlier, equal cast `keep`."""

    step: int
    keep: int
    why: Why


@dataclass(frozen=True, slots=True)
class Retarget:
    """Let a cast read another value."""

    step: int
    source: int
    why: Why


@dataclass(frozen=True, slots=True)
class Hoist:
    """Make one cast of what several casts read, before step `before` of the same block or one around it.

    step: the first of the casts. casts: all of them, to the same format. Of a weight the new cast replaces them; of
    what may turn out to be one, they read it.
    """

    step: int
    before: int
    casts: tuple[int, ...]
    why: Why


@dataclass(frozen=True, slots=True)
class Reread:
    """Let an operand of a step that read a cast read `source`, the value that the cast reads."""

    step: int
    operand: int
    source: int
    why: Why


@dataclass(frozen=True, slots=True)
class CastReturn:
    """Cast to `dst` what the program returns at `position`; `step` makes it."""

    step: int
    position: int
    dst: Format
    why: Why


Edit = (
    InsertCast | CastTogether | CastResult | CastReturn | Follow | SetDtype | Remove | Share | Retarget | Reread
    | Hoist
)  # fmt: skip


_KINDS: dict[type, str] = {
    InsertCast: "insert", CastResult: "insert", CastTogether: "insert", SetDtype: "set dtype", Follow: "follow",
    Remove: "remove", Share: "share", Retarget: "fold", Hoist: "share", Reread: "remove",
    CastReturn: "insert",
}  # fmt: skip


def edit_records(program: Program, edits: Sequence[Edit]) -> list[EditRecord]:
    """Return the ledger's records of edits that are made together: what a cast reads may follow another format now."""
    followed = {edit.step: edit.format for edit in edits if isinstance(edit, Follow)}
    return [_record(program, edit, followed) for edit in edits]


def _record(program: Program, edit: Edit, followed: Mapping[int, Format]) -> EditRecord:
    step = program.steps[edit.step]
    value, argument, dst = _subject(program, step, edit)
    if value is not None and value.id in followed and not isinstance(edit, CastResult):
        value = replace(value, type=followed[value.id].name)
    why: Why = edit.why
    src = value.type if value is not None and value.shape is not None else ""
    moved = value.bytes + value.elements * FORMATS[dst].bits // 8 if value is not None and dst in FORMATS else 0
    about = _KINDS[type(edit)], why.by, step.op, argument, *step.site.at
    action, rule = (str(why.rule.action), str(why.rule)) if why.rule else ("", "")
    return EditRecord(*about, src, dst, moved, step.direction, action, rule, why.reason, why.policy)


def _subject(program: Program, step: Step, edit: Edit) -> tuple[Value | None, str, str]:
    """Return the value that a cast of this edit reads, the argument that it is for, and the format of its output."""
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


def apply_edits(program: Program, edits: Sequence[Edit]) -> Program:
    """Return the program with all edits made, in one walk. New casts are numbered in the order of the program.

    Raises ProgramError for an edit about a step that is not there, or one that is not allowed about it.
    """
    return _Editor(program, edits).run() if edits else program


class _Editor:
    def __init__(self, program: Program, edits: Sequence[Edit]) -> None:
        self.program = program
        self.made: dict[int, Value] = {}
        self.inserts: dict[int, list[InsertCast]] = {}
        self.together: dict[int, CastTogether] = {}
        self.hoists: dict[int, list[Hoist]] = {}
        self.results: dict[int, CastResult] = {}
        self.follows: dict[int, Format] = {}
        self.dtypes: dict[int, SetDtype] = {}
        self.sources: dict[int, int] = {}
        self.gone: set[int] = set()
        self.instead: dict[int, int] = {}
        self.rereads: dict[tuple[int, int], int] = {}
        self.returns: dict[int, CastReturn] = {}
        for edit in edits:
            self._file(edit)
        self.next_id = max(program.values) + 1  # an edit is about a step: there are values

    def _file(self, edit: Edit) -> None:
        step = self.program.steps.get(edit.step)
        if step is None:
            raise ProgramError(f"{type(edit).__name__} about %{edit.step}", "the program has no such step")
        if isinstance(edit, InsertCast):
            self.inserts.setdefault(edit.step, []).append(edit)
        elif isinstance(edit, CastTogether):
            self.together[edit.step] = edit
        elif isinstance(edit, CastResult):
            self.results[edit.step] = edit
        elif isinstance(edit, Follow):
            self.follows[edit.step] = edit.format
        elif isinstance(edit, Reread):
            self.rereads[edit.step, edit.operand] = edit.source
        elif isinstance(edit, CastReturn):
            self.returns[edit.position] = edit
        elif isinstance(edit, SetDtype):
            self.dtypes[edit.step] = edit
        else:
            if not step.is_cast and not step.op.startswith("region."):
                raise ProgramError(f"{type(edit).__name__} about %{edit.step}", f"{step.op} is no cast")
            if isinstance(edit, Remove):
                self._remove(edit.step, edit.instead)
            elif isinstance(edit, Share):
                self._remove(edit.step, edit.keep)
            elif isinstance(edit, Hoist):
                self.hoists.setdefault(edit.before, []).append(edit)
            else:
                self.sources[edit.step] = edit.source

    def _remove(self, step: int, instead: int | None) -> None:
        self.gone.add(step)
        if instead is not None:
            self.instead[step] = instead

    def _now(self, value: int) -> int:
        seen = []
        while value in self.instead:
            seen.append(value)
            value = self.instead[value]
        for earlier in seen:
            self.instead[earlier] = value
        return value

    def run(self) -> Program:
        return replace(self.program, body=self._block(self.program.body))

    def _block(self, block: Block) -> Block:
        steps: list[Step] = []
        for step in block.steps:
            self._add(step, steps)
        returns = [self._now(value) for value in block.returns]
        for position, edit in self.returns.items() if block is self.program.body else ():
            cast = self._cast(returns[position], edit.dst, self.program.steps[edit.step], False)
            steps.append(replace(cast, region=None))
            returns[position] = cast.id
        return replace(block, steps=tuple(steps), returns=tuple(returns))

    def _hoist(self, edit: Hoist, steps: list[Step], before: Step) -> None:
        cast = replace(self.program.steps[edit.step], grad_mode=before.grad_mode)
        source = self.program.values[cast.operands[0].value]
        known = source.weight
        value = self._new(cast.value if known else source)
        hoisted = self._beside(cast, value, CAST if known else WEIGHT, (Operand("self", source.id),))
        steps.append(hoisted if known else replace(hoisted, constants=cast.value.type, aliases=(0,)))
        for other in edit.casts:
            if known:
                self._remove(other, value.id)
            else:
                self.sources[other] = value.id

    def _add(self, step: Step, steps: list[Step]) -> None:
        for hoist in self.hoists.get(step.id, ()):
            self._hoist(hoist, steps, step)
        if step.id in self.gone:
            return
        operands = [self._operand(step, n, o) for n, o in enumerate(step.operands)]
        if step.id in self.sources:
            operands[0] = replace(operands[0], value=self.sources[step.id])
        for edit in self.inserts.get(step.id, ()):
            cast = self._cast(operands[edit.operand].value, edit.dst, step, edit.exactly)
            steps.append(cast if edit.region is None else replace(cast, region=edit.region))
            operands[edit.operand] = replace(operands[edit.operand], value=cast.id)
        if step.id in self.together:
            self._cast_together(step, operands, steps)
        dtype = self.dtypes.get(step.id)
        changed = replace(step, operands=tuple(operands), blocks=tuple(self._block(b) for b in step.blocks))
        if dtype is not None:
            changed = replace(changed, op=dtype.op or step.op, given=step.given | {f"dtype={dtype.dst}"})
        if step.id in self.follows:
            changed = replace(changed, value=replace(changed.value, type=self.follows[step.id].name))
        result = self.results.get(step.id)
        if result is not None:
            self.made[step.id] = replace(changed.value, type=result.src.name if result.src is not None else TENSOR)
            changed = replace(changed, value=self.made[step.id])
        steps.append(changed)
        if result is not None:
            if result.dst is None:
                value = self._new(self.made[step.id], type=TENSOR)
                like = [Operand("like", self._now(number)) for number in result.like]
                cast = self._beside(step, value, BACK, (Operand(RESULT, step.id), *like))
            else:
                cast = self._cast(step.id, result.dst, step, result.exactly, RESULT)
            steps.append(cast)
            self.instead[step.id] = cast.id

    def _cast_together(self, step: Step, operands: list[Operand], steps: list[Step]) -> None:
        """Add one step that casts the operands, and one for each result; `operands` then reads those."""
        positions = self.together[step.id].operands
        chosen = [operands[p] for p in positions]
        casts = self._new(Value(0, "tuple", gradient=step.grad_mode))
        rule = self.together[step.id].why.rule
        together = self._beside(step, casts, TOGETHER, tuple(chosen))
        steps.append(replace(together, constants=str(rule.action) if rule is not None else ""))
        for n, (position, operand) in enumerate(zip(positions, chosen, strict=True)):
            known = self.made.get(operand.value) or self.program.values[operand.value]
            value = self._new(known, type=TENSOR, gradient=known.gradient and step.grad_mode)
            element = self._beside(step, value, "getitem", (Operand("a0", casts.id),))
            steps.append(replace(element, constants=str(n), aliases=(0,)))
            operands[position] = replace(operand, value=value.id)

    def _operand(self, step: Step, position: int, operand: Operand) -> Operand:
        value = self._now(self.rereads.get((step.id, position), operand.value))
        return operand if value == operand.value else replace(operand, value=value)

    def _cast(self, source: int, dst: Format, step: Step, exactly: bool, name: str = "self") -> Step:
        known = self.made.get(source) or self.program.values[source]
        value = self._new(known, type=dst.name, gradient=known.gradient and step.grad_mode)
        cast = self._beside(step, value, CAST, (Operand(name, source),))
        return replace(cast, constants=EXACTLY) if exactly and known.type == TENSOR else cast

    def _new(self, like: Value, **facts: Any) -> Value:
        value = replace(like, id=self.next_id, weight=False, **facts)
        self.next_id += 1
        self.made[value.id] = value
        return value

    def _beside(self, step: Step, value: Value, op: str, operands: tuple[Operand, ...]) -> Step:
        """Return a new step in the region, and at the place, of one that is there."""
        return Step(
            value, op, operands,
            region=step.region, grad_mode=step.grad_mode, direction=step.direction, site=step.site,
        )  # fmt: skip
