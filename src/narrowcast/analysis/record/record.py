"""`record`: a ledger of what autocasting does in a block, forward and backward."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from narrowcast.analysis.record.advice import Adviser
from narrowcast.core.decide import Plan
from narrowcast.core.ledger import CallKind, Cast, Refusal, Tally
from narrowcast.core.ops import multiplications
from narrowcast.core.policy import MODULE_CALL_OP, Site
from narrowcast.formats import Format, fp32
from narrowcast.frontends.eager.call_hook import stand_at_calls
from narrowcast.frontends.eager.watch import DecidedCall
from narrowcast.observation.observer.mode import WatchingMode
from narrowcast.observation.observer.words import deciding_rule, format_names, planned_names
from narrowcast.observation.restore.weights import Weights
from narrowcast.reports.results.ledger import Ledger
from narrowcast.runtime.devices.abilities import slow_note
from narrowcast.runtime.sites.numbering import counting
from narrowcast.runtime.sites.python_stack import find_site
from narrowcast.runtime.torch_bridge import DTYPES, FORMATS, OpFacts, Slot, is_weight, op_facts, tensors_in
from narrowcast.runtime.torch_surface.autograd import (
    current_autograd_node,
    is_leaf,
    next_sequence_number,
    sequence_number,
)
from narrowcast.runtime.torch_surface.dispatch import OpOverload, call_op, converts, version_of
from narrowcast.runtime.torch_surface.dynamo import is_traced

_UNLISTED = "follows input dtype"
_SIZES = {str(f): dtype.itemsize for f, dtype in DTYPES.items()}


def record() -> AbstractContextManager[Ledger]:
    """List in a ledger, `with record() as ledger:`, every cast that autocasting causes in the block, and every refusal.

    Native regions are recorded too. Records: casts of inputs, weights and activations, forward and in the backward run
    inside the block, with the op, the argument, the module path, the user's line, the rule and its reason; refused
    calls; and for each op how often it ran in which formats. Recordings nest; each sees what happens in its block on
    the thread that opened it (and on autograd's threads). Compiled code runs as eager code meanwhile, on every thread:
    the casts that are written in its graphs are listed by `narrowcast.explain`. It costs time only while it runs.
    """
    return recording()


@contextmanager
def recording(weights: Weights | None = None, around: Any = None) -> Iterator[Ledger]:
    """Record, and keep these weights as they are before the run writes to them. around: the region that a verb has
    put around all of the program.
    """
    recorder = Recorder(Ledger())
    recorder.weights, recorder.adviser.around = weights, around
    stand_at_calls()
    with counting(), recorder.observing(), recorder.adviser.watching():
        yield recorder.ledger


@dataclass(slots=True)
class _RecordedCall:
    """A call on its way: what was decided, and which of its planned casts were seen.

    `again`: the op that the mode is executing has come round to its own kernel; it is counted already. `done`: what the
    ops inside it moved and multiplied.
    """

    decided: DecidedCall
    input_formats: str
    seen: list[bool]
    widens: bool
    again: bool
    seen_widening: bool = False
    done: Tally = field(default_factory=Tally)

    def cast_seen(self, src: torch.Tensor, dst: Format) -> str:
        """Return the argument, or `result`, whose planned cast was seen; empty for a conversion without a plan."""
        tensors, plan = self.decided.tensors, self.decided.plan
        for position, (slot, tensor) in enumerate(tensors):
            if tensor is src and not self.seen[position] and plan.formats[position] is dst:
                self.seen[position] = True
                return slot.name
        if dst in [r.format for r in plan.results] and not any(src is t for _, t in tensors):
            return "result"
        if self.widens and not self.seen_widening and tensors[0][1] is src and dst is fp32:
            self.seen_widening = True
            return tensors[0][0].name
        return ""


class _RecorderState(threading.local):
    """The calls on their way on one thread, innermost last. entered: whether the op that executes has come round."""

    def __init__(self) -> None:
        self.calls: list[_RecordedCall] = []
        self.entered = False


class Recorder(WatchingMode):
    """Sees every op that executes; our kernels report which call it belongs to."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger.notes)
        self.ledger = ledger
        self.adviser = Adviser(ledger.advice, self.door, ledger.matches)
        self._state = _RecorderState()
        self._cast_before: dict[tuple[int, int, str], weakref.ref[torch.Tensor]] = {}
        self._weights: dict[tuple[int, str], weakref.ref[torch.Tensor]] = {}
        self._labels: dict[int, str] = {}
        self._made: dict[int, weakref.ref[torch.Tensor]] = {}
        self._forward_casts: dict[int, Cast] = {}
        self._noted: set[Format] = set()

    def begin(self, call: DecidedCall) -> None:
        """Note that a call reaches a kernel of ours, with its plan, and the casts to be seen until it ends."""
        is_ours = not is_traced({type(t) for _, t in call.tensors})
        call_seen = self.door.run(call.facts.id, self._begun, call) if is_ours else None
        lost = _RecordedCall(call, "", [True] * len(call.tensors), widens=False, again=True)
        self._state.calls.append(call_seen or lost)

    def _begun(self, call: DecidedCall) -> _RecordedCall:
        tensors, plan = call.tensors, call.plan
        first = tensors[0][1] if tensors else None
        widens = (plan.set_dtype or plan.append_dtype) and first is not None and first.dtype is not torch.float32
        state = self._state
        again = self._executing.op is call.facts.op and not state.entered
        state.entered = state.entered or again
        inputs = format_names([t.dtype for _, t in tensors if t is not None])
        if not again:
            if current_autograd_node() is not None:
                self.adviser.backward()
            for rule in plan.rules:
                label = self._labels.get(id(rule)) or self._labels.setdefault(id(rule), rule.label)
                self.ledger.count_match(label, call.site.module_path)
            self._note_slow(plan, tensors)
            self.adviser.decided(call.facts, call.site, [t for _, t in tensors if t is not None])
        return _RecordedCall(call, inputs, [f is None for f in plan.formats], widens, again)

    def _note_slow(self, plan: Plan, tensors: list[tuple[Slot, torch.Tensor | None]]) -> None:
        """Say once what a low format costs here, when the first call computes in it."""
        low = plan.computes_in
        if low is None or low.bits > 16 or low in self._noted:
            return
        self._noted.add(low)
        first = next((t for _, t in tensors if t is not None), None)
        if first is not None and type(first) in (torch.Tensor, torch.nn.Parameter):
            self.ledger.note(slow_note(first.device.type, low))

    def end(self, result: Any) -> None:
        """Note that the call returned: casts planned and not seen are from the cache, or happened inside the op."""
        call = self._state.calls.pop()
        if not call.again:
            self.door.run(call.decided.facts.id, self._ended, call, result)

    def _ended(self, call: _RecordedCall, result: Any) -> None:
        decided, plan = call.decided, call.decided.plan
        if decided.facts.id != MODULE_CALL_OP:
            self.adviser.gave(decided.facts, tensors_in(result), decided.site)
        elif not decided.tensors:
            return  # the casts of its results: it is counted already
        for position, dst in enumerate(plan.formats):
            if dst is not None and not call.seen[position]:
                slot, tensor = decided.tensors[position]
                self._add_cast(call, slot.name, tensor, str(dst), self._how_unseen(call, tensor, str(dst)))
        if call.widens and not call.seen_widening:
            slot, tensor = decided.tensors[0]
            self._add_cast(call, slot.name, tensor, "fp32", "inside")
        computes = planned_names(plan, decided.tensors) if plan.rules else call.input_formats
        self._count(decided.facts.id, decided.site, call.input_formats, computes, result, call.done, decided)

    def _how_unseen(self, call: _RecordedCall, tensor: torch.Tensor | None, dst: str) -> str:
        """Return how a cast was made that was planned and that the mode did not see."""
        if tensor is None:
            return "inside"
        cacheable = call.decided.caches and is_weight(tensor)
        before = self._weights.get((id(tensor), dst))
        if cacheable and (self._executing.op is None or (before is not None and before() is tensor)):
            return "cached"
        self._weights[id(tensor), dst] = weakref.ref(tensor)
        return "copied" if self._executing.op is not None else "inside"

    def fail(self, error: BaseException) -> None:
        """Note that the call that began last has raised: close it, and record it as refused if a policy refused it."""
        call = self._state.calls.pop().decided
        if call.plan.refused is not None:
            self.door.run(call.facts.id, self._note_refused, call, call.plan.refused)

    def _note_refused(self, call: DecidedCall, why: str) -> None:
        self.ledger.refusals.append(Refusal(call.facts.id, *call.site.at, call.policy.name, why))

    def let_go(self, tensors: tuple[Any, ...]) -> None:
        """Keep no references to these."""
        ids = {id(t) for t in tensors}
        self.adviser.let_go(ids)
        self._made = {key: ref for key, ref in self._made.items() if key not in ids}
        self._weights = {key: ref for key, ref in self._weights.items() if key[0] not in ids}
        self._cast_before = {key: ref for key, ref in self._cast_before.items() if key[0] not in ids}

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # questions such as prim.device, asked without going through the dispatcher
            return call_op(func, args, kwargs)
        facts = op_facts(func)
        if facts.is_view:  # nothing is moved, and nothing is called inside
            result = call_op(func, args, kwargs)
            self.door.run(facts.id, self._viewed, args, kwargs, result)
            return result
        on = self._autocast_on()
        if is_traced(types):
            return self._execute(func, args, kwargs, on)
        self._keep_weights(facts, args, kwargs)
        in_call = bool(self._state.calls)
        self.door.run(facts.id, self.adviser.runs, facts, tensors_in(args, kwargs), bool(on), in_call)
        if on:  # casts asked for inside are listed as they were planned: meanwhile the mode sees nothing
            self._state.entered = False
        result = self._execute(func, args, kwargs, on)
        self.door.run(facts.id, self._computed, facts, args, kwargs, result, on)
        return result

    def _viewed(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        self._note_made(tensors_in(result))
        self.adviser.passed_on(tensors_in(args, kwargs), tensors_in(result))

    def _computed(self, facts: OpFacts, args: Any, kwargs: Any, result: Any, on: tuple[Any, ...]) -> None:
        """Enter an op that was executed: as a cast, as a part of the call around it, or as a call of its own."""
        func, arguments, results = facts.op, tensors_in(args, kwargs), tensors_in(result)
        self._note_made(results)
        if not results or (converts(func, args) and self._see_cast(args[0], result)):
            return
        done = Tally(
            1, _bytes_of(arguments) + _bytes_of(results), set(), _multiplied(facts.id, args, arguments, results)
        )
        calls = self._state.calls
        if calls:
            calls[-1].done.add(done)
        else:
            inputs = format_names([t.dtype for t in arguments])
            site = find_site(with_names=False)
            if current_autograd_node() is None:
                self.adviser.ran(facts, arguments, results, bool(on), site)
            self._count(facts.id, site, inputs, inputs, result, done, None)

    def _note_made(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            self._made[id(tensor)] = weakref.ref(tensor)

    def _autocast_on(self) -> tuple[Any, ...]:
        """Return nothing inside calls that were decided."""
        calls = self._state.calls
        is_inside = (calls and calls[-1].decided.plan.shields) or self._executing.op is not None
        return () if is_inside else super()._autocast_on()

    def _see_cast(self, src: torch.Tensor, result: torch.Tensor) -> bool:
        """List a conversion that is a cast between floating formats caused by autocasting; return whether it is."""
        if src.dtype is result.dtype or src.dtype not in FORMATS or result.dtype not in FORMATS:
            return False
        calls = self._state.calls
        if not calls:
            return self._see_backward_cast(src, result)
        dst = FORMATS[result.dtype]
        argument = calls[-1].cast_seen(src, dst)
        if not argument:
            return False
        cast = self._add_cast(calls[-1], argument, src, str(dst), "copied")
        if src.requires_grad and torch.is_grad_enabled():
            self._forward_casts[next_sequence_number() - 1] = cast  # its autograd node, for the backward
        return True

    def _see_backward_cast(self, src: torch.Tensor, result: torch.Tensor) -> bool:
        node = current_autograd_node()
        if node is None:
            return False
        cast = self._forward_casts.get(sequence_number(node))
        if cast is None or not node.name().startswith("ToCopyBackward"):
            return False
        elements = src.numel()
        facts: dict[str, Any] = {
            "src": str(FORMATS[src.dtype]),
            "dst": str(FORMATS[result.dtype]),
            "elements": elements,
        }
        facts |= {"moved_bytes": elements * (src.itemsize + result.itemsize), "direction": "backward"}
        reason = f"gradient of the forward cast to {cast.dst}"
        self.adviser.casts += 1
        self.ledger.add(replace(cast, **facts, reason=reason, repeated=False))
        return True

    def _add_cast(self, call: _RecordedCall, argument: str, tensor: torch.Tensor | None, dst: str, how: str) -> Cast:
        elements = src_size = 0
        src, kind, repeated = "?", "input", False
        if tensor is not None:
            elements, src_size, src = tensor.numel(), tensor.itemsize, str(FORMATS[tensor.dtype])
            kind = self._kind(tensor)
            if how == "copied":
                key = (id(tensor), version_of(tensor), dst)
                before = self._cast_before.get(key)
                repeated = before is not None and before() is tensor
                self._cast_before[key] = weakref.ref(tensor)
        decided, moved = call.decided, elements * (src_size + _SIZES[dst]) if how == "copied" else 0
        facts = {"src": src, "dst": dst, "elements": elements, "moved_bytes": moved, "how": how, "kind": kind}
        facts |= {"direction": "forward", "policy": decided.policy.name, "repeated": repeated, "number": decided.number}
        cast = Cast.of(decided.facts.id, argument, decided.site, decided.plan.rule_for(argument), **facts)
        self.adviser.casts += 1
        self.ledger.add(cast)
        return cast

    def _kind(self, tensor: torch.Tensor) -> str:
        if isinstance(tensor, torch.nn.Parameter) or (tensor.requires_grad and is_leaf(tensor)):
            return "weight"
        reference = self._made.get(id(tensor))
        return "activation" if reference is not None and reference() is tensor else "input"

    def _count(
        self, op: str, site: Site, inputs: str, computes: str, result: Any, done: Tally, decided: DecidedCall | None
    ) -> None:
        self.adviser.calls += 1
        plan, policy, number = (decided.plan, decided.policy.name, decided.number) if decided else (None, "", 0)
        rule = deciding_rule(plan)
        action, reason = (str(rule.action), rule.reason or str(rule)) if rule else ("no rule", _UNLISTED)
        outputs = format_names([t.dtype for t in tensors_in(result)])
        direction = "forward" if current_autograd_node() is None else "backward"
        kind = CallKind(op, *site.at, inputs, computes, outputs, action, reason, policy, direction)
        self.ledger.count_call(kind, done.moved_bytes, number, done.multiplications)


def _bytes_of(tensors: list[torch.Tensor]) -> int:
    """Return how much memory the elements take."""
    return sum([t.numel() * t.itemsize for t in tensors])


def _multiplied(op: str, args: tuple[Any, ...], given: list[torch.Tensor], outputs: list[torch.Tensor]) -> int | None:
    """Return how many multiplications a call made; None where that is not known, as for rows of several lengths."""
    if any(t.is_nested or t.layout is not torch.strided for t in (*given, *outputs)):
        return None
    transposed = op.startswith("aten.convolution") and any(value is True for value in args)
    return multiplications(op, [t.shape for t in given], [t.shape for t in outputs], transposed)
