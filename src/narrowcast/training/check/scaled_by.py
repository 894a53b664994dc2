"""By which loss scale each weight's gradient is multiplied, and by which it is divided."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from narrowcast.core.policy import NOWHERE, Site
from narrowcast.observation.statistics.by_storage import ByStorage
from narrowcast.runtime.sites.python_stack import loop_line
from narrowcast.runtime.torch_bridge import values_of
from narrowcast.runtime.torch_surface.dispatch import storage_key
from narrowcast.training.check.gradients import Found
from narrowcast.training.check.powers import PLAIN, UNKNOWN, Powers

NEVER_SKIPPED = "a step that is never skipped"
Scale = tuple[int, float]
"""A loss scale: its storage key and its value."""


@dataclass(frozen=True, slots=True)
class _Scaled:
    """By which scale a loss was multiplied, how often that had been updated, and the line of the backward."""

    scale: Scale
    updates: int
    site: Site


@dataclass(slots=True, eq=False)
class _Leaf:
    """A weight that the backward of a scaled loss reached."""

    leaf: torch.Tensor
    by: _Scaled


class ScaledBy:
    """The scales of the gradients since an optimizer stepped."""

    def __init__(self, powers: Powers) -> None:
        self._powers = powers
        self._scaled: dict[int, _Leaf] = {}
        self._without: dict[int, tuple[torch.Tensor, Site, bool]] = {}
        self._plain: ByStorage[Site] = ByStorage()  # what backwards of losses that are not scaled gave, and their lines
        self._given: ByStorage[_Scaled] = ByStorage()  # what those of scaled ones gave
        self._updates: dict[int, tuple[int, Site]] = {}  # of each scale: how many, and the line of the last one
        self._unscaled: list[Found] = []  # until the scale of this step proves to be known

    def reaches(self, leaf: torch.Tensor, scale: Scale | None, site: Site) -> Found | None:
        """Note that the backward of a loss that was multiplied by a scale reaches a leaf; return a finding if it is
        added to what was multiplied by another.
        """
        if scale is None:
            return None
        before = self._scaled.get(id(leaf))
        self._scaled[id(leaf)] = _Leaf(leaf, self._by_now(scale, site))
        if before is None or before.by.scale[1] == scale[1] or leaf.grad is None:
            return None
        gradient = values_of(leaf.grad)
        if self._powers.of(gradient).power != 1:
            return None
        self._powers.put(gradient, UNKNOWN)  # reported once
        advice = "Change the scale, scaler.update(), once gradients of all micro-batches were used."
        if before.by.scale[0] != scale[0]:
            advice = "Scale all losses of an optimizer by the scaler that steps it."
        return (
            "gradients of several scales",
            f"gradients of a loss that is multiplied by {scale[1]:g} are added to those of one that was multiplied by "
            f"{before.by.scale[1]:g}, and are divided by one of these",
            advice,
            site,
        )

    def reaches_unscaled(self, leaf: torch.Tensor, site: Site, is_part: bool) -> None:
        """Note that the backward of a loss that was not scaled reaches a leaf. is_part: the rest of the loss was."""
        self._without[id(leaf)] = leaf, site, is_part

    def cleared(self, leaf: torch.Tensor) -> None:
        """Note that a leaf has no gradient: that of a loss that was not scaled is gone."""
        self._without.pop(id(leaf), None)

    def written(self, keys: set[int]) -> None:
        """Note that gradients in these storages are cleared, or have been used by a step."""
        self._without = {key: row for key, row in self._without.items() if not _lies_in(row[0].grad, keys)}

    def gave_unscaled(self, tensor: torch.Tensor, site: Site) -> None:
        """Note what a backward of a loss that was not scaled returned, as to torch.autograd.grad."""
        self._plain.put(tensor, site)

    def gave_scaled(self, tensor: torch.Tensor, scale: Scale, site: Site) -> None:
        """Note what a backward of a scaled loss returned: the loop may hand it to a leaf itself."""
        self._given.put(tensor, self._by_now(scale, site))

    def _by_now(self, scale: Scale, site: Site) -> _Scaled:
        return _Scaled(scale, self._updates.get(scale[0], (0, NOWHERE))[0], site)

    def divided(self, gradients: list[torch.Tensor], scale: float) -> list[Found]:
        """Note that gradients are divided by a scale; return findings about those that were multiplied by another, or
        by one that was updated since.
        """
        keys = {storage_key(gradient) for gradient in gradients}
        self._judge_unscaled(keys)
        plain = next((at for g in gradients if self._powers.of(g) == PLAIN and (at := self._plain.get(g))), None)
        if plain is not None and scale != 1:
            self._found_unscaled(plain)
        of_leaves = {
            storage_key(values_of(row.leaf.grad)) for row in self._scaled.values() if row.leaf.grad is not None
        }
        findings = [found for leaf in list(self._scaled.values()) if (found := self._judge_leaf(leaf, keys, scale))]
        handed = [g for g in gradients if storage_key(g) not in of_leaves and self._powers.of(g).power == 1]
        by = next(filter(None, map(self._given.get, handed)), None)
        if by is not None and (found := self._judge(by, scale)):
            findings.append(found)
        for gradient in gradients:
            self._powers.unscaled(gradient)
        return findings

    def _judge_leaf(self, leaf: _Leaf, keys: set[int], scale: float) -> Found | None:
        gradient = None if leaf.leaf.grad is None else values_of(leaf.leaf.grad)
        if gradient is None or self._powers.of(gradient).power != 1 or storage_key(gradient) not in keys:
            return None
        del self._scaled[id(leaf.leaf)]
        return self._judge(leaf.by, scale)

    def _judge(self, by: _Scaled, scale: float) -> Found | None:
        key, multiplied_by = by.scale
        updates, site = self._updates.get(key, (0, NOWHERE))
        if updates != by.updates:
            return (
                "a scale updated before all steps",
                "the scale is updated after the backward of gradients that it has yet to divide: they may have been "
                "multiplied by another",
                "Call scaler.update() once, after scaler.step(optimizer) of the last optimizer.",
                site,
            )
        if scale != 1 and abs(multiplied_by - scale) > 1e-3 * scale:  # 1: an optimizer's own kernel will divide
            return (
                "gradients unscaled by another scale",
                f"the loss is multiplied by {multiplied_by:g}, and its gradients are divided by {scale:g}: by another "
                "scaler, or the scale was changed since",
                "Scale a loss by the scaler that steps with its gradients, and change a scale, scaler.update(), after "
                "the step alone.",
                by.site,
            )
        return None

    def _judge_unscaled(self, keys: set[int]) -> None:
        wrong = [row for row in self._without.values() if _lies_in(row[0].grad, keys)]
        if wrong:
            self._found_unscaled(*wrong[0][1:])
        for leaf, _, _ in wrong:
            if leaf.grad is not None:
                self._powers.put(values_of(leaf.grad), UNKNOWN)  # reported once
        self._without.clear()

    def _found_unscaled(self, site: Site, is_part: bool = False) -> None:
        """Note a loss that is not scaled, by the line of its backward. is_part: the rest of it was."""
        part = "a part of this loss is" if is_part else "this loss is"
        self._unscaled.append((
            "a loss that is not scaled",
            f"{part} not multiplied by the loss scale, and its gradients are divided by it, like the others: they are "
            "too small by a factor of the loss scale",
            "Scale each loss, or their sum: scaler.scale(first + second).backward().",
            site,
        ))  # fmt: skip

    def updated(self, scale: torch.Tensor, is_known: bool) -> list[Found]:
        """Note that a scale is updated; return the findings about losses that it had not scaled. is_known: it was known
        before, and so the losses that it scaled are.
        """
        updates, _ = self._updates.get(storage_key(scale), (0, NOWHERE))
        self._updates[storage_key(scale)] = updates + 1, loop_line()
        findings = self._unscaled if is_known else []
        self._unscaled = []
        self._without.clear()
        return findings


def _lies_in(gradient: torch.Tensor | None, keys: set[int]) -> bool:
    return gradient is not None and storage_key(values_of(gradient)) in keys


def steps_with_scaled(todo: str, site: Site) -> Found:
    """Return a finding: gradients are used while they are multiplied by the scale."""
    return (
        "an optimizer steps with scaled gradients",
        "the loss is multiplied by the loss scale, and the gradients are never divided by it: they are too large by "
        "the scale",
        todo,
        loop_line() if site is NOWHERE else site,
    )


def never_skipped(what: str, has_scaler: bool) -> Found:
    """Return a finding: nobody asks whether gradients are finite. has_scaler: a loss is scaled, else no scale helps."""
    todo = "Fix the first call that gives NaN or infinity: nc.watch() names it."
    if has_scaler:
        asks = "Step by way of the scaler, which asks: scaler.step(optimizer), scaler.update(). Where no scale helps"
        todo = f"{asks}, f{todo[1:]}"
    return NEVER_SKIPPED, what, todo, loop_line()


def scaled_twice(what: str) -> Found:
    """Return the finding about a loss to which this applies, at the line that runs."""
    return (
        "a loss that is scaled twice",
        f"{what} are divided by it once: they are too large by a factor of the loss scale",
        "Scale it once: scaler.scale(loss).backward().",
        loop_line(),
    )
