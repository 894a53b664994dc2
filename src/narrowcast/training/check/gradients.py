"""Looks at gradients in steps of training: who clips them while they are scaled."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch

from narrowcast.core.policy import Site
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.statistics.arguments import tensors_by_name
from narrowcast.observation.statistics.by_storage import ByStorage, has_storage
from narrowcast.runtime.torch_bridge import tensors_in, values_of
from narrowcast.runtime.torch_surface.dispatch import TO_COPY, op_name, storage_key
from narrowcast.runtime.torch_surface.grad_scaling import scale_for_kernel
from narrowcast.runtime.torch_surface.modules import optimized_by
from narrowcast.training.check.kept import KeptMemory, written

_MEASURES = frozenset(
    f"{start}{name}" for start in ("", "_foreach_") for name in ("norm", "pow", "abs", "max", "mul", "square")
) | {"linalg_vector_norm", "amax", "aminmax", "dot", "cat", "stack"}
"""What a norm of gradients is computed with."""
_FACTORS = ("mul", "div", "_foreach_mul", "_foreach_div")
_SCALES = 64.0
"""From here on a number that a loss is multiplied by scales it; below, it is a weight."""
_SIGNS = ("sign", "sgn", "neg", "clone")
_TERMS = ("add", "sub", "_foreach_add", "_foreach_sub")
_LIMITS = ("clamp", "clamp_min", "clamp_max", "_foreach_clamp_min", "_foreach_clamp_max")
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


class Gradients:
    """What is done to gradients between a backward and the optimizer's step. is_scaled_by_hand: they were multiplied by
    a number that no norm of theirs went into, or by any where the loss was multiplied by a large one.
    """

    def __init__(self, kept: KeptMemory) -> None:
        self._kept = kept
        self.is_scaled_by_hand = False
        self._known: set[int] | None = None
        self._weights: Set[int] | None = None
        self._are_measured = False
        self._knows_scale = False
        self._scales: set[float] = set()
        self._is_loss_scaled = False  # by a number
        self.used()

    def backward(self) -> None:
        """New gradients are computed."""
        self._known, self._knows_scale = None, False

    def scale_read(self, scale: float) -> None:
        """A scale is read: whatever knows it may clip at a limit that is scaled, too, or unscale by hand."""
        self._knows_scale = True
        self._scales.add(scale)

    def forget(self) -> None:
        """Gradients and weights may lie elsewhere."""
        self._known = self._weights = None

    def used(self) -> None:
        """All optimizers have had theirs."""
        self._known, self._are_measured = None, False
        self._changed_scaled: ByStorage[tuple[str, Site, tuple[str, str, str]]] = ByStorage()
        self._unscaled: ByStorage[bool] = ByStorage()
        self._copies: ByStorage[bool] = ByStorage()
        self._divided: ByStorage[tuple[int, Site | None]] = ByStorage()  # how often by a scale, and where by hand

    def written(self, call: SeenCall) -> None:
        """A call is about to write to something, perhaps to a gradient."""
        name = op_name(call.facts.op)
        if name.endswith("_") and name[:-1] in (*_FACTORS, *_LIMITS, *_TERMS):
            targets = written(call.facts, call.args, call.kwargs)
            self._changed(call, name[:-1], targets, targets)

    def copied(self, call: SeenCall) -> None:
        """A call has perhaps made copies of gradients in fp32, for weights of which there are copies."""
        if call.facts.op is TO_COPY and has_storage(call.args[0]) and storage_key(call.args[0]) in self.lie_in():
            self._copies.put(call.result, True)

    def drawn(self, result: Any) -> None:
        """An op has drawn random numbers: noise, which no scale has multiplied."""
        for tensor in tensors_in(result):
            if has_storage(tensor):
                self._unscaled.put(tensor, True)

    def computed(self, call: SeenCall) -> None:
        """A call has computed something, perhaps of a gradient."""
        name = op_name(call.facts.op)
        if name not in _MEASURES and name not in (*_FACTORS, *_LIMITS, *_TERMS, *_SIGNS):
            return
        given = [t for t in tensors_in(call.args, call.kwargs) if has_storage(t)]
        keeps = name in ("sub", *_SIGNS) or (name == "mul" and len(given) == 1)  # by a number, that is no scale
        if keeps and any(map(self._is_not_scaled, given)) and not any(t.requires_grad and t.grad_fn for t in given):
            self._unscaled.put(call.result, True)
        if name == "mul" and call.result.numel() == 1 and any(t.requires_grad for t in given):
            by = [t for t in given if not t.requires_grad] + [n for n in call.args if isinstance(n, int | float)]
            self._is_loss_scaled |= any(float(number) >= _SCALES for number in by)
        if name in (*_FACTORS, *_LIMITS, *_TERMS) and self._changed(call, name, given[:1], call.results):
            return
        if name in _MEASURES and any(storage_key(t) in self.lie_in() for t in given):
            self._are_measured = True

    def _changed(self, call: SeenCall, name: str, read: list[torch.Tensor], gives: list[torch.Tensor]) -> bool:
        """Whether a call gives gradients times a factor, or within limits. A factor that a norm went into clips them;
        one that knows nothing of them averages, or unscales.
        """
        read = [t for t in read if has_storage(t)]
        if not any(storage_key(t) in self.lie_in() or self._copies.get(t) for t in read):
            return False
        others = [t for n, t in tensors_by_name(call.facts, call.args, call.kwargs) if n.split(".")[0] != "self"]
        if name in _TERMS and not any(map(self._is_not_scaled, others)):
            return False
        if name in _FACTORS:
            if any(t.numel() != 1 for t in others):
                return False  # a mask, or a product of gradients
            if (times := self._divides(name, call.args[1] if len(call.args) > 1 else None)) != 0:
                for before, after in zip(read, gives, strict=False):
                    so_far, _ = self._divided.get(before) or (0, None)
                    self._divided.put(after, (so_far + times, call.site))
            self.is_scaled_by_hand |= self._is_loss_scaled
            if not self._are_measured:
                self.is_scaled_by_hand = True
                return True
        if not self._knows_scale:
            for tensor in gives:
                self._changed_scaled.put(tensor, (call.id.op, call.site, _ADDITION if name in _TERMS else _CLIP))
        return True

    def _divides(self, name: str, factor: Any) -> int:
        """1 if a factor divides by a scale that was read, -1 if it multiplies by one."""
        if self._scales and isinstance(factor, torch.Tensor):
            factor = float(factor)
        if not self._scales or not isinstance(factor, int | float) or not factor:
            return 0
        by = 1 / factor if name.endswith("mul") else float(factor)
        is_near = lambda scale: scale != 1 and abs(by - scale) <= 1e-6 * scale  # noqa: E731
        if any(map(is_near, self._scales)):
            return 1
        by = 1 / by
        return -any(map(is_near, self._scales))

    def steps(self, optimizer: Any) -> Found | None:
        """An optimizer is about to use its gradients: whether these were unscaled twice."""
        by_kernel = scale_for_kernel(optimizer) is not None
        gradients = [values_of(p.grad) for p in optimized_by(optimizer) if p.grad is not None]
        divided = [known for gradient in gradients if (known := self._divided.get(gradient)) is not None]
        times, site = max(divided, key=lambda row: row[0], default=(0, None))
        for gradient in gradients:
            self._divided.drop(gradient)
            self._changed_scaled.drop(gradient)
        if site is None or times + by_kernel < 2:
            return None
        return (
            "gradients unscaled twice",
            "gradients are divided by the loss scale here, and by the scaler, too: they are too small by the scale",
            "Remove this line: scaler.unscale_(optimizer), or scaler.step(optimizer), divides them.",
            site,
        )

    def lie_in(self) -> set[int]:
        """Where gradients lie now."""
        if self._known is None:
            self._known = self._kept.gradients()
        return self._known

    def _is_not_scaled(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a weight or noise, or a multiple of one."""
        if self._weights is None:
            self._weights = self._kept.names().keys()
        return has_storage(tensor) and (storage_key(tensor) in self._weights or bool(self._unscaled.get(tensor)))

    def unscaled(self, call: SeenCall) -> Found | None:
        """Gradients are unscaled: whether these were clipped, or weights were added to them, before."""
        gradients = written(call.facts, call.args, call.kwargs)
        found = next(filter(None, map(self._changed_scaled.get, gradients)), None)
        for gradient in gradients:
            times, by_hand = self._divided.get(gradient) or (0, None)
            self._divided.put(gradient, (times + 1, by_hand))
            self._changed_scaled.drop(gradient)
        if found is None:
            return None
        op, site, (kind, what, todo) = found
        return kind, f"{op} {what}", todo, site
