"""Programs composed of idioms, drawn again from a seed: masks, norms, caches, reductions, losses, checkpoints."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from program import Fn, Made, Program
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

ROWS, T, D = 4, 10, 24
CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()
SEEN = (torch.arange(T) < torch.tensor([[10], [6], [3], [10]]))[:, None, None]
LOWEST = lambda s: torch.finfo(s.dtype).min


def root_mean_square(x: Tensor) -> Tensor:
    h = x.float()
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).type_as(x)


NORMS = {
    "layer norm": lambda m, x: F.layer_norm(x, (D,)),
    "layer norm with weights": lambda m, x: m.layer(x),
    "rms norm": lambda m, x: F.rms_norm(x, (D,)),
    "rms by hand": lambda m, x: root_mean_square(x),
    "batch norm": lambda m, x: F.batch_norm(x.transpose(1, 2), None, None, training=True).transpose(1, 2),
    "batch norm with weights": lambda m, x: m.batch(x.transpose(1, 2)).transpose(1, 2),
    "group norm": lambda m, x: F.group_norm(x.transpose(1, 2), 4).transpose(1, 2),
    "unit length": lambda m, x: F.normalize(x, dim=-1) * 5,
    "none": lambda m, x: x,
}
MASKS = {
    "no mask": lambda s: s,
    "fill with -inf": lambda s: s.masked_fill(~CAUSAL, float("-inf")),
    "fill with the lowest": lambda s: s.masked_fill(~CAUSAL, LOWEST(s)),
    "fill with -1e4": lambda s: s.masked_fill(~CAUSAL, -1e4),
    "fill padding with -1e4": lambda s: s.masked_fill(~SEEN, -1e4),
    "add log": lambda s: s + CAUSAL.float().log(),
    "add log of padding": lambda s: s + torch.log(SEEN.float()),
    "add (1 - m) * lowest": lambda s: s + (1 - CAUSAL.to(s.dtype)) * LOWEST(s),
    "add fp32's lowest": lambda s: s + torch.zeros(T, T).masked_fill(~CAUSAL, torch.finfo(torch.float32).min),
    "where": lambda s: torch.where(CAUSAL, s, torch.tensor(float("-inf"), dtype=s.dtype)),
    "add log under where": lambda s: s + torch.where(CAUSAL, 0.0, torch.log((~CAUSAL).float()) * 2),
    "weights of zero": lambda s: s - 100.0 * (~CAUSAL),
    "rows that see nothing": lambda s: s.masked_fill((torch.arange(ROWS) % 2 == 1)[:, None, None, None], LOWEST(s)),
    "multiplied": lambda s: s * SEEN - 1e4 * (1 - SEEN.to(s.dtype)),
    "distance": lambda s: s - 0.5 * (torch.arange(T)[:, None] - torch.arange(T)).abs(),
}
POINTWISE = {
    "gelu": F.gelu, "silu": F.silu, "relu": F.relu, "squared relu": lambda x: F.relu(x).square(),
    "softplus": F.softplus, "gated": lambda x: F.silu(x) * x.sigmoid(),
    "glu by sigmoid": lambda x: x * x.sigmoid(), "tanh": torch.tanh, "mish": F.mish,
    "log1p of exp": lambda x: torch.log1p(x.exp().clamp(max=1e4)), "snake": lambda x: x + x.sin().square(),
    "masked log": lambda x: torch.where(x > 0, x.clamp(min=1e-3).log(), 0.0),
    "log under where": lambda x: torch.where(x > 0, F.relu(x).log().exp(), 0.0),
}  # fmt: skip
REDUCTIONS = {
    "all": lambda x: x, "mean": lambda x: x.mean(1), "max": lambda x: x.amax(1), "last": lambda x: x[:, -1],
    "first": lambda x: x[:, 0], "logsumexp": lambda x: x.logsumexp(1), "sum": lambda x: x.sum(1) / 3,
    "deviation": lambda x: x.std(1), "top": lambda x: x.topk(3, 1).values, "cumsum": lambda x: x.cumsum(1),
    "attention pool": lambda x: (x.mean(-1, keepdim=True).softmax(1) * x).sum(1),
    "running mean": lambda x: (x.float().cumsum(1) / torch.arange(1, T + 1)[:, None])[:, -1],
    "those seen": lambda x: (x * SEEN[:, 0, 0, :, None]).sum(1) / SEEN[:, 0, 0].sum(-1, keepdim=True),
    "scatter": lambda x: torch.zeros(x.shape[0], 3, D, dtype=x.dtype)
    .index_add(1, torch.arange(T) % 3, x).mean(1),
}  # fmt: skip


def labels(y: Tensor) -> Tensor:
    return torch.arange(len(y)) % y.shape[1]


LOSSES = {
    "none": lambda y: y,
    "cross entropy": lambda y: F.cross_entropy(y, labels(y)),
    "smoothed": lambda y: F.cross_entropy(y, labels(y), label_smoothing=0.1),
    "some ignored": lambda y: F.cross_entropy(y, torch.where(torch.arange(len(y)) % 2 == 0, labels(y), -100)),
    "square": lambda y: F.mse_loss(y.float(), torch.ones(y.shape)),
    "sum": lambda y: y.sum(),
    "huber": lambda y: F.huber_loss(y.float(), torch.ones(y.shape)),
    "hinge": lambda y: F.relu(1 - y).mean(),
    "entropy": lambda y: -(y.softmax(-1) * y.log_softmax(-1)).sum(-1).mean(),
    "divergence": lambda y: F.kl_div(y.log_softmax(-1), torch.full(y.shape, 0.2), reduction="batchmean"),
    "cosine": lambda y: 1 - F.cosine_similarity(y, y.roll(1, 0).detach() + 1, dim=-1).mean(),
    "norm": lambda y: y.float().norm(),
    "two": lambda y: (y, y.float().abs().mean()),
    "chunks": lambda y: sum(F.cross_entropy(h, torch.ones(len(h), dtype=torch.long)) for h in y.chunk(2)) / 2,
}
CACHES = {
    "no cache": lambda m, k, v: (k, v),
    "a dictionary": lambda m, k, v: tuple(torch.cat([{"k": t[:, :, :5]}["k"], t[:, :, 5:]], 2) for t in (k, v)),
    "filled in place": lambda m, k, v: filled(torch.zeros(2, *k.shape, dtype=k.dtype), k, v),
    "a buffer": lambda m, k, v: filled(m.kept.to(k.dtype).clone(), k, v),
}
FORMS = {
    "plain": lambda run, m, x: run(m, x),
    "checkpointed": lambda run, m, x: checkpoint(run, m, x, use_reentrant=False),
    "checkpointed, reentrant": lambda run, m, x: checkpoint(run, m, x + 0 * m.out.bias, use_reentrant=True)
    if torch.is_grad_enabled() else run(m, x),
    "called twice": lambda run, m, x: run(m, run(m, x)),
}  # fmt: skip
TABLES: tuple[dict[str, Any], ...] = (NORMS, MASKS, POINTWISE, REDUCTIONS, LOSSES, CACHES, FORMS)


def filled(cache: Tensor, k: Tensor, v: Tensor) -> Any:
    cache[0], cache[1] = k, v
    return cache


class Layer(nn.Module):
    """What a block may need."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.up, self.down = (nn.Linear(*n) for n in ((D, 3 * D), (D, D), (D, 2 * D), (2 * D, D)))
        self.layer, self.batch = nn.LayerNorm(D), nn.BatchNorm1d(D)
        self.register_buffer("kept", torch.zeros(2, ROWS, 4, T, D // 4), persistent=False)


def composed(seed: int) -> tuple[str, Any]:
    """A name of what was drawn, and what makes it."""
    draw = random.Random(seed)
    names = [draw.choice(list(table)) for table in TABLES]
    norm, mask, act, reduction, loss, cache, form = (table[name] for table, name in zip(TABLES, names, strict=True))
    post = draw.random() < 0.4

    def attention(m: Any, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in m.qkv(x).chunk(3, -1))
        k, v = cache(m, k, v)
        scores = mask(q @ k.transpose(-1, -2) / 2.4)
        return m.out((scores.softmax(-1).type_as(v) @ v).transpose(1, 2).flatten(2))

    def block(m: Any, x: Tensor) -> Tensor:
        for part in (attention, lambda m, h: m.down(act(m.up(h)))):
            x = norm(m, x + part(m, x)) if post else x + part(m, norm(m, x))
        return x

    def run(m: Any, x: Tensor) -> Tensor:
        for one in m.blocks:
            x = form(block, one, x)
        return loss(m.head(reduction(x)).flatten(0, -2))

    def make() -> Made:
        blocks = nn.ModuleList(Layer() for _ in range(2))
        return Made(Fn(run, blocks=blocks, head=nn.Linear(D, 5)), (torch.randn(ROWS, T, D),))

    return ", ".join([*names, "post" if post else "pre"]), make


def programs(seed: int, count: int) -> Iterator[Program]:
    """So many, from seeds that follow."""
    for one in range(seed, seed + count):
        what, make = composed(one)
        yield Program(f"idioms {one}: {what}", "composed idioms", make)
