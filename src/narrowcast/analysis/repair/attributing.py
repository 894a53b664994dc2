"""What each low call does to the output, all of it learnt from one run in fp32.

Each call is also run alone as the policy has it, on the reference's inputs: d is its result then, less its result in
fp32. Backward passes from random signs at the output yield g at each call, and the mean of (g . d)^2 over the signs is
the square of the error that the call alone makes in the output, to first order. Without gradients, d alone decides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from narrowcast.analysis.compare.reference import run_low
from narrowcast.analysis.compare.rules import rule_about
from narrowcast.analysis.repair.looking import ForwardCall, RepairObserver
from narrowcast.core.ledger.identity import CallId
from narrowcast.core.policy import Action, Kind, Policy, Rule
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.trial.finiteness import is_floating
from narrowcast.observation.trial.trial import tensors_of
from narrowcast.runtime.torch_surface.dispatch import without_modes

PROBES = 8
"""How many draws of signs: each takes a backward; for a single call the estimate of the square is off by half."""
_NEAR = 2.0
"""The predicted error may be this many times the true one, or as many times less: roundings add up, or cancel."""
LARGEST = 1 << 22
"""How many elements of a call's result are sampled, at even distances."""


@dataclass(slots=True)
class Effect:
    """What one low call does. probes: g . d by draw of signs; empty without gradients. local: its local error."""

    probes: tuple[float, ...] = ()
    local: float = 0.0


@dataclass(slots=True)
class _ChangedResult:
    """A result of a call, and how the call alone in its low formats changes it; every `step`-th element of both."""

    identity: CallId
    result: torch.Tensor
    change: torch.Tensor
    step: int


class Attribution(RepairObserver):
    """The run in fp32, in which the effects of low calls are found. `probe` is the loss that the run differentiates."""

    def __init__(self, low: Mapping[CallId, ForwardCall]) -> None:
        super().__init__((_visiting(low),), ranges=True)
        self._asked = low
        self._changes: list[_ChangedResult] = []
        self.effects: dict[CallId, Effect] = {}

    def after(self, call: SeenCall) -> None:
        """Run the call alone, too, in its low formats."""
        super().after(call)
        wanted = self._asked.get(call.id)
        if wanted is None or wanted.kept is None or call.is_cast:
            return
        results = [t for t in call.results if is_floating(t)]
        noise = signal = 0.0
        for result, low in zip(results, run_low(call, wanted.kept) or (), strict=False):
            if low.shape != result.shape:
                continue
            step = max(1, math.ceil(result.numel() / LARGEST))
            at = result.detach().flatten()[::step]
            change = low.to(result.dtype).flatten()[::step] - at
            noise += float(change.double().square().sum())
            signal += float(at.double().square().sum())
            if result.requires_grad:
                self._changes.append(_ChangedResult(call.id, result, change, step))
        self.effects[call.id] = Effect(local=math.sqrt(noise / signal) if signal else math.inf * (noise > 0))

    def probe(self, output: Any) -> torch.Tensor:
        """Find the effects of the calls, and return a loss that adds nothing to gradients."""
        ends = [t for t in tensors_of(output) if t.requires_grad and t.is_floating_point()]
        watched = [change.result for change in self._changes]
        sums_by_call: dict[CallId, list[float]] = {}
        with without_modes():
            for draw in range(PROBES if ends and watched else 0):
                signs = [_signs(t, draw) for t in ends]
                gradients = torch.autograd.grad(ends, watched, signs, retain_graph=True, allow_unused=True)
                for change, gradient in zip(self._changes, gradients, strict=True):
                    sums = sums_by_call.setdefault(change.identity, [0.0] * PROBES)
                    if gradient is not None:
                        at = gradient.flatten()[:: change.step]
                        sums[draw] += float((at.double() * change.change.double()).sum()) * change.step
        for identity, sums in sums_by_call.items():
            self.effects[identity].probes = tuple(sums)
        self._changes.clear()
        return torch.zeros((), device="cpu", requires_grad=True)


def _visiting(low: Mapping[CallId, ForwardCall]) -> Policy:
    """Return a policy that names the ops which only follow: so they are seen where gradients are recorded."""
    ops = dict.fromkeys(identity.op for identity, call in low.items() if call.kept and not call.kept.call.facts.writes)
    return Policy("visited", (tuple(Rule(op, Action(Kind.FOLLOW)) for op in ops),), extends=())


def _signs(tensor: torch.Tensor, draw: int) -> torch.Tensor:
    """Return random signs, always the same; those of a large output weigh as much as those of a small one."""
    generator = torch.Generator().manual_seed(draw)
    signs = torch.randint(0, 2, tensor.shape, generator=generator, device="cpu") * 2.0 - 1.0
    size = float(tensor.detach().double().norm()) or 1.0
    return (signs / size).to(tensor)


@contextmanager
def gradients_recorded(parameters: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Have all floating-point weights record gradients, frozen ones too, so that the calls that read them do."""
    frozen = [
        p for p in parameters.values()
        if p.is_floating_point() and p.is_leaf and not (p.requires_grad or p.is_inference())
    ]  # fmt: skip
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        with torch.enable_grad():
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


@dataclass(slots=True)
class Worth:
    """By rule, its part in the square of the output's error, or where not by_gradient, in that of local errors."""

    parts: dict[Rule, float] = field(default_factory=dict)
    by_gradient: bool = True

    def foretells(self, error: float) -> bool:
        """Return whether the parts add up to the error that a run had: else they do not show which calls need fp32, as
        where softmax or tanh saturate.
        """
        return self.by_gradient and 1 / _NEAR <= math.sqrt(sum(self.parts.values())) / (error or math.inf) <= _NEAR


def worth_of(effects: Mapping[CallId, Effect], look: RepairObserver) -> Worth:
    """Return the worth of a rule about each op of each module. A call that only follows counts for what it follows."""
    by_gradient = any(any(effect.probes) for effect in effects.values())
    sums: dict[Rule, list[float]] = {}
    for identity, effect in effects.items():
        makers = look.decided_behind(identity)
        probes = effect.probes if by_gradient else (effect.local,)
        for maker in makers:
            total = sums.setdefault(rule_about(maker.op, maker.module_path), [0.0] * (PROBES if by_gradient else 1))
            for draw, value in enumerate(probes):
                total[draw] += value / len(makers)
    parts = {rule: sum(value * value for value in total) / len(total) for rule, total in sums.items()}
    return Worth(parts, by_gradient)
