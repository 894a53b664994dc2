"""What backwards accumulate: gradients that were used or unscaled before, their formats, and their loss scales."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from narrowcast.core.ops.facts import named
from narrowcast.core.policy import NOWHERE, Site
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.statistics.by_storage import ByStorage, has_storage
from narrowcast.observation.trial.finiteness import is_finite, is_floating
from narrowcast.output.words import counted
from narrowcast.runtime.sites.python_stack import loop_line
from narrowcast.runtime.torch_bridge import LOW, OpFacts, values_of
from narrowcast.runtime.torch_surface import autograd
from narrowcast.runtime.torch_surface.dispatch import op_name, quietly, storage_key
from narrowcast.runtime.torch_surface.grad_scaling import steps_by_scaler, takes_scale
from narrowcast.runtime.torch_surface.modules import optimized_by
from narrowcast.training.check.accumulated import Accumulated
from narrowcast.training.check.gradients import HIDDEN, Found, gradients_of
from narrowcast.training.check.powers import PLAIN, UNKNOWN, Power, Powers
from narrowcast.training.check.scaled_by import Scale, ScaledBy, never_skipped, scaled_twice, steps_with_scaled
from narrowcast.training.check.unused import Unused, has_finite_gradient


@dataclass(slots=True, eq=False)
class _Gradient:
    """The state of a gradient: the line that unscaled it, whether an optimizer has used it, and the line of a backward
    that was added to it since. divided: what had divided it by the scale before that. is_reported: with its cause.
    """

    unscaled: Site | None = None
    is_used: bool = False
    added: Site | None = None
    divided: Power | None = None
    is_reported: bool = False


class Backwards:
    """Inspects each backward: whether its loss is scaled, and the gradients that it adds to."""

    def __init__(self, powers: Powers, was_returned: Callable[[torch.Tensor], bool]) -> None:
        self.found: list[Found] = []
        self._powers = powers
        self._thread = threading.get_ident()
        self._task = -1
        self._lines: list[Site] = []  # of the backwards since an optimizer stepped
        self._line = NOWHERE  # of the one that runs
        self._broken: list[torch.Tensor] = []  # weights, finite as yet, whose gradients are not
        self._gradients: ByStorage[_Gradient] = ByStorage()
        self._used: list[torch.Tensor] = []  # the gradients that the optimizer that steps began with
        self._scaling: dict[int, Scale | None] = {}  # the autograd nodes that scale a loss, and by what
        self._finite: set[int] = set()  # those whose loss was finite
        self._coming: dict[int, torch.Tensor] = {}  # leaves that the next backward reaches past any scale
        self._reaches: dict[int, torch.Tensor] = {}
        self._next, self._power = UNKNOWN, UNKNOWN  # of the results of the next backward, and of this one
        self._next_by: Scale | None = None
        self._by: Scale | None = None
        self._scaled_by = ScaledBy(powers)
        self._is_checked = False  # since gradients were unscaled, the host has read something
        self._asked: Site | None = None  # the line at which it read whether gradients of this backward are finite,
        self._infinite: list[torch.Tensor] = []  # and the leaves of those that were not
        self.trained: set[int] = set()  # storage keys of weights that have a gradient
        self.differentiated: set[int] = set()  # autograd nodes of what is differentiated with create_graph=True
        self.unused = Unused(was_returned)
        self.accumulated = Accumulated()

    # -- losses --------------------------------------------------------------------------------------------------------

    @property
    def has_scaled(self) -> bool:
        """Whether a loss was multiplied by a scale."""
        return bool(self._scaling)

    @property
    def has_run(self) -> bool:
        """Whether there was a backward."""
        return self._task != -1

    def number_read(self, is_answer: bool) -> None:
        """Note that the host reads a number. is_answer: it says whether gradients are finite."""
        self._is_checked |= not steps_by_scaler()
        if is_answer and self._asked is None:
            self._asked = loop_line()
            with quietly():
                self._infinite = self.unused.not_finite()

    def scales(self, tensors: list[torch.Tensor], power: Power, scales: dict[int, float]) -> Found | None:
        """Inspect an op of the forward that may scale a loss; return a finding if it was scaled before. tensors: the
        inputs; power: of the result; scales: those among the inputs, by storage key.
        """
        of_losses = [self._powers.of(t) for t in tensors if t.requires_grad]
        before = [one.power for one in of_losses if one.power is not None]
        if (power.power or scales) and not any(before):
            [*by] = scales.items()
            node = autograd.next_sequence_number() - 1
            self._scaling[node] = by[0] if len(by) == 1 else None
            with quietly():
                self._finite |= {node} if all(is_finite(t) for t in tensors if t.requires_grad) else set()
            sums = [one for one in of_losses if one.is_mixed and one.op.split(".")[1] in ("add", "sub")]
            if scales and not all(one.of_gradients for one in sums):
                return scaled_twice(
                    "this loss is multiplied by the loss scale, a part of it was before, and its gradients"
                )
        elif before and power.power == 2 and max(before) == 1 and not power.of_gradients:
            return scaled_twice("this loss is multiplied by the loss scale, and was before, and its gradients")
        elif any(one.is_gradient for one in of_losses) and before and (power.power or 0) > max(before) and scales:
            return self._of_scaled("a loss is computed of gradients that are multiplied by the loss scale", loop_line())
        return None

    @staticmethod
    def _of_scaled(what: str, site: Site) -> Found:
        todo = "Divide them first: gradients = [g / scaler.get_scale() for g in gradients]."
        return "scaled gradients in a loss", f"{what}: it changes with the scale", todo, site

    def gave(self, results: Iterable[torch.Tensor]) -> None:
        """Note the results of a call of a backward: those of a scaled loss are multiplied by its scale."""
        for tensor in results:
            self._powers.put(tensor, self._power)
            if self._power == PLAIN and self._powers.has_scales:
                self._scaled_by.gave_unscaled(tensor, self._line)
            elif self._power.power == 1 and self._by is not None:
                self._scaled_by.gave_scaled(tensor, self._by, self._line)

    def begins_at(self, root: torch.Tensor) -> None:
        """Inspect the root of the next backward, for which torch makes a gradient of ones."""
        known = self._powers.of(root)
        scaling = self._scaling if known.power != 0 else {}  # it is divided again
        nodes = autograd.nodes_before(root.grad_fn, scaling.keys())
        at = [n for n in map(autograd.sequence_number, nodes) if n in scaling]
        met = [scaling[n] for n in at]
        is_judged = not known.power and (met or known.is_mixed or known.power == 0)
        self._coming = {id(n.variable): n.variable for n in nodes if hasattr(n, "variable")} if is_judged else {}
        if met:
            self._next = Power(known.power if known.power and known.of_gradients else 1.0, of_gradients=True)
        else:
            self._next = PLAIN if known.power == 0 else UNKNOWN
        self._next_by = met[0] if len(set(met)) == 1 else None
        self._judge_loss(root)
        self.unused.begins_at(root, bool(at) and self._finite.issuperset(at), bool(at))

    def _judge_loss(self, root: torch.Tensor) -> None:
        """Report a loss computed from scaled gradients together with values that are not scaled."""
        mixed = self._powers.mixed
        numbers = mixed.keys() & autograd.numbers_before(root.grad_fn) if mixed else set()
        if numbers:
            into = mixed[min(numbers)]
            what = f"{into.op} puts gradients that are multiplied by the loss scale together with what is not, and a "
            self.found.append(self._of_scaled(f"{what}loss is computed of it", into.site))

    def unscales(self, call: SeenCall, never_skips: bool) -> bool:
        """Inspect a call that unscales gradients: those of a loss that was not scaled should not be. never_skips: the
        loop steps with them, finite or not. Return whether it will skip the step.
        """
        gradients = [t for t in call.args[0] if has_storage(t)]
        with quietly():
            is_skipped = not never_skips and not all(is_finite(g) for g in gradients if is_floating(g))
        by = float(call.args[2])
        self._is_checked = False
        self._judge_hidden()
        if by != 1:  # an optimizer's own kernel will divide
            self._judge_divided(gradients)
        self.found += self._scaled_by.divided(gradients, 1 / by if by else 0.0)
        if is_skipped:  # what is not finite stays so
            self._judge_added([seen for g in gradients if (seen := self._gradients.get(g)) is not None])
        for gradient in gradients:
            power, known = self._powers.of(gradient), self._gradients.setdefault(gradient, _Gradient)
            known.unscaled = None if is_skipped else loop_line()
            known.is_used |= is_skipped
            known.divided = power if (power.power or 0) < 0 and power.site is not NOWHERE else None
        return is_skipped

    def _judge_hidden(self) -> None:
        """Report gradients that were not finite when the host asked, and are, or are gone, as the scaler looks."""
        with quietly():
            if self._asked is not None and any(map(has_finite_gradient, self._infinite)):
                kind, _, todo = HIDDEN
                what = "gradients that are not finite are cleared, or replaced, while they are multiplied by the loss "
                what += "scale: the scaler no longer sees that its scale is too large"
                self.found.append((kind, what, todo, self._asked))
                self.unused.used()
        self._asked, self._infinite = None, []

    def _judge_divided(self, gradients: list[torch.Tensor]) -> None:
        """Report gradients that are unscaled, or that an optimizer has used, as a scaler is about to divide them."""
        known = [seen for g in gradients if (seen := self._gradients.get(g)) is not None]
        again = [seen for seen in known if seen.unscaled is not None or (seen.is_used and seen.added is None)]
        if again and not any(seen.is_reported for seen in again):
            self.found.append((
                "gradients unscaled twice",
                f"{counted(len(again), 'gradient')} that the loss scale had divided before: it divides them again, and "
                "they are too small by a factor of it",
                "Give each weight to one optimizer, or call optimizer.zero_grad() and the backward again between the "
                "steps of two.",
                loop_line(),
            ))  # fmt: skip
        for seen in again:
            seen.is_reported = True

    # -- gradients -----------------------------------------------------------------------------------------------------

    def runs(self) -> None:
        """Note that an op of a backward runs: perhaps the first, perhaps one that accumulates a leaf's gradient."""
        task = autograd.current_graph_task()
        if task != self._task:
            self._task, self._reaches, self._coming = task, self._coming, {}
            self.unused.begins()
            self._asked, self._infinite = None, []
            self._power, self._next = self._next, UNKNOWN
            self._by, self._next_by = self._next_by, None
            here = loop_line()
            if not here.file:  # autograd's own thread: the one that waits has the line
                here = loop_line(sys._current_frames().get(self._thread))
            self._lines.append(here)
            self._line = here
            if torch.is_grad_enabled():
                self.differentiated |= autograd.numbers_before(autograd.current_autograd_node())
        leaf = getattr(autograd.current_autograd_node(), "variable", None)
        if leaf is not None and has_storage(values_of(leaf)):
            self.trained.add(storage_key(values_of(leaf)))
            self.unused.reaches(leaf, self._line)
        if leaf is not None and leaf.grad is None:
            self._scaled_by.cleared(leaf)
        if leaf is not None and id(leaf) in self._reaches:
            self._scaled_by.reaches_unscaled(leaf, self._line, bool(self._power.power))
        elif leaf is not None and (mixed := self._scaled_by.reaches(leaf, self._by, self._line)):
            self.found.append(mixed)

    def adds_itself(self, facts: OpFacts) -> bool:
        """Return whether autograd itself accumulates gradients by this op, and no hook's line calls it."""
        return op_name(facts.op) in named("gradients.accumulate") and loop_line().at in (self._line.at, NOWHERE.at)

    def adds(self, call: SeenCall) -> None:
        """Inspect a call of a backward that is about to write: perhaps it accumulates a gradient."""
        target = values_of(call.args[0]) if op_name(call.facts.op) == "add_" else None
        if target is None or not has_storage(target):
            return
        leaf = getattr(autograd.current_autograd_node(), "variable", None)
        gradient = values_of(leaf.grad) if leaf is not None and leaf.grad is not None else target
        if storage_key(gradient) != storage_key(target) or (leaf is None and self._gradients.get(target) is None):
            return
        site, known = self._line, self._gradients.setdefault(gradient, _Gradient)
        if known.is_used:
            known.added = site
        elif known.unscaled is not None and self._power.power:  # not a penalty that is added unscaled, as they are
            known.is_reported = True
            self.found.append((
                "gradients added after unscale_",
                "a later backward adds gradients that are multiplied by the loss scale to those that are unscaled here",
                "Call scaler.unscale_(optimizer) once, after the last backward of the step: "
                "if is_last: scaler.unscale_(optimizer).",
                known.unscaled,
            ))  # fmt: skip
        elif gradient.dtype in LOW and [line.at for line in self._lines].count(site.at) > 1:
            self.accumulated.adds(target, call.args[1], site)

    def written(self, call: SeenCall, targets: Iterable[torch.Tensor], adds_gradients: bool) -> None:
        """Note that a call outside of backwards is about to write: it may clear gradients, or add others to them."""
        clears = op_name(call.facts.op).removesuffix("_") in named("finite.written_unread")
        if clears:
            self._scaled_by.written({storage_key(tensor) for tensor in targets if has_storage(tensor)})
        if op_name(call.facts.op) in named("gradients.clear"):
            self.unused.cleared(list(targets), call.site)
        for tensor in targets:
            known = self._gradients.get(tensor)
            if known is not None and known.is_used and adds_gradients:
                known.added = loop_line()
            elif known is not None and (clears or (known.is_used and known.added is None)):
                self._gradients.drop(tensor)

    def runs_outside(self, facts: OpFacts, tensors: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        """Note that a user's op runs: gradients may be read, or have been used by weights' own updates."""
        if any(map(self._powers.is_weight, targets)):
            self.unused.used()
        elif op_name(facts.op) not in named("gradients.clear"):
            self.unused.reads(tensors)

    def divides(self, targets: list[torch.Tensor], powers: list[Power]) -> None:
        """Note gradients that were divided by the scale twice, before an op whose result does not show it any more."""
        for target, power in zip(targets, powers * len(targets) if len(powers) == 1 else powers, strict=False):
            before, known = self._powers.of(target), self._gradients.get(target)
            if known is not None and power.power is None and (before.power or 0) < 0 and before.site is not NOWHERE:
                known.divided = before

    def moves(self, facts: OpFacts, targets: list[torch.Tensor], powers: list[Power]) -> None:
        """Inspect a user's op that is about to write to tensors; report weights that scaled gradients change."""
        unscaled = [known for known in map(self._gradients.get, targets) if known is not None and known.unscaled]
        keeps = op_name(facts.op) in named("gradients.clip") | named("gradients.shift")
        self._is_checked |= bool(unscaled) and not keeps  # it may replace what is not finite
        scaled = [power for power in powers if power.of_gradients]
        if any(power.power or power.is_mixed for power in scaled) and any(map(self._powers.is_weight, targets)):
            self._moved(loop_line())

    def end_of_round(self) -> bool:
        """Report weights whose memory is a sum with scaled gradients; return whether the loop has skipped its step."""
        for power in self._powers.moved_weights():
            self._moved(power.site)
        self.found += self.accumulated.found()
        return self.unused.end_of_round()

    def _moved(self, site: Site) -> None:
        self.found.append(steps_with_scaled("Divide them: scaler.unscale_(optimizer), before this line.", site))

    def judge(self) -> Found | None:
        """Return a finding about gradients that nobody uses, or a loss that is not finite, in all steps."""
        return self.unused.judge()

    def steps(self, optimizer: Any) -> None:
        """Inspect the gradients that an optimizer is about to use."""
        self.found += self.unused.steps(optimizer)
        self.accumulated.steps()
        gradients = [gradient for gradient in gradients_of(optimizer) if has_storage(gradient)]
        known = [seen for g in gradients if (seen := self._gradients.get(g)) is not None]
        is_reported = any(seen.is_reported for seen in known)  # what follows has the same cause
        if not is_reported:
            self._judge_powers(gradients)
        is_unscaled = any(seen.unscaled for seen in known) and not is_reported
        if is_unscaled and not self._is_checked and not takes_scale(optimizer) and not steps_by_scaler():
            self.found.append(never_skipped(
                "the scaler has unscaled the gradients, and nobody asks whether they are finite: where the scale is "
                "too large, they are not, and neither are the weights afterwards", has_scaler=True,
            ))  # fmt: skip
        self._judge_added(known)
        self._scaled_by.written({*map(storage_key, gradients)})
        self._used = gradients
        for gradient in gradients:
            self._gradients.put(gradient, _Gradient(is_used=True))
        self._lines.clear()
        with quietly():
            is_told = takes_scale(optimizer) or is_reported
            if not is_told and not all(is_finite(g) for g in gradients if is_floating(g)):
                weights = [values_of(p) for p in optimized_by(optimizer) if p.grad is not None]
                self._broken = weights if all(map(is_finite, weights)) else []

    def copies_used(self, gradients: Iterable[torch.Tensor]) -> None:
        """Note that an optimizer is about to use copies of these gradients, for copies of weights."""
        self._judge_added([seen for g in gradients if (seen := self._gradients.get(g)) is not None])
        for gradient in gradients:
            self._gradients.put(gradient, _Gradient(is_used=True))

    def _judge_added(self, known: Iterable[_Gradient]) -> None:
        """Report gradients that were added to after an optimizer has used them."""
        again = [seen.added for seen in known if seen.added]
        if again:
            self.found.append((
                "gradients never cleared",
                f"{counted(len(again), 'gradient')} that an optimizer has used, or left out: later ones are added to "
                "them, and used again, so that each step repeats those before it",
                "Clear them before the first backward of each step: optimizer.zero_grad().",
                again[0] or NOWHERE,
            ))  # fmt: skip

    def stepped(self) -> None:
        """Report a step by gradients that are not finite, if the weights were finite before and are not after it; and
        gradients that a closure, called by the step, has added to those of the last one.
        """
        self._judge_added([seen for g in self._used if (seen := self._gradients.get(g)) is not None])
        self._used = []
        self.unused.used()
        with quietly():
            if not all(map(is_finite, self._broken)):
                what = "gradients are not finite in this step, and neither are the weights after it"
                self.found.append(never_skipped(what, self.has_scaled))
        self._broken = []

    def _judge_powers(self, gradients: list[torch.Tensor]) -> None:
        """Report gradients that an optimizer is about to use while scaled, or divided by the scale twice."""
        rows = [(self._powers.of(g), self._gradients.get(g) or _Gradient()) for g in gradients]
        scaled = next((p for p, seen in rows if (p.power or 0) > 0 or (p.is_mixed and not seen.unscaled)), None)
        again = next((p for p, _ in rows if (p.power or 0) < 0 and p.site is not NOWHERE), None)
        again = again or next((seen.divided for p, seen in rows if seen.divided and (p.power or -1) < 0), None)
        if scaled is not None:
            todo = "Step by way of the scaler: scaler.step(optimizer), scaler.update()."
            self.found.append(steps_with_scaled(todo, scaled.site))
        elif again is not None:
            self.found.append((
                "gradients unscaled twice",
                "gradients are divided by the loss scale, or by what it has multiplied, here, and by the scaler, too: "
                "they are too small by a factor of the scale",
                "Remove this line, or compute it of unscaled gradients: scaler.unscale_(optimizer), or "
                "scaler.step(optimizer), divides them.",
                again.site,
            ))  # fmt: skip

    def updated(self, scale: torch.Tensor, is_known: bool, is_skipped: bool) -> None:
        """Note that a scaler updates its scale. is_known: it was known before, and so the losses that it scaled are;
        is_skipped: their step was skipped.
        """
        self.found += self._scaled_by.updated(scale, is_known)
        self.unused.is_used = True
        self.unused.has_skipped |= is_skipped
        for known in self._gradients.living() if is_skipped else ():
            known.unscaled = None
        self._lines.clear()
