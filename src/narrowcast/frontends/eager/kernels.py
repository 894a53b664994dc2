"""Python kernels at the Autocast keys: they ask what was decided, and do it.

A kernel is registered only for ops that some region's policy changes (it then stays, and passes everything outside
such regions to what was there before, for about two microseconds a call), and while a recording runs for all ops on
the native lists (those are removed with the recording).
"""

from __future__ import annotations

from contextlib import nullcontext
from operator import attrgetter
from typing import Any

import torch

from narrowcast.core.decide import Plan, decide
from narrowcast.core.policy import NOWHERE, Policy, Site
from narrowcast.core.refusals import check_counted, refusal
from narrowcast.errors import RegionError, ScriptWarning
from narrowcast.frontends.eager.watch import Arguments, DecidedCall, Keywords, Watcher, told, watchers
from narrowcast.runtime.regions.ruling import active_region, native_region, tell_hidden
from narrowcast.runtime.regions.stack import CHECKED, Decided, OpenRegion, stack
from narrowcast.runtime.sites.graph_nodes import current_site, traced_site
from narrowcast.runtime.sites.numbering import number_call
from narrowcast.runtime.sites.python_stack import find_site, in_generated_code, warn_at, warn_here
from narrowcast.runtime.torch_bridge import (
    DTYPES,
    OpFacts,
    cast,
    defaults_after,
    is_weight,
    number_as_tensor,
    op_facts,
    overload_with_dtype,
)
from narrowcast.runtime.torch_bridge.calls import (
    NUMBERS,
    call_of,
    cast_arguments,
    cast_results,
    gather,
    list_lengths,
    places_of,
    slots_of,
)
from narrowcast.runtime.torch_surface.dispatch import (
    DispatchKeySet,
    OpOverload,
    is_below_autograd,
    is_inside_kernel,
    registered_kernel,
)
from narrowcast.runtime.torch_surface.dynamo import never_trace, tracing_compiled_code
from narrowcast.runtime.torch_surface.jit import is_inside_recorded, records_whole
from narrowcast.runtime.torch_surface.state import autocast_key, below, excluding
from narrowcast.runtime.weights.cache import native_cast

_ELSEWHERE = object()  # represents a tensor on another device type: such calls are decided again each time


class Kernel:
    """The kernel of one op at one Autocast key. Called by the dispatcher with (keyset, *args, **kwargs).

    Native's rules are carried out here like any others, not by torch's kernel: Python would call that with the
    interpreter locked, and it waits for the lock of torch's weight cache, whose holder may wait for the interpreter.
    """

    def __init__(self, op: OpOverload, device_type: str) -> None:
        self.facts: OpFacts = op_facts(op)
        self.device_type = device_type
        key = autocast_key(device_type)
        self._keyset = DispatchKeySet(key)
        self._below = below(key)
        self._is_here = attrgetter(f"is_{device_type}")  # a fifth of the time that `device.type` takes
        self._native = registered_kernel(op, device_type)
        native_rules = Policy.native(device_type).table.candidates(self.facts.id, self.facts.computes).whole
        self._native_rule = native_rules[0] if native_rules else None

    def __call__(self, keyset: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        """Run the call as decided; but what a kernel calls is cast by torch's lists alone, as torch's autocast does."""
        if self._native is None and is_below_autograd() and is_inside_kernel():
            return self._pass_on(keyset, args, kwargs)
        region = active_region(self.device_type)
        number = number_call(self.facts.id)
        watching = watchers()
        if watching:
            return self._run_watched(watching, region, number, keyset, args, kwargs)
        if region is None or self.facts.id not in region.prepared.changed:
            if region is None and stack.innermost is not None:
                tell_hidden(self.facts.id, self.device_type, lambda: _noted_site() or find_site())
            if self._native is None:
                return self._pass_on(keyset, args, kwargs)
            region = native_region(self.device_type)  # also where ours agrees with it: the same weight cache
        tensors = gather(self.facts, args, kwargs)
        decided = self._decide(tensors, args, kwargs, region, number)
        if not region.prepared.trains:
            _watch_gradients(decided, region, tensors)
        return self.run(decided, region, keyset, args, kwargs)

    def _pass_by(self, decided: Decided, keyset: DispatchKeySet, args: Arguments, kwargs: Keywords) -> Any:
        """Run the call as it is made, as the trace will, which has the op around it as one call; and say so."""
        told = next(iter(decided.plan.rules), None)
        text = f"narrowcast: the trace has what calls {self.facts.id} here as one op: the rule {told} does not hold in "
        warn_here(f"{text}it. Let the rule name that op, or use nc.compile or nc.export", ScriptWarning)
        return self._pass_on(keyset, args, kwargs)

    def _decide(
        self, tensors: Tensors, args: Arguments, kwargs: Keywords, region: OpenRegion, number: int, site: Site = NOWHERE
    ) -> Decided:
        """Decide this call. Plans that do not depend on the place are remembered by the input formats."""
        is_here = self._is_here
        given = dtype_is_given(self.facts, args, kwargs)
        inputs = [None if t is None else t.dtype if is_here(t) else _ELSEWHERE for t in tensors]
        if self.facts.has_lists:
            inputs.append(list_lengths(self.facts, args, kwargs))
        key = (self, given, *inputs)
        decided = region.prepared.plans.get(key)
        if decided is not None:
            return decided
        depends_on_site = region.prepared.policy.asks_where(self.facts.id, self.facts.computes)
        if depends_on_site and site is NOWHERE:
            site = self._site()
        if depends_on_site and region.prepared.sightings is not None:
            region.prepared.sightings.see(site, self.facts.id, number)
        if depends_on_site and not number:
            check_counted(region.prepared.policy, self.facts.id, site, self.facts.computes)
        slots = slots_of(self.facts, args, kwargs)
        call = call_of(self.facts, slots, tensors, site, given, number)
        plan = decide(call, region.prepared.policy, region.prepared.facts)
        is_native = plan.rule == self._native_rule and not plan.argument_rules
        decided = Decided(plan, is_native, plan.changes_nothing, places_of(slots, plan))
        if not depends_on_site and _ELSEWHERE not in inputs:
            region.prepared.plans[key] = decided
        return decided

    def _site(self) -> Site:
        site = _noted_site()
        if site is not None:
            return site
        if tracing_compiled_code() or in_generated_code():
            raise RegionError(
                asked=f"a rule about {self.facts.id} that names a module, class or function, inside torch.compile",
                found="this backend runs its graphs without saying where their calls are made",
                advice="Compile with nc.compile, leave the region outside, or write rules about ops alone.",
            )
        return find_site()

    def _run_watched(
        self,
        watching: tuple[Watcher, ...],
        region: OpenRegion | None,
        number: int,
        keyset: DispatchKeySet,
        args: Arguments,
        kwargs: Keywords,
    ) -> Any:
        """Run the call as `__call__` does and notify the watchers, under native regions too."""
        policy = region.prepared.policy if region is not None else Policy.native(self.device_type)
        if region is None or (self.facts.id not in region.prepared.changed and self._native is not None):
            region = native_region(self.device_type)
        tensors = gather(self.facts, args, kwargs)
        noted = _noted_site()
        if noted is None and region.prepared.policy.asks_where(self.facts.id, self.facts.computes):
            noted = find_site(region.prepared.policy.table.asks_for_names)
        place = NOWHERE if noted is None or tracing_compiled_code() else noted
        decided = self._decide(tensors, args, kwargs, region, number, place)
        if not region.prepared.trains:
            _watch_gradients(decided, region, tensors)
        if decided.plan.rule is None and decided.plan.changes_nothing:  # its parts are watched, if any are
            watching = tuple(w for w in watching if w.wants_whole(self.facts.id, self.device_type))
        if not watching:
            return self.run(decided, region, keyset, args, kwargs)
        pairs = list(zip(slots_of(self.facts, args, kwargs), tensors, strict=True))
        call = DecidedCall(
            self.facts, decided.plan, noted, pairs, policy, region.prepared.facts.cache, args, kwargs, number
        )
        return told(watching, call, lambda: self.run(decided, region, keyset, args, kwargs))

    def run(
        self, decided: Decided, region: OpenRegion, keyset: DispatchKeySet, args: Arguments, kwargs: Keywords
    ) -> Any:
        """Carry out a plan: casts around the op, which runs with autocast off inside."""
        if decided.changes_nothing:
            return self._pass_on(keyset, args, kwargs)
        if self._native is None and is_inside_recorded():
            return self._pass_by(decided, keyset, args, kwargs)
        plan = decided.plan
        if plan.refused is not None:
            if decided.is_native and self._native is not None:
                return self._native.call_boxed(keyset, *args, **kwargs)  # torch's own error
            raise refusal(plan, self.facts.id, find_site())
        if decided.places:
            args, kwargs = cast_arguments(decided.places, args, kwargs, _cast_cached, region)
        if not plan.shields:
            if not plan.results:
                return self._pass_on(keyset, args, kwargs)
            op = self.facts.op.name().partition(".")[0]
            with excluding(self._keyset) if records_whole(op) else nullcontext():  # casts inside are in no trace
                return cast_results(self._pass_on(keyset, args, kwargs), plan)
        with excluding(self._keyset):
            result = invoke(self.facts, plan, args, kwargs)
            return cast_results(result, plan) if plan.results else result

    def _pass_on(self, keyset: DispatchKeySet, args: Arguments, kwargs: Keywords) -> Any:
        """Call the next key, as if nothing were registered here, with autocast still on for what is inside."""
        for slot in self.facts.slots:
            if slot.position < len(args) and type(args[slot.position]) in NUMBERS:
                # torch's redispatch takes no numbers for tensors. The ops that do are elementwise: nothing is inside.
                with excluding(self._keyset):
                    return _call(self.facts, args, kwargs)
        return self.facts.op.redispatch(keyset & self._below, *args, **kwargs)


never_trace(Kernel.__call__)  # called from eager code between compiled graphs

Tensors = list[torch.Tensor | None]


def invoke(facts: OpFacts, plan: Plan, args: Arguments, kwargs: Keywords) -> Any:
    """Run the op with arguments that are cast as planned, and with the planned dtype."""
    op = facts.op
    if plan.append_dtype:
        other = overload_with_dtype(op)
        args = (*args, *defaults_after(op, len(args)))
        return other(*args, **kwargs, dtype=torch.float32) if other else op(*args, **kwargs)
    if plan.set_dtype:
        position = facts.dtype_position
        if position is not None and position < len(args):
            return op(*args[:position], torch.float32, *args[position + 1 :], **kwargs)
        return op(*args, **{**kwargs, "dtype": torch.float32})
    return _call(facts, args, kwargs)


def _call(facts: OpFacts, args: Arguments, kwargs: Keywords) -> Any:
    """Run the op from the top. Where torch takes no number for a tensor from Python, it is made a tensor."""
    try:
        return facts.op(*args, **kwargs)
    except RuntimeError as error:
        single = [slot.position for slot in facts.slots if not slot.is_list]
        numbers = [p for p in single if p < len(args) and type(args[p]) in NUMBERS]
        if not numbers or "Expected a value of type 'Tensor'" not in str(error):
            raise
    others = [t for t in args if isinstance(t, torch.Tensor)]
    new_args = [number_as_tensor(a, others) if p in numbers else a for p, a in enumerate(args)]
    return facts.op(*new_args, **kwargs)


def _noted_site() -> Site | None:
    """Return the place that a graph notes for the current call, traced or run; None where the Python stack has it."""
    return traced_site() if tracing_compiled_code() else current_site()


def dtype_is_given(facts: OpFacts, args: Arguments, kwargs: Keywords) -> bool:
    """Return whether the caller passed a dtype."""
    position = facts.dtype_position
    if position is None:
        return False
    return kwargs.get("dtype") is not None or (position < len(args) and args[position] is not None)


def _cast_cached(tensor: torch.Tensor, dtype: torch.dtype, region: OpenRegion) -> torch.Tensor:
    """Return the cast; of a weight (an fp32 leaf that requires grad), once per region while it is not written to.

    Native regions keep torch's rules, faults included; but a trace has casts of its own, where torch's cannot be
    traced. Code that traces has the cache off, and in the memory of a CUDA graph nothing may be kept.
    """
    if not (
        region.prepared.facts.cache
        and is_weight(tensor)
        and not torch.is_inference_mode_enabled()
        and not tensor.is_inference()
        and torch.is_autocast_cache_enabled()
        and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
    ):
        return cast(tensor, dtype)
    if region.owner is None:
        around = stack.innermost
        if around is None or around.prepared.grade not in CHECKED:
            return native_cast(tensor, dtype, DTYPES[region.prepared.facts.low])
        region = around  # torch's region inside one of ours whose cache is checked
    prepared = region.prepared
    return region.casts.cast(tensor, dtype, prepared.cache_limit_bytes, prepared.grade == "checksum")


def _watch_gradients(decided: Decided, region: OpenRegion, tensors: Tensors) -> None:
    """Warn, once per open region in a format that its policy does not train in, if gradients flow through a call."""
    low = region.prepared.facts.low
    if region.has_warned or decided.plan.computes_in is not low or not torch.is_grad_enabled():
        return
    if any(t is not None and t.requires_grad for t in tensors):
        region.has_warned, policy = True, region.prepared.policy
        warn_at(
            f"narrowcast: gradients are recorded in a region in {low}, and the policy {policy.name} is for training in "
            f"{' or '.join(policy.training)} alone. Train with dtype={policy.training[0]!r}, or run inference under "
            "torch.no_grad()",
            find_site(with_names=False),
        )
