"""Sound programs that read sequences: decoders, encoders, experts, recurrent and state space models, speech."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from program import Fn, Made, program
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

D, H, V, T = 32, 4, 50, 12


def ids(*shape: int) -> Tensor:
    return torch.randint(0, V, shape)


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (H, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)


class RMS(nn.Module):
    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).type_as(x) * self.weight


class Attention(nn.Module):
    """way: sdpa, lowest (masks with the lowest value), infinite (adds -inf), fill (masked_fill with -inf)."""

    def __init__(self, way: str = "sdpa", causal: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(D, D) for _ in range(4))
        self.way, self.causal = way, causal

    def forward(self, x: Tensor, memory: Tensor | None = None, keep: Tensor | None = None, bias: Any = None,
                cache: dict[Any, Any] | None = None) -> Tensor:  # fmt: skip
        source = x if memory is None else memory
        q, k, v = split(self.q(x)), split(self.k(source)), split(self.v(source))
        if cache is not None:
            if self in cache:
                k, v = torch.cat([cache[self][0], k], 2), torch.cat([cache[self][1], v], 2)
            cache[self] = k, v
        sees = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        sees = sees if self.causal else torch.ones_like(sees)
        if keep is not None:
            sees = sees & keep[:, None, None, :]
        if self.way == "sdpa" and bias is None:
            return self.out(joined(F.scaled_dot_product_attention(q, k, v, attn_mask=sees)))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if bias is not None:
            scores = scores + bias
        if self.way == "infinite":
            scores = scores + torch.log(sees.float())
        else:
            lowest = float("-inf") if self.way == "fill" else torch.finfo(scores.dtype).min
            scores = scores.masked_fill(~sees, lowest)
        return self.out(joined(scores.softmax(-1).type_as(v) @ v))


class Block(nn.Module):
    def __init__(self, norm: Any = nn.LayerNorm, way: str = "sdpa", causal: bool = True, post: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = norm(D), norm(D), Attention(way, causal)
        self.up, self.down, self.post = nn.Linear(D, 2 * D), nn.Linear(2 * D, D), post

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor, **more: Any) -> Tensor:
        if self.post:
            x = self.norm1(x + self.attention(x, **more))
            return self.norm2(x + self.mlp(x))
        x = x + self.attention(self.norm1(x), **more)
        return x + self.mlp(self.norm2(x))


class Language(nn.Module):
    """A language model of two blocks."""

    def __init__(self, checkpointed: bool = False, tied: bool = False, **options: Any) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(V, D), nn.Embedding(64, D)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(2))
        self.norm, self.head, self.checkpointed = nn.LayerNorm(D), nn.Linear(D, V, bias=False), checkpointed
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, start: int = 0, **more: Any) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(start, start + ids.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x, **more)
        return self.head(self.norm(x))


def language_loss(x: Tensor) -> Any:
    return lambda out: F.cross_entropy(out[:, :-1].flatten(0, 1).float(), x[:, 1:].flatten())


def cached(model: nn.Module, x: Tensor) -> Tensor:
    """A prompt of half the sequence, then a token at a time."""
    cache: dict[Any, Any] = {}
    half = x.shape[1] // 2
    out = [model(x[:, :half], cache=cache)]
    out += [model(x[:, n : n + 1], start=n, cache=cache) for n in range(half, x.shape[1])]
    return torch.cat(out, 1)


def language(**options: Any) -> Made:
    x = ids(2, T)
    model = Language(**options)
    twin = Language(**{**options, "way": "fill" if options.get("way", "sdpa") == "sdpa" else "sdpa"})
    twin.load_state_dict(model.state_dict())
    decode = None if options.get("checkpointed") else lambda x: cached(model, x)
    return Made(model, (x,), language_loss(x), twin, decode)


@program("decoder")
def decoder() -> Made:
    return language()


@program("decoder")
def decoder_rms() -> Made:
    return language(norm=RMS)


@program("decoder")
def decoder_tied_post_norm() -> Made:
    return language(post=True, tied=True)


@program("decoder")
def decoder_lowest() -> Made:
    return language(way="lowest")


@program("decoder")
def decoder_log_of_mask() -> Made:
    return language(way="infinite")


@program("checkpointing")
def decoder_checkpointed() -> Made:
    return language(checkpointed=True, way="fill")


@program("decoder with rotary places")
def decoder_rotary() -> Made:
    def turned(x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[2])[:, None] * 100.0 ** (-torch.arange(0, 4) / 4)
        a, b = x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.tokens(x)
        q, k, v = (split(t) for t in m.qkv(m.norm(h)).chunk(3, -1))
        q, k = turned(q).type_as(v), turned(k).type_as(v)
        h = h + m.out(joined(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
        return m.head(h + m.down(F.silu(m.gate(h)) * m.up(h)))

    x = ids(2, T)
    parts = {name: nn.Linear(D, D) for name in ("out", "down", "gate", "up")}
    model = Fn(run, tokens=nn.Embedding(V, D), qkv=nn.Linear(D, 3 * D), norm=RMS(), head=nn.Linear(D, V), **parts)
    return Made(model, (x,), language_loss(x))


@program("decoder with softcap")
def decoder_softcap() -> Made:
    model = Language()
    x = ids(2, T)
    return Made(Fn(lambda m, x: 30 * torch.tanh(m.model(x) / 30), model=model), (x,), language_loss(x))


def encoder(**options: Any) -> Made:
    keep = torch.arange(T) < torch.tensor([[T], [5]])
    blocks = nn.ModuleList(Block(causal=False, **options) for _ in range(2))

    def run(m: Any, x: Tensor, keep: Tensor) -> Tensor:
        for block in m.blocks:
            x = block(x, keep=keep)
        return m.head((x * keep[..., None]).sum(1) / keep.sum(1, keepdim=True))

    way = options.pop("way", "sdpa")
    twin_blocks = nn.ModuleList(Block(causal=False, way="fill" if way == "sdpa" else "sdpa", **options)
                                for _ in range(2))  # fmt: skip
    model = Fn(run, blocks=blocks, head=nn.Linear(D, 5))
    twin = Fn(run, blocks=twin_blocks, head=nn.Linear(D, 5))
    twin.load_state_dict(model.state_dict())
    y = torch.tensor([1, 3])
    return Made(model, (torch.randn(2, T, D), keep), lambda out: F.cross_entropy(out.float(), y), twin)


@program("encoder, pre-norm")
def encoder_pre_norm() -> Made:
    return encoder()


@program("encoder, post-norm")
def encoder_post_norm() -> Made:
    return encoder(post=True)


@program("masked attention with padded rows")
def encoder_padded_lowest() -> Made:
    return encoder(post=True, way="lowest")


@program("encoder, torch's layers")
def encoder_of_torch() -> Made:
    layer = nn.TransformerEncoderLayer(D, H, 2 * D, dropout=0.0, batch_first=True, activation="gelu")
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    keep = torch.arange(T) < torch.tensor([[T], [7]])
    return Made(Fn(lambda m, x, pad: m.e(x, src_key_padding_mask=pad), e=model), (torch.randn(2, T, D), ~keep))


@program("relative positions")
def relative_buckets() -> Made:
    """T5's, whose logarithm of zero `where` never takes."""

    def run(m: Any, x: Tensor) -> Tensor:
        n = torch.arange(x.shape[1])
        far = (n[None] - n[:, None]).neg().clamp(min=0)
        large = 4 + (torch.log(far.float() / 4) / math.log(8) * 4).to(torch.long)
        bucket = torch.where(far < 4, far, large.clamp(max=7))
        return m.head(m.block(x, bias=m.table(bucket).permute(2, 0, 1)))

    model = Fn(run, table=nn.Embedding(8, H), block=Block(way="lowest"), head=nn.Linear(D, 7))
    return Made(model, (torch.randn(2, T, D),))


@program("relative positions")
def alibi() -> Made:
    slope = 2.0 ** -torch.arange(1, H + 1)[:, None, None]
    bias = -slope * (torch.arange(T)[:, None] - torch.arange(T)).abs()
    model = Fn(lambda m, x: m.block(x, bias=bias), block=Block(way="fill", norm=RMS))
    return Made(model, (torch.randn(2, T, D),))


@program("relative positions")
def disentangled() -> Made:
    """DeBERTa's: content to content, content to place."""

    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = split(m.q(x)), split(m.k(x)), split(m.v(x))
        place = split(m.p(m.table.weight)[None])
        at = (torch.arange(T)[:, None] - torch.arange(T)).clamp(-4, 4) + 4
        near = (q @ place.transpose(-1, -2)).gather(-1, at.expand(2, H, T, T))
        scores = (q @ k.transpose(-1, -2) + near) / math.sqrt(8 * 2)
        return m.norm(x + m.out(joined(scores.softmax(-1).type_as(v) @ v)))

    model = Fn(run, table=nn.Embedding(9, D), norm=nn.LayerNorm(D), **{n: nn.Linear(D, D) for n in "qkvp"},
               out=nn.Linear(D, D))  # fmt: skip
    return Made(model, (torch.randn(2, T, D),))


@program("seq2seq")
def seq2seq() -> Made:
    def run(m: Any, source: Tensor, target: Tensor) -> Tensor:
        memory = m.encoder(m.tokens(source))
        x = m.own(m.tokens(target))
        return m.head(m.norm(x + m.cross(x, memory=memory)))

    source, target = ids(2, 9), ids(2, T)
    model = Fn(run, tokens=nn.Embedding(V, D), encoder=Block(causal=False), own=Block(), norm=nn.LayerNorm(D),
               cross=Attention(causal=False), head=nn.Linear(D, V))  # fmt: skip
    return Made(model, (source, target), language_loss(target))


@program("seq2seq")
def seq2seq_of_torch() -> Made:
    model = nn.Transformer(D, H, 1, 1, 2 * D, dropout=0.0, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(T)
    return Made(Fn(lambda m, s, t: m.t(s, t, tgt_mask=mask), t=model), (torch.randn(2, 9, D), torch.randn(2, T, D)))


def experts(m: Any, x: Tensor) -> Tensor:
    flat = x.flatten(0, 1)
    weight, chosen = m.router(flat).float().softmax(-1).topk(2)
    weight = weight / weight.sum(-1, keepdim=True)
    out = torch.zeros_like(flat)
    for n, expert in enumerate(m.experts):
        rows, column = torch.where(chosen == n)
        if len(rows):
            out = out.index_add(0, rows, (expert(flat[rows]) * weight[rows, column, None]).type_as(out))
    return m.norm(x + out.view_as(x))


@program("mixture of experts")
def mixture() -> Made:
    parts = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.SiLU(), nn.Linear(D, D)) for _ in range(4))
    model = Fn(experts, router=nn.Linear(D, 4, bias=False), experts=parts, norm=RMS())
    return Made(model, (torch.randn(2, T, D),))


@program("mixture of experts")
def soft_mixture_with_balance() -> Made:
    def run(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = m.router(x).softmax(-1)
        out = torch.einsum("bte,btd,edf->btf", shares, x, m.weight)
        return out, (shares.mean((0, 1)).square().sum() * 4)

    model = Fn(run, router=nn.Linear(D, 4), weight=nn.Parameter(torch.randn(4, D, D) / 6))
    return Made(model, (torch.randn(2, T, D),), lambda o: o[0].float().square().mean() + 0.01 * o[1].float())


@program("state space")
def state_space() -> Made:
    def run(m: Any, x: Tensor) -> Tensor:
        u, z = m.come(x).chunk(2, -1)
        step = F.softplus(m.step(u)).float()
        decay = torch.exp(-step * m.log_decay.exp())
        b, c, h, out = m.b(u), m.c(u), torch.zeros(2, D, 4), []
        for t in range(x.shape[1]):
            h = decay[:, t, :, None] * h + (step[:, t] * u[:, t].float())[..., None] * b[:, t, None].float()
            out.append((h * c[:, t, None].float()).sum(-1))
        return m.go(torch.stack(out, 1).type_as(z) * F.silu(z))

    model = Fn(run, come=nn.Linear(D, 2 * D), step=nn.Linear(D, D), b=nn.Linear(D, 4), c=nn.Linear(D, 4),
               log_decay=nn.Parameter(torch.zeros(D)), go=nn.Linear(D, D))  # fmt: skip
    return Made(model, (torch.randn(2, T, D),))


@program("state space")
def gated_scan_in_log_space() -> Made:
    def run(m: Any, x: Tensor) -> Tensor:
        gate, value = m.gate(x), m.value(x)
        keep = F.logsigmoid(-gate).float().cumsum(1)
        new = F.logsigmoid(gate).float() + torch.log(F.softplus(value).float() + 1e-4)
        return m.out((keep + torch.logcumsumexp(new - keep, 1)).exp())

    model = Fn(run, gate=nn.Linear(D, D), value=nn.Linear(D, D), out=nn.Linear(D, D))
    return Made(model, (torch.randn(2, T, D),))


@program("state space")
def linear_attention() -> Made:
    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = (split(t) for t in m.qkv(x).chunk(3, -1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        seen = torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2)
        norm = (q * k.cumsum(2)).sum(-1, keepdim=True).clamp(min=1e-4)
        return m.out(joined(torch.einsum("bhtd,bhtde->bhte", q, seen) / norm))

    return Made(Fn(run, qkv=nn.Linear(D, 3 * D), out=nn.Linear(D, D)), (torch.randn(2, T, D),))


@program("recurrent")
def lstm() -> Made:
    model = Fn(lambda m, x: m.head(m.rnn(x)[0]), rnn=nn.LSTM(D, D, batch_first=True), head=nn.Linear(D, 5))
    return Made(model, (torch.randn(2, T, D),))


@program("recurrent")
def gru_both_ways() -> Made:
    rnn = nn.GRU(D, 16, bidirectional=True, batch_first=True)
    return Made(Fn(lambda m, x: m.head(m.rnn(x)[0][:, -1]), rnn=rnn, head=nn.Linear(D, 5)), (torch.randn(2, T, D),))


@program("recurrent")
def cell_by_hand() -> Made:
    def run(m: Any, x: Tensor) -> Tensor:
        h = c = torch.zeros(x.shape[0], D)
        for t in range(x.shape[1]):
            i, f, g, o = (m.x(x[:, t]) + m.h(h)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return m.head(h)

    return Made(Fn(run, x=nn.Linear(D, 4 * D), h=nn.Linear(D, 4 * D), head=nn.Linear(D, 3)), (torch.randn(3, T, D),))


@program("CTC")
def ctc() -> Made:
    y, n, k = torch.randint(1, 10, (3, 4)), torch.full((3,), T), torch.full((3,), 4)

    def loss(out: Tensor) -> Tensor:
        return F.ctc_loss(out.float().log_softmax(-1).transpose(0, 1), y, n, k, zero_infinity=True)

    model = nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, 10))
    return Made(model, (torch.randn(3, T, D),), loss)


@program("CTC")
def ctc_with_a_target_too_long() -> Made:
    """zero_infinity takes the infinite loss of the one that does not fit."""
    y, n, k = torch.randint(1, 10, (2, 8)), torch.tensor([T, 3]), torch.tensor([4, 8])

    def run(m: Any, x: Tensor) -> Tensor:
        return F.ctc_loss(m.net(x).log_softmax(-1).transpose(0, 1), y, n, k, zero_infinity=True)

    return Made(Fn(run, net=nn.Linear(D, 10)), (torch.randn(2, T, D),))


@program("RNN-T")
def transducer() -> Made:
    """The loss as a recursion over the lattice, with -inf at its edge."""
    y = torch.randint(1, 8, (2, 3))

    def run(m: Any, x: Tensor) -> Tensor:
        both = torch.tanh(m.x(x)[:, :, None] + m.y(m.table(F.pad(y, (1, 0))))[:, None])
        p = m.head(both).log_softmax(-1)
        blank, label = p[..., 0], p[:, :, :3].gather(-1, y[:, None, :, None].expand(-1, x.shape[1], -1, 1))[..., 0]
        edge = p.new_full((2,), float("-inf"))
        rows: list[list[Tensor]] = []
        for t in range(x.shape[1]):
            row: list[Tensor] = []
            for u in range(4):
                if not t and not u:
                    row.append(p.new_zeros(2))
                    continue
                up = rows[t - 1][u] + blank[:, t - 1, u] if t else edge
                left = row[u - 1] + label[:, t, u - 1] if u else edge
                row.append(torch.logaddexp(up, left))
            rows.append(row)
        return -(rows[-1][3] + blank[:, -1, 3]).mean()

    model = Fn(run, x=nn.Linear(D, D), y=nn.Linear(D, D), table=nn.Embedding(8, D), head=nn.Linear(D, 8))
    return Made(model, (torch.randn(2, 5, D),))


@program("LoRA")
def lora() -> Made:
    """B is zero, so A's gradient is."""
    base = nn.Linear(D, D).requires_grad_(False)
    run = lambda m, x: m.base(x) + (x @ m.a.T) @ m.b.T * 2.0
    return Made(Fn(run, base=base, a=nn.Parameter(torch.randn(4, D) / 6), b=nn.Parameter(torch.zeros(D, 4))),
                (torch.randn(8, D),))  # fmt: skip


@program("chunked losses")
def chunked_cross_entropy() -> Made:
    y = ids(64)

    def run(m: Any, x: Tensor) -> Tensor:
        pairs = zip(m.table(x).chunk(16), y.chunk(16), strict=True)
        return torch.stack([F.cross_entropy(m.head(h), t, label_smoothing=0.1) for h, t in pairs]).mean()

    return Made(Fn(run, table=nn.Embedding(V, D), head=nn.Linear(D, V)), (ids(64),))


@program("chunked losses")
def ignored_labels() -> Made:
    y = torch.where(torch.arange(T) < 7, ids(2, T), -100)
    loss = lambda out: F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=-100)
    return Made(Language(), (ids(2, T),), loss)


@program("distillation")
def distillation() -> Made:
    teacher = nn.Sequential(nn.Linear(D, 64), nn.GELU(), nn.Linear(64, V)).requires_grad_(False)

    def run(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = (m.teacher(x) / 2).log_softmax(-1)
        return F.kl_div((m.net(x) / 2).log_softmax(-1), wanted, log_target=True, reduction="batchmean") * 4

    return Made(Fn(run, teacher=teacher, net=nn.Linear(D, V)), (torch.randn(16, D),))


@program("RL")
def policy_gradient() -> Made:
    """Actions that are not allowed have -inf; clipped ratio, value, entropy."""
    action, old, gain = torch.randint(0, 4, (16,)), torch.randn(16) * 0.1 - 1.4, torch.randn(16)
    allowed = torch.rand(16, 6) > 0.3
    allowed[:, :4] = True

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.body(x)
        logp = m.policy(h).masked_fill(~allowed, float("-inf")).log_softmax(-1)
        ratio = (logp.gather(-1, action[:, None])[:, 0] - old).exp()
        actor = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        entropy = -(logp.exp() * logp.masked_fill(~allowed, 0.0)).sum(-1).mean()
        return actor + 0.5 * F.mse_loss(m.value(h)[:, 0].float(), gain) - 0.01 * entropy.float()

    body = nn.Sequential(nn.Linear(D, D), nn.Tanh())
    masked = Fn(run, body=body, policy=nn.Linear(D, 6), value=nn.Linear(D, 1))
    return Made(masked, (torch.randn(16, D),))


@program("RL")
def preferences() -> Made:
    """DPO."""
    model, frozen, good, bad = Language(), Language().requires_grad_(False), ids(2, T), ids(2, T)

    def logp(net: Any, x: Tensor) -> Tensor:
        return net(x)[:, :-1].log_softmax(-1).gather(-1, x[:, 1:, None])[..., 0].sum(-1)

    def run(m: Any, good: Tensor, bad: Tensor) -> Tensor:
        with torch.no_grad():
            reference = logp(m.frozen, good) - logp(m.frozen, bad)
        return -F.logsigmoid(0.1 * (logp(m.model, good) - logp(m.model, bad) - reference)).mean()

    return Made(Fn(run, model=model, frozen=frozen), (good, bad))
