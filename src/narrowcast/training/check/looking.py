"""Inspects steps of training: what runs outside of regions, what is cast again, where a scaler is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from narrowcast.analysis.record.advice import Adviser
from narrowcast.core.decide import Plan
from narrowcast.core.ledger import Advice
from narrowcast.core.ledger.identity import BACKWARD, FORWARD
from narrowcast.core.policy import Site
from narrowcast.observation.observer.observer import Observer
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.restore.process import written
from narrowcast.observation.statistics.by_storage import has_storage
from narrowcast.runtime.sites.python_stack import loop_line
from narrowcast.runtime.torch_bridge import LOW, OpFacts, is_random, is_weight, op_facts, tensors_in
from narrowcast.runtime.torch_surface import dispatch
from narrowcast.runtime.torch_surface.autograd import current_autograd_node, current_graph_task, in_hook
from narrowcast.runtime.torch_surface.grad_scaling import UNSCALE, UPDATE_SCALE
from narrowcast.runtime.weights.stored import stored_by
from narrowcast.training.check.backwards import Backwards
from narrowcast.training.check.casts import Reduced, Stale, cast_again, casts_beside
from narrowcast.training.check.exact import LOST_OF_WEIGHTS, UPDATES, Begun, Exact, no_longer_finite, told
from narrowcast.training.check.gradients import Found, Gradients, Updates, clears
from narrowcast.training.check.kept import KeptMemory
from narrowcast.training.check.outside import OutsideRegions, in_region
from narrowcast.training.check.powers import UNKNOWN, Power, Powers
from narrowcast.training.check.rounded import RoundedWeights
from narrowcast.training.check.scaled_by import NEVER_SKIPPED
from narrowcast.training.check.sums import Sums, low_statistics
from narrowcast.training.check.underflow import Underflow


class LoopObserver(Observer):
    """Inspects the steps of a loop. found: how often each finding occurred; updates: of a scale; has_seen, has_lowered:
    there was a call, a region lowered one; is_cast_beside: a wrapper casts besides the region.
    """

    sees_inside = True

    def __init__(self, kept: KeptMemory) -> None:
        super().__init__()
        self.found: dict[Advice, int] = {}
        self.adviser = Adviser({}, self.door)
        self.updates = Updates()
        self._outside = OutsideRegions()
        self._kept = kept
        self._powers = Powers(kept)
        self._gradients = Gradients(kept, self._powers)
        self._depth, self._is_stepping = 0, False
        self._is_in_closure = False  # that a scaler's step calls: since its backward, until gradients are unscaled
        self._is_without_grad = False  # of the outermost module; torch casts weights with gradients on in any case
        self._casts: dict[int, dict[tuple[Any, ...], list[Site]]] = {}  # of weights, which may share memory
        self._fp16: tuple[str, Site] | None = None
        self._low: tuple[str, Site] | None = None
        self.has_seen = self.has_lowered = self.is_cast_beside = False
        self._scales: Site | None = None
        self._broken: Found | None = None
        self._backwards = Backwards(self._powers, self._gradients.was_returned)
        self._exact = Exact(kept.was_there, self._gradients)
        self._sums = Sums(kept.was_there)
        self._stale, self._reduced, self._rounded = Stale(), Reduced(), RoundedWeights()
        self._underflow = Underflow()

    @property
    def calls(self) -> dict[str, int]:
        """How many calls of a forward a region decided about, and how many ran outside that it would lower."""
        return self._outside.calls

    @property
    def rounds_with_care(self) -> bool:
        """Whether weights in a low format lose nothing: the rest is kept, in copies in fp32 that are trained, or beside
        them; or they are rounded stochastically.
        """
        return self._exact.is_careful or self._gradients.has_masters

    @property
    def never_skips(self) -> bool:
        """Whether an optimizer was seen to step with gradients that are not finite, or that nobody has asked about."""
        kinds = [*(finding.kind for finding in self.found), *(kind for kind, *_ in self._backwards.found)]
        return NEVER_SKIPPED in kinds

    def add(self, kind: str, what: str, todo: str, site: Site) -> None:
        """Note a finding, once per line."""
        finding = Advice(kind, what, todo, *site.at)
        self.found[finding] = self.found.get(finding, 0) + 1

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Observe what runs inside, with what a recording advises on."""
        with super().observing(), self.adviser.watching():
            yield

    def let_go(self, tensors: tuple[Any, ...]) -> None:
        """Keep no references to these."""
        self.adviser.let_go({id(t) for t in tensors})
        self._stale.forget()

    def called(self, call: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a module's call; the outermost shows whether it is an evaluation."""
        if self._depth:
            return super().called(call, module, args, kwargs)
        self.door.run("a model", self._met_model, module)
        self._is_without_grad = not torch.is_grad_enabled()
        self._outside.calls_model(module, self._is_without_grad)
        self._depth += 1
        try:
            return super().called(call, module, args, kwargs)
        finally:
            self._depth -= 1
            self._outside.calls_model(None)
            self._is_without_grad = False

    def _met_model(self, module: torch.nn.Module) -> None:
        self._kept.model(module)
        self._gradients.forget()
        self._powers.forget()
        self._reduced.met(module, loop_line())
        finding = casts_beside(module, loop_line()) if in_region() else None
        if finding is not None and not self.is_cast_beside:
            self.is_cast_beside = True
            self.add(*finding)

    def __torch_dispatch__(
        self, func: dispatch.OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._local.looking:  # what we compute ourselves
            return super().__torch_dispatch__(func, types, args, kwargs)
        facts = op_facts(func)
        with dispatch.without_functions():  # asking for a gradient, or for a dtype, is a call
            begun = self.door.run(facts.id, self._before_op, facts, args, kwargs or {})
            powers = self.door.run(facts.id, self._follows_scale, facts, args, kwargs or {})
            in_call = bool(self._local.decided) or self._executing.op is not None
            is_on = not in_call and bool(self._autocast_on())
            if not facts.is_view:
                self.door.run(facts.id, self.adviser.runs, facts, tensors_in(args, kwargs), is_on, in_call)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if begun is not None or is_random(func):
            with dispatch.without_functions():
                self.door.run(facts.id, self._computed_again, begun, result)
        if not in_call and current_autograd_node() is None:
            self.door.run(facts.id, self.adviser.ran, facts, tensors_in(args, kwargs), tensors_in(result), is_on)
        if powers is not None:
            self.door.run(facts.id, self._powers.gave, tensors_in(result), powers, _trains(args, kwargs))
        return result

    def _follows_scale(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Power] | None:
        """Return the powers of an op's results, outside of backwards and in hooks; None if they are not followed."""
        is_backward = current_graph_task() != -1
        scales = self._kept.scales()
        if facts.is_view or facts.id in (UNSCALE, UPDATE_SCALE) or not scales:
            return None
        trains = _trains(args, kwargs)
        if (is_backward and not in_hook()) or (self._is_updating and not trains):  # a closure trains
            return None
        powers = self._powers.runs(facts, args, kwargs, loop_line)
        if is_backward and self._backwards.adds_itself(facts):  # of losses, which are judged themselves
            powers = [UNKNOWN if power.is_mixed else power for power in powers]
        if facts.overwrites:
            targets = written(facts, args, kwargs)
            self._backwards.divides(targets, powers)
            self._powers.gave(targets, powers, trains=False, are_new=False)
            self._backwards.moves(facts, targets, powers)
            return None
        read = [t for t in tensors_in(args, kwargs) if has_storage(t)]
        met = {dispatch.storage_key(t): float(t) for t in read if dispatch.storage_key(t) in scales}
        if met and not trains:
            self._gradients.scale_read()
        if not is_backward and trains:
            self._powers.met |= {*met.values()}
            self._say(self._backwards.scales(read, powers[0], met))
        return powers

    def _computed_again(self, begun: Begun | None, result: Any) -> None:
        if begun is not None:
            self._exact.end(begun, result)
        else:
            self._exact.drawn(result)

    def _before_op(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Begun | None:
        targets = self._kept.before_op(facts, args, kwargs)
        for tensor in targets:
            self._casts.pop(dispatch.storage_key(tensor), None)  # another weight is cast next time
        is_backward = current_graph_task() != -1
        if not (is_backward or self._is_stepping):
            self._backwards.runs_outside(facts, tensors_in(args, kwargs), targets)
        if is_backward:
            self._is_in_closure = self._is_stepping and bool(self._kept.scales())
            self._backwards.runs()
            self._say(self._reduced.sends(facts, args))
        elif targets and not self._is_stepping and in_region():
            self._stale.written(targets, loop_line())
        if facts.op is dispatch.READ_NUMBER and has_storage(args[0]):
            self._powers.number_read(args[0])
            self._backwards.number_read(self._powers.answers(args[0]))
            if dispatch.storage_key(args[0]) in self._kept.scales():
                self._gradients.scale_read()
        if facts.op is dispatch.ONES_LIKE and not is_backward and args[0].grad_fn is not None and self._kept.scales():
            self._backwards.begins_at(args[0])
        trains = _trains(args, kwargs)
        in_forward = self._depth and torch.is_grad_enabled()  # else it may be an average
        if not (facts.is_view or trains) and (self._is_stepping or not (is_backward or in_forward)):
            return self._exact.begin(facts, args, kwargs, loop_line, self._is_stepping)
        if targets and not is_backward and all(t.dtype in LOW and self._kept.was_there(t) for t in targets):
            return self._exact.begin(facts, args, kwargs, loop_line, steps=False)  # a buffer that a forward updates
        self._exact.forget(targets)
        return None

    def looks_before(self, facts: OpFacts) -> bool:
        """Return whether an op writes to its arguments."""
        return facts.overwrites

    def before(self, call: SeenCall) -> None:
        """Inspect a call that is about to write: a scaler's, or one that may clip or accumulate gradients."""
        if call.facts.id == UNSCALE:
            self._is_in_closure = False
            self._scales = self._scales or loop_line()
            self._say(self._gradients.unscaled(call))
            if self._backwards.unscales(call, self.never_skips):
                self.end_of_step()
        elif call.facts.id == UPDATE_SCALE:
            is_known = dispatch.storage_key(call.args[0]) in self._kept.scales()
            is_skipped = bool(call.args[2]) and not self.never_skips
            self.updates.add(float(call.args[0]), is_skipped, is_known, loop_line())
            self._backwards.updated(call.args[0], is_known, is_skipped)
            self._gradients.used()
            self._kept.meets_scale(call.args[0])
            self.end_of_step()
        elif call.id.direction == BACKWARD:
            self._backwards.adds(call)
        elif not self._is_updating or clears(call):  # as a closure may
            self._gradients.written(call)
            self._backwards.written(call, written(call.facts, call.args, call.kwargs), self._gradients.adds(call))

    def after(self, call: SeenCall) -> None:
        """Inspect a call that has run: in a region or not, and its results."""
        if call.id.direction == BACKWARD:
            results = [] if in_hook() else call.results
            self._gradients.backward(results)
            self._backwards.gave(results)
            self._outside.are_intentional(call.results if call.notes.get("trains") else [])
            if self._fp16 is not None or any(t.dtype is torch.float16 for t in call.results):
                self._underflow.look(call)
        if call.id.direction == FORWARD and (not self._is_stepping or call.notes.get("trains")):  # or in a closure
            self._adds_up(call)
            self._outside.goes_on_in_fp32(call)
            self._gradients.copied(call)
        self._rounded.widens(call)
        self.adviser.calls += 1
        if call.plan is not None:
            self._advise(call, call.plan)
        if call.is_cast or call.id.direction == BACKWARD:
            return
        self.has_seen = True
        if not self._is_updating or call.notes.get("trains"):
            self._gradients.computed(call)
        is_region = call.plan is not None
        computes = call.computes.split(",") if is_region or call.notes.get("trains") else ()
        is_trained = call.notes.get("trains") or any(t.requires_grad for t in call.results)
        if is_trained and "fp16" in computes and all(map(has_storage, call.results)):  # who knows scales in torch.func
            self._fp16 = self._fp16 or (call.id.op, call.site)
        elif is_trained and is_region and call.rule is not None and "bf16" in computes:
            self._low = self._low or (call.id.op, call.site)
        if is_trained and not self._depth:
            self._outside.gives_loss(call)
        if is_region and not self._is_stepping:
            self._say(self._stale.read(call))
        if is_region:
            self.has_lowered |= "fp16" in computes or (call.rule is not None and "bf16" in computes)
            self._outside.ran_inside(call)
        else:
            self._outside.ran_outside(call)
        self._say(low_statistics(call))

    def _advise(self, call: SeenCall, plan: Plan) -> None:
        self.adviser.casts += any(plan.formats) or plan.set_dtype or plan.append_dtype
        self.adviser.decided(call.facts, call.site, tensors_in(call.args, call.kwargs))
        self.adviser.gave(call.facts, call.results, call.site)

    @property
    def _is_updating(self) -> bool:
        """Whether an optimizer computes, and not a closure that it calls."""
        return self._is_stepping and not self._is_in_closure

    @property
    def follows(self) -> bool:
        """Whether there are gradients in fp16, or values that are in fp32 on purpose, whose copies are followed."""
        return self._fp16 is not None or self._outside.follows

    def moved(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note a copy: it has the round-off of its source, and is in fp32 on purpose if that is."""
        self._underflow.passed_on((args, kwargs), tensors_in(result))
        self._outside.copied(tensors_in(args, kwargs), tensors_in(result))

    def gives(self, seen: SeenCall, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Note casts of weights, and whether gradients will flow back; return the result."""
        if (is_recorded := torch.is_grad_enabled()) and seen.plan is None:
            seen.notes["trains"] = any(t.requires_grad for t in tensors_in(args, kwargs))
        is_forward = seen.id.direction == FORWARD and is_recorded
        is_weights = facts.op is dispatch.TO_COPY and seen.plan is not None and is_weight(args[0])
        if is_forward and is_weights and not self._is_without_grad:
            part = args[0].storage_offset(), args[0].shape, result.dtype
            self._casts.setdefault(dispatch.storage_key(args[0]), {}).setdefault(part, []).append(seen.site)
        if is_weights:
            self._stale.cast(seen, args[0], result)
        return result

    def steps(self, optimizer: Any, is_seen: bool) -> None:
        """Inspect an optimizer that is about to step. is_seen: in the thread that is observed."""
        self._kept.optimizer(optimizer, is_seen)
        with dispatch.without_functions():
            self._backwards.copies_used(self._gradients.copied_for(optimizer))
            for part in (self._gradients, self._backwards, self._rounded):
                part.steps(optimizer)
        self._is_stepping = True
        self.end_of_step()

    def stepped(self, optimizer: Any) -> None:
        """Inspect the weights after an optimizer's step."""
        stored = stored_by(optimizer)
        lost = 0.0 if stored is None else stored.lost[-1]
        if lost > LOST_OF_WEIGHTS:
            what = f"{lost:.0%} of the elements that a step should move stay where they were: what is added "
            todo = 'Declare what completes them: master = "remainder" or "fp32"; or rounding = "stochastic", "kahan".'
            self.add(UPDATES, f"{what}is less than half a unit of the weight", todo, loop_line())
        self._is_stepping = self._is_in_closure = False
        with dispatch.without_functions():
            self._backwards.stepped()
            self._rounded.stepped()

    def end_of_step(self) -> None:
        """Report weights cast more than once, as an optimizer is about to step, or a scaler has skipped its step."""
        casts = [(key, sites) for key, parts in self._casts.items() for sites in parts.values() if len(sites) > 1]
        self._say(cast_again(casts, self._kept.names) if casts else None)
        self._casts.clear()
        self._gradients.forget()
        self._sums.end_of_step()

    @property
    def is_stuck(self) -> bool:
        """Whether all steps so far were skipped, and a scale may yet be small enough."""
        return self.updates.is_stuck or self._backwards.unused.is_stuck

    def end_of_round(self) -> None:
        """Report what is known once the step function has returned."""
        self._gradients.used()
        self.updates.end_of_round()
        if self._backwards.end_of_round():
            self._casts.clear()
        self._powers.end_of_step()
        self._sums.end_of_step()
        self._say(self._underflow.end_of_step())
        lost = self._exact.end_of_step(self._kept.states(), self._backwards.trained)
        trained = self._backwards.trained | self._kept.optimized()
        for finding in (*told(lost, self._kept.names(), trained), *self._backwards.found):
            self._say(finding)
        self._backwards.found.clear()
        self._broken = self._broken or no_longer_finite(self._kept, loop_line())

    def _adds_up(self, call: SeenCall) -> None:
        """Report sums of gradients, and outside of models of losses, that a call accumulates in a low format."""
        dtype = self._sums.of_gradients(call, self._gradients.is_one)
        if dtype is not None:
            self._backwards.accumulated.meets(dtype, call.site)
        elif not self._depth or (not torch.is_grad_enabled() and self._sums.counts(call)):
            self._say(self._sums.of_losses(call))

    def _say(self, finding: Found | None) -> None:
        if finding is not None:
            self.add(*finding)

    def judge(self) -> None:
        """Report what only all of the steps together show."""
        backwards, trained = self._backwards, self._kept.trained()
        outside = self._outside.judge(backwards.differentiated, trained, backwards.has_run)
        skipped = self.updates.judge(self._kept.trains_what_was_there)
        rest = self._gradients.judge(backwards.trained), None if skipped else backwards.judge()
        for told_of in (*outside, skipped, *rest):
            self._say(told_of)
        if not any(finding.kind == UPDATES for finding in self.found):  # else it has told of the same loss
            self._say(self._rounded.found)
        self._say(None if self.found else self._broken or self._gradients.all_zero())
        scaled = self._scales is not None or self._backwards.has_scaled or self._gradients.is_scaled_by_hand
        if self._fp16 is not None and not scaled:
            op, site = self._fp16
            to_do = "Scale the loss (nc.Scaler): gradients below 6e-8 are zero in fp16. Or "
            to_do += f'bring it into bf16: nc.Rule("{op}", "lower").' if self._low else "train in bf16."
            self.add("fp16 without a scaler", f"{op} computes in fp16, and nothing unscales gradients", to_do, site)
        if self._scales is not None and self._fp16 is None and self._low is not None:
            to_do = "Use no scaler (enabled=False): bf16 has the range of fp32."
            self.add("an unneeded scaler", "gradients are scaled, and no call computes in fp16", to_do, self._scales)


def _trains(args: Any, kwargs: Any) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(args, kwargs))
