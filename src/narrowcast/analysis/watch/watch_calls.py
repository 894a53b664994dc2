"""Inspects each call of a run for values that are not finite: what made them, and their consequences."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from narrowcast.analysis.watch import culprit, history
from narrowcast.analysis.watch.makers import LowMakers
from narrowcast.analysis.watch.ranges import Ranges
from narrowcast.analysis.watch.replay import Replay
from narrowcast.core.ledger.identity import BACKWARD, FORWARD, RECOMPUTATION
from narrowcast.core.policy import Policy
from narrowcast.observation.observer.module_calls import parameter_at, path_of
from narrowcast.observation.observer.observer import Observer
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.trial import finiteness
from narrowcast.observation.trial.rerun import copies_of_written, is_of_others
from narrowcast.output.words import counted
from narrowcast.reports.results.findings import FOR_SCALER, GIVEN, Finding, Watching
from narrowcast.runtime.torch_bridge import FORMATS, OpFacts, tensors_in
from narrowcast.runtime.torch_surface.autograd import gradient_of
from narrowcast.runtime.torch_surface.grad_scaling import UNSCALE

KEPT = 8
"""How many findings keep their tensors for `finding.save`."""


class WatchCalls(Observer):
    """Inspects the results of each call, and reports findings. of_backward: the dtypes of results of backwards; scale:
    that of the gradients that a scaler has unscaled last.
    """

    def __init__(
        self, watching: Watching, at: str, report: Callable[[Finding, int], None], policies: tuple[Policy, ...] = ()
    ) -> None:
        super().__init__(policies)
        self._watching, self._at, self._report = watching, at, report
        self._flags = finiteness.Flags()
        self._history = history.ValueHistory()
        self._low_makers, self.ranges = LowMakers(), Ranges(watching)
        self._reported: set[tuple[str | int, ...]] = set()
        self._numbers: dict[int, int] = {}
        self._later, self._stepped = history.Later(), set[int]()
        self._is_skipped = False
        self.of_backward: set[torch.dtype] = set()
        self.scale: float | None = None

    def let_go(self, tensors: tuple[Any, ...]) -> None:
        """Keep no references to these."""
        self._low_makers.forget()

    def looks_before(self, facts: OpFacts) -> bool:
        """Return whether an op overwrites inputs: others still exist afterwards, and are inspected only on a fault."""
        return facts.overwrites

    def before(self, call: SeenCall) -> None:
        """Note the inputs, before the op writes to them."""
        inputs = call.notes["came"] = finiteness.came_in(call)
        flags = call.notes["flags"] = [self._flags.number(t) for t in inputs]
        call.notes["given"] = tensors_in(call.args, call.kwargs)
        if call.facts.id == UNSCALE:
            self.scale = 1 / float(call.args[2])
        largest = map(self._flags.largest, flags, inputs)
        if call.facts.writes and self._looks_now(inputs) and not finiteness.stays_finite(call, [*largest]):
            call.args, call.kwargs = copies_of_written(call.facts, call.args, call.kwargs)

    def after(self, call: SeenCall) -> None:
        """Inspect the results, now or later."""
        self._watching.calls += 1
        is_new_scale = self._history.has_new_scale(call)
        self._is_skipped = not is_new_scale and self._is_skipped
        results = finiteness.gave(call)
        self.ranges.count(results)
        self.of_backward |= {t.dtype for t in results[:1] if call.who.direction == BACKWARD}
        for tensor in results if call.facts.writes else ():
            self._flags.written(tensor)
        if not self._looks_now(results or finiteness.came_in(call)):
            self._later.put_off(call, self._input_flags(call), results, self._flags)
            if is_new_scale:
                self._read_later(is_skipped=False, is_used=lambda: False)
            return
        parts = finiteness.numbers_of_complex(call.results)
        bad = [tensor for tensor in (*results, *parts) if not self._inspect(call, tensor)]
        overflowed, masks = culprit.overflowing_casts(call, gave_finite=not bad)
        for name, _ in masks:
            self._watching.count_intentional(f"a mask that the cast of an argument makes -inf ({name} of {call.id.op})")
        if overflowed and not self._is_allowed(call, overflowed[0][0]):
            self._make(call, culprit.cast_finding(call, overflowed), bad)
        elif bad:
            self._judge(call, bad)
        elif self._history:
            self._read(call, [*results, *parts])
        if self._history.due:
            self._report_due()
        if results and (self._low_makers or call.policy is not None or FORMATS[results[0].dtype].bits < 32):
            self._note_rounding(call, results)

    def _inspect(self, call: SeenCall, result: torch.Tensor) -> bool:
        total = float(finiteness.total_of(result))
        if call.facts.overwrites:  # what it has written, the next one writes to
            self._flags.number(result, total)
        if is_finite := math.isfinite(total):
            self.ranges.note(call, result, total)
        return is_finite

    def _note_rounding(self, call: SeenCall, results: list[torch.Tensor]) -> None:
        """Record a call with results in or from a low format, which an op that writes does not choose."""
        is_low = FORMATS[results[0].dtype].bits < 32 and not call.facts.writes
        maker = (call.facts.id, call.site if call.is_cast else call.who.module()) if is_low else None
        self._low_makers.note(call, maker, results, passes=not culprit.sums_all(call))  # sums hide how terms round

    def _culprit(self, call: SeenCall, results: list[torch.Tensor]) -> Finding:
        inputs = finiteness.came_in(call)[-1:] if culprit.is_quotient(call) else finiteness.came_in(call)
        paths = lambda module: path_of(module, self.roots)  # noqa: E731
        return culprit.find_culprit(call, finiteness.inputs_of(call), results, self._low_makers.of(call, inputs), paths)

    def _input_flags(self, call: SeenCall) -> list[int]:
        flags: list[int] | None = call.notes.get("flags")
        return [self._flags.number(t) for t in finiteness.came_in(call)] if flags is None else flags

    def _bad_inputs(self, call: SeenCall) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
        """Return the arguments that are not finite: their names, their values before the call, and themselves."""
        pairs = zip(finiteness.inputs_of(call), finiteness.came_in(call), self._input_flags(call), strict=True)
        bad = [(name, was, tensor) for (name, was), tensor, flag in pairs if not self._flags.is_finite(flag)]
        return [each for each in bad if finiteness.reads(call, each[0])]

    def _looks_now(self, tensors: list[torch.Tensor]) -> bool:
        return self._at == "op" or (self._at == "auto" and all(t.is_cpu for t in tensors))

    def _read(self, call: SeenCall, results: list[torch.Tensor]) -> None:
        """Note a call with finite results as a reader of the inputs that are not finite, which it masks."""
        inputs = call.notes.get("given") or tensors_in(call.args, call.kwargs)
        carriers = [(t, carrier) for t in inputs if (carrier := self._history.carriers.get(t)) is not None]
        whole = [t for t in call.results if finiteness.is_whole_number(t)]
        if not carriers or not (results or whole):
            for tensor, carrier in carriers:  # the formula of a backward asks where it is finite
                carrier.is_read |= call.who.direction == BACKWARD
                self._history.asked(tensor, carrier)
            return
        bad = {id(tensor) for _, _, tensor in self._bad_inputs(call)}
        followed = [t for t in whole if finiteness.out_of_range(t)]
        for tensor, carrier in carriers:
            if id(tensor) not in bad and finiteness.is_number(tensor):
                carrier.read_beside()
            elif followed:
                self._history.carries(followed, carrier.causes)
                carrier.is_read = True
            elif results or (whole and not carrier.has_nan):
                self._read_finite(call, carrier)
        for tensor in filter(finiteness.fills, results if call.facts.writes else ()):
            self._history.carriers.drop(tensor)

    def _read_finite(self, call: SeenCall, carrier: history.Carrier) -> None:
        inexact = [cause for cause in carrier.waiting if not cause.is_exact]
        if inexact and not culprit.gives_the_same_without(call):
            self._history.came_to(inexact, f"{call.id} reads it, and gives something else than for a finite one")
        elif not carrier.is_read and carrier.waiting:
            self._watching.count_intentional(carrier.waiting[0].harmless)
        carrier.is_read = True
        self._carry([], carrier.causes, call)
        for cause in carrier.causes:
            cause.is_masked = True

    def _judge(self, call: SeenCall, results: list[torch.Tensor]) -> None:
        inside = ((name, t, t) for name, t in finiteness.parts_inside(call) if not finiteness.is_finite(t))
        if bad := self._bad_inputs(call) or list(inside):
            self._pass_on(call, bad, results)
            return
        why = finiteness.intended(call, results) or self._is_allowed(call)
        if why:
            self._watching.count_intentional(why)
            self._carry(results, [self._history.cause(why)], call)
            return
        known = self._known(call)
        if known is not None:
            self._watching.spread += known.is_told and call.id.direction != RECOMPUTATION
            self._watching.repeated += known.is_told and call.id.direction == RECOMPUTATION
            self._carry(results, [known], call)
            return
        self._make(call, self._culprit(call, results), results)

    def _known(self, call: SeenCall) -> history.Maker | None:
        """Return the cause that a call repeats: of its forward, which it recomputes or whose gradient it computes."""
        if call.id.direction == RECOMPUTATION:
            return self._history.made.get(history.place_of(call))
        if (of := call.forward) is None:
            return None
        cause = self._history.made.get((of.module_path, of.op, FORWARD, call.site.file, call.site.line))
        return cause if cause is not None and cause.is_told else None

    def _make(
        self, call: SeenCall, finding: Finding, results: list[torch.Tensor], besides: Iterable[history.Maker] = ()
    ) -> history.Maker:
        """Make a new cause: reported now if a low format made it, else once it has consequences."""
        finding = replace(finding, step=self._watching.steps + 1)
        if len(self._watching.findings) < KEPT and call.args and not any(map(is_of_others, tensors_in(call.args))):
            finding = replace(finding, replay=Replay.of(call))
        why = FOR_SCALER if self._is_skipped and culprit.is_overflow(finding) else ""
        is_fault = not (culprit.waits(finding) or (call.args and culprit.overflows_by_mask(call, finding)))
        cause = self._history.cause(why, call, finding, is_fault=is_fault)
        self._carry(results, [*besides, cause], call)
        if culprit.is_for_scaler(call, finding):
            self._history.at_step.append(cause)
        elif cause.is_fault:
            self._history.came_to([cause])
            self._report_due()
        return cause

    def _carry(self, tensors: list[torch.Tensor], causes: Iterable[history.Maker], by: SeenCall | None = None) -> None:
        """Note that tensors hold values with these causes. by: the call that returned them."""
        if by is not None and by.who.direction != BACKWARD:
            self._history.met(by.id, causes, any(t.requires_grad for t in tensors_in(by.args, by.kwargs)))
        for tensor in tensors:
            self._history.carries([tensor], causes, bool(tensor.isnan().any()))

    def _pass_on(
        self, call: SeenCall, bad: list[tuple[str, torch.Tensor, torch.Tensor]], results: list[torch.Tensor]
    ) -> None:
        """Pass the causes of inputs that are not finite on to results; inputs without causes are from outside."""
        causes: dict[history.Maker, None] = {}
        for name, was, tensor in bad:
            carrier = self._history.carriers.get(tensor) or self._given(call, name, was, tensor)
            carrier.is_read = True
            causes.update(dict.fromkeys(carrier.causes))
        if culprit.unscales(call) and float(call.args[2]) < 1:  # of a loss that the scaler had made larger
            self._skips_step()
        if any(cause.is_told for cause in causes):
            self._watching.spread += 1
            self._carry(results, causes, call)
            return
        has_nan = any(bool(t.isnan().any()) for t in results)
        had_nan = any(bool(was.isnan().any()) for _, was, _ in bad)
        is_passed_on = finiteness.only_passed_on([was for _, was, _ in bad], results)
        overflow = None if is_passed_on else culprit.made_besides(call, results)
        if overflow is not None and not self._is_allowed(call):
            self._make(call, overflow, results, causes)
            return
        waiting = [cause for cause in causes if cause.is_open]
        if has_nan and not had_nan and waiting:
            for cause in waiting:
                cause.became = cause.became or f"it became NaN in {call.id} ({call.site.file}:{call.site.line})"
        elif has_nan and not had_nan and not self._is_allowed(call):
            why = next(iter(causes)).why
            if why != FOR_SCALER:
                finding = self._culprit(call, results)
                finding = replace(finding, sentence=f"NaN computed from intentional infinities: {why}")
                self._make(call, finding, results, causes)
                return
        self._carry(results, causes, call)

    def _given(self, call: SeenCall, name: str, value: torch.Tensor, tensor: torch.Tensor) -> history.Carrier:
        """Return a carrier for an input that no watched call made. What a call keeps for its backward has the causes
        that the call had; of other inputs, infinities count as intentional, NaN does not.
        """
        kept = self._history.met_by(call.forward)
        if kept:
            self._carry([tensor], kept)
        elif not value.isnan().any():
            why = "given from outside"
            self._watching.count_intentional(why)
            self._carry([tensor], [self._history.cause(why)])
        else:
            kind = parameter_at(tensor, self.roots) or "a tensor made outside of the watched calls"
            share = f"{int(value.isnan().sum())} of {counted(value.numel(), 'element')}"
            sentence = f"its argument {name}, {kind}, holds NaN: {share}"
            advice = "Look at the data and the weights, and at what made them."
            finding = culprit.finding_of(call, finiteness.inputs_of(call), "nan", GIVEN, sentence, advice)
            self._carry([tensor], [self._make(call, finding, [])])
        carrier = self._history.carriers.get(tensor)
        if carrier is None:
            raise AssertionError("what was just kept is there")
        return carrier

    def _is_allowed(self, call: SeenCall, argument: str = "") -> str:
        """Return why the policy allows values that are not finite, if one of its rules does."""
        rule = call.allows_nonfinite(argument)
        return f"allowed by a rule about {rule.op} ({rule.origin})" if rule is not None else ""

    # -- ops that are followed and no calls ----------------------------------------------------------------------------

    @property
    def follows(self) -> bool:
        """Copies are followed once there is something to follow, or to read later."""
        return bool(self._history) or bool(self._later) or bool(self._low_makers)

    def moved(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Pass causes on to copies; note a loss by the `ones_like` its backward begins with, and what is asked."""
        if self._low_makers:
            self._low_makers.note_copy(facts, args, kwargs, result)
        is_of_loss, asks = facts.id == "aten.ones_like.default", all(t.dtype is torch.bool for t in tensors_in(result))
        for tensor in tensors_in(args, kwargs):
            is_loss = is_of_loss and tensor.requires_grad and tensor.numel() == 1
            if (is_loss or asks) and self._later and finiteness.is_floating(tensor):
                (self._later.losses if is_loss else self._later.asked).append(self._flags.number(tensor))
            carrier = self._history.carriers.get(tensor)
            if is_loss and carrier is not None:
                self._history.came_to(carrier.causes, "a gradient is taken through it")
            if is_of_loss or carrier is None:
                continue
            if asks:
                self._history.asked(tensor, carrier)
            self._copied(carrier, result)
        self._report_due()

    def passed_through(self, args: tuple[Any, ...], result: Any) -> None:
        """Pass causes on to what was made of them unseen."""
        for tensor in tensors_in(args):
            if (carrier := self._history.carriers.get(tensor)) is not None:
                self._copied(carrier, result)

    def _copied(self, carrier: history.Carrier, result: Any) -> None:
        copies = [t for t in finiteness.inspected(tensors_in(result)) if not finiteness.is_finite(t)]
        if copies and not any(self._history.carriers.get(t) is carrier for t in copies):
            self._carry(copies, carrier.causes)
            carrier.is_read = True

    # -- reports -------------------------------------------------------------------------------------------------------

    def _report_due(self) -> None:
        """Report the causes that have consequences, in the order of making; each once, not again in later steps."""
        due, self._history.due = self._history.due, []
        for cause, what in sorted(due, key=lambda pair: pair[0].number):
            if cause.call is None or cause.finding is None or not cause.is_open:
                continue
            cause.is_told = True
            key = (*history.place_of(cause.call), cause.finding.made_by)
            if key in self._reported:
                self._watching.repeated += 1
                continue
            finding, more = cause.finding, cause.became or what
            finding = replace(finding, sentence=f"{finding.sentence}; {more}") if more else finding
            self._reported.add(key)
            self._numbers[id(finding)] = cause.number
            later = (n for n, f in enumerate(self._watching.findings) if self._numbers.get(id(f), 0) > cause.number)
            self._report(finding, next(later, len(self._watching.findings)))

    # -- at the end of a step ------------------------------------------------------------------------------------------

    def settle(self, final: bool, parameters: Sequence[torch.Tensor] = (), is_skipped: bool = False) -> None:
        """End a step, or the block: report causes that reached gradients, and read the flags that were put off.

        parameters: those that an optimizer is about to change. is_skipped: a scaler skips the step.
        """
        is_used = lambda: not all(p.grad is None or finiteness.is_finite(p.grad) for p in parameters)  # noqa: E731
        if is_skipped:
            self._skips_step()
        elif self._is_skipped and self._history.skipped and is_used():
            self._watching.count_intentional(FOR_SCALER, -1)
            self._history.steps_nevertheless()
        self._is_skipped = False
        self._history.step_ends(is_skipped=False, final=final)
        for why in dict.fromkeys(self._history.sweep(goes_on=not (final or is_skipped))):
            self._watching.count_intentional(why)
        if self._history and not is_skipped:
            roots = self.roots if final or not self._history.is_scaled else ()  # others are not yet skipped
            held = (*parameters, *(p for root in roots for p in root.parameters()))
            for gradient in [g for p in held if (g := gradient_of(p)) is not None]:
                if (carrier := self._history.carriers.get(gradient)) is not None:
                    self._history.came_to(carrier.waiting, "it reached the gradient of a parameter")
        if final:
            self._history.ends()
        self._report_due()
        if final or is_skipped or not self._waits(parameters) or is_used():
            self._read_later(is_skipped, is_used)

    def _waits(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return whether a scaler may yet skip the step of another optimizer: once for each, up to its update."""
        first = {id(parameter) for parameter in parameters[:1]}
        is_again = not first.isdisjoint(self._stepped)
        self._stepped |= first
        return self._history.is_scaled and not is_again

    def _skips_step(self) -> None:
        self._is_skipped = True
        if self._history.step_ends(is_skipped=True):
            self._watching.count_intentional(FOR_SCALER)

    def _read_later(self, is_skipped: bool, is_used: Callable[[], bool]) -> None:
        """Read the flags that were put off, in one transfer."""
        later, self._later, self._stepped = self._later, history.Later(), set()
        skips = False
        read = self._flags.read()
        self.ranges.note_later(later.calls, read)
        for put_off, verdict, why in history.judged(later, read, is_skipped, is_used):
            if verdict is history.Verdict.SPREAD:
                self._watching.spread += 1
            elif verdict is history.Verdict.MEANT:
                self._watching.count_intentional(why)
            elif verdict is history.Verdict.SKIPPED:
                skips = True
            else:
                sentence = f"{why}; nc.watch(at='op') proves who made it"
                self._make(put_off.call, culprit.finding_of(put_off.call, [], "nan or infinity", "", sentence), [])
        if skips:
            self._watching.count_intentional(FOR_SCALER)
