"""Looks at gradients in steps of training: who clips them while they are scaled, and which underflow."""

from __future__ import annotations

import math
from typing import Any

import torch

from narrowcast.loops.kept import Kept, written
from narrowcast.policy import Site
from narrowcast.runs.arguments import tensors_by_name
from narrowcast.runs.by_storage import has_storage
from narrowcast.runs.finiteness import is_floating
from narrowcast.runs.rerun import run_in
from narrowcast.runs.seen_call import SeenCall
from narrowcast.torch_bridge import FORMATS, tensors_in
from narrowcast.torch_surface.dispatch import op_name, storage_key

_UNDERFLOWS = 0.5
"""The share of a gradient's elements with two bits or fewer that is told of."""
_LOST = 0.5
"""The share of a gradient's elements that a cast makes zero that is told of."""
_MEASURES = frozenset(
    f"{start}{name}" for start in ("", "_foreach_") for name in ("norm", "pow", "abs", "max", "mul", "square")
) | {"linalg_vector_norm", "amax", "aminmax", "dot", "cat", "stack"}
"""What a norm of gradients is computed with."""
_FACTORS = ("mul", "div", "_foreach_mul", "_foreach_div")
_LIMITS = ("clamp", "clamp_min", "clamp_max", "_foreach_clamp_min", "_foreach_clamp_max")
_TWO_BITS = 4 * FORMATS[torch.float16].smallest
"""Below it fp16 has two bits left or fewer. Larger subnormal numbers are no sign of a fault: the gradients of queries
and keys at the start of training are such, at any usual scale.
"""
Found = tuple[str, str, str, Site]


class Gradients:
    """What is done to gradients between a backward and the optimizer's step. is_scaled_by_hand: they were multiplied by
    a number that no norm of theirs went into.
    """

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self.is_scaled_by_hand = False
        self._known: set[int] | None = None
        self._are_measured = False
        self._knows_scale = False
        self._clipped: dict[int, tuple[str, Site]] = {}

    def backward(self) -> None:
        """New gradients are computed."""
        self._known, self._knows_scale = None, False

    def scale_read(self) -> None:
        """A scale is read: whoever knows it may clip at a limit that is scaled, too."""
        self._knows_scale = True

    def forget(self) -> None:
        """Gradients may lie elsewhere."""
        self._known = None

    def end_of_step(self) -> None:
        """An optimizer has them."""
        self._known, self._are_measured = None, False
        self._clipped.clear()

    def written(self, call: SeenCall) -> None:
        """A call is about to write to something, perhaps to a gradient."""
        name = op_name(call.facts.op)
        if name.endswith("_") and name[:-1] in (*_FACTORS, *_LIMITS):
            targets = written(call.facts, call.args, call.kwargs)
            self._changed(call, name[:-1], targets, targets)

    def computed(self, call: SeenCall) -> None:
        """A call has computed something, perhaps of a gradient."""
        name = op_name(call.facts.op)
        if name not in _MEASURES and name not in (*_FACTORS, *_LIMITS):
            return
        given = [t for t in tensors_in(call.args, call.kwargs) if has_storage(t)]
        if name in (*_FACTORS, *_LIMITS) and self._changed(call, name, given[:1], call.results):
            return
        if name in _MEASURES and any(storage_key(t) in self.lie_in() for t in given):
            self._are_measured = True

    def _changed(self, call: SeenCall, name: str, read: list[torch.Tensor], gives: list[torch.Tensor]) -> bool:
        """Whether a call gives gradients times a factor, or within limits. A factor that a norm went into clips them;
        one that knows nothing of them averages, or unscales.
        """
        if not any(has_storage(t) and storage_key(t) in self.lie_in() for t in read):
            return False
        if name in _FACTORS:
            others = [t for n, t in tensors_by_name(call.facts, call.args, call.kwargs) if n.split(".")[0] != "self"]
            if any(t.numel() != 1 for t in others):
                return False  # a mask, or a product of gradients
            if not self._are_measured:
                self.is_scaled_by_hand = True
                return True
        if not self._knows_scale:
            self._clipped.update((storage_key(t), (call.id.op, call.site)) for t in gives if has_storage(t))
        return True

    def lie_in(self) -> set[int]:
        """Where gradients lie now."""
        if self._known is None:
            self._known = self._kept.gradients()
        return self._known

    def unscaled(self, call: SeenCall) -> Found | None:
        """Gradients are unscaled: whether these were clipped before."""
        found = [self._clipped.pop(storage_key(t), None) for t in written(call.facts, call.args, call.kwargs)]
        op, site = next(filter(None, found), (None, None))
        if op is None or site is None:
            return None
        return (
            "clip before unscale",
            f"{op} changes gradients that are still multiplied by the loss scale: they are clipped to a limit that is "
            "as many times too small",
            "Call scaler.unscale_(optimizer) before the gradients are clipped.",
            site,
        )


def find_underflow(call: SeenCall) -> Found | None:
    """Of a call of the backward: whether what it gives in fp16 lies below what fp16 holds."""
    of = call.forward
    results = [t for t in call.results if t.dtype is torch.float16 and t.numel() and is_floating(t)]
    if not results or of is None or op_name(call.facts.op) == "sum":
        return None  # the gradient of a bias may be zero in theory, and round-off in fact: of a key's, before a norm
    for number, result in enumerate(results):
        x = result.detach().abs().float()
        if not math.isfinite(float(x.sum())):
            continue  # a step that a scaler skips
        there = int((x > 0).sum())
        small = int(((x > 0) & (x < _TWO_BITS)).sum())
        what = ""
        if call.is_cast:
            src: Any = call.args[0]
            before = int(src.detach().count_nonzero()) if src.dtype is torch.float32 else 0
            if before and 1 - there / before > _LOST:
                what = f"{1 - there / before:.0%} of it become zero when it is cast"
        elif not there and _is_something_in_fp32(call, number):
            what = "all of it is zero"
        if not what and there and small / there > _UNDERFLOWS:
            what = f"{small / there:.0%} of it lie below {_TWO_BITS:.1e}, where fp16 has two bits"
        if what:
            return (
                "gradients underflow",
                f"the gradient of {of} in fp16: {what}",
                "Scale the loss: nc.Scaler, or GradScaler with a larger init_scale; or keep this call in bf16 or "
                "fp32 by a rule.",
                call.site,
            )
    return None


def _is_something_in_fp32(call: SeenCall, number: int) -> bool:
    """Whether zeros that a call gives are none in fp32. A saturated loss, a zero weight, a mask make zeros, too."""
    wide = None if call.facts.overwrites else run_in(call, torch.float32)
    results = [] if wide is None else [t for t in wide if is_floating(t) and t.numel()]
    return number < len(results) and bool(results[number].count_nonzero())
