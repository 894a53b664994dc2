"""Models from torch alone, at the sizes that people run; and a few of other packages, with random weights.

Three scales: `small` for a test on a cpu, `middle` for conformance, `real` for benchmarks.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch
from context import Skip
from torch import nn
from torch.nn import functional as F

Made = tuple[nn.Module, tuple]
SMALL, MIDDLE, REAL = "small", "middle", "real"


def _pick(scale: str, small: object, middle: object, real: object) -> object:
    return {SMALL: small, MIDDLE: middle, REAL: real}[scale]


class Block(nn.Module):
    """A transformer's block, norms first, with fused projections and torch's attention."""

    def __init__(self, width: int, heads: int, causal: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        made = self.qkv(self.norm(x)).view(rows, tokens, 3, self.heads, width // self.heads)
        q, k, v = made.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.dropout(self.out(y.transpose(1, 2).reshape(rows, tokens, width)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class Encoder(nn.Module):
    """Blocks over vectors, a norm and a head."""

    def __init__(self, layers: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads, False, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.softmax(self.head(self.norm(x)), -1)


class Gpt(nn.Module):
    """A decoder that learns the next token: embeddings, causal blocks, logits and their loss."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, tokens: int, dropout: float) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width, heads, True, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class DecodeBlock(nn.Module):
    """One Llama block at one token, its keys and values given."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        shape = (x.shape[0], 1, self.heads, -1)
        q, k, v = (f(y).view(shape).transpose(1, 2) for f in (self.q, self.k, self.v))
        keys, values = torch.cat([keys.to(k.dtype), k], 2), torch.cat([values.to(v.dtype), v], 2)
        y = F.scaled_dot_product_attention(q, keys, values)
        x = x + self.o(y.transpose(1, 2).reshape(x.shape))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decode(nn.Module):
    """A Llama-style decode step at batch 1."""

    def __init__(self, layers: int, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DecodeBlock(width, heads, inner) for _ in range(layers))

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, keys, values)
        return x


class Bottleneck(nn.Module):
    """ResNet's block of three convolutions."""

    def __init__(self, came: int, planes: int, stride: int) -> None:
        super().__init__()
        made = 4 * planes
        self.conv1, self.bn1 = nn.Conv2d(came, planes, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3, self.bn3 = nn.Conv2d(planes, made, 1, bias=False), nn.BatchNorm2d(made)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or came != made:
            self.shortcut = nn.Sequential(nn.Conv2d(came, made, 1, stride, bias=False), nn.BatchNorm2d(made))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        y = torch.relu(self.bn2(self.conv2(y)))
        return torch.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-50 for (3, 4, 6, 3) blocks of 64 planes and more."""

    def __init__(self, blocks: tuple[int, ...], planes: int) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, planes, 7, 2, 3, bias=False), nn.BatchNorm2d(planes)
        self.pool = nn.MaxPool2d(3, 2, 1)
        layers: list[nn.Module] = []
        came = planes
        for stage, count in enumerate(blocks):
            for number in range(count):
                width = planes * 2**stage
                layers.append(Bottleneck(came, width, 2 if stage and not number else 1))
                came = 4 * width
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(came, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.pool(torch.relu(self.bn(self.conv(x)))))
        return self.head(x.mean((2, 3)))


class Lstm(nn.Module):
    """Two layers of LSTM and a head."""

    def __init__(self, came: int, hidden: int) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(came, hidden, 2, batch_first=True), nn.Linear(hidden, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.head(self.lstm(x)[0]))


def mlp(scale: str) -> Made:
    width, rows = _pick(scale, (64, 8), (512, 256), (4096, 4096))
    layers = [nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 256)]
    return nn.Sequential(*layers), (torch.randn(rows, width),)


def encoder(scale: str, dropout: float = 0.0) -> Made:
    layers, width, heads, tokens, rows = _pick(scale, (2, 32, 2, 16, 2), (2, 256, 4, 128, 4), (4, 1024, 16, 512, 32))
    return Encoder(layers, width, heads, dropout), (torch.randn(rows, tokens, width),)


def gpt(scale: str, dropout: float = 0.0) -> Made:
    layers, width, heads, vocabulary, tokens, rows = _pick(
        scale, (2, 32, 2, 64, 16, 2), (2, 256, 4, 1024, 128, 4), (4, 1024, 16, 32768, 1024, 8)
    )
    model = Gpt(layers, width, heads, vocabulary, tokens, dropout)
    return model, (torch.randint(0, vocabulary, (rows, tokens)),)


def decode(scale: str) -> Made:
    layers, width, heads, inner, before = _pick(scale, (2, 64, 4, 128, 8), (2, 512, 8, 1408, 64),
                                                (4, 4096, 32, 11008, 512))  # fmt: skip
    cache = torch.randn(1, heads, before, width // heads)
    return Decode(layers, width, heads, inner), (torch.randn(1, 1, width), cache, cache.clone())


def resnet50(scale: str) -> Made:
    blocks, planes, side, rows = _pick(
        scale, ((1, 1), 8, 32, 2), ((1, 1, 1, 1), 16, 64, 4), ((3, 4, 6, 3), 64, 224, 64)
    )
    return ResNet(blocks, planes), (torch.randn(rows, 3, side, side),)


def lstm(scale: str) -> Made:
    came, hidden, tokens, rows = _pick(scale, (16, 24, 5, 3), (64, 96, 16, 8), (512, 1024, 128, 64))
    return Lstm(came, hidden), (torch.randn(rows, tokens, came),)


def lstm_odd(scale: str) -> Made:
    """Sizes that are no multiples of anything: what a library packs into one buffer has gaps then."""
    del scale
    return Lstm(19, 37), (torch.randn(3, 7, 19),)


# -- of other packages, where they are ---------------------------------------------------------------------------------


def _needs(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise Skip(f"the package {package} is not installed")


def timm_convnext(scale: str) -> Made:
    _needs("timm")
    import timm

    name, side, rows = _pick(scale, ("convnext_atto", 64, 1), ("convnext_atto", 96, 2), ("convnext_tiny", 224, 64))
    return timm.create_model(name, pretrained=False), (torch.randn(rows, 3, side, side),)


def transformers_bert(scale: str) -> Made:
    _needs("transformers")
    import transformers

    layers, width, heads, rows, tokens = _pick(scale, (1, 32, 2, 2, 8), (2, 256, 4, 4, 64), (6, 768, 12, 32, 256))
    config = transformers.BertConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width
    )
    return transformers.BertModel(config), (torch.randint(0, 1000, (rows, tokens)),)


def transformers_llama(scale: str) -> Made:
    _needs("transformers")
    import transformers

    layers, width, heads, rows, tokens = _pick(scale, (1, 32, 2, 1, 8), (2, 256, 4, 2, 64), (4, 2048, 16, 8, 512))
    config = transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads, num_key_value_heads=heads // 2,
        intermediate_size=11 * width // 4, vocab_size=1024, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), (torch.randint(0, 1000, (rows, tokens)),)


SUBJECTS: dict[str, Callable[[str], Made]] = {
    f.__name__: f
    for f in (mlp, encoder, gpt, decode, resnet50, lstm, lstm_odd, timm_convnext, transformers_bert, transformers_llama)
}


def make(name: str, scale: str, device: str, trains: bool = False, dropout: float = 0.0) -> Made:
    """The model on its device, in fp32, with its arguments. Skip if it needs a package that is not there."""
    torch.manual_seed(0)
    more = {"dropout": dropout} if dropout else {}
    model, args = SUBJECTS[name](scale, **more)
    return model.to(device).train(trains), tuple(a.to(device) for a in args)
