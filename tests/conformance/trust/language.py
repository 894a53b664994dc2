"""Sound programs of attention: decoders, encoders, sequence to sequence."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from program import Fn, Made, enter, program
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
    def __init__(self, norm: Any = nn.LayerNorm, way: str = "sdpa", causal: bool = True, post: bool = False,
                 act: Any = F.gelu) -> None:  # fmt: skip
        super().__init__()
        self.norm1, self.norm2, self.attention = norm(D), norm(D), Attention(way, causal)
        self.up, self.down, self.post, self.act = nn.Linear(D, 2 * D), nn.Linear(2 * D, D), post, act

    def mlp(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))

    def forward(self, x: Tensor, **more: Any) -> Tensor:
        if self.post:
            x = self.norm1(x + self.attention(x, **more))
            return self.norm2(x + self.mlp(x))
        x = x + self.attention(self.norm1(x), **more)
        return x + self.mlp(self.norm2(x))


class Language(nn.Module):
    """A language model of two blocks."""

    def __init__(self, checkpointed: bool = False, tied: bool = False, softcap: float = 0.0, **options: Any) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(V, D), nn.Embedding(64, D)
        self.blocks = nn.ModuleList(Block(**options) for _ in range(2))
        self.norm, self.head, self.checkpointed = nn.LayerNorm(D), nn.Linear(D, V, bias=False), checkpointed
        self.softcap = softcap
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, start: int = 0, **more: Any) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(start, start + ids.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x, **more)
        logits = self.head(self.norm(x))
        return self.softcap * torch.tanh(logits / self.softcap) if self.softcap else logits


def cross_entropy_of_next(x: Tensor) -> Any:
    return lambda out: F.cross_entropy(out[:, :-1].flatten(0, 1).float(), x[:, 1:].flatten())


def with_loss(model: nn.Module, chunks: int = 1, smoothing: float = 0.0) -> nn.Module:
    """The model and its loss in one, as transformers have them."""

    def run(m: Any, x: Tensor) -> Tensor:
        logits, wanted = m.model(x)[:, :-1].flatten(0, 1).chunk(chunks), x[:, 1:].flatten().chunk(chunks)
        losses = [F.cross_entropy(a, b, label_smoothing=smoothing) for a, b in zip(logits, wanted, strict=True)]
        return sum(losses) / chunks

    return Fn(run, model=model)


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
    return Made(model, (x,), cross_entropy_of_next(x), twin, decode)


FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "decoder": ("decoder", {}), "decoder_rms": ("decoder", {"norm": RMS}),
    "decoder_tied_post_norm": ("decoder", {"post": True, "tied": True}),
    "decoder_lowest": ("decoder", {"way": "lowest"}), "decoder_log_of_mask": ("decoder", {"way": "infinite"}),
    "decoder_checkpointed": ("checkpointing", {"checkpointed": True, "way": "fill"}),
    "gpt_tied": ("decoder", {"tied": True}), "decoder_softcap": ("decoder with softcap", {"softcap": 30.0}),
    "rms_silu_softcap": ("decoder with softcap", {"norm": RMS, "act": F.silu, "softcap": 15.0}),
}  # fmt: skip
for name, (family, options) in FORMS.items():
    enter(name, family, partial(language, **options))


SEEN = torch.arange(T) < torch.tensor([[T], [7]])
READ: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "lowest_of_format": ("decoder", SEEN, {"way": "lowest"}),
    "pre_norm": ("encoder, pre-norm", SEEN, {"causal": False}),
    "post_norm": ("encoder, post-norm", SEEN, {"causal": False, "post": True}),
    "written_out": ("masked attention with padded rows", SEEN, {"way": "fill"}),
    "nothing_seen": ("masked attention with padded rows", SEEN & torch.tensor([[True], [False]]),
                     {"causal": False, "way": "lowest"}),
}  # fmt: skip


def reading(seen: Tensor, **options: Any) -> Made:
    """Tokens with padded rows."""
    model, twin = Language(**options), Language(**options | {"way": "lowest"})
    twin.load_state_dict(model.state_dict())
    read = lambda m, x: m.model(x, keep=seen)
    return Made(Fn(read, model=model), (ids(2, T),), twin=Fn(read, model=twin))


for name, (family, seen, options) in READ.items():
    enter(name, family, partial(reading, seen, **options))


def decoding(batch: int, **options: Any) -> Made:
    model = Fn(lambda m, x: cached(m.model, x), model=Language(**options))
    return Made(model.eval(), (ids(batch, T),))


enter("decode_1", "decoder with cache", partial(decoding, 1))
enter("decode_2", "decoder with cache", partial(decoding, 2, norm=RMS))
enter("decode_written_out", "decoder with cache", partial(decoding, 2, way="lowest"))
enter("scalar_loss", "decoder", lambda: Made(with_loss(Language()), (ids(2, T),)))
enter("smoothed_chunks", "chunked losses", lambda: Made(with_loss(Language(), 2, 0.1), (ids(2, T),)))
enter("checkpointed_blocks", "checkpointing", lambda: Made(with_loss(Language(checkpointed=True)), (ids(2, T),)))


def twins(first: nn.Module, second: nn.Module) -> Made:
    """One function in two ways."""
    second.load_state_dict(first.state_dict())
    return Made(first, (torch.randn(2, T, D),), twin=second)


class Recomputed(Block):
    def forward(self, x: Tensor, **more: Any) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


enter("masks_of_attention", "masked attention", lambda: twins(Attention("fill"), Attention("lowest")))
enter("block_checkpointed", "checkpointing", lambda: twins(Block(), Recomputed()))


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
    return Made(model, (x,), cross_entropy_of_next(x))


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


enter("encoder_pre_norm", "encoder, pre-norm", encoder)
enter("encoder_post_norm", "encoder, post-norm", partial(encoder, post=True))
enter("encoder_padded_lowest", "masked attention with padded rows", partial(encoder, post=True, way="lowest"))


@program("encoder, torch's layers")
def encoder_of_torch() -> Made:
    layer = nn.TransformerEncoderLayer(D, H, 2 * D, dropout=0.0, batch_first=True, activation="gelu")
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    keep = torch.arange(T) < torch.tensor([[T], [7]])
    return Made(Fn(lambda m, x, pad: m.e(x, src_key_padding_mask=pad), e=model), (torch.randn(2, T, D), ~keep))


@program("encoder, torch's layers")
def layer_of_torch() -> Made:
    return Made(nn.TransformerEncoderLayer(D, H, 2 * D, 0.0, batch_first=True), (torch.randn(2, T, D),))


@program("sentence vectors")
def pooled() -> Made:
    """The mean of the tokens that are there, of length one."""

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.model(x, keep=SEEN) * SEEN[..., None]
        return F.normalize(h.sum(1) / SEEN.sum(1, keepdim=True).clamp(min=1), dim=-1)

    return Made(Fn(run, model=Language(causal=False, post=True)), (ids(2, T),))


def buckets(length: int) -> Tensor:
    """T5's, whose logarithm of zero `where` never takes."""
    n = torch.arange(length)
    far = (n[None] - n[:, None]).neg().clamp(min=0)
    large = 4 + (torch.log(far.float() / 4) / math.log(8) * 4).to(torch.long)
    return torch.where(far < 4, far, large.clamp(max=7))


@program("relative positions")
def relative_buckets() -> Made:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.head(m.block(x, bias=m.table(buckets(x.shape[1])).permute(2, 0, 1)))

    model = Fn(run, table=nn.Embedding(8, H), block=Block(way="lowest"), head=nn.Linear(D, 7))
    return Made(model, (torch.randn(2, T, D),))


@program("relative positions")
def relative_buckets_padded() -> Made:
    """Both ways from each token, with tokens that are not there."""

    def run(m: Any, x: Tensor) -> Tensor:
        bias = m.table(buckets(T) + buckets(T).T).permute(2, 0, 1)
        return m.model(x, keep=SEEN, bias=bias)

    return Made(Fn(run, table=nn.Embedding(16, H), model=Language(way="fill", causal=False)), (ids(2, T),))


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
    return Made(model, (source, target), cross_entropy_of_next(target))


@program("seq2seq")
def seq2seq_of_torch() -> Made:
    model = nn.Transformer(D, H, 1, 1, 2 * D, dropout=0.0, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(T)
    return Made(Fn(lambda m, s, t: m.t(s, t, tgt_mask=mask), t=model), (torch.randn(2, 9, D), torch.randn(2, T, D)))


@program("seq2seq")
def seq2seq_padded() -> Made:
    def run(m: Any, source: Tensor, target: Tensor) -> Tensor:
        mask, pad = nn.Transformer.generate_square_subsequent_mask(T), ~SEEN
        masks = {"tgt_mask": mask, "src_key_padding_mask": pad, "memory_key_padding_mask": pad}
        return m.head(m.t(m.table(source), m.table(target), **masks))

    model = nn.Transformer(D, H, 1, 1, 2 * D, dropout=0.0, batch_first=True)
    return Made(Fn(run, table=nn.Embedding(V, D), t=model, head=nn.Linear(D, V)), (ids(2, T), ids(2, T)))


@program("attention of torch")
def attention_of_torch() -> Made:
    return Made(Fn(lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(D, H)), (torch.randn(2, T, D),))
