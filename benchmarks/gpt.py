"""A small language model that is trained here: bytes of Python's standard library in, the next byte out.

    python benchmarks/gpt.py

trains it into build/gpt.pt if it is not there yet (some minutes on two cores; begun again, it goes on from its last
checkpoint), and says its loss on files that it has not seen. `trained()` does the same and returns it. 1.3 M
parameters: 4 blocks of width 160, 4 heads, rotary positions, pre-norm, a head that shares the embedding's weight.
"""

import hashlib
import math
import sys
import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, BLOCKS, CONTEXT, BYTES = 160, 4, 4, 128, 256
STEPS, ROWS, WARM_UP, RATE, CHECKPOINT = 1500, 16, 100, 2e-3, 100
KEPT = Path(__file__).parents[1] / "build" / "gpt.pt"


class Block(nn.Module):
    """Attention with rotary positions, and two linear layers, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(turned(q, turns), turned(k, turns), v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


def turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Turn pairs of elements by the angles of their positions. turns: cosines and sines, [2, T, half a head]."""
    (cos, sin), (one, two) = turns.to(x.dtype), x.chunk(2, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


class GPT(nn.Module):
    """Logits [N, T, 256] of ids [N, T]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, WIDTH)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(BLOCKS)), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, BYTES, bias=False)
        self.head.weight = self.embedding.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        half = WIDTH // HEADS // 2
        angles = torch.arange(ids.shape[1])[:, None] * 1e4 ** (-torch.arange(half) / half)
        x, turns = self.embedding(ids), torch.stack([angles.cos(), angles.sin()])
        for block in self.blocks:
            x = block(x, turns)
        return self.head(self.norm(x))


def text(*, is_held_out: bool) -> torch.Tensor:
    """Bytes of the standard library's modules; one file in twenty, by its name, is held out."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [p for folder in (root, root / "asyncio", root / "email", root / "json") for p in folder.glob("*.py")]
    chosen = [p for p in sorted(files) if (hashlib.sha256(p.name.encode()).digest()[0] % 20 == 0) == is_held_out]
    return torch.frombuffer(bytearray(b"\n".join(p.read_bytes() for p in chosen)), dtype=torch.uint8)


def windows(data: torch.Tensor, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and the next ones, [count, CONTEXT] both."""
    starts = torch.randint(len(data) - CONTEXT - 1, (count,), generator=torch.Generator().manual_seed(seed))
    rows = torch.stack([data[start : start + CONTEXT + 1] for start in starts.tolist()]).long()
    return rows[:, :-1], rows[:, 1:]


def loss_of(model: nn.Module, ids: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Cross entropy, in nats a byte."""
    return F.cross_entropy(model(ids).flatten(0, 1).float(), wanted.flatten())


def rate_at(step: int) -> float:
    """Linear warm-up, then half a cosine down to a twentieth."""
    falls = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / STEPS))
    return RATE * min(1.0, (step + 1) / WARM_UP) * falls


def train(path: Path = KEPT) -> None:
    """Train it, or what is left of it."""
    torch.manual_seed(0)
    model, data, first = GPT(), text(is_held_out=False), 0
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    begun = path.with_suffix(".begun")
    if begun.exists():
        kept = torch.load(begun, weights_only=True)
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        first = kept["step"]
    path.parent.mkdir(exist_ok=True)
    for step in range(first, STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step)
        loss = loss_of(model, *windows(data, ROWS, step))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % CHECKPOINT == 0:
            sys.stdout.write(f"{step + 1} of {STEPS} steps: {loss.item():.3f} nats a byte\n")
            sys.stdout.flush()
            kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(kept, begun)
    torch.save(model.state_dict(), path)
    begun.unlink(missing_ok=True)


def trained() -> GPT:
    """Return the trained model; trains it first, if that was not done here."""
    if not KEPT.exists():
        train()
    model = GPT()
    model.load_state_dict(torch.load(KEPT, weights_only=True))
    return model.eval()


if __name__ == "__main__":
    one = trained()
    with torch.no_grad():
        held = loss_of(one, *windows(text(is_held_out=True), 128, 0)).item()
    sys.stdout.write(f"{sum(p.numel() for p in one.parameters()):,} parameters, held out {held:.3f} nats a byte\n")
