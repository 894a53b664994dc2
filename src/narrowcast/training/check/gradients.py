"""Inspects gradients in steps of training: whether they are clipped while scaled, and how the scale is updated."""

from __future__ import annotations

from typing import Any

import torch

from narrowcast.core.ops import named
from narrowcast.core.policy import NOWHERE, Site
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.restore.process import written
from narrowcast.observation.statistics.arguments import tensors_by_name
from narrowcast.observation.statistics.by_storage import ByStorage, has_storage
from narrowcast.runtime.sites.python_stack import loop_line
from narrowcast.runtime.torch_bridge import tensors_in, values_of
from narrowcast.runtime.torch_surface.dispatch import TO_COPY, op_name, quietly, storage_key
from narrowcast.runtime.torch_surface.modules import optimized_by
from narrowcast.training.check.kept import KeptMemory
from narrowcast.training.check.powers import HIDES, LIMITS, UNKNOWN, Power, Powers

_SCALES = 16.0
"""From here on, a factor of a loss is a loss scale; below, it is a weight."""
_TWICE = 2
"""How many steps show whether weights change: some loops copy them at the start of the next step."""
Found = tuple[str, str, str, Site]
_CLIP = (
    "clip before unscale",
    "changes gradients that are still multiplied by the loss scale: they are clipped to a limit that is too small by "
    "the loss scale",
    "Call scaler.unscale_(optimizer) before the gradients are clipped.",
)
_ADDITION = (
    "added before unscale",
    "adds to gradients that are still multiplied by the loss scale what is not (weights, noise): it is too small by "
    "the loss scale",
    "Call scaler.unscale_(optimizer) before this line; or leave a decay to the optimizer's weight_decay.",
)


HIDDEN = (
    "infinities hidden from the scaler",
    "replaces what is not finite in gradients that are still multiplied by the loss scale: the scaler no longer sees "
    "that its scale is too large, and steps with them",
    "Remove this line: scaler.step(optimizer) skips a step whose gradients are not finite.",
)


def clears(call: SeenCall) -> bool:
    """Return whether a call fills what it writes to, perhaps gradients, with a number."""
    return op_name(call.facts.op) in named("gradients.clear")


class Gradients:
    """Inspects gradients between a backward and the optimizer's step. is_scaled_by_hand: they were multiplied by a
    number that was not computed from a norm of theirs, or the loss was by a large one.
    """

    def __init__(self, kept: KeptMemory, powers: Powers) -> None:
        self._kept, self._powers = kept, powers
        self.is_scaled_by_hand = False
        self._taken: ByStorage[bool] = ByStorage()  # what backwards returned, as to torch.autograd.grad
        self._copies_used: list[Site] = []  # the lines of optimizers' steps with copies of gradients
        self._steps: list[Site] = []  # of those of all optimizers
        self._has_gradients, self._zero = False, list[Site]()  # the lines of steps whose gradients are all zero
        self._idle: list[Site] = []  # and of those without gradients, of weights of no model that is called
        self._known: set[int] | None = None
        self._are_measured = False
        self._knows_scale = False
        self.used()

    def backward(self, results: list[torch.Tensor]) -> None:
        """Note that new gradients are computed."""
        self._known, self._knows_scale = None, False
        for tensor in results:
            if has_storage(tensor) and not self._kept.was_there(tensor):  # as a view of a weight was
                self._taken.put(tensor, True)

    def is_one(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a gradient of a parameter, or one that a backward returned."""
        return has_storage(tensor) and (storage_key(tensor) in self.lie_in() or self._taken.get(tensor) is not None)

    def was_returned(self, tensor: torch.Tensor) -> bool:
        """Return whether a backward computed a tensor, and it is alive."""
        return self._taken.get(tensor) is not None

    def scale_read(self) -> None:
        """Note that a scale is read: later code may clip at a limit that is scaled, too, or unscale by hand."""
        self._knows_scale = True

    def forget(self) -> None:
        """Forget where gradients lie, as they may have moved."""
        self._known = None

    def used(self) -> None:
        """Note that all optimizers have used their gradients."""
        self._known, self._are_measured = None, False
        self._clipped: ByStorage[tuple[str, Site]] = ByStorage()
        self._copies: ByStorage[bool] = ByStorage()
        self._copied = set[int]()  # the gradients of which these are, by storage key

    def written(self, call: SeenCall) -> None:
        """Inspect a call that is about to write, perhaps to a gradient."""
        name = op_name(call.facts.op)
        if name.endswith("_") and name[:-1] in named("gradients.scale"):
            targets = written(call.facts, call.args, call.kwargs)
            self._changed(call, targets, targets)

    def adds(self, call: SeenCall) -> bool:
        """Return whether a call adds new gradients to those that it writes to, as a scaler does that divides each."""
        terms = tensors_in(call.args[1:]) if op_name(call.facts.op) == "add_" else []
        return any(map(self.is_one, terms))

    def copied(self, call: SeenCall) -> None:
        """Note copies of gradients that a call has made, perhaps in fp32, for copies of weights; and sums of such."""
        sources = [t for t in tensors_in(call.args) if has_storage(t)]
        is_cast = call.facts.op is TO_COPY and any(storage_key(t) in self.lie_in() for t in sources)
        is_sum = op_name(call.facts.op) in named("gradients.accumulate") and any(map(self._copies.get, sources))
        self._copied |= {storage_key(t) for t in sources} if is_cast else set()
        for tensor in call.results if is_cast or is_sum else ():
            self._copies.put(tensor, True)

    def copied_for(self, optimizer: Any) -> list[torch.Tensor]:
        """Return the gradients whose copies an optimizer is about to use."""
        if not any(map(self._copies.get, gradients_of(optimizer))):
            return []
        return [gradient for key, gradient in self._kept.gradients().items() if key in self._copied]

    def computed(self, call: SeenCall) -> None:
        """Inspect a call that has run: it may scale a loss, measure gradients or multiply them."""
        name = op_name(call.facts.op)
        is_factor, measures = name in named("gradients.scale"), name in named("gradients.measure")
        if not (is_factor or measures):
            return
        inputs = [t for t in tensors_in(call.args, call.kwargs) if has_storage(t)]
        if name == "mul" and call.result.numel() == 1 and any(t.requires_grad for t in inputs):
            by = [t for t in inputs if not t.requires_grad] + [n for n in call.args if isinstance(n, int | float)]
            self.is_scaled_by_hand |= any(float(number) >= _SCALES for number in by)
        if is_factor and self._changed(call, inputs[:1], call.results):
            return
        if measures and any(storage_key(t) in self.lie_in() for t in inputs):
            self._are_measured = True

    def _changed(self, call: SeenCall, read: list[torch.Tensor], results: list[torch.Tensor]) -> bool:
        """Return whether a call multiplies gradients by a factor. If a norm was computed before, it clips them; else it
        averages or unscales them.
        """
        others = [t for n, t in tensors_by_name(call.facts, call.args, call.kwargs) if n.split(".")[0] != "self"]
        if any(t.numel() != 1 for t in others):
            return False  # a mask, or a product of gradients
        if not any(has_storage(t) and (storage_key(t) in self.lie_in() or self._copies.get(t)) for t in read):
            return False
        for tensor in results if any(map(self._copies.get, read)) else ():
            self._copies.put(tensor, True)
        if not self._are_measured:
            self.is_scaled_by_hand = True
        elif not self._knows_scale:
            for tensor in results:
                self._clipped.put(tensor, (call.id.op, call.site))
        return True

    def steps(self, optimizer: Any) -> None:
        """Inspect the gradients that an optimizer is about to use: copies, or none."""
        gradients = gradients_of(optimizer)
        self._steps.append(loop_line())
        self._has_gradients |= bool(gradients)
        with quietly():
            self._zero += [loop_line()] * (bool(gradients) and not any(bool(g.any()) for g in gradients))
        if any(map(self._copies.get, gradients)):
            self._copies_used.append(loop_line())
        names = self._kept.names()
        if names and not gradients and not any(storage_key(values_of(p)) in names for p in optimized_by(optimizer)):
            self._idle.append(loop_line())
        for gradient in gradients:
            self._clipped.drop(gradient)

    @property
    def has_masters(self) -> bool:
        """Whether copies of weights in a low format are trained, and written back to these."""
        return bool(self._copies_used) and any(self._kept.low_weights().values())

    def judge(self, reached: set[int]) -> Found | None:
        """Return a finding if no weight has a gradient, or an optimizer holds no weight of the models, or trains copies
        of weights in a low format, and nothing writes to the weights themselves. reached: the storage keys of leaves
        that backwards reach.
        """
        if len(self._idle) >= _TWICE:
            return (
                "weights that never move",
                "nothing that the optimizer holds has a gradient, or is a weight of a model that is called: these were "
                "put in the place of others after it was made",
                "Make the optimizer after the model is converted or wrapped.",
                self._idle[0],
            )
        if len(self._steps) >= _TWICE and not self._has_gradients and not reached & self._kept.optimized():
            return (
                "weights that never move",
                "no weight that an optimizer holds has a gradient: the loss does not depend on them, as where it is "
                "made of a number, or of what was detached",
                "Call backward() on the loss itself, of outputs that were computed with gradients on.",
                self._steps[0],
            )
        weights = self._kept.low_weights()
        if len(self._copies_used) < _TWICE or not weights or any(weights.values()):
            return None
        return (
            "weights that never move",
            "the optimizer steps with copies of the gradients, and nothing writes to the weights in a low format "
            f"({next(iter(weights))} and others): the model stays as it is",
            "Copy what was trained back after each step: weight.copy_(master), in torch.no_grad().",
            self._copies_used[0],
        )

    def all_zero(self) -> Found | None:
        """Return a finding if every element of every gradient was zero, in all steps."""
        if len(self._zero) < max(_TWICE, len(self._steps)):
            return None
        return (
            "weights that never move",
            "every element of every gradient is zero in each step, as where they are divided by an infinite norm, or "
            "what they are made of is too small for its format",
            "Look for what overflows on the way, in fp16 above 65504 (nc.watch() around the step names it), or is zero "
            "in the low format alone (nc.compare of the model).",
            self._zero[0],
        )

    def lie_in(self) -> set[int]:
        """Return the storage keys of the current gradients."""
        if self._known is None:
            self._known = {*self._kept.gradients()}
        return self._known

    def unscaled(self, call: SeenCall) -> Found | None:
        """Return a finding if gradients that are unscaled now were clipped, or had unscaled values added, before."""
        gradients = written(call.facts, call.args, call.kwargs)
        changed = next((power for power in map(self._powers.of, gradients) if _is_changed(power)), None)
        clipped = next(filter(None, (self._clipped.get(g) for g in gradients if self._powers.of(g) == UNKNOWN)), None)
        for gradient in gradients:
            self._clipped.drop(gradient)
            if changed is not None or clipped is not None:
                self._powers.put(gradient, UNKNOWN)  # reported once
        if changed is not None:
            is_sum = changed.is_mixed and any(part in changed.op for part in ("add", "sub", "lerp"))
            (kind, what, todo) = HIDDEN if changed.does == HIDES else _ADDITION if is_sum else _CLIP
            return kind, f"{changed.op} {what}", todo, changed.site
        if clipped is not None:
            return _CLIP[0], f"{clipped[0]} {_CLIP[1]}", _CLIP[2], clipped[1]
        return None


def gradients_of(optimizer: Any) -> list[torch.Tensor]:
    """Return the gradients that an optimizer would use now: of a sharded one, this process's part."""
    return [values_of(p.grad) for p in optimized_by(optimizer) if p.grad is not None]


def _is_changed(power: Power) -> bool:
    """Return whether scaled gradients were changed so that unscaling them does not yield the right values."""
    return power.is_mixed or power.does == HIDES or (power.does == LIMITS and power.power == 0)


class Updates:
    """Updates of a loop's scale. skipped: those of steps that were skipped; is_known: the scale of the last one was
    known before it.
    """

    def __init__(self) -> None:
        self.skipped = 0
        self.is_known = False
        self._updates = self._of_known = 0
        self._firsts: list[bool] = []  # of each round: whether its first update is of a known scale
        self._is_first = True
        self._scale = 0.0
        self._has_room = False
        self._site: Site | None = None

    def add(self, scale: float, is_skipped: bool, is_known: bool, site: Site) -> None:
        """Count an update."""
        self._updates += 1
        self._of_known += is_known
        self._firsts += [is_known] * self._is_first
        self._is_first = False
        self.skipped += is_skipped
        self.is_known = is_known
        self._has_room = is_known and scale > 1 and (self._updates == 1 or scale < self._scale)
        self._scale, self._site = scale, site

    def end_of_round(self) -> None:
        """Begin another round of the loop."""
        self._is_first = True

    @property
    def is_stuck(self) -> bool:
        """Whether all steps so far were skipped, and the scale can still decrease."""
        return bool(self._updates) and self.skipped == self._updates and self._has_room

    def judge(self, were_there: bool) -> Found | None:
        """Return a finding if all steps are skipped, or each has a new scaler. were_there: weights existed before."""
        is_new_in_each = self._updates >= _TWICE and not self._of_known
        begins_anew = len(self._firsts) >= _TWICE and not any(self._firsts)  # as an inner run of several steps does
        if were_there and (is_new_in_each or (begins_anew and self.skipped)):
            of = f"each of {self._updates} updates" if is_new_in_each else "the first update of each step"
            return (
                "a scaler made in each step",
                f"{of} is of a new scaler: its scale is the first one in every step, and where that is too large, all "
                "are skipped",
                "Make the scaler once, before the loop.",
                self._site or NOWHERE,
            )
        if not self._updates or self.skipped < self._updates or not self.is_known:
            return None
        todo = "Find the first call that gives NaN or infinity: with nc.watch(): step(). A scale cannot fix it."
        if self._has_room:
            todo = "Begin with a smaller scale, or let it fall faster: init_scale=65536, backoff_factor=0.5."
        return (
            "every step is skipped",
            f"{self.skipped} of {self._updates} steps, the last at a scale of {self._scale:g}, have gradients that are "
            "not finite: no weight moves",
            todo,
            self._site or NOWHERE,
        )
