"""Loops of training in which one line is wrong; `nc.check_training` must name it, and no right loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import narrowcast as nc

BF16, FP16 = torch.bfloat16, torch.float16


class Loop:
    """What a script has. low: the format of its weights."""

    def __init__(self, low: torch.dtype = torch.float32, rate: float = 1e-3) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)).to(low)
        self.weights = list(self.net.parameters())
        self.optimizer = torch.optim.AdamW(self.weights, lr=rate)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        self.x, self.y = torch.randn(8, 16, dtype=low), torch.arange(8) % 4
        self.average = [p.detach().to(BF16) for p in self.weights]
        self.total = torch.zeros((), dtype=BF16) + 300.0
        self.count = 0

    def loss(self, dtype: torch.dtype = BF16) -> Tensor:
        with nc.autocast("cpu", dtype):
            return F.cross_entropy(self.net(self.x), self.y)

    def end(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


def no_region(loop: Loop) -> None:
    F.cross_entropy(loop.net(loop.x), loop.y).backward()


def backward_inside(loop: Loop) -> None:
    with nc.autocast("cpu", BF16):
        F.cross_entropy(loop.net(loop.x), loop.y).backward()


def loss_outside(loop: Loop) -> None:
    with nc.autocast("cpu", BF16):
        out = loop.net(loop.x)
    F.cross_entropy(out, loop.y).backward()


def without_scaler(loop: Loop) -> None:
    loop.loss(FP16).backward()


def scaler_without_need(loop: Loop) -> None:
    loop.scaler.scale(loop.loss()).backward()
    loop.end()


def clipped_too_early(loop: Loop) -> None:
    loop.scaler.scale(loop.loss(FP16)).backward()
    nn.utils.clip_grad_norm_(loop.weights, 0.1)
    loop.end()


def values_clipped_too_early(loop: Loop) -> None:
    loop.scaler.scale(loop.loss(FP16)).backward()
    nn.utils.clip_grad_value_(loop.weights, 0.1)
    loop.end()


def one_loss_unscaled(loop: Loop) -> None:
    (loop.scaler.scale(loop.loss(FP16)) + loop.loss(FP16)).backward()
    loop.end()


def second_backward_unscaled(loop: Loop) -> None:
    loop.scaler.scale(loop.loss(FP16)).backward()
    loop.loss(FP16).backward()
    loop.end()


def always_skipped(loop: Loop) -> None:
    loop.scaler.scale(loop.loss(FP16) * float("inf")).backward()
    loop.end()


def unscaled_in_the_first_part(loop: Loop) -> None:
    loop.scaler.scale(loop.loss(FP16)).backward()
    loop.scaler.unscale_(loop.optimizer)
    loop.scaler.scale(loop.loss(FP16)).backward()
    loop.end()


def underflowing(loop: Loop) -> None:
    loop.scaler.scale(loop.loss(FP16) * 1e-9).backward()
    loop.end()


def updates_lost(loop: Loop) -> None:
    F.cross_entropy(loop.net(loop.x).float(), loop.y).backward()


def average_in_bf16(loop: Loop) -> None:
    loop.loss().backward()
    loop.optimizer.step()
    with torch.no_grad():
        for mean, weight in zip(loop.average, loop.weights, strict=True):
            mean.mul_(0.9999).add_(weight.to(BF16), alpha=1e-4)


def losses_summed_in_bf16(loop: Loop) -> None:
    loss = loop.loss()
    loss.backward()
    loop.total += loss.detach().to(BF16)


def optimizer_inside(loop: Loop) -> None:
    loop.loss().backward()
    with nc.autocast("cpu", BF16):
        loop.optimizer.step()


def weights_by_data(loop: Loop) -> None:
    with nc.autocast("cpu", BF16):
        loss = F.cross_entropy(loop.net(loop.x), loop.y)
        loop.weights[0].data = loop.weights[0].data * 0.99
        loss = loss + F.cross_entropy(loop.net(loop.x), loop.y)
    loss.backward()


def evaluation_outside(loop: Loop) -> None:
    loop.loss().backward()
    loop.optimizer.step()
    loop.net.eval()
    with torch.no_grad():
        loop.net(loop.x)
    loop.net.train()


def never_cleared(loop: Loop) -> None:
    loop.loss().backward()
    loop.optimizer.step()


def two_formats(loop: Loop) -> None:
    policy = nc.Policy("mine").with_rules(nc.Rule("aten.linear", "full"))
    with nc.autocast("cpu", BF16, policy=policy), torch.autocast("cpu", BF16):
        loss = F.cross_entropy(loop.net(loop.x), loop.y)
    loss.backward()


# a step, and a part of the kind that is to be found
LOOPS: dict[Callable[[Loop], None], str] = {
    no_region: "no region", backward_inside: "backward in a region", loss_outside: "left the region",
    without_scaler: "without a scaler", scaler_without_need: "without need", clipped_too_early: "clip before",
    values_clipped_too_early: "clip before", one_loss_unscaled: "scaled", second_backward_unscaled: "scaled",
    always_skipped: "skipped", unscaled_in_the_first_part: "unscale", underflowing: "underflow", updates_lost: "update",
    average_in_bf16: "average", losses_summed_in_bf16: "sum", optimizer_inside: "optimizer step",
    weights_by_data: "region", evaluation_outside: "evaluation", never_cleared: "clear", two_formats: "hidden",
}  # fmt: skip
STEPPING = (average_in_bf16, optimizer_inside, evaluation_outside, never_cleared)


def judged(wrong: Callable[[Loop], None], kind: str) -> str:
    loop = Loop(BF16 if wrong is updates_lost else torch.float32, 1e-5 if wrong is updates_lost else 1e-3)

    def step() -> None:
        if wrong is not never_cleared:
            loop.optimizer.zero_grad()
        wrong(loop)
        if wrong not in STEPPING and "end" not in wrong.__code__.co_names:
            loop.optimizer.step()

    found = nc.check_training(step)
    wrong_ones = [finding for finding in found.findings if finding.kind != "weights cast again"]
    is_right = len({finding.kind for finding in wrong_ones}) == 1 and kind in wrong_ones[0].kind
    if not is_right or not any(is_in(finding, function) for finding in wrong_ones for function in (wrong, Loop, step)):
        return f"wanted {kind} in {wrong.__name__}:\n{found}"
    return ""


def is_in(finding: Any, function: Any) -> bool:
    """Whether it is at a line of that function, or of what the function calls here."""
    lines, first = inspect.getsourcelines(function)
    return finding.file == __file__ and first <= finding.line < first + len(lines)


def faults() -> Iterator[tuple[str, str, str, Callable[[], str], Callable[[], bool]]]:
    for wrong, kind in LOOPS.items():
        yield wrong.__name__, wrong.__name__, "check_training", partial(judged, wrong, kind), lambda: True
