"""Steps of training as scripts have them, for tests of `nc.check_training`: a small image model, and right steps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import narrowcast as nc

BF16, FP16 = torch.bfloat16, torch.float16


class Net(nn.Module):
    """A convolution with a batch norm, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(4 * 6 * 6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.body(x))
        return y


class Loop:
    """What a training script has."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.optimizer = optimizer(self.net.parameters(), lr=0.01, **options)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.x, self.y = torch.randn(4, 1, 8, 8), torch.arange(4)

    def state(self) -> list[torch.Tensor]:
        held = [*self.net.state_dict().values(), torch.get_rng_state()]
        states = [v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
        return [t.clone() for t in (*held, *states, torch.tensor(self.scaler.get_scale()))]


def region(dtype: torch.dtype, **options: Any) -> Any:
    return torch.autocast("cpu", dtype, **options)


# -- right loops -------------------------------------------------------------------------------------------------------


def plain_bf16(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    with region(BF16):
        loss = cross_entropy(loop.net(loop.x), loop.y)
    loss.backward()
    loop.optimizer.step()


def ours_bf16(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    with nc.autocast("cpu", BF16, policy="safe"):
        loss = cross_entropy(loop.net(loop.x), loop.y)
    loss.backward()
    loop.optimizer.step()


def scaled_fp16(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    with region(FP16):
        loss = cross_entropy(loop.net(loop.x), loop.y)
    loop.scaler.scale(loss).backward()
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()


def clipped_fp16(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    with region(FP16):
        loss = cross_entropy(loop.net(loop.x), loop.y)
    loop.scaler.scale(loss).backward()
    loop.scaler.unscale_(loop.optimizer)
    clip_grad_norm_(loop.net.parameters(), 0.1)
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()


def accumulated(loop: Loop) -> None:
    with region(BF16):
        losses = [cross_entropy(loop.net(x), y) / 2 for x, y in zip(loop.x.split(2), loop.y.split(2), strict=True)]
    for loss in losses:
        loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def gradient_penalty(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    x = loop.x.clone().requires_grad_()
    with region(FP16):
        loss = cross_entropy(loop.net(x), loop.y)
    (scaled,) = torch.autograd.grad(loop.scaler.scale(loss), x, create_graph=True)
    unscaled = scaled / loop.scaler.get_scale()
    with region(FP16):
        loss = loss + unscaled.pow(2).sum().sqrt()
    loop.scaler.scale(loss).backward()
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()


def evaluated(loop: Loop) -> None:
    plain_bf16(loop)
    loop.net.eval()
    with torch.no_grad(), region(BF16):
        loop.net(loop.x)
    loop.net.train()


def part_in_fp32(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    with region(BF16):
        features = loop.net.body(loop.x)
        with region(BF16, enabled=False):
            out = loop.net.head(features.float())
        loss = cross_entropy(out, loop.y)
    loss.backward()
    loop.optimizer.step()


def clipped_values(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    with region(BF16):
        loss = cross_entropy(loop.net(loop.x), loop.y)
    loss.backward()
    clip_grad_value_(loop.net.parameters(), 0.1)
    loop.optimizer.step()


def two_losses(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    with region(FP16):
        out = loop.net(loop.x)
        first, second = cross_entropy(out, loop.y), out.float().square().mean()
    loop.scaler.scale(first).backward(retain_graph=True)
    loop.scaler.scale(second).backward()
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()


RIGHT = [
    plain_bf16, ours_bf16, scaled_fp16, clipped_fp16, accumulated, gradient_penalty, evaluated, clipped_values,
    two_losses, part_in_fp32,
]  # fmt: skip
