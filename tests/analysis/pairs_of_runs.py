"""Pairs of runs: sound ones, of which nothing is to be said, and such with a fault that is to be named.

A pair is made by a function that gives both runs; of a fault a text goes with it that the first screen must show.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc
from narrowcast.reports.results.run import Run

Pair = Callable[[], tuple[Run, Run]]
WIDTH, HEADS, VOCABULARY, LENGTH, PROMPT = 32, 4, 61, 16, 6


def rotated(x: torch.Tensor, start: int, base: float = 10000.0) -> torch.Tensor:
    """Rotary embeddings of [..., T, D], from a position on."""
    half = x.shape[-1] // 2
    places = torch.arange(start, start + x.shape[-2], dtype=torch.float32)
    angles = places[:, None] * base ** (-torch.arange(half) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class RMSNorm(nn.Module):
    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(1 + 0.1 * torch.randn(WIDTH)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps))


class Attention(nn.Module):
    """With a cache that is a dict; what is wrong with it is said by `fault`."""

    def __init__(self, rope: bool = False, written_out: bool = False, fault: str = "") -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.rope, self.written_out, self.fault = rope, written_out, fault

    def forward(self, x: torch.Tensor, cache: dict | None = None) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        before = cache["k"].shape[2] if cache else 0
        if self.rope:
            offset = before + (self.fault == "offset" and before > 0)
            base = 1e6 if self.fault == "base" else 1e4
            q, k = rotated(q, offset, base), rotated(k, offset, base)
        if cache:
            k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
        if cache is not None:
            kept = v.clone() if self.fault == "stale" else v
            if self.fault == "stale" and before > PROMPT:
                kept[:, :, before - 1] = kept[:, :, before - 2]
            cache.update(k=k, v=kept)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(before + (self.fault == "mask by one"))
        scale = 1 / math.sqrt(WIDTH) if self.fault == "scale" else 1 / math.sqrt(WIDTH // HEADS)
        if self.fault == "mask":
            seen = torch.ones_like(seen)
        if self.written_out:
            scores = (q @ k.transpose(-1, -2)) * scale
            y = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, **of_attention: object) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(**of_attention)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.activation: Callable[..., torch.Tensor] = F.gelu
        self.post = False

    def forward(self, x: torch.Tensor, cache: dict | None = None) -> torch.Tensor:
        if self.post:
            x = self.norm1(x + self.attention(x, cache))
            return self.norm2(x + self.down(self.activation(self.up(x))))
        x = x + self.attention(self.norm1(x), cache)
        return x + self.down(self.activation(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """Embedding, blocks (none: one attention), head."""

    def __init__(self, layers: int = 2, **of_attention: object) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH + 1, WIDTH)
        made = [Block(**of_attention) for _ in range(layers)]
        self.blocks = nn.ModuleList(made or [Attention(**of_attention)])
        self.norm, self.head = nn.LayerNorm(WIDTH) if layers else nn.Identity(), nn.Linear(WIDTH, VOCABULARY)
        self.off_by = 0
        self.last: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits

    def forward(self, ids: torch.Tensor, caches: list[dict] | None = None, start: int = 0) -> torch.Tensor:
        at = start + self.off_by * (start > 0)
        x = self.tokens(ids) + self.places(torch.arange(at, at + ids.shape[1]))
        for n, block in enumerate(self.blocks):
            x = block(x, caches[n] if caches is not None else None)
        return self.last(self.head(self.norm(x)))


def decoder(seed: int = 0, **given: object) -> Decoder:
    torch.manual_seed(seed)
    return Decoder(**given).eval()


def like(model: nn.Module, **given: object) -> Decoder:
    """Another decoder with the same weights."""
    other = Decoder(len(model.blocks) if isinstance(model.blocks[0], Block) else 0, **given).eval()
    other.load_state_dict(model.state_dict())
    return other


def ids_of(batch: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (batch, LENGTH), generator=torch.Generator().manual_seed(1), device="cpu").to(
        torch.get_default_device()
    )


def log_probabilities(run: Run, logits: torch.Tensor, ids: torch.Tensor) -> None:
    values = logits[:, :-1].double().log_softmax(-1)
    run.keep_tokens(ids[:, 1:], values.gather(-1, ids[:, 1:, None]))


@torch.no_grad()
def whole(model: nn.Module, batch: int = 1, dtype: str = "", tokens: bool = False) -> Run:
    """A forward of all tokens."""
    ids = ids_of(batch)
    with nc.capture() as run, nc.autocast(torch.get_default_device().type, dtype or "bf16", enabled=bool(dtype)):
        logits = model(ids)
    if tokens:
        log_probabilities(run, logits, ids)
    return run


@torch.no_grad()
def stepped(model: nn.Module, batch: int = 1, dtype: str = "", tokens: bool = False) -> Run:
    """The prompt, then one token after the other."""
    ids = ids_of(batch)
    caches: list[dict] = [{} for _ in model.blocks]
    with nc.capture() as run, nc.autocast(torch.get_default_device().type, dtype or "bf16", enabled=bool(dtype)):
        found = [model(ids[:, :PROMPT], caches)]
        found += [model(ids[:, n : n + 1], caches, n) for n in range(PROMPT, LENGTH)]
    if tokens:
        log_probabilities(run, torch.cat(found, 1), ids)
    return run


class Function(nn.Module):
    """A function of tensors as a module, with parameters of its own."""

    def __init__(self, function: Callable[..., torch.Tensor], **parts: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.function(self, *args)


def both(model: nn.Module, args: tuple, dtype: str = "bf16", backward: object = False) -> tuple[Run, Run]:
    """In fp32 and in a low format."""
    return nc.capture(model, args, backward=backward), nc.capture(model, args, under=dtype, backward=backward)


class Encoder(nn.Module):
    """Post-norm, as BERT's."""

    def __init__(self, written_out: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(written_out=written_out) for _ in range(3))
        for block in self.blocks:
            block.post = True
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class GraphNet(nn.Module):
    """Messages added up after a norm over the nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            y = layer(x)
            centred = y - y.mean(0, keepdim=True) * self.scale
            y = centred / (centred.square().mean(0, keepdim=True) + 1e-5).sqrt()
            x = torch.zeros_like(y).scatter_add_(0, target[:, None].expand(-1, WIDTH), y[source])
        return x.sum(0)


class Experts(nn.Module):
    """A router over experts, the two best of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        result = torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            rows, place = (chosen == n).nonzero(as_tuple=True)
            result.index_add_(0, rows, (expert(x[rows]) * weights[rows, place, None]).to(result.dtype))
        return result


def _seeded(make: Callable[[], object]) -> object:
    torch.manual_seed(0)
    return make()


def _cached(layers: int, batch: int, dtype: str = "", **given: object) -> Pair:
    def made() -> tuple[Run, Run]:
        model = decoder(layers=layers, **given)
        return whole(model, batch, dtype), stepped(model, batch, dtype)

    return made


def _attentions() -> tuple[Run, Run]:
    model = decoder(rope=True)
    return whole(model, 2), whole(like(model, rope=True, written_out=True), 2)


def _norms() -> tuple[Run, Run]:
    norm, w = _seeded(lambda: (RMSNorm(), nn.Linear(WIDTH, WIDTH)))
    a = Function(lambda m, x: m.linear(m.norm(x)), norm=norm, linear=w)
    b = Function(lambda m, x: m.linear(F.rms_norm(x, (WIDTH,), m.norm.weight, 1e-6)), norm=norm, linear=w)
    x = torch.randn(2, 9, WIDTH)
    return nc.capture(a, (x,), backward=True), nc.capture(b, (x,), backward=True)


def _layer_norms() -> tuple[Run, Run]:
    def by_hand(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = m.first(x)
        mean = x.mean(-1, keepdim=True)
        y = (x - mean) * torch.rsqrt((x - mean).square().mean(-1, keepdim=True) + m.norm.eps)
        return m.last(y * m.norm.weight + m.norm.bias)

    def made() -> dict[str, nn.Module]:
        return {"first": nn.Linear(WIDTH, WIDTH), "norm": nn.LayerNorm(WIDTH), "last": nn.Linear(WIDTH, 8)}

    parts = _seeded(made)
    a, b = Function(lambda m, x: m.last(m.norm(m.first(x))), **parts), Function(by_hand, **parts)
    x = torch.randn(2, 9, WIDTH)
    return nc.capture(a, (x,), under="bf16"), nc.capture(b, (x,), under="bf16")


def _losses() -> tuple[Run, Run]:
    head, x = _seeded(lambda: (nn.Linear(WIDTH, VOCABULARY), torch.randn(40, WIDTH)))
    wanted = torch.randint(0, VOCABULARY, (40,))
    a = Function(lambda m, x: F.cross_entropy(m.head(x), wanted), head=head)
    b = Function(lambda m, x: -m.head(x).log_softmax(-1).gather(-1, wanted[:, None]).mean(), head=head)
    return nc.capture(a, (x,), backward=True), nc.capture(b, (x,), backward=True)


def _encoder(dtype: str, backward: bool) -> Pair:
    def made() -> tuple[Run, Run]:
        model, x = _seeded(lambda: (Encoder(), torch.randn(2, 12, WIDTH)))
        return both(model, (x,), dtype, backward)

    return made


def _graph() -> tuple[Run, Run]:
    model, x = _seeded(lambda: (GraphNet(), torch.randn(24, WIDTH)))
    source, target = torch.randint(0, 24, (2, 96))
    return both(model, (x, source, target))


def _experts() -> tuple[Run, Run]:
    return both(*_seeded(lambda: (Experts(), (torch.randn(48, WIDTH),))))


def _images() -> tuple[Run, Run]:
    model, x = _seeded(lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8),
                      nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)),
        torch.randn(4, 3, 12, 12)))  # fmt: skip
    return both(model, (x,), "bf16", True)


def _compiled(dtype: str | None) -> Pair:
    def made() -> tuple[Run, Run]:
        model, x = _seeded(lambda: (Encoder(), torch.randn(2, 12, WIDTH)))
        compiled = nc.compile(model, under=dtype or "bf16", backend="aot_eager") if dtype else torch.compile(
            model, backend="aot_eager")  # fmt: skip
        with torch.no_grad():
            pair = nc.capture(model, (x,), under=dtype), nc.capture(compiled, (x,))
        torch._dynamo.reset()
        return pair

    return made


def _recurrent() -> tuple[Run, Run]:
    model, x = _seeded(lambda: (nn.GRU(WIDTH, WIDTH, batch_first=True), torch.randn(2, 12, WIDTH)))

    def by_hand(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        h, found = torch.zeros(x.shape[0], WIDTH), []
        gru = m.gru
        for t in range(x.shape[1]):
            a = F.linear(x[:, t], gru.weight_ih_l0, gru.bias_ih_l0).chunk(3, -1)
            b = F.linear(h, gru.weight_hh_l0, gru.bias_hh_l0).chunk(3, -1)
            r, z = torch.sigmoid(a[0] + b[0]), torch.sigmoid(a[1] + b[1])
            h = (1 - z) * torch.tanh(a[2] + r * b[2]) + z * h
            found.append(h)
        return torch.stack(found, 1)

    a, b = Function(lambda m, x: m.gru(x)[0], gru=model), Function(by_hand, gru=model)
    with torch.no_grad():
        return nc.capture(a, (x,)), nc.capture(b, (x,))


def _low(a: nn.Module, b: nn.Module, x: torch.Tensor) -> tuple[Run, Run]:
    """Forward and backward of both in bf16."""
    runs = []
    for model in (a, b):
        model.zero_grad()  # they may share weights
        with nc.capture() as run, nc.autocast(torch.get_default_device().type, "bf16"):
            model(x).float().square().mean().backward()
        runs.append(run)
    return runs[0], runs[1]


def _cells() -> tuple[Run, Run]:
    """A GRU, and its cell step by step."""
    gru, x = _seeded(lambda: (nn.GRU(WIDTH, WIDTH, batch_first=True), torch.randn(2, 8, WIDTH)))
    cell = nn.GRUCell(WIDTH, WIDTH)
    cell.load_state_dict({name.removesuffix("_l0"): value for name, value in gru.state_dict().items()})

    def steps(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        h, found = torch.zeros(x.shape[0], WIDTH), []
        for t in range(x.shape[1]):
            h = m.g(x[:, t], h)
            found.append(h)
        return torch.stack(found, 1)

    return _low(Function(lambda m, x: m.g(x)[0], g=gru), Function(steps, g=cell), x)


def _heads() -> tuple[Run, Run]:
    """A sum over an index for all heads, and a product for each: what autograd adds up is no call of the other."""
    weight, x = _seeded(lambda: (nn.Parameter(torch.randn(HEADS, WIDTH, 8) / 6), torch.randn(2, 10, WIDTH)))
    head = nn.Linear(HEADS * 8, 8)
    a = Function(lambda m, x: m.head(torch.einsum("btd,hdk->bthk", x, m.w).flatten(2)), w=weight, head=head)
    b = Function(
        lambda m, x: m.head(torch.stack([x @ m.w[i] for i in range(HEADS)], 2).flatten(2)), w=weight, head=head
    )
    return _low(a, b, x)


def _transposed() -> tuple[Run, Run]:
    """A product with its bias, and one with a transposed weight to which a bias is added."""
    linear, x = _seeded(lambda: (nn.Linear(WIDTH, 2 * WIDTH), torch.randn(8, WIDTH)))
    w, bias = nn.Parameter(linear.weight.detach().t().contiguous()), nn.Parameter(linear.bias.detach().clone())
    a = Function(lambda m, x: F.gelu(m.layer(x)), layer=linear)
    return _low(a, Function(lambda m, x: F.gelu(x @ m.w + m.bias.bfloat16()), w=w, bias=bias), x)


def _fused(order: str, by_head: bool = False) -> Pair:
    """Queries, keys and values of one weight each, and of one for all, without modules that names would pair."""

    def heads(y: torch.Tensor) -> torch.Tensor:
        return y.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def attention(m: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(y.transpose(1, 2).flatten(2), m.out)

    def apart(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return attention(m, *(heads(F.linear(x, w)) for w in (m.q, m.k, m.v)))

    def at_once(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, m.fused)
        if by_head:
            return attention(m, *y.unflatten(-1, (HEADS, 3, -1)).transpose(1, 2).unbind(3))
        parts = dict(zip(order, map(heads, y.chunk(3, -1)), strict=True))
        return attention(m, *(parts[name] for name in "qkv"))

    def make() -> tuple[nn.Module, nn.Module, torch.Tensor]:
        given = {name: nn.Parameter(torch.randn(WIDTH, WIDTH) / 6) for name in ("q", "k", "v", "out")}
        parts = [given[name].detach() for name in order]
        fused = torch.stack([w.view(HEADS, -1, WIDTH) for w in parts], 1) if by_head else torch.cat(parts)
        other = Function(at_once, fused=nn.Parameter(fused.reshape(-1, WIDTH)), out=given["out"])
        return Function(apart, **given), other, torch.randn(2, 7, WIDTH)

    return lambda: _low(*_seeded(make))


def _by_hand() -> tuple[Run, Run]:
    """nn.MultiheadAttention, which computes tokens before sequences, and the same with sequences before tokens."""
    attention, x = _seeded(lambda: (nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), torch.randn(2, 7, WIDTH)))

    def by_hand(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        parts = F.linear(x, m.a.in_proj_weight, m.a.in_proj_bias).chunk(3, -1)
        y = F.scaled_dot_product_attention(*(part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts))
        return m.a.out_proj(y.transpose(1, 2).flatten(2))

    a = Function(lambda m, x: m.a(x, x, x, need_weights=False)[0], a=attention)
    return nc.capture(a, (x,)), nc.capture(Function(by_hand, a=attention), (x,))


def _encoders() -> tuple[Run, Run]:
    """torch's layer and one by hand; biases begin as zeros, which no value tells apart."""
    attention, x = _seeded(lambda: (nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), torch.randn(2, 7, WIDTH)))
    parts = {name: nn.Linear(WIDTH, WIDTH) for name in ("q", "k", "v", "out")}
    weights = [*attention.in_proj_weight.chunk(3), attention.out_proj.weight]
    for part, weight in zip(parts.values(), weights, strict=True):
        part.load_state_dict({"weight": weight, "bias": torch.zeros(WIDTH)})

    def by_hand(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (m.q, m.k, m.v))
        y = (q * (WIDTH // HEADS) ** -0.5 @ k.mT).softmax(-1) @ v
        return m.out(y.transpose(1, 2).flatten(2))

    a = Function(lambda m, x: m.a(x, x, x, need_weights=False)[0], a=attention)
    return _low(a, Function(by_hand, **parts), x)


def _rows_of_all_sizes() -> tuple[Run, Run]:
    """A norm that is written out, of rows of which a few are small; half of the rows one by one."""
    first, head = _seeded(lambda: (nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8)))
    x = torch.randn(2, 24, WIDTH) * torch.logspace(-3, 0, 24)[:, None]

    def norm(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, m.first.weight)
        return m.head(y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-12))

    b = Function(lambda m, x: torch.cat([norm(m, x[:, n : n + 1]) for n in range(24)], 1), first=first, head=head)
    with torch.no_grad():
        return nc.capture(Function(norm, first=first, head=head), (x,)), nc.capture(b, (x,))


def _decoders() -> tuple[Run, Run]:
    """Two blocks of a decoder with fused weights and torch's functions, and with neither: forward and backward."""
    x = torch.randn(2, 9, WIDTH)

    def block(m: nn.ModuleDict, x: torch.Tensor, is_fused: bool) -> torch.Tensor:
        y = m["n1"](x)
        parts = m["qkv"](y).chunk(3, -1) if is_fused else (m[name](y) for name in "qkv")
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        if is_fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores, seen = (q @ k.mT) / math.sqrt(WIDTH // HEADS), torch.ones(9, 9, dtype=torch.bool).tril()
            y = (
                scores.masked_fill(~seen, torch.finfo(scores.dtype).min).softmax(-1, dtype=torch.float32).to(v.dtype)
                @ v
            )
        x = x + m["o"](y.transpose(1, 2).flatten(2))
        return x + m["down"](F.gelu(m["up"](m["n2"](x))))

    def make(is_fused: bool) -> Function:
        sizes = {"o": (WIDTH, WIDTH), "up": (WIDTH, 64), "down": (64, WIDTH)}
        sizes |= {"qkv": (WIDTH, 3 * WIDTH)} if is_fused else dict.fromkeys("qkv", (WIDTH, WIDTH))
        layers = [{name: nn.Linear(*size) for name, size in sizes.items()} for _ in range(2)]
        blocks = [nn.ModuleDict(there | {n: nn.LayerNorm(WIDTH) for n in ("n1", "n2")}) for there in layers]
        return Function(lambda m, x: block(m.b[1], block(m.b[0], x, is_fused), is_fused), b=nn.ModuleList(blocks))

    fused, plain = _seeded(lambda: (make(True), make(False)))
    state = fused.state_dict()
    for name in [name for name in state if ".qkv." in name]:
        state |= {name.replace("qkv", n): part for n, part in zip("qkv", state.pop(name).chunk(3), strict=True)}
    plain.load_state_dict(state)
    return _low(fused, plain, x)


def _in_another_order() -> tuple[Run, Run]:
    """A sum of bf16 and fp32 from the other side, rows that are sorted and put back, and one norm of two copies."""
    linear, head, x = _seeded(lambda: (nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8), torch.randn(12, WIDTH)))
    order = x[:, 0].argsort()
    a = Function(lambda m, x: m.head(F.gelu(m.linear(x) + x)), linear=linear, head=head)
    b = Function(lambda m, x: m.head(F.gelu(x[order] + m.linear(x[order])))[order.argsort()], linear=linear, head=head)
    with torch.no_grad():
        return nc.capture(a, (x,), under="bf16"), nc.capture(b, (x,), under="bf16")


def _cosines() -> tuple[Run, Run]:
    """Cosines of all rows with all, and a product of rows of length one."""
    linear, x = _seeded(lambda: (nn.Linear(WIDTH, WIDTH), torch.randn(2, 7, WIDTH)))
    a = Function(lambda m, x: F.cosine_similarity(m.l(x)[:, :, None], m.l(x)[:, None], dim=-1) * 10, l=linear)

    def product(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = F.normalize(m.l(x), dim=-1)
        return y @ y.mT * 10

    with torch.no_grad():
        return nc.capture(a, (x,), under="bf16"), nc.capture(Function(product, l=linear), (x,), under="bf16")


def _folded() -> tuple[Run, Run]:
    """Convolutions with their norms, and with these in their weights."""
    norm = nn.BatchNorm2d(16)
    conv, x = _seeded(lambda: (nn.Conv2d(3, 16, 3), torch.randn(4, 3, 12, 12)))
    with torch.no_grad():
        for tensor in (norm.running_var, norm.weight):
            tensor.uniform_(0.5, 2)
        norm.running_mean.normal_()
    folded = nn.utils.fusion.fuse_conv_bn_eval(conv.eval(), norm.eval())
    a = Function(lambda m, x: m.norm(m.conv(x)).relu().mean((2, 3)), conv=conv, norm=norm)
    b = Function(lambda m, x: m.conv(x).relu().mean((2, 3)), conv=folded)
    with torch.no_grad():
        return nc.capture(a, (x,), under="bf16"), nc.capture(b, (x,), under="bf16")


def _time_first(often: int) -> Pair:
    """Time before batch, and a module that is called more than once in each step."""

    def made() -> tuple[Run, Run]:
        parts = _seeded(lambda: {"embed": nn.Embedding(VOCABULARY, WIDTH), "head": nn.Linear(WIDTH, VOCABULARY)})
        model = Function(lambda m, ids: m.head(sum(m.embed(ids.T.roll(n, 1)) for n in range(often))), **parts)
        ids = ids_of(3)
        with torch.no_grad():
            with nc.capture() as a:
                model(ids)
            with nc.capture() as b:
                for part in (ids[:, :PROMPT], *(ids[:, n : n + 1] for n in range(PROMPT, LENGTH))):
                    model(part)
        return a, b

    return made


def _copied() -> tuple[Run, Run]:
    """What a copy holds no call of a run made."""
    model, x = _seeded(lambda: (nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH)))
    return both(Function(lambda m, x: m.linear(x).float().clone().sin(), linear=model), (x,))


def _in_chunks() -> tuple[Run, Run]:
    """Attention of all queries at once, and of four at a time, with the backward: parts of calls, and sums of them."""
    torch.manual_seed(7)
    parts = nn.ModuleDict({name: nn.Linear(16, 16) for name in ("q", "k", "v")})

    class Whole(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.parts, self.size = parts, size

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (self.parts[name](x) for name in ("q", "k", "v"))
            rows = [(some @ k.mT / 4).softmax(-1) @ v for some in q.split(self.size, 1)]
            return torch.cat(rows, 1) if len(rows) > 1 else rows[0]

    x, target = torch.randn(2, 12, 16), torch.randn(2, 12, 16)
    loss = lambda y: (y.float() - target).square().mean()
    whole, chunks = (nc.capture(Whole(size), x, under="bf16", backward=loss) for size in (12, 4))
    return whole, chunks


SOUND: dict[str, Pair] = {
    "one attention, cache, batch 1": _cached(0, 1),
    "one attention, cache, batch 2": _cached(0, 2),
    "one attention, cache, batch 2, bf16": _cached(0, 2, "bf16"),
    "one attention, cache, written out": _cached(0, 2, written_out=True),
    "blocks, cache, batch 1": _cached(2, 1),
    "blocks, cache, batch 3, bf16": _cached(2, 3, "bf16"),
    "blocks, rope, cache, fp16": _cached(2, 2, "fp16", rope=True),
    "blocks, rope, written out, cache, bf16": _cached(2, 2, "bf16", rope=True, written_out=True),
    "time first, in parts": _time_first(1),
    "a module called twice, in parts": _time_first(2),
    "two attentions": _attentions,
    "attention in chunks, bf16, backward": _in_chunks,
    "two norms, backward": _norms,
    "a norm by hand in bf16": _layer_norms,
    "two losses, backward": _losses,
    "post-norm encoder in bf16": _encoder("bf16", False),
    "post-norm encoder in fp16, backward": _encoder("fp16", True),
    "graph in bf16": _graph,
    "experts in bf16": _experts,
    "images in bf16, backward": _images,
    "compiled": _compiled(None),
    "compiled in bf16": _compiled("bf16"),
    "a cell by hand": _recurrent,
    "a cell in bf16, backward": _cells,
    "heads one by one in bf16, backward": _heads,
    "a transposed weight in bf16, backward": _transposed,
    "a fused weight in bf16, backward": _fused("vqk"),
    "a weight fused by head in bf16, backward": _fused("qkv", by_head=True),
    "attention by hand": _by_hand,
    "two decoders in bf16, backward": _decoders,
    "two encoders in bf16, backward": _encoders,
    "rows of all sizes": _rows_of_all_sizes,
    "rows in another order in bf16": _in_another_order,
    "cosines in bf16": _cosines,
    "folded norms in bf16": _folded,
    "copies": _copied,
}


def _steep(function: Callable[[torch.Tensor], torch.Tensor]) -> Pair:
    """A function that may grow as fast as any, in fp32 and in fp16."""

    def made() -> tuple[Run, Run]:
        parts, x = _seeded(lambda: ({"a": nn.Linear(8, 12), "b": nn.Linear(12, 4)}, torch.randn(64, 8)))
        return both(Function(lambda m, x: m.b(function(m.a(x).float())), **parts), (x,), "fp16")

    return made


SOUND |= {
    f"{name} in fp16": _steep(function)
    for name, function in {
        "tan": lambda h: torch.tan(2 * h).clamp(-20, 20),
        "sinc": lambda h: torch.sinc(30 * h),
        "a quotient by what has two signs": lambda h: (h.roll(1, -1) / h).clamp(-50, 50),
        "lgamma": lambda h: torch.lgamma(3 * h),
        "a floor": lambda h: torch.div(h, 0.1, rounding_mode="floor"),
        "hardshrink": lambda h: F.hardshrink(h, 0.5),
        "places": lambda h: h.argsort(-1).float() * h,
    }.items()
}


# -- faults -----------------------------------------------------------------------------------------------------------


def _changed(change: Callable[[Decoder], object], steps: bool = False, tokens: bool = False, dtype: str = "",
             **given: object) -> Pair:  # fmt: skip
    """A decoder, and the same changed; run token by token, if that is asked for."""

    def made() -> tuple[Run, Run]:
        model = decoder(**given)
        other = like(model, **given)
        change(other)
        run = stepped if steps else whole
        return whole(model, 2, dtype, tokens), run(other, 2, dtype, tokens)

    return made


def _fault(n: int, fault: str) -> Callable[[Decoder], object]:
    return lambda model: setattr(model.blocks[n].attention, "fault", fault)


def _activation(model: Decoder) -> None:
    model.blocks[1].activation = lambda x: F.gelu(x, approximate="tanh")


def _dropout(model: Decoder) -> None:
    model.blocks[0].down = nn.Sequential(model.blocks[0].down, nn.Dropout(0.1).train())


def _swapped(model: Decoder) -> None:
    model.blocks[1].post = True


def _last(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Decoder], object]:
    return lambda model: setattr(model, "last", function)


def _rounded(y: torch.Tensor) -> torch.Tensor:
    return y.to(torch.float8_e5m2).to(y.dtype)


def _softmax_of(dim: int) -> Function:
    scores = torch.full((8, 8), -1e4).triu(1)
    return Function(lambda m, x: torch.softmax(m.linear(x) + scores.to(torch.bfloat16), dim), linear=nn.Linear(8, 8))


def _other_dimension() -> tuple[Run, Run]:
    a, b = _softmax_of(-1), _softmax_of(0)
    b.load_state_dict(a.state_dict())
    x = torch.randn(8, 8)
    with torch.no_grad():
        return nc.capture(a, (x,), under="bf16"), nc.capture(b, (x,), under="bf16")


def _untied() -> tuple[Run, Run]:
    model = decoder()
    model.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    model.head.weight = model.tokens.weight
    other = copy.deepcopy(model)
    other.head.weight = nn.Parameter(model.tokens.weight + 0.02 * torch.randn(VOCABULARY, WIDTH))
    return whole(model), whole(other)


FAULTS: dict[str, tuple[Pair, str]] = {
    "scale of attention": (_changed(_fault(1, "scale")), "blocks.1.attention"),
    "epsilon": (_changed(lambda m: setattr(m.blocks[1].norm1, "eps", 1e-2)), "blocks.1.norm1"),
    "a missing mask": (_changed(_fault(0, "mask")), "blocks.0.attention"),
    "a mask off by one, cached": (_changed(_fault(0, "mask by one"), True), "blocks.0.attention"),
    "an offset of rope": (_changed(_fault(1, "offset"), True, rope=True), "blocks.1.attention"),
    "a base of rope": (_changed(_fault(1, "base"), rope=True), "blocks.1.attention"),
    "a position off by one": (_changed(lambda m: setattr(m, "off_by", 1), True), "places"),
    "a softcap": (_changed(_last(lambda y: 2 * torch.tanh(y / 2)), tokens=True), "tanh"),
    "a temperature": (_changed(_last(lambda y: y / 0.9), tokens=True), "aten.div"),
    "a temperature, cached, bf16": (_changed(_last(lambda y: y / 0.9), True, True, dtype="bf16"), "aten.div"),
    "dropout left on": (_changed(_dropout), "blocks.0.down"),
    "tied weights broken": (_untied, "head"),
    "the order of norms": (_changed(_swapped), "blocks.1"),
    "a stale row of the cache": (_changed(_fault(1, "stale"), True), "blocks.1.attention"),
    "a rounding at the end": (_changed(_last(_rounded)), "_to_copy"),
    "a rounding between": (
        _changed(lambda m: setattr(m.blocks[1], "activation", lambda x: _rounded(F.gelu(x)))),
        "_to_copy",
    ),
    "a softmax of columns": (lambda: _seeded(_other_dimension), "softmax"),
    "gelu by tanh": (_changed(_activation), "blocks.1 aten.gelu"),
}


def _of_parts(
    function: Callable[..., torch.Tensor], dtype: str | None = None, **parts: Callable[[], nn.Module]
) -> Callable[[], tuple[Run, Run]]:
    """One program, right and with an argument that is another part, or comes from elsewhere. function: with a flag."""

    def made() -> tuple[Run, Run]:
        there, x = _seeded(lambda: ({name: make() for name, make in parts.items()}, torch.randn(2, 9, WIDTH)))
        given = {} if dtype is None else {"under": dtype}
        with torch.no_grad():
            runs = [nc.capture(Function(lambda m, x, w=wrong: function(m, x, w), **there), (x,), **given)
                    for wrong in (False, True)]  # fmt: skip
        return runs[0], runs[1]

    return made


def _halves(m: nn.Module, x: torch.Tensor, is_wrong: bool) -> torch.Tensor:
    gate, up = m.up(x).chunk(2, -1)
    return m.down(F.silu(up) * gate if is_wrong else F.silu(gate) * up)


def _keys_for_values(m: nn.Module, x: torch.Tensor, is_wrong: bool) -> torch.Tensor:
    q, k, v = (part[:, None] for part in m.qkv(x).chunk(3, -1))
    return F.scaled_dot_product_attention(q, v if is_wrong else k, k if is_wrong else v)


def _contiguous(m: nn.Module, x: torch.Tensor, is_wrong: bool) -> torch.Tensor:
    y = m.out(x.mT.contiguous().mT)
    y = (1.2 * y if is_wrong else y).unflatten(1, (3, 3)).transpose(1, 2).contiguous().flatten(1, 2)
    return 20 * x + y


def _continued(m: nn.Module, x: torch.Tensor, is_wrong: bool) -> torch.Tensor:
    first, state = m.gru(x[:, :4])
    return torch.cat([first, m.gru(x[:, 4:], None if is_wrong else state)[0]], 1)


FAULTS |= {
    "halves of a projection": (
        _of_parts(_halves, up=lambda: nn.Linear(WIDTH, 64), down=lambda: nn.Linear(32, 8)), "silu"),
    "keys for values": (_of_parts(_keys_for_values, qkv=lambda: nn.Linear(WIDTH, 96)), "scaled_dot_product_attention"),
    "another token": (
        _of_parts(lambda m, x, w: m.head(m.norm(x)[:, 0 if w else -1]), norm=lambda: nn.LayerNorm(WIDTH),
                  head=lambda: nn.Linear(WIDTH, 5)), "head"),
    "a residual of the norm": (
        _of_parts(lambda m, x, w: m.head((m.norm(x) if w else x) + F.gelu(m.norm(x))), norm=lambda: nn.LayerNorm(WIDTH),
                  head=lambda: nn.Linear(WIDTH, 5)), "add"),
    "a factor before a copy in bf16": (_of_parts(_contiguous, "bf16", out=lambda: nn.Linear(WIDTH, WIDTH)), "aten.mul"),
    "a state that is dropped": (_of_parts(_continued, gru=lambda: nn.GRU(WIDTH, WIDTH, batch_first=True)), "gru"),
    "an imaginary part": (
        _of_parts(lambda m, x, w: m.head(getattr(torch.fft.rfft(m.norm(x), dim=1), "imag" if w else "real")),
                  norm=lambda: nn.LayerNorm(WIDTH), head=lambda: nn.Linear(WIDTH, 5)), "head"),
}  # fmt: skip
