"""assign: what `decide` says about each call becomes explicit casts, and the regions go.

Before, and after:

    %2: none = region.enter()                                %4: bf16[2, 4] cpu = cast(self=%1)
    %3: bf16[2, 8] cpu = aten.mm.default(self=%1, ...)       %5: bf16[4, 8] cpu = cast(self=%0)
    %9: none = region.exit(region=%2)                        %3: bf16[2, 8] cpu = aten.mm.default(self=%4, ...)

Exact: the casts are those that eager autocast makes, in the same places. Refuses: a call that the policy refuses
(RefusedError). Recurses into all blocks. Idempotent: afterwards no step runs in a region.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from narrowcast.core.decide import Argument, Call, Output, Plan, decide
from narrowcast.core.ops.facts import NORM, op_kind
from narrowcast.core.policy import MODULE_CALL_OP, RESULT, Kind, Policy, Rule
from narrowcast.core.refusals import check_counted, origins, refusal
from narrowcast.errors import RefusedError
from narrowcast.formats import Format, fp32, widest
from narrowcast.programs.passes.readers import Readers, find_readers
from narrowcast.programs.program import ENTER, EXIT, TENSOR, Block, Program, Step, Value
from narrowcast.programs.program.edits import CastResult, CastTogether, Edit, Follow, InsertCast, Remove, SetDtype, Why

NAME = "assign"
_MEETING = (Kind.PROMOTE, Kind.ALIGN)
Overload = Callable[[str], str]


def assign_casts(
    program: Program, policies: Mapping[str, Policy], overload_with_dtype: Overload = lambda op: op
) -> list[Edit]:
    """Return the edits that make every format explicit.

    policies: by digest, resolved for their region's device type. overload_with_dtype: from an op id to that of the
    overload that takes a dtype besides.
    """
    edits: list[Edit] = []
    readers: Readers | None = None
    for block, step in program.body.walk():
        if step.op in (ENTER, EXIT):
            edits.append(Remove(step.id, Why(NAME, "its casts are explicit now")))
        elif step.region is not None and not step.is_cast and not step.blocks:
            decided: list[Edit] = []
            for number in (step.region, *step.others):
                if program.regions[number].facts.enabled:
                    decided += _decided_in(program, step, number, policies, overload_with_dtype)
            edits += decided
            if decided and step.direction != "forward":
                readers = readers or find_readers(program)
                edits += _followed(block, step, decided, readers)
    return edits


def call_of(program: Program, step: Step, number: int | None = None) -> Call:
    """Return the step as the call that `decide` takes, in its region or in the one with this number."""
    number = step.region if number is None else number
    here = program.regions[number].facts.device_type if number is not None else ""
    values = [program.values[o.value] for o in step.operands]
    arguments = tuple(  # where the device is not known, whatever casts looks
        Argument(o.name, v.format, v.device or here, o.written, v.type == TENSOR)
        for o, v in zip(step.operands, values, strict=True)
    )
    return Call(step.op, arguments, step.site, step.given, step.computes, step.direction, step.number)


def _decided_in(
    program: Program, step: Step, number: int, policies: Mapping[str, Policy], overload_with_dtype: Overload
) -> Iterator[Edit]:
    region = program.regions[number]
    policy = policies[region.policy]
    if not step.number:
        check_counted(policy, step.op, step.site, step.computes)
    plan = decide(call_of(program, step, number), policy, region.facts)
    if step.op == MODULE_CALL_OP:
        yield from _at_boundary(program, step, number, plan, policy)
        return
    if plan.refused is not None and not ("enabled" in region.open and plan.rule and plan.rule.action.kind in _MEETING):
        raise refusal(plan, step.op, step.site)
    for position, (operand, dst) in enumerate(zip(step.operands, plan.formats, strict=True)):
        if dst is not None:
            rule = plan.rule_for(operand.name)
            yield InsertCast(step.id, position, dst, _why(rule, policy), number)
    why = _why(plan.rule, policy)
    if plan.undecided is not None or plan.refused is not None:  # where the region turns out to be on, that raises
        tensors = (n for n, o in enumerate(step.operands) if _may_float(program.values[o.value]) and not o.written)
        yield CastTogether(step.id, tuple(tensors), why)
    if plan.set_dtype:
        yield SetDtype(step.id, fp32, why)
    if plan.append_dtype:
        yield SetDtype(step.id, fp32, why, overload_with_dtype(step.op))
    for wanted in plan.results:
        rule = plan.rule_for(f"{RESULT}.{wanted.part}".rstrip("."))
        yield from _cast_results(program, step, plan, wanted, _why(rule, policy))


def _why(rule: Rule | None, policy: Policy) -> Why:
    return Why(NAME, rule.reason if rule is not None else "", rule, policy.name)


def _at_boundary(program: Program, step: Step, number: int, plan: Plan, policy: Policy) -> Iterator[Edit]:
    """Yield the casts where a value goes into a module's call, or comes out of it: such a step is about one value.

    Its `constants` say which: `argument`, or `result` and the part, by position and by name. A result's other operands
    are the arguments.
    """
    if plan.refused is not None:
        raise refusal(plan, step.op, step.site)
    if step.constants == "argument":
        (operand,), (dst,) = step.operands, plan.formats
        if dst is not None:
            rule = plan.rule_for(operand.name)
            yield InsertCast(step.id, 0, dst, _why(rule, policy), number, rule is not None and rule.is_exact)
        return
    parts = ("", *step.constants.split()[1:])
    wanted = next((r for r in reversed(plan.results) if r.part in parts), None)
    if wanted is None or not _may_float(step.value):
        return
    rule = plan.rule_for(f"{RESULT}.{wanted.part}".rstrip("."))
    why = _why(rule, policy)
    src = program.values[step.operands[-1].value].format
    followed = {name for name, rule in plan.argument_rules if rule.action.kind is Kind.FOLLOW}
    arguments = [o for o in step.operands[:-1] if o.name not in followed]
    like = tuple(o.value for o in arguments or step.operands[:-1])
    if wanted.format is not src or src is None:
        yield CastResult(step.id, src, wanted.format, why, wanted.exactly, like if wanted.format is None else ())


def _may_float(value: Value) -> bool:
    return value.format is not None or value.type == TENSOR


def _followed(block: Block, step: Step, decided: list[Edit], readers: Readers) -> Iterator[Edit]:
    """Yield the edits for a backward op's result, which no capture shows, after its operands' format changed.

    The result, and views of it, have the new format; casts that read them take it from there, so that a weight's
    gradient computed in fp32 is not rounded on its way; every other reader gets the format that it had.
    """
    formats = {e.dst for e in decided if isinstance(e, InsertCast)}
    if len(formats) != 1:
        return
    (now,) = formats
    for result in _results(step, readers):
        before = result.value.format
        if before is not None and before is not now:
            yield from _followed_from(block, result, before, now, decided[0].why, readers)


def _results(step: Step, readers: Readers) -> list[Step]:
    """Return the step, or the elements taken from the tuple that it makes."""
    if step.value.shape is not None:
        return [step]
    return [reader for reader, _ in readers.get(step.id, ()) if reader.op == "getitem"]


def _followed_from(block: Block, step: Step, before: Format, now: Format, why: Why, readers: Readers) -> Iterator[Edit]:
    """Yield the edits for one result that had the format `before` and has the format `now`."""
    reached = [step.id]
    for number in reached:
        reached += [r.id for r, _ in readers.get(number, ()) if _is_view(r)]
    if any(number in block.returns for number in reached):
        yield CastResult(step.id, now, before, why)
        return
    as_others = Why(NAME, "its other operands have this format", why.rule)
    for number in reached:
        yield Follow(number, now, why)
        for reader, position in readers.get(number, ()):
            if not _is_view(reader) and not reader.is_cast:
                yield InsertCast(reader.id, position, before, as_others)


def _is_view(step: Step) -> bool:
    return bool(step.aliases) and not step.computes and not step.writes and step.op.startswith("aten.")


def _cast_results(program: Program, step: Step, plan: Plan, wanted: Output, why: Why) -> Iterator[Edit]:
    """Yield the casts of the step's result, or of the elements taken from the tuple that it makes.

    Where these were captured with the cast made, they have the format to go to already.
    """
    results = [step] if step.value.shape is not None else []
    if not results:
        results = [s for s in program.steps.values() if s.op == "getitem" and s.operands[0].value == step.id]
        results = [s for s in results if wanted.part in ("", s.constants)]
    for result in results:
        if wanted.format is None:
            asked = f"the result of {step.op} in the format of its input"
            found = "a script that does not say what format comes in"
            advice = 'Name the format, action = "to(bf16)" for example, or give the whole call the action "inside".'
            raise RefusedError(asked, found, origins(step.site, why.rule), advice)
        src = None if result.value.type == TENSOR else _given(program, step, plan, result)
        if result.value.type == TENSOR or result.value.format is wanted.format is not src:
            yield CastResult(result.id, src, wanted.format, why, wanted.exactly)


def _given(program: Program, step: Step, plan: Plan, result: Step) -> Format | None:
    """Return the format that a call, on its operands cast as planned, gives a result; None where that is unknown."""
    values = [program.values[o.value] for o in step.operands]
    after = [cast or value.format for cast, value in zip(plan.formats, values, strict=True)]
    floats = [f for f in after if f is not None]
    is_known = all(cast or value.type != TENSOR for cast, value in zip(plan.formats, values, strict=True))
    if op_kind(step.op).family == NORM and floats:  # whose weights may be in another format, as statistics are then
        if result.op != "getitem" or result.constants == "0":
            return plan.computes_in or floats[0]
        if result.value.device not in ("", "cpu"):
            return fp32
    elif plan.computes_in is not None:
        return plan.computes_in
    return widest(floats) if floats and is_known else None
