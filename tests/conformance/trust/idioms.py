"""Programs composed of idioms, drawn anew from a seed: masks, norms, caches, reductions, losses, checkpoints."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from program import Fn, Made, Program
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

D, T = 24, 10
Masked = Any


def root_mean_square(x: Tensor) -> Tensor:
    h = x.float()
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).type_as(x)


NORMS = {
    "layer norm": lambda x: F.layer_norm(x, (D,)),
    "rms norm": lambda x: F.rms_norm(x, (D,)),
    "rms by hand": root_mean_square,
    "batch norm": lambda x: F.batch_norm(x.transpose(1, 2), None, None, training=True).transpose(1, 2),
    "group norm": lambda x: F.group_norm(x.transpose(1, 2), 4).transpose(1, 2),
    "unit length": lambda x: F.normalize(x, dim=-1) * 5,
    "none": lambda x: x,
}
MASKS = {
    "fill with -inf": lambda s, m: s.masked_fill(~m, float("-inf")),
    "fill with the lowest": lambda s, m: s.masked_fill(~m, torch.finfo(s.dtype).min),
    "fill with -1e4": lambda s, m: s.masked_fill(~m, -1e4),
    "add log": lambda s, m: s + m.float().log(),
    "add (1 - m) * lowest": lambda s, m: s + (1 - m.to(s.dtype)) * torch.finfo(s.dtype).min,
    "where": lambda s, m: torch.where(m, s, torch.tensor(float("-inf"), dtype=s.dtype)),
    "weights of zero": lambda s, m: s - 100.0 * (~m),
}
POINTWISE = {
    "gelu": F.gelu, "silu": F.silu, "relu": F.relu, "squared relu": lambda x: F.relu(x).square(),
    "softplus": F.softplus,
    "glu by sigmoid": lambda x: x * x.sigmoid(), "tanh": torch.tanh, "mish": F.mish,
    "log1p of exp": lambda x: torch.log1p(x.exp().clamp(max=1e4)), "snake": lambda x: x + x.sin().square(),
    "masked log": lambda x: torch.where(x > 0, x.clamp(min=1e-3).log(), 0.0),
    "log under where": lambda x: torch.where(x > 0, F.relu(x).log().exp(), 0.0),
}  # fmt: skip
REDUCTIONS = {
    "mean": lambda x: x.mean(1), "max": lambda x: x.amax(1), "last": lambda x: x[:, -1],
    "logsumexp": lambda x: x.logsumexp(1), "sum": lambda x: x.sum(1) / 3,
    "attention pool": lambda x: (x.mean(-1, keepdim=True).softmax(1) * x).sum(1),
    "running mean": lambda x: (x.float().cumsum(1) / torch.arange(1, T + 1)[:, None])[:, -1],
    "scatter": lambda x: torch.zeros(x.shape[0], 3, D, dtype=x.dtype)
    .index_add(1, torch.arange(T) % 3, x).mean(1),
}  # fmt: skip
LOSSES = {
    "cross entropy": lambda y: F.cross_entropy(y, torch.arange(len(y)) % y.shape[1]),
    "smoothed": lambda y: F.cross_entropy(y, torch.arange(len(y)) % y.shape[1], label_smoothing=0.1),
    "square": lambda y: F.mse_loss(y.float(), torch.ones(y.shape)),
    "huber": lambda y: F.huber_loss(y.float(), torch.ones(y.shape)),
    "hinge": lambda y: F.relu(1 - y).mean(),
    "entropy": lambda y: -(y.softmax(-1) * y.log_softmax(-1)).sum(-1).mean(),
    "norm": lambda y: y.float().norm(),
    "chunks": lambda y: sum(F.cross_entropy(h, torch.ones(len(h), dtype=torch.long)) for h in y.chunk(2)) / 2,
}


def attention(m: Any, x: Tensor, mask: Any, cached: bool) -> Tensor:
    q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in m.qkv(x).chunk(3, -1))
    if cached:  # as from a cache that is filled in place
        full = k.new_zeros(*k.shape[:2], T, k.shape[-1]), v.new_zeros(*v.shape[:2], T, v.shape[-1])
        full[0][:, :, : k.shape[2]], full[1][:, :, : v.shape[2]] = k, v
        k, v = full
    scores = mask(q @ k.transpose(-1, -2) / 2.4, torch.ones(T, T, dtype=torch.bool).tril())
    return m.out((scores.softmax(-1).type_as(v) @ v).transpose(1, 2).flatten(2))


def composed(seed: int) -> tuple[str, Any]:
    """A name of what was drawn, and what makes it."""
    draw = random.Random(seed)
    norm, mask, act, reduction, loss = (draw.choice(list(t)) for t in (NORMS, MASKS, POINTWISE, REDUCTIONS, LOSSES))
    post, cached, checkpointed = (draw.random() < 0.4 for _ in range(3))

    def block(m: Any, x: Tensor) -> Tensor:
        for part in (lambda h: attention(m, h, MASKS[mask], cached), lambda h: m.down(POINTWISE[act](m.up(h)))):
            x = NORMS[norm](x + part(x)) if post else x + part(NORMS[norm](x))
        return x

    def run(m: Any, x: Tensor) -> Tensor:
        for one in m.blocks:
            x = checkpoint(block, one, x, use_reentrant=False) if checkpointed else block(one, x)
        return LOSSES[loss](m.head(REDUCTIONS[reduction](x)))

    def make() -> Made:
        blocks = nn.ModuleList(
            nn.ModuleDict({"qkv": nn.Linear(D, 3 * D), "out": nn.Linear(D, D), "up": nn.Linear(D, 2 * D),
                           "down": nn.Linear(2 * D, D)})
            for _ in range(2)
        )  # fmt: skip
        return Made(Fn(run, blocks=blocks, head=nn.Linear(D, 5)), (torch.randn(4, T, D),))

    ways = [name for name, holds in (("post", post), ("cached", cached), ("checkpoint", checkpointed)) if holds]
    return ", ".join([norm, mask, act, reduction, loss, *ways]), make


def programs(seed: int, count: int) -> Iterator[Program]:
    """So many, from seeds that follow."""
    for one in range(seed, seed + count):
        what, make = composed(one)
        yield Program(f"idioms {one}: {what}", "composed idioms", make)
