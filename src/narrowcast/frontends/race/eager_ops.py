"""Goals for eager code between graphs: ops that the policy lowers run so, or in fp32 where that takes less time.

Nothing is placed there. But what Dynamo leaves to eager code is seen when it runs (a recurrent layer, and all that
follows it in the same `forward`), and each op that the policy lowers is timed on inputs of the same sizes, under the
policy and in fp32. What is found becomes rules: of the policy for eager code, not of that for graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from narrowcast.core.goals import Goal
from narrowcast.core.ops import named
from narrowcast.core.policy import MODULE_CALL_OP, RESULT, Action, Kind, Policy, Rule
from narrowcast.formats import Format, fp32
from narrowcast.frontends.eager import autocast
from narrowcast.frontends.eager.registered import install_visiting, remove_visiting
from narrowcast.frontends.eager.watch import DecidedCall, Watcher, add_watcher, remove_watcher
from narrowcast.frontends.race.candidates import HIGH, POLICY
from narrowcast.frontends.race.choosing import choice_key, load_choice, save_choice, time_sides
from narrowcast.runtime.devices.device import device_now, random_state_kept
from narrowcast.runtime.devices.measure import LARGEST_BYTES, MeasuredOperand, make_tensor
from narrowcast.runtime.torch_bridge import FORMATS, PLAIN, OpFacts, find_op, op_facts, op_id, short_type, tensors_in
from narrowcast.runtime.torch_surface.dispatch import OpOverload, tree_flatten, tree_map, tree_unflatten
from narrowcast.runtime.torch_surface.state import is_enabled

RECURRENT = tuple(
    getattr(getattr(torch.ops.aten, name), overload)
    for name in sorted(named("computation.recurrent"))
    for overload in ("input", "data")
)
"""Ops that are one call, whatever they call inside: results of their steps are not to be cast to and fro."""
_INSIDE = tuple(f"aten.{name}.default" for name in sorted(named("inside.of_recurrent")))
_MEASURED = "measured:"


class EagerCalls(Watcher):
    """A watcher that keeps the calls that may gain: those that are lowered, and recurrent ones; each kind once.

    kinds: by op; what a call was given, with operands in place of floating tensors: of these only sizes are kept.
    """

    whole = frozenset(op_id(op) for op in RECURRENT)

    def __init__(self) -> None:
        self.kinds: dict[OpOverload, dict[str, list[Any]]] = {}
        self._open: list[bool] = []

    def begin(self, call: DecidedCall) -> None:
        """Note that a call reaches a kernel. What it calls inside is part of it; what is only traced takes no time."""
        is_inside, is_module = any(self._open), call.facts.id == MODULE_CALL_OP
        self._open.append(not is_module)
        lowers = call.plan.rule is not None and call.plan.rule.action.kind is Kind.LOWER
        if is_inside or is_module or not (lowers or call.facts.id in self.whole):
            return
        leaves, spec = tree_flatten((call.args, call.kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if all(type(t) in PLAIN and t.layout is torch.strided for t in tensors):
            kept = [_kept(leaf) for leaf in leaves]
            self.kinds.setdefault(call.facts.op, {}).setdefault(str(kept), tree_unflatten(kept, spec))

    def end(self, result: Any) -> None:
        """Note that the call that began last has returned."""
        self._open.pop()

    def fail(self, error: BaseException) -> None:
        """Note that the call that began last has raised."""
        self._open.pop()

    def wants_whole(self, op: str, device_type: str) -> bool:
        """Return True for recurrent ops, which are one call."""
        return op in self.whole


def is_raced(region: autocast, goal: Goal) -> bool:
    """Return whether eager code in the region has formats to choose from, and may be timed."""
    return goal.races and is_enabled(region) and region.fast_dtype.itemsize < 4


def run_watched(run: Callable[[], Any], region: autocast) -> tuple[Any, Policy]:
    """Run in the region; the result, and the policy for eager code in the runs to come. region: not open."""
    calls = EagerCalls()  # graphs run without autocast: theirs are not among these
    lowered = (find_op(r.op) for r in region.policy.resolve(region.device).rules if r.action.kind is Kind.LOWER)
    install_visiting((*filter(None, lowered), *RECURRENT), region.device)
    add_watcher(calls)
    try:
        with region:
            result = run()
    finally:
        remove_watcher(calls)
        remove_visiting(region.device)
    return result, _eager_policy(calls, region)


def _eager_policy(calls: EagerCalls, region: autocast) -> Policy:
    """Return the region's policy, with rules for the ops whose calls, each kind once, take less time in fp32.

    Results keep the formats that they have under the policy.
    """
    rules: list[Rule] = []
    policy = region.policy.resolve(region.device)
    for op in sorted(calls.kinds, key=lambda op: op in RECURRENT):  # those see what was found about what they call
        if not _is_free(op_facts(op), policy):
            continue
        # an op may not take numbers of ours, or memory may be gone: then the policy holds
        with suppress(Exception), random_state_kept():
            rules += _raced(op, list(calls.kinds[op].values()), region, rules)
    return region.policy.with_rules(rules, name=f"{region.policy.name}, placed") if rules else region.policy


def eager_note(policy: Policy) -> str:
    """Return what the race decided for eager code, for a reader: a sentence for each op."""
    lifted = [rule for rule in policy.rules if rule.reason.startswith(_MEASURED) and not rule.argument]
    return " ".join(f"{rule.op} in eager code between graphs runs in fp32 ({rule.reason})." for rule in lifted)


def _kept(leaf: Any) -> Any:
    """Return an operand for a floating tensor. Others, such as sizes in a packed sequence, must keep their values."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if leaf.dtype not in FORMATS:
        return leaf.detach().clone()
    shape, stride = tuple(leaf.shape), leaf.stride()
    return MeasuredOperand(shape, stride, short_type(leaf.dtype), str(leaf.device), leaf.requires_grad)


def _is_free(facts: OpFacts, policy: Policy) -> bool:
    """Return whether all rules about the op, and about those inside, are that it runs low or in fp32, wherever it is:
    what else a rule asks for, or asks for in one module, is not to be overruled.
    """
    ids = (facts.id, *_INSIDE) if facts.op in RECURRENT else (facts.id,)
    inside = [policy.table.candidates(op, True) for op in ids]
    whole = [rule for candidates in inside for rule in candidates.whole]
    is_plain = all(rule.is_unconditional and rule.action.kind in (Kind.LOWER, Kind.FULL) for rule in whole)
    return is_plain and not any(candidates.per_argument for candidates in inside)


def _raced(op: OpOverload, kinds: list[Any], region: autocast, earlier: list[Rule]) -> list[Rule]:
    """Return the rules for one op, if its calls together take less time in fp32."""
    leaves, spec = tree_flatten(kinds)
    if sum(leaf.bytes for leaf in leaves if isinstance(leaf, MeasuredOperand)) > LARGEST_BYTES:
        return []

    as_policy = region.with_eager_policy(region.policy.with_rules(earlier))
    kept = _result_format(op, as_policy, kinds, FORMATS[region.fast_dtype])
    if kept is None:
        return []
    full = Rule(op_id(op), Action(Kind.FULL))
    back = Rule(
        op_id(op), Action(Kind.TO, kept), argument=RESULT, reason="placed: results keep the policy's format"
    )  # fmt: skip
    key = choice_key(
        device_now(region.device), region.policy.with_rules(earlier, full, back).digest, str(region), str(leaves),
        str(torch.is_grad_enabled()),
    )  # fmt: skip
    choice = load_choice(key, (POLICY, HIGH))
    if choice is None:
        in_fp32 = region.with_eager_policy(region.policy.with_rules(earlier, full, back))

        def run_in(around: autocast, *flat: Any) -> list[Any]:
            return _run(op, around, tree_unflatten(list(flat), spec))

        sides = {POLICY: partial(run_in, as_policy), HIGH: partial(run_in, in_fp32)}
        choice = time_sides(sides, [_filled(leaf) for leaf in leaves], frozenset())
        save_choice(key, choice)
    if choice.chosen != HIGH:
        return []
    high, policy = (choice.times_ns[name] / 1e6 for name in (HIGH, POLICY))
    return [replace(full, reason=f"{_MEASURED} {high:.3g} ms in fp32, {policy:.3g} ms as the policy says"), back]


def _run(op: OpOverload, around: autocast, calls: list[Any]) -> list[Any]:
    with around:
        return [op(*args, **kwargs) for args, kwargs in calls]


def _result_format(op: OpOverload, around: autocast, kinds: list[Any], low: Format) -> Format | None:
    """Return the format of all results, if it is one, and the same for arguments in any formats: a rule knows no other.

    All calls are run; of one, each floating argument is tried low and in fp32.
    """

    def formats(calls: list[Any]) -> set[Format | None]:
        with torch.no_grad():
            return {FORMATS.get(t.dtype) for t in tensors_in(_run(op, around, tree_map(_filled, calls)))}

    leaves, spec = tree_flatten(kinds[0])
    floats = [n for n, leaf in enumerate(leaves) if isinstance(leaf, MeasuredOperand)]
    results = formats(kinds)
    for changed in (floats, *([n] for n in floats)):
        tried = list(leaves)
        for n in changed:  # in fp32 if it is low, and low if not
            tried[n] = replace(leaves[n], type=fp32.name if leaves[n].type == low.name else low.name)
        with suppress(RuntimeError):  # mixed formats may be an error
            results |= formats([tree_unflatten(tried, spec)])
    return results.pop() if len(results) == 1 else None


def _filled(leaf: Any) -> Any:
    return make_tensor(leaf) if isinstance(leaf, MeasuredOperand) else leaf
