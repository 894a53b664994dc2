"""Sound training loops that compute with scaled gradients, or keep state of their own; see `loops.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from loops import Loop, Step, Trainer, X, Y, inside, net
from torch import Tensor, nn

Body = Callable[[Trainer], None]


def of(body: Body, *widths: int, **options: Any) -> Callable[[torch.dtype], Step]:
    """A loop whose step is this body."""

    def make(dtype: torch.dtype) -> Step:
        t = Trainer(dtype, net(*widths), **options)
        return lambda: body(t)

    return make


def backward(t: Trainer) -> None:
    t.optimizer.zero_grad()
    t.scaler.scale(inside(t)).backward()


def gradients_of(t: Trainer) -> list[Tensor]:
    return [p.grad for p in t.model.parameters()]


def slope(t: Trainer) -> Tensor:
    """The gradient of a scaled output with respect to the input."""
    x = X.clone().requires_grad_()
    with t.region():
        y = t.model(x)
    [found] = torch.autograd.grad(t.scaler.scale(y.float().sum()), x, create_graph=True)
    return found


# -- gradients in a loss -----------------------------------------------------------------------------------------------


def divided_slope(t: Trainer) -> None:
    penalty = (slope(t) / t.scaler.get_scale()).norm(2, -1).square().mean()
    t.step(inside(t) + penalty)


def divided_after_the_norm(t: Trainer) -> None:
    norm = slope(t).norm(2, -1) / t.scaler.get_scale()
    t.step(inside(t) + (norm - 1).square().mean())


def direction_alone(t: Trainer) -> None:
    t.step(inside(t) + F.normalize(slope(t), dim=1)[:, 0].square().mean())


def fast_weights(t: Trainer) -> None:
    """MAML, with the inner gradients divided."""
    weights, k = [*t.model.parameters()], t.scaler.get_scale()
    gradients = torch.autograd.grad(t.scaler.scale(inside(t)), weights, create_graph=True)
    fast = [w - 0.01 * (g / k) for w, g in zip(weights, gradients, strict=True)]
    with t.region():
        y = F.linear(F.gelu(F.linear(X, fast[0], fast[1])), fast[2], fast[3])
        loss = F.cross_entropy(y, Y)
    t.step(loss)


def balanced(t: Trainer) -> None:
    """Two losses whose scaled gradients say how they are weighed."""
    with t.region():
        y = t.model(X).float()
    first, second = F.cross_entropy(y, Y), y.square().mean()
    last = t.model[-1].weight
    [a], [b] = (torch.autograd.grad(t.scaler.scale(loss), last, retain_graph=True) for loss in (first, second))
    t.step(first + (a.norm() / b.norm()).clamp(0, 10) * second)


# -- gradients changed -------------------------------------------------------------------------------------------------


def sharpness_aware(t: Trainer) -> None:
    backward(t)
    weights = [*t.model.parameters()]
    with torch.no_grad():
        before = [w.clone() for w in weights]
        norm = torch.stack([g.norm() for g in gradients_of(t)]).norm()
        for w in weights:
            w.add_(w.grad * (0.05 / (norm + 1e-12)))
    backward(t)
    with torch.no_grad():
        for w, old in zip(weights, before, strict=True):
            w.copy_(old)
    t.end()


def signs(t: Trainer) -> None:
    backward(t)
    with torch.no_grad():
        for w in t.model.parameters():
            w.add_(w.grad.sign(), alpha=-1e-3)


def trusted(t: Trainer) -> None:
    """Ratios of norms of weights and gradients, in which a scale cancels (LARS)."""
    backward(t)
    with torch.no_grad():
        for w in t.model.parameters():
            w.sub_(w.grad * (1e-3 * w.norm() / (w.grad.norm() + 1e-9)))


def centred(t: Trainer) -> None:
    backward(t)
    for g in gradients_of(t):
        if g.dim() > 1:
            g.sub_(g.mean(1, keepdim=True))
    t.end()


def scaled_noise(t: Trainer) -> None:
    backward(t)
    for g in gradients_of(t):
        g.add_(t.scaler.scale(torch.randn_like(g)) * 1e-3)
    t.end()


def scaled_decay(t: Trainer) -> None:
    k = t.scaler.get_scale()
    backward(t)
    with torch.no_grad():
        for w in t.model.parameters():
            w.grad.add_(w, alpha=1e-3 * k)
    t.end()


def orthogonal(t: Trainer) -> None:
    """Newton-Schulz of normalised gradients (Muon)."""
    backward(t)
    with torch.no_grad():
        for w in t.model.parameters():
            if w.dim() == 2:
                x = w.grad / (w.grad.norm() + 1e-7)
                for _ in range(3):
                    x = 1.5 * x - 0.5 * x @ x.T @ x
                w.sub_(x, alpha=1e-3)


def asked_whether_finite(t: Trainer) -> None:
    backward(t)
    t.scaler.unscale_(t.optimizer)
    if bool(nn.utils.clip_grad_norm_(t.model.parameters(), 1.0).isfinite()):
        t.optimizer.step()
    t.scaler.update()


def cached_embeddings(t: Trainer) -> None:
    """GradCache: the gradients of embeddings in fp32 are handed on to their parts."""
    t.optimizer.zero_grad()
    with torch.no_grad(), t.region():
        z = torch.cat([t.model(part) for part in X.split(4)]).float()
    z = z.clone().requires_grad_()
    e = F.normalize(z, dim=1)
    [gradient] = torch.autograd.grad(t.scaler.scale(F.cross_entropy(e @ e.T / 0.1, Y)), z)
    with t.region():
        parts = [t.model(part) for part in X.split(4)]
    for y, part in zip(parts, gradient.split(4), strict=True):
        (y.float() * part).sum().backward()
    t.end()


def within_a_scaled_limit(t: Trainer) -> None:
    """A clip by norm whose limit is multiplied by the scale, as a tensor."""
    backward(t)
    norm = torch.stack([g.norm() for g in gradients_of(t)]).norm()
    limit = t.scaler.scale(torch.ones(()))
    torch._foreach_mul_(gradients_of(t), (limit / (norm + 1e-6)).clamp(max=1.0))
    t.end()


def balanced_within_limits(t: Trainer) -> None:
    """A ratio of two norms, within limits of its own."""
    backward(t)
    first, *_, last = gradients_of(t)
    last.mul_((first.norm() / last.norm()).clamp(0.1, 10.0))
    t.end()


def without_outliers(t: Trainer) -> None:
    """Limits that are quantiles of the gradient itself."""
    backward(t)
    for g in gradients_of(t):
        g.clamp_(g.quantile(0.05), g.quantile(0.95))
    t.end()


def cautious(t: Trainer) -> None:
    """Gradients that agree with the weights in sign alone."""
    backward(t)
    for w in t.model.parameters():
        w.grad.mul_((w.grad * w.detach() > 0).float())
    t.end()


def finite_ones_are_measured(t: Trainer) -> None:
    """What is finite of scaled gradients is looked at, and they stay as they are."""
    backward(t)
    torch.stack([torch.where(g.isfinite(), g, 0.0).norm() for g in gradients_of(t)])
    t.end()


def cleaned_after_unscaling(t: Trainer) -> None:
    backward(t)
    t.scaler.unscale_(t.optimizer)
    for g in gradients_of(t):
        g[~g.isfinite()] = 0.0
    t.end()


def decayed_in_hooks(t: Trainer) -> None:
    """A decay that is multiplied by the scale."""
    weights = [*t.model.parameters()]
    k = t.scaler.get_scale()
    handles = [w.register_hook(lambda g, w=w: g + 1e-3 * k * w.detach()) for w in weights]
    backward(t)
    for handle in handles:
        handle.remove()
    t.end()


def norm_alone(t: Trainer) -> None:
    """Clipped at no limit, to log the norm."""
    backward(t)
    _ = torch.nn.utils.clip_grad_norm_(t.model.parameters(), float("inf")) / t.scaler.get_scale()
    t.end()


def of_one_length(t: Trainer) -> None:
    """Each gradient gets the mean of all lengths; a small number keeps it from a division by zero."""
    backward(t)
    t.scaler.get_scale()
    gradients = gradients_of(t)
    mean = torch.stack([g.norm() for g in gradients]).mean()
    for g in gradients:
        g.mul_(mean / (g.norm() + 1e-12))
    t.end()


def weights_of(t: Trainer) -> Tensor:
    return torch.stack([p.square().sum() for p in t.model.parameters()]).sum()


def scaled_by_a_number(t: Trainer) -> None:
    """A second loss, times the scale by hand, and a factor that is written beside it."""
    backward(t)
    (1e-3 * t.scaler.get_scale() * weights_of(t)).backward()
    t.end()


def scaled_by_a_part_of_it(t: Trainer) -> None:
    backward(t)
    (weights_of(t) * (t.scaler.get_scale() / 8)).backward()
    t.end()


def divided_by_its_inverse(t: Trainer) -> None:
    backward(t)
    (weights_of(t) / (4 * (1 / t.scaler.get_scale()))).backward()
    t.end()


# -- state of a loop's own ---------------------------------------------------------------------------------------------


def with_momentum(dtype: torch.dtype) -> Step:
    """Momentum in bf16, that moves, of unscaled gradients."""
    t = Trainer(dtype, net())
    kept = [torch.zeros_like(p, dtype=torch.bfloat16) for p in t.model.parameters()]

    def step() -> None:
        backward(t)
        t.scaler.unscale_(t.optimizer)
        with torch.no_grad():
            for held, w in zip(kept, t.model.parameters(), strict=True):
                w.grad.copy_(held.mul_(0.9).add_(w.grad.bfloat16()))
        t.end()

    return step


def compressed(dtype: torch.dtype) -> Step:
    """Signs with a mean size, and what they leave out for the next step, all of it scaled."""
    t = Trainer(dtype, net())
    left = [torch.zeros_like(p) for p in t.model.parameters()]

    def step() -> None:
        backward(t)
        for rest, g in zip(left, gradients_of(t), strict=True):
            whole = g + rest
            sent = whole.sign() * whole.abs().mean()
            rest.copy_(whole - sent)
            g.copy_(sent)
        t.end()

    return step


def stepped_in_hooks(dtype: torch.dtype) -> Step:
    """An optimizer for each weight, which steps in the backward."""
    t = Trainer(dtype, net())
    kinds = {w: torch.optim.SGD([w], lr=1e-2) for w in t.model.parameters()}

    def hook(w: Tensor) -> None:
        w.grad.mul_(1.0 / t.scaler.get_scale())
        if bool(w.grad.isfinite().all()):
            kinds[w].step()
        w.grad = None

    for w in t.model.parameters():
        w.register_post_accumulate_grad_hook(hook)
    return lambda: t.scaler.scale(inside(t)).backward()


def measured(dtype: torch.dtype) -> Step:
    """Running means of the loss: in fp32, and one in bf16 that has arrived; a counter that is small."""
    t = Trainer(dtype, net())
    means = [torch.tensor(2.0), torch.tensor(1.4, dtype=torch.bfloat16)]
    count = torch.tensor(3.0, dtype=torch.bfloat16)

    def step() -> None:
        loss = inside(t)
        t.step(loss)
        means[:] = [0.99 * m + 0.01 * loss.detach().to(m.dtype) for m in means]
        count.add_(1)

    return step


def in_turn(dtype: torch.dtype) -> Step:
    """Two optimizers, one scaler, and an update after each: every loss is scaled and unscaled between two."""
    maker, judge = Trainer(dtype, net(16, 32, 16)), Trainer(dtype, net(16, 32, 1))
    maker.scaler = judge.scaler

    def step() -> None:
        with maker.region():
            loss = F.softplus(-judge.model(maker.model(X))).mean()
        maker.step(loss)
        with judge.region():
            loss = F.softplus(judge.model(maker.model(X).detach())).mean() + F.softplus(-judge.model(X)).mean()
        judge.step(loss)

    return step


BODIES = [
    divided_slope, divided_after_the_norm, direction_alone, fast_weights, balanced, sharpness_aware, signs, trusted,
    centred, scaled_noise, scaled_decay, orthogonal, asked_whether_finite, cached_embeddings,
    within_a_scaled_limit, balanced_within_limits, without_outliers, cautious, finite_ones_are_measured,
    cleaned_after_unscaling, decayed_in_hooks,
    norm_alone, of_one_length, scaled_by_a_number, scaled_by_a_part_of_it, divided_by_its_inverse,
]  # fmt: skip
LOOPS_OF_SCALES = [
    *(Loop(body.__name__, "scaled gradients", of(body)) for body in BODIES),
    Loop("with_momentum", "state by hand", with_momentum), Loop("measured", "state by hand", measured),
    Loop("compressed", "state by hand", compressed), Loop("stepped_in_hooks", "hooks", stepped_in_hooks),
    Loop("in_turn", "GAN", in_turn),
]  # fmt: skip
