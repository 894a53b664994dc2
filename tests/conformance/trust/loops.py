"""Sound training loops: each takes a format, and gives one step to run. Under fp16 every loop scales its loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import sequences
import torch
import torch.nn.functional as F
from language import Language, T, ids, with_loss
from torch import Tensor, nn

X, Y = torch.linspace(-1, 1, 256).reshape(16, 16).sin(), torch.arange(16) % 4


Step = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Loop:
    """One of the corpus. make: of a format, a step to run."""

    name: str
    family: str
    make: Callable[[torch.dtype], Step]


def net(*widths: int) -> nn.Sequential:
    widths = widths or (16, 32, 4)
    layers = [layer for i, o in pairwise(widths) for layer in (nn.Linear(i, o), nn.GELU())]
    return nn.Sequential(*layers[:-1])


class Trainer:
    """What a loop has: a model, its optimizer with a scaler, and a region."""

    def __init__(self, dtype: torch.dtype, model: nn.Module, kind: Any = torch.optim.AdamW, **options: Any) -> None:
        self.dtype, self.model = dtype, model
        self.optimizer = kind([p for p in model.parameters() if p.requires_grad], **({"lr": 1e-3} | options))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4096.0, enabled=dtype is torch.float16)

    def region(self) -> Any:
        return torch.autocast("cpu", self.dtype)

    def step(self, loss: Tensor, clip: float | None = None) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.end(clip)

    def end(self, clip: float | None = None) -> None:
        if clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()


def plain(dtype, loss=F.cross_entropy, **options):
    t = Trainer(dtype, net(), **options)

    def step():
        with t.region():
            lost = loss(t.model(X), Y)
        t.step(lost)

    return step


def loss_outside(dtype, clip=None):
    t = Trainer(dtype, net(), torch.optim.SGD, lr=0.1, momentum=0.9)

    def step():
        with t.region():
            y = t.model(X)
        t.step(F.cross_entropy(y.float(), Y), clip)

    return step


def accumulated(dtype):
    t = Trainer(dtype, net())

    def step():
        t.optimizer.zero_grad()
        for x, y in zip(X.chunk(4), Y.chunk(4), strict=True):
            with t.region():
                loss = F.cross_entropy(t.model(x), y) / 4
            t.scaler.scale(loss).backward()
        t.end(1.0)

    return step


def average(dtype):
    t = Trainer(dtype, net())
    mean = torch.optim.swa_utils.AveragedModel(t.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99))

    def step():
        with t.region():
            loss = F.cross_entropy(t.model(X), Y)
        t.step(loss)
        mean.update_parameters(t.model)

    return step


def adversarial(dtype):
    maker, judge = Trainer(dtype, net(8, 32, 16)), Trainer(dtype, net(16, 32, 1))

    def step():
        with judge.region():
            made = maker.model(X[:, :8])
            real, false = judge.model(X), judge.model(made.detach())
            ones, zeros = torch.ones_like(real), torch.zeros_like(false)
            loss = F.binary_cross_entropy_with_logits(real, ones) + F.binary_cross_entropy_with_logits(false, zeros)
        judge.step(loss)
        with maker.region():
            loss = F.binary_cross_entropy_with_logits(judge.model(made), ones)
        maker.step(loss)

    return step


def queue(dtype):
    """A key encoder that follows, and keys in an fp32 queue."""
    t = Trainer(dtype, net(16, 32, 8))
    keys, follower = F.normalize(torch.randn(32, 8), dim=-1), copy.deepcopy(t.model)

    def step():
        with torch.no_grad(), t.region():
            key = F.normalize(follower(X + 0.01), dim=-1)
        with t.region():
            query = F.normalize(t.model(X), dim=-1)
            scores = torch.cat([(query * key).sum(-1, keepdim=True), query @ keys.T], -1) / 0.1
            loss = F.cross_entropy(scores, torch.zeros(16, dtype=torch.long))
        t.step(loss)
        keys.copy_(torch.cat([key.to(keys.dtype), keys[:16]]))
        with torch.no_grad():
            for slow, fast in zip(follower.parameters(), t.model.parameters(), strict=True):
                slow.mul_(0.99).add_(fast, alpha=0.01)

    return step


def two_losses(dtype):
    t, head = Trainer(dtype, net()), nn.Linear(4, 1)

    def step():
        with t.region():
            y = t.model(X)
            first = F.cross_entropy(y, Y)
        second = F.mse_loss(head(y.float())[:, 0], Y.float())
        t.step(first + 0.1 * second)

    return step


def adapters(dtype):
    t = Trainer(dtype, sequences.lora_of_layers().model)

    def step():
        with t.region():
            loss = F.mse_loss(t.model(X.repeat(1, 2)).float(), X.repeat(1, 2).cos())
        t.step(loss)

    return step


def checkpointed(dtype):
    t, tokens = Trainer(dtype, with_loss(Language(checkpointed=True))), ids(2, T)

    def step():
        with t.region():
            loss = t.model(tokens)
        t.step(loss, 1.0)

    return step


def penalty(dtype):
    """The gradient with respect to the input, in fp32, as WGAN-GP has it."""
    t = Trainer(dtype, net(16, 32, 1))

    def step():
        x = X.clone().requires_grad_()
        [slope] = torch.autograd.grad(t.model(x).sum(), x, create_graph=True)
        with t.region():
            y = t.model(X).float().mean()
        t.step(y + (slope.norm(2, -1) - 1).square().mean())

    return step


def decayed(dtype):
    """Groups, a schedule, and an evaluation after the step."""
    t = Trainer(dtype, net(), torch.optim.AdamW, weight_decay=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(t.optimizer, lambda n: min(1.0, (n + 1) / 4))

    def step():
        with t.region():
            loss = F.cross_entropy(t.model(X), Y, label_smoothing=0.1)
        t.step(loss, 1.0)
        schedule.step()
        with torch.no_grad(), t.region():
            t.model(X).argmax(-1)

    return step


LOOPS = [
    Loop("plain", "loop", plain),
    Loop("sgd_outside", "loop", loss_outside),
    Loop("clipped", "loop", lambda dtype: loss_outside(dtype, 1.0)),
    Loop("foreach", "loop", lambda dtype: plain(dtype, foreach=True)),
    Loop("adagrad", "loop", lambda dtype: plain(dtype, kind=torch.optim.Adagrad)),
    Loop("schedule", "loop", decayed),
    Loop("four_parts", "gradient accumulation", accumulated),
    Loop("averaged_model", "EMA", average),
    Loop("two_optimizers", "GAN", adversarial),
    Loop("penalty", "GAN", penalty),
    Loop("queue", "metric learning", queue),
    Loop("two_losses", "loop", two_losses),
    Loop("adapters", "LoRA", adapters),
    Loop("checkpointed_loop", "checkpointing", checkpointed),
]


def moved_by(step: Step) -> list[Tensor]:
    """Weights of the models, and the tensors, that a step's closure holds."""
    held = [cell.cell_contents for cell in step.__closure__ or ()]
    modules = [getattr(value, "model", value) for value in held]
    tensors = [t for m in modules if isinstance(m, nn.Module) for t in (*m.parameters(), *m.buffers())]
    return tensors + [value for value in held if isinstance(value, Tensor)]
