"""Looks at what backwards add up: to gradients that were used or unscaled already, in which format, scaled or not."""

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
from narrowcast.runtime.sites.python_stack import loop_line
from narrowcast.runtime.torch_bridge import FORMATS, LOW, tensors_in, values_of
from narrowcast.runtime.torch_surface import autograd
from narrowcast.runtime.torch_surface.dispatch import op_name, storage_key
from narrowcast.runtime.torch_surface.grad_scaling import scale_for_kernel
from narrowcast.runtime.torch_surface.modules import optimized_by
from narrowcast.training.check.gradients import Found

_FACTORS = ("mul", "_foreach_mul")


@dataclass(slots=True, eq=False)
class _Gradient:
    """What became of a gradient: the line that unscaled it before the scale was updated, whether an optimizer has had
    it, and the lines of backwards that were added to it since.
    """

    unscaled: Site | None = None
    is_used: bool = False
    added: Site | None = None


class Backwards:
    """What each backward starts from and adds to."""

    def __init__(self) -> None:
        self.found: list[Found] = []
        self._thread = threading.get_ident()
        self._task = -1
        self._lines: list[Site] = []  # of the backwards since an optimizer stepped
        self._gradients: ByStorage[_Gradient] = ByStorage()
        self._scaling: set[int] = set()  # the autograd nodes that multiply a loss by a scale
        self._numbers: set[float] = set()  # scales that the host has read
        self._coming: dict[int, torch.Tensor] = {}  # leaves that the next backward reaches past any scale
        self._reaches: dict[int, torch.Tensor] = {}
        self._is_mixed = self._meets_scale = False
        self._without_scale: dict[int, tuple[torch.Tensor, Site, bool]] = {}
        self._of_scaled: ByStorage[bool] = ByStorage()
        self._scaled: dict[int, set[int]] = {}  # by leaf where the gradient lies that a scaled loss has given it
        self.trained: set[int] = set()  # where weights lie that have got a gradient
        self.differentiated: set[int] = set()  # the autograd nodes of what a gradient with a graph of its own is of
        self._unscaled: list[Found] = []  # until the scale of this step is seen to be one that is known

    # -- losses --------------------------------------------------------------------------------------------------------

    @property
    def has_scaled(self) -> bool:
        """Whether a loss was multiplied by a scale."""
        return bool(self._scaling)

    def scale_read(self, scale: torch.Tensor) -> None:
        """The host reads a scale: it may multiply a loss by the number."""
        self._numbers.add(float(scale))

    def computed(self, call: SeenCall, find_scales: Callable[[], set[int]]) -> Found | None:
        """A call of the forward: whether it multiplies by a scale, again. find_scales: where these lie, asked of
        products.
        """
        if op_name(call.facts.op) in _FACTORS and (scales := find_scales()):
            tensors = [t for t in call.args if isinstance(t, torch.Tensor) and has_storage(t)]
            if any(t.requires_grad for t in tensors) and any(map(self._of_scaled.get, tensors)):  # as GradCache does
                self._scaling.add(autograd.next_sequence_number() - 1)
                return None
            by_number = any(isinstance(n, int | float) and float(n) in self._numbers for n in call.args)
            by_number |= any(t.dim() == 0 and t.dtype is torch.float64 and float(t) in self._numbers for t in tensors)
            if by_number or any(storage_key(t) in scales for t in tensors):
                again = any(autograd.paths_to_leaves(t.grad_fn, self._scaling)[1] for t in tensors)
                self._scaling.add(autograd.next_sequence_number() - 1)
                if again and not self.differentiated:  # a gradient that is unscaled, and goes into a loss
                    return (
                        "a loss that is scaled twice",
                        "this loss is multiplied by the loss scale, and was before, and its gradients are divided by "
                        "it once: they are too large by the loss scale",
                        "Scale it once: scaler.scale(loss).backward().",
                        loop_line(),
                    )
        return None

    def gave(self, results: Iterable[torch.Tensor]) -> None:
        """A call of a backward has given these: of a scaled loss, they are multiplied by its scale."""
        if self._is_mixed:
            for tensor in filter(has_storage, results):
                self._of_scaled.put(tensor, True)

    def begins_at(self, root: torch.Tensor) -> None:
        """What torch asks of a backward's root, a gradient of ones, is made."""
        leaves, self._meets_scale = autograd.paths_to_leaves(root.grad_fn, self._scaling)
        self._coming = {id(leaf): leaf for leaf in leaves}

    def unscales(self, call: SeenCall) -> None:
        """Gradients are unscaled: those of a loss that was not scaled should not be."""
        gradients = [t for t in call.args[0] if has_storage(t)]
        self._judge_scales({storage_key(t) for t in gradients})
        for gradient in gradients:
            self._of(gradient).unscaled = loop_line()
            for lies in self._scaled.values():
                lies.discard(storage_key(gradient))

    def _judge_scales(self, keys: set[int]) -> None:
        for parameter, site, is_mixed in self._without_scale.values():
            gradient = parameter.grad
            if gradient is not None and storage_key(values_of(gradient)) in keys:
                part = "a part of this loss is" if is_mixed else "this loss is"
                self._unscaled.append((
                    "a loss that is not scaled",
                    f"{part} not multiplied by the loss scale, and its gradients are divided by it with the others': "
                    "they are too small by the loss scale",
                    "Scale each loss, or their sum: scaler.scale(first + second).backward().",
                    site,
                ))  # fmt: skip
                break
        self._without_scale.clear()

    # -- gradients -----------------------------------------------------------------------------------------------------

    def runs(self, args: tuple[Any, ...]) -> None:
        """An op of a backward runs: perhaps the first, perhaps one that gives a leaf its gradient."""
        task = autograd.current_graph_task()
        if task != self._task:
            self._task, self._reaches, self._coming = task, self._coming, {}
            self._is_mixed, self._meets_scale = self._meets_scale, False
            here = loop_line()
            if not here.file:  # autograd's own thread: the one that waits has the line
                here = loop_line(sys._current_frames().get(self._thread))
            self._lines.append(here)
            if torch.is_grad_enabled():
                self.differentiated |= autograd.numbers_before(autograd.current_autograd_node())
        leaf = getattr(autograd.current_autograd_node(), "variable", None)
        if leaf is not None and has_storage(values_of(leaf)):
            self.trained.add(storage_key(values_of(leaf)))
        if leaf is not None and id(leaf) in self._reaches:
            self._without_scale[id(leaf)] = leaf, self._lines[-1], self._is_mixed
        elif leaf is not None and self._is_mixed:
            given = {storage_key(values_of(t)) for t in tensors_in(args) if has_storage(values_of(t))}
            self._scaled.setdefault(id(leaf), set()).update(given)

    def adds(self, call: SeenCall) -> None:
        """A call of a backward is about to write: perhaps to a gradient, what it adds."""
        target = values_of(call.args[0]) if op_name(call.facts.op) == "add_" else None
        if target is None or not has_storage(target):
            return
        leaf = getattr(autograd.current_autograd_node(), "variable", None)
        gradient = values_of(leaf.grad) if leaf is not None and leaf.grad is not None else target
        if storage_key(gradient) != storage_key(target) or (leaf is None and self._gradients.get(target) is None):
            return
        site, known = self._lines[-1], self._of(gradient)
        if known.is_used:
            known.added = site
        elif known.unscaled is not None:
            self.found.append((
                "gradients added after unscale_",
                "a later backward adds gradients that are multiplied by the loss scale to those that are unscaled here",
                "Call scaler.unscale_(optimizer) once, after the last backward of the step: "
                "if is_last: scaler.unscale_(optimizer).",
                known.unscaled,
            ))  # fmt: skip
        elif gradient.dtype in LOW and [line.at for line in self._lines].count(site.at) > 1:
            self.low_sum(gradient.dtype, site)

    def low_sum(self, dtype: torch.dtype, site: Site) -> None:
        """Gradients of several backwards are added up in a low format."""
        self.found.append((
            "gradients added up in a low format",
            f"the gradients of several backwards are added up in {FORMATS[dtype]}: what is less than half a unit of "
            "the sum is lost",
            "Add them up in fp32: keep the weights in fp32 (model.float()) and run the forward in a region; or "
            "total.add_(weight.grad.float()) with a total in fp32.",
            site,
        ))  # fmt: skip

    def written(self, call: SeenCall, targets: Iterable[torch.Tensor]) -> None:
        """Something outside of backwards is about to be written to."""
        clears = op_name(call.facts.op).removesuffix("_") in named("finite.written_unread")
        targets = list(targets)
        if not self._numbers and any(storage_key(t) in self.trained for t in targets):
            read = {storage_key(t) for t in tensors_in(call.args[1:], call.kwargs) if has_storage(t)}
            if any(read & lies for lies in self._scaled.values()):
                self.found.append(_steps_with_scaled("Divide them: scaler.unscale_(optimizer), before this line."))
        for tensor in targets:
            for lies in self._scaled.values():
                lies.discard(storage_key(tensor))
            known = self._gradients.get(tensor)
            if known is not None and (clears or (known.is_used and known.added is None)):
                self._gradients.drop(tensor)

    def steps(self, optimizer: Any) -> None:
        """An optimizer is about to use its gradients."""
        gradients = [values_of(p.grad) for p in optimized_by(optimizer) if p.grad is not None]
        gradients = [gradient for gradient in gradients if has_storage(gradient)]
        if scale_for_kernel(optimizer) is not None:
            self._judge_scales({storage_key(gradient) for gradient in gradients})
        elif any(self._is_scaled(parameter) for parameter in optimized_by(optimizer)):
            self.found.append(_steps_with_scaled("Step by way of the scaler: scaler.step(optimizer), scaler.update()."))
        again = [known.added for g in gradients if (known := self._gradients.get(g)) is not None and known.added]
        if again:
            self.found.append((
                "gradients never cleared",
                f"{len(again)} gradients that an optimizer has used are added to, and used again: each step repeats "
                "those before it",
                "Clear them before the first backward of each step: optimizer.zero_grad().",
                again[0] or NOWHERE,
            ))  # fmt: skip
        for parameter in optimized_by(optimizer):
            self._scaled.pop(id(parameter), None)
        for gradient in gradients:
            self._gradients.put(gradient, _Gradient(is_used=True))
        self._lines.clear()

    def updated(self, is_known: bool) -> None:
        """A scaler is done with a step. is_known: its scale was known, so that losses that it multiplies are."""
        if is_known:
            self.found += self._unscaled
        self._unscaled.clear()
        for known in self._gradients.living():
            known.unscaled = None
        self._without_scale.clear()
        self._scaled.clear()
        self._lines.clear()

    def _is_scaled(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter's gradient is as a backward of a scaled loss has left it."""
        if parameter.grad is None or not has_storage(parameter.grad):
            return False
        known = self._gradients.get(parameter.grad)
        is_unscaled = known is not None and known.unscaled is not None
        return not is_unscaled and storage_key(parameter.grad) in self._scaled.get(id(parameter), ())

    def _of(self, gradient: torch.Tensor) -> _Gradient:
        known = self._gradients.get(gradient)
        if known is None:
            known = _Gradient()
            self._gradients.put(gradient, known)
        return known


def _steps_with_scaled(todo: str) -> Found:
    return (
        "an optimizer steps with scaled gradients",
        "the loss is multiplied by the loss scale, and nobody divides the gradients by it: they are too large by the "
        "scale",
        todo,
        loop_line(),
    )
