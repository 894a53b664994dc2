"""The decision: in which format does each tensor argument of a call compute?

Everything else in Narrowcast either asks this function or carries out what it answers. It is pure and total: any call,
policy and region give a plan, never an exception.

Semantics of the actions that native autocast has: aten/src/ATen/autocast_mode.{h,cpp} of torch 2.11 to 2.15.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from narrowcast.core.policy import NOWHERE, Kind, Lack, Policy, Rule, Site
from narrowcast.formats import Format, fp32, fp64, widest

Lacking = Mapping[Format | None, Lack]


@dataclass(frozen=True, slots=True)
class Argument:
    """One tensor of a call. A tensor list counts element by element, under one name.

    `format` is None for what has no floating format (integers, booleans, an optional tensor that is absent), and for
    what is `unknown` until the call runs.
    """

    name: str
    format: Format | None
    device: str = "cpu"
    written: bool = False
    unknown: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """One op invocation as facts.

    `given` holds the names of arguments that the caller passed and that are not tensors (`dtype` matters).
    `computes` is False for views, copies, conversions, factories, in-place and out= forms; patterns pass those by.
    `direction` is `forward`; or, for what autograd runs, `dgrad`, `wgrad`, or `backward` where it is neither.
    `number` says which call of the op it is in its module's call, from 1; 0 where nobody counted.
    """

    op: str
    arguments: tuple[Argument, ...]
    site: Site = NOWHERE
    given: frozenset[str] = frozenset()
    computes: bool = True
    direction: str = "forward"
    number: int = 0


@dataclass(frozen=True, slots=True)
class Region:
    """Where autocasting holds, as facts: device type, low format, whether it is enabled, the weight cache."""

    device_type: str
    low: Format
    enabled: bool = True
    cache: bool = True


@dataclass(frozen=True, slots=True)
class Output:
    """What to cast floating results to: all of them, or one `part` (`1` is the second of several, `logits` a name).

    A format of None is that of the first eligible argument, which is not known until the call runs. fp64 is cast only
    where the format is asked for `exactly`.
    """

    part: str
    format: Format | None
    exactly: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done with one call.

    formats:    per tensor argument the format to cast it to; None leaves it as it is.
    rule:       the rule that decided; None where the policy says nothing about the call.
    argument_rules: rules that decided about single arguments, (name, rule).
    set_dtype:  pass dtype=fp32, which the caller left open.
    append_dtype: call the overload that takes a dtype, with fp32.
    results:    casts of what the call returns: first of the whole, without the parts that have a cast of their own.
    computes_in: the format of the results before these, as far as the plan says it.
    shields:    ops inside this one are not autocast (as native does below every listed op).
    refused:    why the call must not run; None if it may.
    undecided:  the rule's action, where it depends on formats that are unknown; `formats` are empty then.
    """

    formats: tuple[Format | None, ...]
    rule: Rule | None = None
    argument_rules: tuple[tuple[str, Rule], ...] = ()
    set_dtype: bool = False
    append_dtype: bool = False
    results: tuple[Output, ...] = ()
    computes_in: Format | None = None
    shields: bool = False
    refused: str | None = None
    undecided: Kind | None = None

    @property
    def rules(self) -> tuple[Rule, ...]:
        """All rules that decided something about the call."""
        whole = (self.rule,) if self.rule is not None else ()
        return (*(rule for _, rule in self.argument_rules), *whole)

    def rule_for(self, name: str) -> Rule | None:
        """Return the rule that decided about an argument or a result (`input`, `result.logits`), or else the call's."""
        return next((rule for about, rule in self.argument_rules if about == name), self.rule)

    def rule_about(self, name: str) -> Rule | None:
        """Return the rule about an argument, a result or a part of it (`result.logits`), or else the call's."""
        return next((rule for about, rule in self.argument_rules if about.partition(".")[0] == name), self.rule)

    @property
    def output(self) -> Format | None:
        """The format that all floating results are cast to; None if they are not cast alike."""
        return next((r.format for r in self.results if not r.part), None)

    @property
    def changes_nothing(self) -> bool:
        """Whether the call may run exactly as it is made."""
        changes_results = self.set_dtype or self.append_dtype or self.results or self.refused or self.undecided
        return not (self.shields or changes_results) and not any(self.formats)


def decide(call: Call, policy: Policy, region: Region) -> Plan:
    """Return the plan for one call under a policy in a region.

    Eligible are floating tensors on the region's device type that are not fp64 and that the op does not write to;
    everything else passes untouched. (Where a module's call is to have exactly one format, fp64 is cast, too.) Calls
    that no rule names run as their inputs are. An argument whose format is unknown counts as eligible: whatever casts
    it looks when it is there.
    """
    arguments = call.arguments
    untouched = (None,) * len(arguments)
    if not region.enabled:
        return Plan(untouched)
    device = region.device_type
    resolved = policy.resolve(device)
    table = resolved.table
    candidates = table.candidates(call.op, call.computes, call.direction)
    rule = None
    for r in candidates.whole:
        if r.is_unconditional or r.matches_call(call.site, call.number):
            rule = r
            break
    eligible = [
        (a.unknown or (a.format is not None and a.format is not fp64)) and a.device == device and not a.written
        for a in arguments
    ]
    overrides = _argument_rules(call, candidates.per_argument) if candidates.per_argument else ()
    plan = Plan(untouched)
    if rule is not None:
        plan = _apply(rule, call, _floats(call, device) if rule.is_exact else eligible, region.low)
    if overrides:
        plan = _override(plan, overrides, call, eligible, region)
    lacking = resolved.lacking.get(call.op)
    if lacking:  # then the call may not run in the formats that it gives
        plan = _repair_kernel(plan, lacking, call, eligible, resolved, region.low)
        if None in lacking:
            plan = _repair_mixture(plan, lacking[None], call, eligible)
    return plan


def _floats(call: Call, device: str) -> list[bool]:
    return [(a.unknown or a.format is not None) and a.device == device and not a.written for a in call.arguments]


def _apply(rule: Rule, call: Call, eligible: list[bool], low: Format) -> Plan:
    kind = rule.action.kind
    arguments = call.arguments
    untouched = (None,) * len(arguments)
    dst = {Kind.LOWER: low, Kind.FULL: fp32}.get(kind, rule.action.format)  # `to` alone has one
    if dst is not None:
        return Plan(_cast_all(dst, call, eligible), rule, shields=True, computes_in=dst)
    if kind is Kind.FOLLOW:
        return Plan(untouched, rule, shields=True)
    if kind is Kind.REFUSE:
        return Plan(untouched, rule, refused=rule.reason or "the policy refuses this op")
    if kind in _COMPARING and not rule.is_module_call and any(a.unknown for a in arguments):
        return _compare_later(rule, call, eligible)
    if kind is Kind.INSIDE:
        first = _first_format(call, eligible)
        follows = rule.is_module_call or (first is not None and first is not fp32)
        results = (Output("", first),) if follows else ()
        return Plan(_cast_all(fp32, call, eligible), rule, results=results, computes_in=fp32, shields=True)
    if kind is Kind.ALIGN:
        return _align(rule, call, eligible)
    if kind is Kind.PROMOTE:
        return _promote(rule, call, eligible, low)
    starts_eligible = bool(eligible) and eligible[0]
    if kind is Kind.FULL_SET_DTYPE:
        sets = starts_eligible and "dtype" not in call.given
        return Plan(untouched, rule, set_dtype=sets, computes_in=fp32 if sets else None, shields=True)
    computes_in = fp32 if starts_eligible else None
    return Plan(untouched, rule, append_dtype=starts_eligible, computes_in=computes_in, shields=True)


_COMPARING = (Kind.INSIDE, Kind.ALIGN, Kind.PROMOTE)


def _first_format(call: Call, eligible: list[bool], planned: Sequence[Format | None] = ()) -> Format | None:
    """Return the format of the first eligible argument: the planned one, or else its input format."""
    cast = planned or (None,) * len(eligible)
    arguments = zip(call.arguments, eligible, cast, strict=True)
    return next((dst or a.format for a, is_eligible, dst in arguments if is_eligible), None)


def _compare_later(rule: Rule, call: Call, eligible: list[bool]) -> Plan:
    """Return a plan that compares formats when the call runs; one fp32 decides a promotion at once."""
    arguments = zip(call.arguments, eligible, strict=True)
    if rule.action.kind is Kind.PROMOTE and any(e and a.format is fp32 for a, e in arguments):
        return Plan(_cast_all(fp32, call, eligible), rule, shields=True)
    return Plan((None,) * len(call.arguments), rule, shields=True, undecided=rule.action.kind)


def _cast_all(dst: Format, call: Call, eligible: list[bool]) -> tuple[Format | None, ...]:
    return tuple(
        dst if is_eligible and a.format is not dst else None
        for a, is_eligible in zip(call.arguments, eligible, strict=True)
    )


def _promote(rule: Rule, call: Call, eligible: list[bool], low: Format) -> Plan:
    """Plan native promotion: to the wider of the low format and fp32.

    Native folds from the left and stops at the first fp32; a third format that it meets before is an error there.
    """
    arguments = zip(call.arguments, eligible, strict=True)
    first = next((a.format for a, is_eligible in arguments if is_eligible and a.format is not low), low)
    if first is not low and first is not fp32:
        refused = f"native promotion met {first} where it knows only {low} and fp32"
        return Plan((None,) * len(call.arguments), rule, shields=True, refused=refused)
    dst = fp32 if first is fp32 else low
    return Plan(_cast_all(dst, call, eligible), rule, computes_in=dst, shields=True)


def _align(rule: Rule, call: Call, eligible: list[bool]) -> Plan:
    """Align mixed floats to the destination that the op writes to, or else to the widest of them (fp64 counts)."""
    floats = [a for a in call.arguments if a.format is not None]
    destination = next((a.format for a in floats if a.written), None)
    if destination is None:
        try:
            destination = widest(a.format for a in floats if a.format is not None)
        except ValueError:
            kinds = ", ".join(dict.fromkeys(str(a.format) for a in floats))
            refused = f"no format holds all of {kinds}" if len({a.format for a in floats}) > 1 else None
            return Plan((None,) * len(call.arguments), rule, shields=True, refused=refused)
    return Plan(_cast_all(destination, call, eligible), rule, computes_in=destination, shields=True)


def _repair_mixture(plan: Plan, lack: Lack, call: Call, eligible: list[bool]) -> Plan:
    """Return the plan, with arguments aligned where it leaves several formats to an op that takes one."""
    if plan.refused is not None or plan.undecided is not None:
        return plan
    planned = [dst or a.format for a, dst in zip(call.arguments, plan.formats, strict=True)]
    if any(a.unknown and e and p is None for a, e, p in zip(call.arguments, eligible, planned, strict=True)):
        return _compare_later(lack.rule, call, eligible) if not any(plan.formats) else plan
    floats = [p for p in planned if p is not None]
    low_first = lack.low_first and len(set(floats[1:])) == 1 and floats[0].bits < floats[1].bits
    if len(set(floats)) < 2 or low_first:
        return plan
    aligned = _align(lack.rule, call, eligible)
    if aligned.refused is not None:
        return plan
    about_results = tuple(row for row in plan.argument_rules if row[1].is_about_result)
    return replace(aligned, argument_rules=about_results, results=plan.results)


def _repair_kernel(plan: Plan, lacking: Lacking, call: Call, eligible: list[bool], policy: Policy, low: Format) -> Plan:
    """Return the plan, unless the call would compute in a format that the device lacks: then fp32 on the inputs as they
    are, and the results that were promised.
    """
    computes_in = plan.computes_in or _format_inside(lacking, call, policy, low)
    if computes_in is None:
        computes_in = _first_format(call, eligible, plan.formats)
    lack = lacking.get(computes_in) if computes_in is not None and plan.refused is None else None
    if lack is None:
        return plan
    promised = () if plan.output is not None else (Output("", computes_in),)
    return Plan(
        _cast_all(fp32, call, eligible), lack.rule, shields=True, computes_in=fp32,
        argument_rules=tuple(row for row in plan.argument_rules if row[1].is_about_result),
        results=(*promised, *plan.results),
    )  # fmt: skip


def _format_inside(lacking: Lacking, call: Call, policy: Policy, low: Format) -> Format | None:
    """Return the format of the op that the call is made of; None if no rule is about that one."""
    inside = next((lack.inside for lack in lacking.values()), "")
    rules = policy.table.candidates(inside).whole
    action = next((rule.action for rule in rules if rule.matches_call(call.site, 0)), None)
    return None if action is None else {Kind.LOWER: low, Kind.FULL: fp32, Kind.TO: action.format}.get(action.kind)


def _argument_rules(call: Call, rules: tuple[Rule, ...]) -> tuple[tuple[str, Rule], ...]:
    """Return the strongest rule that holds here for each argument, and each result, that a rule names."""
    names = dict.fromkeys([a.name for a in call.arguments])
    names.update((r.argument, None) for r in rules if r.argument is not None and r.is_about_result)
    held = [r for r in rules if r.matches_call(call.site, call.number)]
    strongest = ((name, next((r for r in held if r.argument == name), None)) for name in names)
    return tuple((name, r) for name, r in strongest if r is not None)


def _cast_ones(call: Call, eligible: list[bool], overrides: tuple[tuple[str, Rule], ...]) -> list[bool]:
    """Return the eligible arguments except those that rules of their own keep, unless these are all."""
    kept = {name for name, rule in overrides if rule.action.kind is Kind.FOLLOW}
    cast = [e and a.name not in kept for a, e in zip(call.arguments, eligible, strict=True)]
    return cast if any(cast) else eligible


def _override(
    plan: Plan, overrides: tuple[tuple[str, Rule], ...], call: Call, eligible: list[bool], region: Region
) -> Plan:
    """Return the plan with single arguments and results decided by rules about them."""
    wanted: dict[str, Format | None] = {}
    exactly = set()
    results = {r.part: r for r in plan.results}
    for name, rule in overrides:
        kind = rule.action.kind
        dst = {Kind.LOWER: region.low, Kind.FULL: fp32, Kind.TO: rule.action.format}.get(kind)
        if rule.is_about_result:
            part = name.partition(".")[2]
            results[part] = Output(part, dst, rule.is_exact)
            if kind is Kind.FOLLOW:
                results[part] = Output(part, _first_format(call, _cast_ones(call, eligible, overrides)))
                if results[part].format is None and not any(a.unknown for a in call.arguments):
                    del results[part]  # there is nothing to follow
            continue
        wanted[name] = dst
        if rule.is_exact:
            exactly.add(name)
    formats = list(plan.formats)
    floats = _floats(call, region.device_type)
    for position, a in enumerate(call.arguments):
        if a.name in wanted and (floats if a.name in exactly else eligible)[position]:
            dst = wanted[a.name]
            formats[position] = dst if dst is not a.format else None
    computes_in = plan.computes_in
    if wanted and computes_in is not None:  # the call as a whole is no longer in one format, or in another
        read = {dst or a.format for a, dst, is_float in zip(call.arguments, formats, floats, strict=True) if is_float}
        computes_in = read.pop() if len(read) == 1 else None
    found, outputs = tuple(formats), tuple(sorted(results.values(), key=lambda result: bool(result.part)))
    return replace(plan, formats=found, argument_rules=overrides, results=outputs, computes_in=computes_in)
