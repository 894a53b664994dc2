"""What the examples share: handwritten digits, a residual network, and the plain loop that each must equal.

`python NAME.py --dtype fp16` runs one of them; `torchrun --nproc-per-node 2 NAME.py` two processes of it, where it can.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, TensorDataset

import narrowcast as nc

EPOCHS, MICRO_BATCHES, ACCUMULATED, BATCH, CLIP = 4, 12, 2, 32, 1.0
STEPS = EPOCHS * MICRO_BATCHES // ACCUMULATED


def policy_for(head: str) -> nc.Policy:
    """Native, with the logits in fp32; `head` is the path of the last layer."""
    return nc.Policy.native().with_rules(
        nc.Rule("aten.linear", "full", module=head, reason="logits in fp32"), name="digits"
    )


POLICY = policy_for("head")


class Block(nn.Module):
    """Two convolutions with batch norms, and what they are added to."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images of `channels`, 8 x 8."""
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class ResNet(nn.Module):
    """A residual network for images of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1)
        self.blocks = nn.Sequential(Block(16), Block(16))
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Logits of ten digits."""
        return self.head(self.blocks(F.relu(self.stem(x))).mean((2, 3)))


def make() -> tuple[ResNet, torch.optim.Optimizer]:
    """The same network each time, and its optimizer."""
    torch.manual_seed(0)
    model = ResNet()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def data(processes: int = 1) -> Dataset:
    """Images and labels for an epoch of each process."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    count = MICRO_BATCHES * BATCH * processes
    return TensorDataset(images[:count], torch.tensor(digits.target)[:count])


def loader() -> DataLoader:
    """Batches in their order."""
    return DataLoader(data(), BATCH)


def held_out() -> DataLoader:
    """Images that no one trains on."""
    digits = load_digits()
    images = torch.tensor(digits.images[1500:], dtype=torch.float32).unsqueeze(1) / 16
    return DataLoader(TensorDataset(images, torch.tensor(digits.target[1500:])), 99)


def plain_losses(dtype: str, batches: Callable[[], Iterator], parallel: bool = False) -> list[float]:
    """The loop without a framework: nc.autocast, and torch's own scaler where the format is fp16."""
    model, optimizer = make()
    net = DistributedDataParallel(model) if parallel else model
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == "fp16")
    losses = []
    for _ in range(EPOCHS):
        for number, (x, target) in enumerate(batches(), 1):
            last = number % ACCUMULATED == 0
            with net.no_sync() if parallel and not last else nullcontext():
                with nc.autocast("cpu", dtype, policy=POLICY):
                    loss = F.cross_entropy(net(x), target)
                losses.append(loss.item())
                scaler.scale(loss / ACCUMULATED).backward()
            if last:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
    return losses


@dataclass(frozen=True, slots=True)
class Asked:
    """How an example is run."""

    dtype: str
    folder: Path


def asked() -> Asked:
    """From the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16"))
    return Asked(parser.parse_args().dtype, Path(tempfile.mkdtemp()))


def tell(name: str, losses: list[float], plain: list[float], resumed: list[float], accuracy: float) -> None:
    """Say how the losses compare; exit with 1 if a bit differs."""
    half = len(plain) // 2
    print(f"{name}: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} micro-batches, accuracy {accuracy:.2f}")
    same, again = losses == plain, resumed == plain[half:]
    print(f"  as the plain loop, bit for bit: {same}; after a checkpoint in the middle: {again}")
    if not (same and again) or not losses[-1] < losses[0]:
        raise SystemExit(f"{name}: losses differ\n{losses}\n{plain}\n{resumed}")
