"""Looks at steps of training: what runs outside of regions, what is cast again, what underflows, what is clipped."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from narrowcast.ledger import Advice
from narrowcast.ledger.identity import BACKWARD, FORWARD
from narrowcast.loops.kept import UNSCALE, UPDATE_SCALE, Kept, written
from narrowcast.policy import DEVICE_TYPES, Kind, Policy, Site
from narrowcast.regions.stack import innermost
from narrowcast.runs.arguments import tensors_by_name
from narrowcast.runs.finiteness import is_floating
from narrowcast.runs.observer import Observer, SeenCall
from narrowcast.sites.python_stack import loop_line
from narrowcast.torch_bridge import FORMATS, OpFacts, is_weight
from narrowcast.torch_surface.dispatch import TO_COPY, op_name, storage_key
from narrowcast.torch_surface.state import autocast_nesting

TRAINING, EVALUATION = "training", "evaluation"
_UNDERFLOWS = 0.5
"""The share of a gradient's elements below the normal numbers of fp16 that is told of."""
_CLIPS = ("mul_", "_foreach_mul_", "clamp_", "clamp_min_", "clamp_max_", "_foreach_clamp_min_", "_foreach_clamp_max_")


@dataclass(slots=True)
class _Outside:
    """Calls that a region would lower and that ran in none."""

    op: str
    site: Site
    times: int = 0


class Looking(Observer):
    """Sees the steps of a loop. found: what is wrong, and how often; updates: of a scale."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self.found: dict[Advice, int] = {}
        self.updates = 0
        self.inside = {TRAINING: 0, EVALUATION: 0}
        self.outside: dict[str, _Outside] = {}
        self._kept = kept
        self._phase = TRAINING
        self._depth = 0
        self._keeps_graph = True  # asked where a model is called: a weight is cast with gradients, wherever it is
        self._casts: dict[tuple[int, torch.dtype], list[Site]] = {}
        self._clipped: tuple[str, Site] | None = None
        self._fp16: tuple[str, Site] | None = None
        self._low: tuple[str, Site] | None = None
        self._scales: Site | None = None

    @property
    def has_lowered(self) -> bool:
        """Whether a region lowered a call."""
        return self._fp16 is not None or self._low is not None

    def add(self, kind: str, what: str, todo: str, site: Site) -> None:
        """Note a finding, once per line."""
        finding = Advice(kind, what, todo, *site.at)
        self.found[finding] = self.found.get(finding, 0) + 1

    # -- as it runs ----------------------------------------------------------------------------------------------------

    def called(self, call: Callable[..., Any], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module's call; the outermost says whether this is training."""
        if self._depth:
            return super().called(call, module, args, kwargs)
        self._kept.model(module)
        self._phase = TRAINING if module.training or torch.is_grad_enabled() else EVALUATION
        self._keeps_graph = torch.is_grad_enabled()
        self._depth += 1
        try:
            return super().called(call, module, args, kwargs)
        finally:
            self._depth -= 1
            self._phase, self._keeps_graph = TRAINING, True

    def looks_before(self, facts: OpFacts) -> bool:
        """Whether it writes."""
        return facts.overwrites

    def before(self, call: SeenCall) -> None:
        """What it is about to write to is copied; clipping is noted."""
        self._kept.before_write(call)
        if call.facts.id == UNSCALE:
            self._unscales(call)
        elif call.facts.id == UPDATE_SCALE:
            self.updates += 1
            self.end_of_step()
        elif op_name(call.facts.op) in _CLIPS and call.id.direction == FORWARD:
            self._clips(call)

    def after(self, call: SeenCall) -> None:
        """Where it stood, and what it gave."""
        if call.is_cast:
            return
        if call.id.direction == BACKWARD:
            self._underflow(call)
        elif call.plan is not None:
            self.inside[self._phase] += 1
            if call.computes and "fp16" in call.computes.split(","):
                self._fp16 = self._fp16 or (call.id.op, call.site)
            elif call.rule is not None and "bf16" in call.computes.split(","):
                self._low = self._low or (call.id.op, call.site)
        else:
            self._is_outside(call)
        if "batch_norm" in call.facts.id:
            self._batch_norm(call)

    def gives(self, seen: SeenCall, facts: OpFacts, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Casts of weights."""
        is_forward = seen.id.direction == FORWARD and self._phase is TRAINING and self._keeps_graph
        if is_forward and facts.op is TO_COPY and seen.plan is not None and is_weight(args[0]):
            self._casts.setdefault((storage_key(args[0]), result.dtype), []).append(seen.site)
        return result

    def steps(self, optimizer: Any) -> None:
        """An optimizer is about to step."""
        self._kept.optimizer(optimizer)
        self.end_of_step()

    def end_of_step(self) -> None:
        """An optimizer steps, or a scaler has skipped that: what was cast until now was cast for one step."""
        again = {key: sites for key, sites in self._casts.items() if len(sites) > 1}
        if again:
            (key, _), sites = max(again.items(), key=lambda item: len(item[1]))
            name = self._kept.names().get(key, "a weight")
            self.add(
                "weights cast again",
                f"{len(again)} weights are cast more than once before the optimizer steps, {name} {len(sites)} times",
                "Open one region around all micro-batches of a step (and leave its weight cache on): it casts each "
                "weight once. The values are the same; this costs time alone.",
                sites[1],
            )
        self._casts.clear()
        self._clipped = None

    # -- findings ------------------------------------------------------------------------------------------------------

    def _is_outside(self, call: SeenCall) -> None:
        floats = [t for _, t in tensors_by_name(call.facts, call.args, call.kwargs) if is_floating(t)]
        if not floats or any(t.dtype is not torch.float32 for t in floats) or autocast_nesting() or innermost():
            return
        if op_name(call.facts.op) in _lowered(floats[0].device.type):
            found = self.outside.setdefault(self._phase, _Outside(call.id.op, call.site))
            found.times += 1

    def _unscales(self, call: SeenCall) -> None:
        self._scales = self._scales or loop_line()
        if self._clipped is None:
            return
        op, site = self._clipped
        self.add(
            "clip before unscale",
            f"{op} changes gradients that are still multiplied by the loss scale: they are clipped to a limit that is "
            "as many times too small",
            "Call scaler.unscale_(optimizer) before the gradients are clipped.",
            site,
        )
        self._clipped = None

    def _clips(self, call: SeenCall) -> None:
        by_tensor = [t for name, t in tensors_by_name(call.facts, call.args, call.kwargs) if name in ("other", "max")]
        is_number = op_name(call.facts.op) == "mul_" and not by_tensor
        gradients = self._kept.gradients()
        if not is_number and any(storage_key(t) in gradients for t in written(call)):
            self._clipped = self._clipped or (call.id.op, call.site)

    def _underflow(self, call: SeenCall) -> None:
        results = [t for t in call.results if t.dtype is torch.float16 and t.numel() and is_floating(t)]
        if not results or call.forward is None:
            return
        came = [t for _, t in tensors_by_name(call.facts, call.args, call.kwargs) if is_floating(t)]
        for result in results:
            x = result.detach().abs().float()
            if not math.isfinite(float(x.sum())):
                continue  # a step that a scaler skips
            there = int((x > 0).sum())
            small = int(((x > 0) & (x < FORMATS[torch.float16].smallest_normal)).sum())
            is_gone = not there and all(bool(t.detach().count_nonzero()) for t in came)
            if is_gone or (there and small / there > _UNDERFLOWS):
                what = "all of it is zero" if is_gone else f"{small / there:.0%} of it lie below {_SMALLEST:.1e}"
                self.add(
                    "gradients underflow",
                    f"the gradient of {call.forward} in fp16: {what}",
                    "Scale the loss: nc.Scaler, or GradScaler with a larger init_scale; or keep this call in bf16 or "
                    "fp32 by a rule.",
                    call.site,
                )
                return

    def _batch_norm(self, call: SeenCall) -> None:
        for name, tensor in tensors_by_name(call.facts, call.args, call.kwargs):
            if name in ("running_mean", "running_var") and tensor.dtype in (torch.float16, torch.bfloat16):
                self.add(
                    "batch norm statistics in a low format",
                    f"{name} of {call.id.module_path or 'the module'} is {FORMATS[tensor.dtype]}: what each step adds "
                    "to it is soon lost in rounding",
                    "Keep the module in fp32 (module.float()): a region gives it what it needs.",
                    call.site,
                )
                return

    # -- at the end ----------------------------------------------------------------------------------------------------

    def judge(self) -> None:
        """What only the whole of the steps shows."""
        trained, evaluated = (self.outside.get(phase) for phase in (TRAINING, EVALUATION))
        if trained is not None and not sum(self.inside.values()):
            self.add(
                "no region", f"{trained.times} calls run in fp32, the first of them {trained.op}, and none in a region",
                "Open nc.autocast(device, dtype) around the forward and the loss.", trained.site,
            )  # fmt: skip
        elif trained is not None:
            self.add(
                "forward outside of the region",
                f"{trained.times} calls that the region would lower run outside of it, the first of them {trained.op}",
                "Move this code into the region, or close the region where fp32 is meant: "
                "nc.autocast(device, enabled=False).",
                trained.site,
            )
        if evaluated is not None and self.inside[TRAINING] and not self.inside[EVALUATION]:
            self.add(
                "evaluation without the region",
                f"{evaluated.times} calls of an evaluation run in fp32, where training runs in a region",
                "Open the same region around the evaluation: what is measured is then what was trained.",
                evaluated.site,
            )
        if self._fp16 is not None and self._scales is None:
            op, site = self._fp16
            self.add(
                "fp16 without a scaler", f"{op} computes in fp16, and nothing unscales gradients",
                "Scale the loss (nc.Scaler): gradients below 6e-8 are zero in fp16. Or train in bf16.", site,
            )  # fmt: skip
        if self._scales is not None and self._fp16 is None and self._low is not None:
            self.add(
                "a scaler without need", "gradients are scaled, and no call computes in fp16",
                "Leave the scaler away (enabled=False): bf16 has the range of fp32.", self._scales,
            )  # fmt: skip


_SMALLEST = FORMATS[torch.float16].smallest_normal


@cache
def _lowered(device_type: str) -> frozenset[str]:
    """The names of the ops that native autocast lowers on a device type."""
    if device_type not in DEVICE_TYPES:
        return frozenset()
    rules = Policy.native(device_type).rules
    return frozenset(rule.op.split(".")[1] for rule in rules if rule.action.kind is Kind.LOWER)
