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
from language import Language, with_loss
from program import DEVICE
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
        self.scaler = torch.amp.GradScaler(DEVICE, init_scale=4096.0, enabled=dtype is torch.float16)

    def region(self) -> Any:
        return torch.autocast(DEVICE, self.dtype)

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


def of_loss(lost: Callable[[Trainer], Tensor], model: Callable[[], nn.Module] = net, clip: float | None = None,
            **options: Any) -> Callable[[torch.dtype], Step]:  # fmt: skip
    """A loop that takes a loss, and steps."""

    def make(dtype: torch.dtype) -> Step:
        t = Trainer(dtype, model(), **options)
        return lambda: t.step(lost(t), clip)

    return make


def inside(t):
    with t.region():
        return F.cross_entropy(t.model(X), Y)


def outside(t):
    with t.region():
        y = t.model(X)
    return F.cross_entropy(y.float(), Y)


def two_losses(t):
    with t.region():
        y = t.model[0](X)
        first = F.cross_entropy(y, Y)
    return first + 0.1 * F.mse_loss(t.model[1](y.float())[:, 0], Y.float())


def adapted(t):
    with t.region():
        return F.mse_loss(t.model(X.repeat(1, 2)).float(), X.repeat(1, 2).cos())


def recomputed(t):
    with t.region():
        return t.model((torch.arange(24).reshape(2, 12) * 7) % 50)


def penalised(t):
    """The gradient with respect to the input, in fp32, as WGAN-GP has it."""
    x = X.clone().requires_grad_()
    [slope] = torch.autograd.grad(t.model(x).sum(), x, create_graph=True)
    with t.region():
        y = t.model(X).float().mean()
    return y + (slope.norm(2, -1) - 1).square().mean()


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


recomputing = lambda: with_loss(Language(checkpointed=True))
SGD = {"kind": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}
LOOPS = [
    Loop("plain", "loop", of_loss(inside)),
    Loop("foreach", "loop", of_loss(inside, foreach=True)),
    Loop("adagrad", "loop", of_loss(inside, kind=torch.optim.Adagrad)),
    Loop("sgd_outside", "loop", of_loss(outside, **SGD)),
    Loop("clipped", "loop", of_loss(outside, clip=1.0, **SGD)),
    Loop("two_losses", "loop", of_loss(two_losses, lambda: nn.Sequential(net(), nn.Linear(4, 1)))),
    Loop("schedule", "loop", decayed),
    Loop("adapters", "LoRA", of_loss(adapted, lambda: sequences.lora_of_layers().model)),
    Loop("checkpointed_loop", "checkpointing", of_loss(recomputed, recomputing, 1.0)),
    Loop("penalty", "GAN", of_loss(penalised, lambda: net(16, 32, 1))),
    Loop("two_optimizers", "GAN", adversarial),
    Loop("four_parts", "gradient accumulation", accumulated),
    Loop("averaged_model", "EMA", average),
    Loop("queue", "metric learning", queue),
]


def moved_by(step: Step) -> list[Tensor]:
    """Weights of the models, and the tensors, that a step's closure holds."""
    held = [cell.cell_contents for cell in step.__closure__ or ()]
    modules = [getattr(value, "model", value) for value in held]
    tensors = [t for m in modules if isinstance(m, nn.Module) for t in (*m.parameters(), *m.buffers())]
    return tensors + [value for value in held if isinstance(value, Tensor)]
