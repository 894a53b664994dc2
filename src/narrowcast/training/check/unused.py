"""Inspects gradients that backwards compute and no optimizer uses: cleared before its step, or never finite; and losses
that are never finite.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from narrowcast.core.policy import NOWHERE, Site
from narrowcast.observation.statistics.by_storage import has_storage
from narrowcast.observation.trial.finiteness import is_finite, is_floating
from narrowcast.output.words import counted
from narrowcast.runtime.sites.python_stack import loop_line
from narrowcast.runtime.torch_bridge import values_of
from narrowcast.runtime.torch_surface.dispatch import quietly, storage_key
from narrowcast.runtime.torch_surface.modules import optimized_by
from narrowcast.training.check.gradients import Found

_TWICE = 2
"""How many steps show that none is ever taken: a function may make one of several micro-batches."""


class Unused:
    """Gradients since the last step of an optimizer. is_used: one has stepped since the round began, or a scale was
    updated. has_skipped: a scaler has skipped a step.
    """

    def __init__(self, was_returned: Callable[[torch.Tensor], bool]) -> None:
        self._was_returned = was_returned
        self._backwards = 0
        self._by: dict[int, tuple[int, Site]] = {}  # of these leaves the last backward, and its line
        self._replaced: dict[int, Site] = {}  # those whose gradient was cleared and computed again by the same line
        self._is_read = self._was_read = False  # a gradient since the last backward, and between it and the one before
        self._is_held = False  # one that was replaced
        self._steps, self._losing = 0, list[Site]()  # of optimizers, and where those with such leaves alone lose them
        self.is_used = self.has_skipped = False
        self._roots, self._not_finite = 0, list[Site]()  # of backwards, and the lines of those that are not finite
        self._fresh: dict[int, torch.Tensor] = {}  # leaves that a backward has reached, by identity
        self._by_gradient: dict[int, tuple[int, int]] | None = None
        """Those, and how large they are, by the storage of their gradients; None: not looked up."""
        self._lay: dict[int, int] = {}  # where they lay then
        self._cleared: dict[int, Site] = {}  # and those whose gradients were filled with a number since
        self._line = NOWHERE
        self._rounds = 0
        self._own = 0  # how many of those were so before they were scaled
        self._broken: list[Site] = []  # of rounds in which gradients were not finite, and not used

    def begins_at(self, root: torch.Tensor, is_known: bool, is_scaled: bool) -> None:
        """Note whether a loss is finite. is_known: it was before it was scaled; is_scaled: so that the scale is not to
        blame if it was not.
        """
        with quietly():
            self._roots += 1
            if is_floating(root) and not is_known and not is_finite(root):
                self._not_finite.append(loop_line())
                self._own += is_scaled

    def begins(self) -> None:
        """Note that a backward begins."""
        self._backwards += 1
        self._was_read, self._is_read = self._is_read, False

    def reads(self, tensors: list[torch.Tensor]) -> None:
        """Note that an op outside of backwards and steps reads tensors, perhaps gradients."""
        for tensor in filter(has_storage, tensors) if self._fresh else ():
            if storage_key(tensor) in self._lie_in():
                self._is_read = True
            elif self._was_returned(tensor):
                self._is_held = True

    def reaches(self, leaf: torch.Tensor, line: Site) -> None:
        """Note that a backward computes the gradient of a leaf."""
        before, at = self._by.get(id(leaf), (self._backwards, NOWHERE))
        if before != self._backwards and at.at == line.at and not self._was_read:
            if leaf.grad is None or id(leaf) in self._cleared:
                self._replaced[id(leaf)] = self._cleared.get(id(leaf), line)
        self._by[id(leaf)] = self._backwards, line
        self._fresh[id(leaf)], self._lay[id(leaf)], self._line = leaf, storage_key(values_of(leaf)), line
        self._cleared.pop(id(leaf), None)
        self._by_gradient = None

    def not_finite(self) -> list[torch.Tensor]:
        """Return the leaves that backwards have reached since the last step, and whose gradients are not finite."""
        return [leaf for leaf in self._fresh.values() if not has_finite_gradient(leaf)]

    def cleared(self, tensors: list[torch.Tensor], site: Site) -> None:
        """Note that tensors are filled with a number."""
        for tensor in filter(has_storage, tensors):
            number, size = self._lie_in().get(storage_key(tensor), (0, 0))
            if size and tensor.numel() >= size:  # else the rest is used
                self._cleared[number] = site

    def _lie_in(self) -> dict[int, tuple[int, int]]:
        if self._by_gradient is None:
            gradients = [(n, values_of(leaf.grad)) for n, leaf in self._fresh.items() if leaf.grad is not None]
            self._by_gradient = {storage_key(g): (n, g.numel()) for n, g in gradients if has_storage(g)}
        return self._by_gradient

    def steps(self, optimizer: Any) -> list[Found]:
        """Return a finding if all gradients that an optimizer is about to use were cleared."""
        self.is_used = True
        reached = [p for p in optimized_by(optimizer) if id(p) in self._fresh]
        lost = [self._replaced[id(p)] for p in reached if id(p) in self._replaced]
        self._steps += 1
        self._losing += lost[:1] if len(lost) == len(reached) and not self._is_held else []
        if any(storage_key(values_of(p)) != self._lay[id(p)] for p in reached):  # moved by hand, through .data
            return []
        if not reached or any(p.grad is not None and id(p) not in self._cleared for p in reached):
            return []
        return [(
            "weights that never move",
            "the gradients of the last backward are cleared before this optimizer steps: it uses zeros, or none",
            "Clear them before the backward, or after the step: optimizer.zero_grad().",
            next((self._cleared[id(p)] for p in reached if id(p) in self._cleared), loop_line()),
        )]  # fmt: skip

    def used(self) -> None:
        """Forget gradients: an optimizer has stepped, or weights were written to."""
        for known in (self._fresh, self._cleared, self._by, self._replaced):
            known.clear()
        self._by_gradient = None
        self._is_read = self._was_read = self._is_held = False

    def end_of_round(self) -> bool:
        """Return whether gradients that nobody used are not finite: the loop skips the step."""
        self._rounds += 1
        with quietly():
            is_broken = not self.is_used and not all(map(has_finite_gradient, self._fresh.values()))
        self._broken += [self._line] * is_broken
        self.is_used = False
        return is_broken

    @property
    def is_stuck(self) -> bool:
        """Whether all steps so far were skipped although losses are finite: a scale of the loop's own may decrease."""
        return len(self._broken) == self._rounds > 0 and not self._not_finite

    def judge(self) -> Found | None:
        """Return a finding if no step was taken, as gradients were never finite; if the loss is never finite; or if
        each step uses those of the last of several backwards alone.
        """
        if len(self._losing) == self._steps >= _TWICE:
            return (
                "gradients cleared before they are used",
                "the gradients of this backward are cleared, and computed again by the same line, before an optimizer "
                "steps: each step uses those of the last micro-batch alone",
                "Call optimizer.zero_grad() before the first backward of a step, not before each.",
                self._losing[0],
            )
        if len(self._broken) < max(_TWICE, self._rounds):
            return self._judge_losses()
        return (
            "every step is skipped",
            f"in {self._rounds} steps no optimizer steps: the gradients of this backward are not finite",
            "Call scaler.update() in each step: it lowers a scale that is too large. If none helps, nc.watch() names "
            "the first call that gives NaN or infinity.",
            self._broken[0],
        )

    def _judge_losses(self) -> Found | None:
        may_be_scale = self.has_skipped and self._own < len(self._not_finite)
        if may_be_scale or len(self._not_finite) < max(_TWICE, self._roots):
            return None
        return (
            "a loss that is never finite",
            f"the loss of {counted(self._roots, 'backward')} is NaN or infinity, and its gradients are used: where "
            "they are zero, no weight moves",
            "Compute the loss in fp32: loss_fn(output.float(), ...). nc.watch() names the first call that gives NaN or "
            "infinity.",
            self._not_finite[0],
        )


def has_finite_gradient(leaf: torch.Tensor) -> bool:
    """Return whether a leaf's gradient is finite, or is none."""
    gradient = None if leaf.grad is None else values_of(leaf.grad)
    return gradient is None or not has_storage(gradient) or not is_floating(gradient) or is_finite(gradient)
