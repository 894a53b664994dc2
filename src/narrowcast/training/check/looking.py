"""Looks at steps of training: what runs outside of regions, what is cast again, what a scaler is missing for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from narrowcast.analysis.record.advice import listed_kinds
from narrowcast.core.ledger import Advice
from narrowcast.core.ledger.identity import BACKWARD, FORWARD
from narrowcast.core.policy import Kind, Site
from narrowcast.observation.observer.observer import Observer
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.statistics.arguments import tensors_by_name
from narrowcast.observation.statistics.by_storage import ByStorage, has_storage
from narrowcast.observation.trial.finiteness import is_floating
from narrowcast.runtime.regions.stack import stack
from narrowcast.runtime.sites.python_stack import loop_line
from narrowcast.runtime.torch_bridge import LOW, OpFacts, is_random, is_weight, op_facts, tensors_in
from narrowcast.runtime.torch_surface import dispatch
from narrowcast.runtime.torch_surface.autograd import current_graph_task, next_sequence_number
from narrowcast.runtime.torch_surface.grad_scaling import UNSCALE, UPDATE_SCALE
from narrowcast.runtime.torch_surface.state import autocast_nesting
from narrowcast.training.check.backwards import Backwards
from narrowcast.training.check.casts import Reduced, Stale, casts_beside
from narrowcast.training.check.exact import Begun, Exact, Sums, low_statistics, told
from narrowcast.training.check.gradients import Found, Gradients, Underflow, Updates
from narrowcast.training.check.kept import KeptMemory, written

COSTS_TIME = "weights cast again"


@dataclass(slots=True)
class _Evaluated:
    """A model that was called for an evaluation, and its calls in regions and out of them: op and line."""

    model: torch.nn.Module
    inside: int = 0
    outside: list[tuple[str, Site]] = field(default_factory=list)


class LoopObserver(Observer):
    """Sees the steps of a loop. found: what is wrong, and how often; updates: of a scale; inside, outside: calls;
    has_seen, has_lowered: there was one, a region lowered one; is_cast_beside: somebody casts besides the region.
    """

    sees_inside = True

    def __init__(self, kept: KeptMemory) -> None:
        super().__init__()
        self.found: dict[Advice, int] = {}
        self.updates = Updates()
        self.inside = 0
        self.outside: list[tuple[int, str, Site]] = []  # in training: autograd node, op, line
        self.evaluated: dict[int, _Evaluated] = {}
        self._kept = kept
        self._gradients = Gradients(kept)
        self._evaluation: _Evaluated | None = None
        self._depth = 0
        self._is_stepping = False
        self._is_without_grad = False  # of the outermost module; torch casts weights with gradients on in any case
        self._casts: dict[tuple[int, torch.dtype], list[Site]] = {}
        self._fp16: tuple[str, Site] | None = None
        self._low: tuple[str, Site] | None = None
        self.has_seen = self.has_lowered = False
        self._scales: Site | None = None
        self._backwards = Backwards()
        self._exact = Exact(kept.was_there, self._gradients.lie_in)
        self._sums = Sums(kept.was_there)
        self._stale = Stale()
        self._underflow = Underflow()
        self.is_cast_beside = False
        self._reduced = Reduced()
        self._meant: ByStorage[bool] = ByStorage()

    @property
    def calls(self) -> dict[str, int]:
        """How many calls of a forward a region decided about, and how many ran outside that it would lower."""
        evaluated = self.evaluated.values()
        outside = len(self.outside) + sum(len(e.outside) for e in evaluated)
        return {"inside": self.inside + sum(e.inside for e in evaluated), "outside": outside}

    def add(self, kind: str, what: str, todo: str, site: Site) -> None:
        """Note a finding, once per line."""
        finding = Advice(kind, what, todo, *site.at)
        self.found[finding] = self.found.get(finding, 0) + 1

    # -- as it runs ----------------------------------------------------------------------------------------------------

    def called(self, call: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module's call; the outermost says whether this is training."""
        if self._depth:
            return super().called(call, module, args, kwargs)
        self.door.run("a model", self._met_model, module)
        self._is_without_grad = not torch.is_grad_enabled()
        if self._is_without_grad and not module.training:
            self._evaluation = self.evaluated.setdefault(id(module), _Evaluated(module))
        self._depth += 1
        try:
            return super().called(call, module, args, kwargs)
        finally:
            self._depth -= 1
            self._evaluation = None
            self._is_without_grad = False

    def _met_model(self, module: torch.nn.Module) -> None:
        self._kept.model(module)
        self._gradients.forget()
        self._reduced.met(module, loop_line())
        found = casts_beside(module, loop_line()) if _in_region() else None
        if found is not None and not self.is_cast_beside:
            self.is_cast_beside = True
            self.add(*found)

    def __torch_dispatch__(
        self, func: dispatch.OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._local.looking:  # what we compute ourselves
            return super().__torch_dispatch__(func, types, args, kwargs)
        facts = op_facts(func)
        with dispatch.without_functions():  # asking for a gradient, or for a dtype, is a call
            begun = self.door.run(facts.id, self._before_op, facts, args, kwargs or {})
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if begun is not None or is_random(func):
            with dispatch.without_functions():
                self.door.run(facts.id, self._computed_again, begun, result)
        return result

    def _computed_again(self, begun: Begun | None, result: Any) -> None:
        if begun is not None:
            self._exact.end(begun, result)
        else:
            self._exact.drawn(result)
            self._gradients.drawn(result)

    def _before_op(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Begun | None:
        targets = self._kept.before_op(facts, args, kwargs)
        for tensor in targets:
            for dtype in LOW:
                self._casts.pop((dispatch.storage_key(tensor), dtype), None)  # another weight is cast next time
        is_backward = current_graph_task() != -1
        if is_backward:
            self._backwards.runs(args)
            self._say(self._reduced.sends(facts, args))
        elif targets and not self._is_stepping and _in_region():
            self._stale.written(targets, loop_line())
        reads_number = facts.op is dispatch.READ_NUMBER and has_storage(args[0])
        if reads_number and dispatch.storage_key(args[0]) in self._kept.scales():
            self._gradients.scale_read(float(args[0]))
            self._backwards.scale_read(args[0])
        if facts.op is dispatch.ONES_LIKE and not is_backward and args[0].grad_fn is not None and self._kept.scales():
            self._backwards.begins_at(args[0])
        trains = torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(args, kwargs))
        if not facts.is_view and not trains and (self._is_stepping or not (is_backward or self._depth)):
            return self._exact.begin(facts, args, kwargs, loop_line, self._is_stepping)
        self._exact.forget(targets)
        return None

    def looks_before(self, facts: OpFacts) -> bool:
        """Whether it writes."""
        return facts.overwrites

    def before(self, call: SeenCall) -> None:
        """Scalers and clips."""
        if call.facts.id == UNSCALE:
            self._scales = self._scales or loop_line()
            self._backwards.unscales(call)
            self._say(self._gradients.unscaled(call))
        elif call.facts.id == UPDATE_SCALE:
            is_known = dispatch.storage_key(call.args[0]) in self._kept.scales()
            self.updates.add(float(call.args[0]), bool(call.args[2]), is_known, loop_line())
            self._backwards.updated(is_known)
            self._gradients.used()
            self._kept.meets_scale(call.args[0])
            self.end_of_step()
        elif call.id.direction == BACKWARD:
            self._backwards.adds(call)
        elif not self._is_stepping:
            self._gradients.written(call)
            self._backwards.written(call, written(call.facts, call.args, call.kwargs))

    def after(self, call: SeenCall) -> None:
        """Where it stood, and what it gave."""
        if call.id.direction == BACKWARD:
            self._gradients.backward()
            self._backwards.gave(call.results)
            if self._fp16 is not None:
                self._underflow.look(call)
        if call.id.direction == FORWARD and not self._is_stepping:
            self._adds_up(call)
            self._goes_on_in_fp32(call)
            self._gradients.copied(call)
        if call.is_cast or call.id.direction == BACKWARD:
            return
        self.has_seen = True
        if not self._is_stepping:
            self._gradients.computed(call)
        self._say(self._backwards.computed(call, self._kept.scales))  # in a closure, too
        is_region = call.plan is not None
        computes = call.computes.split(",") if is_region or call.notes.get("trains") else ()
        is_trained = call.notes.get("trains") or any(t.requires_grad for t in call.results)
        if is_trained and "fp16" in computes:
            self._fp16 = self._fp16 or (call.id.op, call.site)
        elif is_trained and is_region and call.rule is not None and "bf16" in computes:
            self._low = self._low or (call.id.op, call.site)
        if is_region and not self._is_stepping:
            self._say(self._stale.read(call))
        if is_region:
            self.has_lowered |= "fp16" in computes or (call.rule is not None and "bf16" in computes)
            if self._evaluation is not None:
                self._evaluation.inside += 1
            else:
                self.inside += 1
        else:
            self._is_outside(call)
        self._say(low_statistics(call))

    @property
    def follows(self) -> bool:
        """Copies of gradients in fp16."""
        return self._fp16 is not None

    def moved(self, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """A copy has what it is copied from."""
        self._underflow.passed_on((args, kwargs), tensors_in(result))

    def gives(self, seen: SeenCall, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Casts of weights; and whether gradients will flow back."""
        is_forward = seen.id.direction == FORWARD and torch.is_grad_enabled()
        if seen.plan is None and is_forward:
            seen.notes["trains"] = any(t.requires_grad for t in tensors_in(args, kwargs))
        is_weights = facts.op is dispatch.TO_COPY and seen.plan is not None and is_weight(args[0])
        if is_forward and is_weights and not self._is_without_grad:
            self._casts.setdefault((dispatch.storage_key(args[0]), result.dtype), []).append(seen.site)
        if is_weights:
            self._stale.cast(seen, args[0], result)
        return result

    def steps(self, optimizer: Any, is_seen: bool) -> None:
        """An optimizer is about to step; is_seen: on the thread that is looked at."""
        self._kept.optimizer(optimizer, is_seen)
        with dispatch.without_functions():
            self._say(self._gradients.steps(optimizer))
            self._backwards.steps(optimizer)
        self._is_stepping = True
        self.end_of_step()

    def stepped(self) -> None:
        """It has stepped."""
        self._is_stepping = False

    def end_of_step(self) -> None:
        """An optimizer steps, or a scaler has skipped that: what was cast until now was cast for one step."""
        again = {key: sites for key, sites in self._casts.items() if len(sites) > 1}
        if again:
            (key, _), sites = max(again.items(), key=lambda item: len(item[1]))
            name = self._kept.names().get(key, "a weight")
            self.add(
                COSTS_TIME,
                f"{len(again)} weights are cast more than once before the optimizer steps, {name} {len(sites)} times",
                "One region around all micro-batches of a step (with its weight cache on) casts each weight once; "
                "switch it off around their backwards: with nc.autocast(device, enabled=False). The values are the "
                "same, and nothing is wrong: this costs time alone.",
                sites[1],
            )
        self._casts.clear()
        self._gradients.forget()
        self._sums.end_of_step()

    def end_of_round(self) -> None:
        """The step function has returned."""
        self._gradients.used()
        self._say(self._underflow.end_of_step())
        lost = self._exact.end_of_step(self._kept.states())
        for found in (*told(lost, self._kept.names(), self._backwards.trained), *self._backwards.found):
            self._say(found)
        self._backwards.found.clear()

    def _adds_up(self, call: SeenCall) -> None:
        """What is added up term by term, outside of models."""
        dtype = self._sums.of_gradients(call, self._gradients.lie_in)
        if dtype is not None:
            self._backwards.low_sum(dtype, call.site)
        elif not self._depth:
            self._say(self._sums.of_losses(call))

    def _goes_on_in_fp32(self, call: SeenCall) -> None:
        """What the user has cast to fp32, and whatever is computed from it outside of regions, is meant to be fp32."""
        if call.plan is not None:
            return
        given = tensors_in(call.args, call.kwargs)
        is_cast = call.facts.op is dispatch.TO_COPY
        is_cast_by_user = is_cast and given[0].dtype in LOW and call.result.dtype is torch.float32
        if is_cast_by_user or any(self._meant.get(t) for t in given):
            for tensor in call.results:
                self._meant.put(tensor, True)

    def _say(self, found: Found | None) -> None:
        if found is not None:
            self.add(*found)

    # -- findings ------------------------------------------------------------------------------------------------------

    def _is_outside(self, call: SeenCall) -> None:
        floats = [t for _, t in tensors_by_name(call.facts, call.args, call.kwargs) if is_floating(t)]
        if not floats or any(t.dtype is not torch.float32 for t in floats) or _in_region():
            return
        if listed_kinds(floats[0].device.type).get(dispatch.op_name(call.facts.op)) is not Kind.LOWER:
            return
        if any(self._meant.get(t) for t in floats):
            return
        if self._evaluation is not None:
            self._evaluation.outside.append((call.id.op, call.site))
        elif call.notes.get("trains"):  # and not what prepares a batch, measures, or updates weights
            self.outside.append((next_sequence_number() - 1, call.id.op, call.site))

    # -- at the end ----------------------------------------------------------------------------------------------------

    def judge(self) -> None:
        """What only the whole of the steps shows."""
        evaluated = self._unlike_training()
        # a gradient that is differentiated itself, as in a penalty, is computed in fp32 on purpose
        trained = [o for o in self.outside if not self.inside or o[0] not in self._backwards.differentiated]
        if trained:
            _, op, site = trained[0]
            if self.inside:
                self.add(
                    "forward outside of the region",
                    f"{len(trained)} calls that the region would lower run outside of it, the first of them {op}",
                    "Move this code into the region, or close the region where fp32 is intended: "
                    "nc.autocast(device, enabled=False).",
                    site,
                )
            else:
                self.add(
                    "no region", f"{len(trained)} calls run in fp32, the first of them {op}, and none in a region",
                    "Open nc.autocast(device, dtype) around the forward and the loss.", site,
                )  # fmt: skip
        if evaluated:
            self.add(
                "evaluation without the region",
                f"{len(evaluated)} calls of an evaluation run in fp32, where training runs in a region",
                "Open the same region around the evaluation: what is measured is then what was trained.",
                evaluated[0][1],
            )
        self._say(self.updates.judge())
        scaled = self._scales is not None or self._backwards.has_scaled or self._gradients.is_scaled_by_hand
        if self._fp16 is not None and not scaled:
            op, site = self._fp16
            self.add(
                "fp16 without a scaler", f"{op} computes in fp16, and nothing unscales gradients",
                "Scale the loss (nc.Scaler): gradients below 6e-8 are zero in fp16. Or train in bf16.", site,
            )  # fmt: skip
        if self._scales is not None and self._fp16 is None and self._low is not None:
            self.add(
                "an unneeded scaler", "gradients are scaled, and no call computes in fp16",
                "Use no scaler (enabled=False): bf16 has the range of fp32.", self._scales,
            )  # fmt: skip

    def _unlike_training(self) -> list[tuple[str, Site]]:
        """What an evaluation of a model that is trained runs outside of regions. A teacher may have its own formats."""
        trained = self._kept.trained()
        for found in self.evaluated.values() if self.inside else ():
            is_trained = not trained or any(id(p) in trained for p in found.model.parameters())
            if found.outside and not found.inside and is_trained:
                return found.outside
        return []


def _in_region() -> bool:
    return bool(autocast_nesting() or stack.innermost)
