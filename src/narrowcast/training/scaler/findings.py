"""What is legal and probably a mistake about a scaler: found while it is used, reported once at the user's line."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from narrowcast.core.ledger.records import Advice
from narrowcast.core.policy import Site
from narrowcast.errors import ScalerWarning
from narrowcast.runtime.sites.python_stack import loop_line, warn_at
from narrowcast.runtime.torch_surface.grad_scaling import formats_of_graph, tell_of_clips
from narrowcast.runtime.torch_surface.modules import optimized_by

MISSING = "loss not scaled"


class Findings:
    """The findings of one scaler."""

    restored_with_owner = True

    def __init__(self, scales: bool) -> None:
        self.found: list[Advice] = []
        self._scales = scales
        self._has_looked = False
        self._has_seen_gradients = False
        self.losses = 0
        self.was_asked = False
        self._clips: list[tuple[set[int], Site]] = []
        if scales:
            tell_of_clips(_clipped)
            _living.add(self)

    def say(self, kind: str, what: str, todo: str, site: Site) -> None:
        """Note a finding, and warn of it at its line; once for each line."""
        advice = Advice(kind, what, todo, *site.at)
        if advice not in self.found:
            self.found.append(advice)
            warn_at(f"{what}. {todo}", site, ScalerWarning)

    # -- as things happen ----------------------------------------------------------------------------------------------

    def scaled(self, outputs: Any) -> None:
        """Note that a loss is about to be scaled, whether or not the scaler is on."""
        self.losses += 1
        self.was_asked = False
        if not self._has_looked and not torch.compiler.is_compiling():
            self._look(outputs)

    def _look(self, outputs: Any) -> None:
        """Check at the first loss with a graph which formats its backward will run in."""
        losses = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        graphs = [t for t in losses if isinstance(t, torch.Tensor) and t.grad_fn is not None]
        if not graphs:
            return
        self._has_looked = True
        formats = set().union(*(formats_of_graph(loss) for loss in graphs))
        if self._scales and torch.bfloat16 in formats and torch.float16 not in formats:
            self.say(
                "scaler not needed",
                "the backward of this loss runs in bf16 and nowhere in fp16: bf16 has the range of fp32, and its "
                "gradients need no scale",
                "Give enabled=False, or use no scaler: it reads every gradient.",
                loop_line(),
            )
        elif not self._scales and torch.float16 in formats:
            self.say(
                MISSING,
                "the backward of this loss runs in fp16, and the scaler is switched off: gradients below 6e-8 become "
                "zero",
                "Give enabled=True, and the device type that the model is on.",
                loop_line(),
            )

    def clipped(self, parameters: Iterable[Any]) -> None:
        """Note that torch.nn.utils is about to clip these parameters' gradients."""
        if self.losses and not self.was_asked:  # whatever asks for the scale may clip at max_norm * scale
            self._clips.append(({id(parameter) for parameter in parameters}, loop_line()))

    def to_be_unscaled(self, optimizer: Any) -> None:
        """Note that an optimizer's gradients, scaled until now, are to be unscaled."""
        if self._clips:
            own = {id(parameter) for parameter in optimized_by(optimizer)}
            for clipped, site in self._clips:
                if own & clipped:
                    self.say(
                        "clip before unscale_",
                        "gradients are clipped here while they are still scaled, so they come out far too small",
                        "Call scaler.unscale_(optimizer) before the clip, or scaler.clip_grad_norm_(optimizer, norm), "
                        "which unscales once.",
                        site,
                    )
        if not self.losses and not self.was_asked:
            self.say(
                MISSING,
                "gradients are unscaled here, and no loss was scaled since the last update(): they are divided by a "
                "scale that they were not multiplied by",
                "Write scaler.scale(loss).backward(), and call update() once, after all optimizers have stepped.",
                loop_line(),
            )
        if not self._has_seen_gradients:
            self._has_seen_gradients = True
            parameters = optimized_by(optimizer)
            low = next((p.grad for p in parameters if p.grad is not None and p.grad.dtype is torch.float16), None)
            if low is not None:
                self.say(
                    "fp16 gradients",
                    "gradients are fp16: unscaled they hold nothing below 6e-8, and what the scale had saved is lost "
                    "again",
                    "Keep weights in fp32 and open a region (nc.autocast) instead of model.half(); with nc.store write "
                    'gradient = "fp32".',
                    loop_line(),
                )

    def computed_anew(self) -> None:
        """Note that a closure is over, which unscaled and may have clipped: its next call computes gradients again."""
        self._clips.clear()

    def not_stepped(self, site: Site) -> None:
        """Report that an iteration ended whose gradients were unscaled, finite, and no optimizer stepped with them."""
        self.say(
            "update without step",
            "an update ends an iteration whose gradients were unscaled and finite, and no optimizer stepped with them",
            "Call scaler.step(optimizer) before update().",
            site,
        )

    def updated(self) -> None:
        """Note that a new iteration begins."""
        self.losses = 0
        self.was_asked = False
        self._clips.clear()


_living: weakref.WeakSet[Findings] = weakref.WeakSet()


def _clipped(parameters: list[Any]) -> None:
    for findings in tuple(_living):
        findings.clipped(parameters)
