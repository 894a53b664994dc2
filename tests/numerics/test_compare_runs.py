"""Two runs that are not alike: who computes in other formats, who makes a difference, and what only carries it on."""

import string

import pytest
import torch
from torch import nn
from torch.nn import functional

import narrowcast as nc

WIDTH, HEADS, LAYERS, LENGTH = 32, 4, 2, 24


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Trainer(nn.Module):
    """A GPT as one writes it to train it."""

    def __init__(self, vocabulary):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, ids):
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class CachedAttention(nn.Module):
    """Fused projections, a cache, attention written out."""

    def __init__(self):
        super().__init__()
        self.qkv_proj, self.o_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, cache):
        parts = self.qkv_proj(x).split(WIDTH, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        if cache:
            k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
        cache.update(k=k, v=v)
        scores = torch.matmul(q, k.transpose(-1, -2)) / (WIDTH // HEADS) ** 0.5
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        y = torch.matmul(scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_norm, self.post_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.self_attn = CachedAttention()
        self.gate_up, self.down_proj = nn.Linear(WIDTH, 128), nn.Linear(64, WIDTH)

    def forward(self, x, cache):
        x = x + self.self_attn(self.input_norm(x), cache)
        gate, up = self.gate_up(self.post_norm(x)).chunk(2, -1)
        return x + self.down_proj(functional.silu(gate) * up)


class Engine(nn.Module):
    """The same function as one writes it to serve it."""

    def __init__(self, vocabulary):
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocabulary, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.final_norm, self.lm_head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocabulary, bias=False)

    def forward(self, ids, caches, start=0):
        x = self.embed(ids) + self.positions(torch.arange(start, start + ids.shape[1]))
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache)
        x = self.final_norm(x)
        return self.lm_head(x.to(self.lm_head.weight.dtype)).float()


def served(trainer):
    """An engine with the weights of a trainer."""
    engine = Engine(trainer.tokens.num_embeddings)
    state, made = trainer.state_dict(), {}
    names = {"tokens": "embed", "places": "positions", "norm": "final_norm", "head": "lm_head", "norm1": "input_norm",
             "norm2": "post_norm", "attention.out": "self_attn.o_proj", "down": "down_proj"}  # fmt: skip
    for name, value in state.items():
        path, _, leaf = name.rpartition(".")
        block, _, part = path.removeprefix("blocks.").partition(".") if path.startswith("blocks.") else ("", "", path)
        prefix = f"layers.{block}." if block else ""
        if part in names:
            made[f"{prefix}{names[part]}.{leaf}"] = value
        elif part in ("attention.q", "gate"):
            others = ("attention.k", "attention.v") if part == "attention.q" else ("up",)
            parts = [value, *(state[f"blocks.{block}.{other}.{leaf}"] for other in others)]
            made[f"{prefix}{'self_attn.qkv_proj' if others[-1] != 'up' else 'gate_up'}.{leaf}"] = torch.cat(parts)
    engine.load_state_dict(made)
    return engine.eval()


@pytest.fixture(scope="module")
def text():
    """Text that ships with Python, as numbers."""
    words = " ".join(filter(None, (getattr(str, n).__doc__ for n in dir(str)))) + string.printable
    letters = sorted(set(words))
    return torch.tensor([letters.index(c) for c in words]), len(letters)


@pytest.fixture(scope="module")
def trainer(text):
    numbers, vocabulary = text
    torch.manual_seed(0)
    model = Trainer(vocabulary)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        starts = torch.randint(0, len(numbers) - LENGTH, (8,))
        ids = torch.stack([numbers[s : s + LENGTH] for s in starts])
        optimizer.zero_grad()
        functional.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
    return model.eval()


@pytest.fixture(scope="module")
def ids(text):
    return text[0][100 : 100 + LENGTH][None]


@torch.no_grad()
def trained(trainer, ids):
    return nc.capture(trainer, (ids,), tokens=ids)


@torch.no_grad()
def generated(engine, ids, prompt=16):
    """The prompt at once, then token by token, as an engine does it; the tokens are given."""
    with nc.capture() as run:
        caches = [{} for _ in range(LAYERS)]
        logits = [engine(ids[:, :prompt], caches)]
        logits += [engine(ids[:, n : n + 1], caches, n) for n in range(prompt, LENGTH)]
        values = torch.cat(logits, 1)[:, :-1].double().log_softmax(-1)
    run.keep_tokens(ids[:, 1:], values.gather(-1, ids[:, 1:, None]))
    return run


class TestTrainerAndEngine:
    """Other modules, fused projections, a cache, another attention: one function."""

    def test_equal_weights_are_alike_and_each_call_is_compared_or_listed(self, trainer, ids):
        a, b = trained(trainer, ids), generated(served(trainer), ids)
        found = nc.compare_runs(a, b)
        assert found.verdict == "round-off" and not found.formats and not found.producers, str(found)
        assert found.tokens.count == LENGTH - 1 and found.tokens.largest < 1e-4
        listed = {name for row in found.rows for name in row.a} | {one.id for one in found.unaligned if one.run == "a"}
        assert listed == {call.id for call in a.calls}
        fused = {" + ".join(str(n) for n in row.a): str(row.b[0]) for row in found.rows if len(row.a) > 1}
        print(fused)
        print(str(nc.report.run_differences.run_differences_text(found, True)))
        print(found.mapping)

    def test_a_wrong_epsilon_and_a_bf16_head_are_named_and_nothing_else(self, trainer, ids):
        engine = served(trainer)
        engine.layers[1].input_norm.eps = 1e-2
        engine.lm_head.bfloat16()
        found = nc.compare_runs(trained(trainer, ids), generated(engine, ids))
        print(found)
        assert [str(row.b[0]) for row in found.formats] == ["lm_head aten.mm.default #1"]
        assert [str(row.b[0]) for row in found.producers] == ["layers.1.input_norm aten.native_layer_norm.default #1"]
        assert found.first_value.given == (("eps", "1e-05", "0.01"),)
