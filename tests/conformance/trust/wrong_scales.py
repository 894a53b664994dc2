"""Loops of training in which scaled gradients go where they should not, or state stands still; see `wrong_loops.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from program import DEVICE
from torch import Tensor, nn

BF16, FP16 = torch.bfloat16, torch.float16
Wrong = Callable[[Any], None]


def scaled(loop: Any) -> None:
    loop.scaler.scale(loop.loss(FP16)).backward()


def slope(loop: Any) -> tuple[Tensor, Tensor]:
    """A loss, and the gradient of it, scaled, with respect to the weights."""
    loss = loop.loss(FP16)
    gradients = torch.autograd.grad(loop.scaler.scale(loss), loop.weights, create_graph=True)
    return loss, torch.cat([g.flatten() for g in gradients])


def penalty_of_scaled(loop: Any) -> None:
    loss, gradient = slope(loop)
    loss = loss + 1e-3 * gradient.norm()  # HERE
    loop.scaler.scale(loss).backward()
    loop.end()


def penalty_divided_once(loop: Any) -> None:
    loss, gradient = slope(loop)
    penalty = gradient.square().mean() / loop.scaler._scale
    loop.scaler.scale(loss + penalty).backward()  # HERE
    loop.end()


def divided_again(loop: Any) -> None:
    loss = loop.scaler.scale(loop.loss(FP16)) / loop.scaler.get_scale()
    loss.backward()  # HERE
    loop.end()


def momentum_of_scaled(loop: Any) -> None:
    scaled(loop)
    held = [0.9 * kept.float() + p.grad for kept, p in zip(loop.kept, loop.weights, strict=True)]  # HERE
    loop.scaler.unscale_(loop.optimizer)
    for p, kept in zip(loop.weights, held, strict=True):
        p.grad.copy_(kept)  # HERE
    loop.end()


def moved_by_hand(loop: Any) -> None:
    scaled(loop)
    with torch.no_grad():
        for p in loop.weights:
            p -= 1e-5 * p.grad  # HERE


def assigned(loop: Any) -> None:
    for p, g in zip(loop.weights, torch.autograd.grad(loop.scaler.scale(loop.loss(FP16)), loop.weights), strict=True):
        p.grad = g
    loop.optimizer.step()  # HERE


def norm_of_scaled(loop: Any) -> None:
    scaled(loop)
    norm = nn.utils.get_total_norm([p.grad for p in loop.weights])
    loop.scaler.unscale_(loop.optimizer)
    nn.utils.clip_grads_with_norm_(loop.weights, 1.0, norm)  # HERE
    loop.end()


def divided_by_the_tensor(loop: Any) -> None:
    scaled(loop)
    for p in loop.weights:
        p.grad = p.grad / loop.scaler._scale  # HERE
    loop.end()


def squashed(loop: Any) -> None:
    scaled(loop)
    for p in loop.weights:
        p.grad = p.grad.tanh()  # HERE
    loop.end()


def orthogonality(loop: Any) -> None:
    scaled(loop)
    first = loop.weights[0]
    with torch.no_grad():
        first.grad += 1e-3 * first @ first.T @ first  # HERE
    loop.end()


def hidden_infinities(loop: Any) -> None:
    scaled(loop)
    for p in loop.weights:
        p.grad.nan_to_num_()  # HERE
    loop.end()


def never_skipped(loop: Any) -> None:
    scaled(loop)
    loop.scaler.unscale_(loop.optimizer)
    nn.utils.clip_grad_norm_(loop.weights, 1.0)
    loop.optimizer.step()  # HERE
    loop.scaler.update()


def updated_between(loop: Any) -> None:
    first, second = (torch.optim.SGD(part, lr=1e-3) for part in (loop.weights[:2], loop.weights[2:]))
    scaled(loop)
    loop.scaler.step(first)
    loop.scaler.update()  # HERE
    loop.scaler.step(second)
    loop.scaler.update()


def another_scaler(loop: Any) -> None:
    loop.scaler.scale(torch.ones(()))
    loop.other.scale(loop.loss(FP16)).backward()  # HERE
    loop.end()


def made_anew(loop: Any) -> None:
    scaler = torch.amp.GradScaler(DEVICE)
    scaler.scale(loop.loss(FP16)).backward()
    scaler.step(loop.optimizer)
    scaler.update()  # HERE


def mean_of_losses(loop: Any) -> None:
    loss = loop.loss()
    loss.backward()
    loop.optimizer.step()
    loop.total = 0.999 * loop.total + 0.001 * loss.detach().to(BF16)  # HERE


def counter(loop: Any) -> None:
    loop.loss().backward()
    loop.optimizer.step()
    loop.total.add_(1)  # HERE


def hooked(loop: Any, hook: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A step with this hook on the gradient of each weight."""
    handles = [p.register_hook(lambda g, p=p: hook(g, p.detach())) for p in loop.weights]
    scaled(loop)
    for handle in handles:
        handle.remove()
    loop.end()


def clamped_in_a_hook(loop: Any) -> None:
    hooked(loop, lambda g, _: g.clamp(-1e-3, 1e-3))  # HERE


def normalised_in_a_hook(loop: Any) -> None:
    hooked(loop, lambda g, _: g / g.norm().clamp(min=1e-12))  # HERE


def decayed_in_a_hook(loop: Any) -> None:
    hooked(loop, lambda g, p: g + 1e-2 * (p + 1))  # HERE


def cleaned_in_a_hook(loop: Any) -> None:
    hooked(loop, lambda g, _: g.nan_to_num(0.0, 0.0, 0.0))  # HERE


def where_finite(loop: Any) -> None:
    scaled(loop)
    for p in loop.weights:
        p.grad = torch.where(p.grad.isfinite(), p.grad, 0.0)  # HERE
    loop.end()


def finite_alone(loop: Any) -> None:
    scaled(loop)
    for p in loop.weights:
        p.grad[p.grad.isnan() | p.grad.isinf()] = 0.0  # HERE
    loop.end()


def times_what_is_finite(loop: Any) -> None:
    scaled(loop)
    for p in loop.weights:
        p.grad.mul_(p.grad.isfinite().float())  # HERE
    loop.end()


def clipped_parts(loop: Any) -> None:
    """DP-SGD: the gradient of each part is clipped, and they are scaled."""
    total = [torch.zeros_like(p) for p in loop.weights]
    for i in range(2):
        loss = loop.scaler.scale(loop.loss(FP16, loop.x[4 * i : 4 * i + 4], loop.y[4 * i : 4 * i + 4]))
        gradients = torch.autograd.grad(loss, loop.weights)
        factor = (1.0 / (nn.utils.get_total_norm(gradients) + 1e-6)).clamp(max=1.0)
        for held, g in zip(total, gradients, strict=True):
            held.add_(g * factor)  # HERE
    for p, held in zip(loop.weights, total, strict=True):
        p.grad = held
    loop.end()


def adaptive(loop: Any) -> None:
    scaled(loop)
    for p in loop.weights:
        limit, norm = 1e-2 * (1 + p.detach().norm()), p.grad.norm().clamp(min=1e-6)
        p.grad.copy_(torch.where(norm > limit, p.grad * (limit / norm), p.grad))  # HERE
    loop.end()


def near_where_it_began(loop: Any) -> None:
    """FedProx."""
    scaled(loop)
    for p, far in zip(loop.weights, loop.average, strict=True):
        p.grad += 0.1 * (p.detach() - far.float() + 1)  # HERE
    loop.end()


def moved_through_data(loop: Any) -> None:
    scaled(loop)
    for p in loop.weights:
        p.data = p.data - 1e-5 * p.grad  # HERE
        p.grad = None


def beyond_fp16(loop: Any) -> None:
    (loop.loss(FP16) * 2.0**24).backward()
    for p in loop.weights:
        p.grad.div_(2.0**24)
    loop.optimizer.step()  # HERE


def counts_of_classes(loop: Any) -> None:
    loop.loss().backward()
    loop.optimizer.step()
    loop.counts.index_add_(0, loop.y, torch.ones(8, dtype=BF16))  # HERE


def divided_and_clipped(loop: Any) -> None:
    scaled(loop)
    for p in loop.weights:
        p.grad.div_(loop.scaler.get_scale())  # HERE
    loop.scaler.unscale_(loop.optimizer)
    nn.utils.clip_grad_norm_(loop.weights, 1.0)
    loop.end()


def unscaled_in_each_part(loop: Any) -> None:
    """Micro-batches, with everything but the step in each of them."""
    loop.optimizer.zero_grad()
    for part in (slice(4), slice(4, 8)):
        loop.scaler.scale(loop.loss(FP16, loop.x[part], loop.y[part]) / 2).backward()
        loop.scaler.unscale_(loop.optimizer)  # HERE
        nn.utils.clip_grad_norm_(loop.weights, 1.0)
        if part.start is None:
            loop.scaler.update()
    loop.end()


def weights_of_two_optimizers(loop: Any) -> None:
    second = torch.optim.SGD(loop.weights[:2], lr=1e-3)
    loop.optimizer.zero_grad()
    scaled(loop)
    loop.scaler.step(loop.optimizer)
    loop.scaler.step(second)  # HERE
    loop.scaler.update()


def cleared_where_infinite(loop: Any) -> None:
    loop.optimizer.zero_grad()
    (loop.scaler.scale(loop.loss(FP16)) * 2.0**22).backward()
    for p in loop.weights:
        if not p.grad.isfinite().all():  # HERE
            p.grad.zero_()
    loop.end()


WRONG_SCALES: dict[Wrong, str] = {
    penalty_of_scaled: "scaled gradients in a loss", penalty_divided_once: "scaled gradients in a loss",
    divided_again: "not scaled", momentum_of_scaled: "steps with scaled", moved_by_hand: "steps with scaled",
    assigned: "steps with scaled", norm_of_scaled: "unscaled twice", divided_by_the_tensor: "unscaled twice",
    squashed: "clip before", orthogonality: "added before", hidden_infinities: "hidden",
    never_skipped: "never skipped", updated_between: "updated before", another_scaler: "another scale",
    made_anew: "made in each", mean_of_losses: "average", counter: "sum",
    clamped_in_a_hook: "clip before", normalised_in_a_hook: "clip before", decayed_in_a_hook: "added before",
    cleaned_in_a_hook: "hidden", where_finite: "hidden", finite_alone: "hidden", times_what_is_finite: "hidden",
    clipped_parts: "clip before", adaptive: "clip before", near_where_it_began: "added before",
    moved_through_data: "steps with scaled", beyond_fp16: "never skipped", counts_of_classes: "average",
    divided_and_clipped: "unscaled twice", unscaled_in_each_part: "after unscale_",
    weights_of_two_optimizers: "unscaled twice", cleared_where_infinite: "hidden",
}  # fmt: skip
