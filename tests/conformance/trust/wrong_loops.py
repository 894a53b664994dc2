"""Loops of training in which one line is wrong; `nc.check_training` must name what it is and that line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from planting import Fault, lines_of, placed
from program import DEVICE, PLACE, RIGHT, Said
from torch import Tensor, nn
from wrong_scales import WRONG_SCALES

import narrowcast as nc

BF16, FP16 = torch.bfloat16, torch.float16
NETS: dict[str, Callable[[], nn.Module]] = {
    "": lambda: nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)),
    ", a norm": lambda: nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 4)),
}


class Loop:
    """What a script has. low: the format of its weights. The second net is trained by SGD, in torch's own region."""

    def __init__(self, net: str, low: torch.dtype = torch.float32, rate: float = 1e-3) -> None:
        torch.manual_seed(0)
        self.net, self.is_torchs = NETS[net]().to(low), bool(net)
        self.weights = list(self.net.parameters())
        kind = torch.optim.SGD if self.is_torchs and low is torch.float32 else torch.optim.AdamW
        self.optimizer = kind(self.weights, lr=rate)
        self.scaler, self.other = (torch.amp.GradScaler(DEVICE, init_scale=scale) for scale in (1024.0, 64.0))
        self.x, self.y = torch.randn(8, 16, dtype=low), torch.arange(8) % 4
        self.average = [p.detach().to(BF16) for p in self.weights]
        self.kept = [torch.zeros_like(p, dtype=BF16) for p in self.weights]
        self.total = torch.zeros((), dtype=BF16) + 300.0
        self.counts = torch.full((4,), 600.0, dtype=BF16)
        self.head = nn.Linear(4, 1)

    def region(self, dtype: torch.dtype = BF16) -> Any:
        return torch.autocast(DEVICE, dtype) if self.is_torchs else nc.autocast(DEVICE, dtype)

    def loss(self, dtype: torch.dtype = BF16, x: Any = None, y: Any = None) -> Tensor:
        with self.region(dtype):
            return F.cross_entropy(self.net(self.x if x is None else x), self.y if y is None else y)

    def end(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


def no_region(loop: Loop) -> None:
    loss = F.cross_entropy(loop.net(loop.x), loop.y)  # HERE
    loss.backward()


def backward_inside(loop: Loop) -> None:
    with loop.region():
        loss = F.cross_entropy(loop.net(loop.x), loop.y)
        loss.backward()  # HERE


def loss_outside(loop: Loop) -> None:
    with loop.region():
        out = loop.net(loop.x)
    F.cross_entropy(out, loop.y).backward()  # HERE


def loss_by_hand(loop: Loop) -> None:
    with loop.region():
        out = loop.net(loop.x)
    loss = -out.log_softmax(-1)[torch.arange(8), loop.y].mean()  # HERE
    loss.backward()


def without_scaler(loop: Loop) -> None:
    with loop.region(FP16):
        loss = F.cross_entropy(loop.net(loop.x), loop.y)  # HERE
    loss.backward()  # HERE


def past_the_scaler(loop: Loop) -> None:
    loop.scaler.scale(loop.loss(FP16)).backward()
    loop.optimizer.step()  # HERE


def scaler_without_need(loop: Loop) -> None:
    loop.scaler.scale(loop.loss()).backward()  # HERE
    loop.scaler.step(loop.optimizer)  # HERE
    loop.scaler.update()


def clipped_too_early(loop: Loop) -> None:
    loop.scaler.scale(loop.loss(FP16)).backward()
    nn.utils.clip_grad_norm_(loop.weights, 0.1)  # HERE
    loop.end()


def values_clipped_too_early(loop: Loop) -> None:
    loop.scaler.scale(loop.loss(FP16)).backward()
    nn.utils.clip_grad_value_(loop.weights, 0.1)  # HERE
    loop.end()


def clipped_by_hand(loop: Loop) -> None:
    loop.scaler.scale(loop.loss(FP16)).backward()
    for p in loop.weights:
        p.grad.clamp_(-0.1, 0.1)  # HERE
    loop.end()


def unscaled_twice(loop: Loop) -> None:
    loop.scaler.scale(loop.loss(FP16)).backward()
    loop.scaler.unscale_(loop.optimizer)
    for p in loop.weights:
        p.grad.div_(loop.scaler.get_scale())  # HERE
    loop.end()


def one_loss_unscaled(loop: Loop) -> None:
    loss, other = loop.loss(FP16), loop.loss(FP16)
    (loop.scaler.scale(loss) + other).backward()  # HERE
    loop.end()


def second_backward_unscaled(loop: Loop) -> None:
    loop.scaler.scale(loop.loss(FP16)).backward()
    loop.loss(FP16).backward()  # HERE
    loop.end()


def loss_of_a_head_unscaled(loop: Loop) -> None:
    with loop.region(FP16):
        y = loop.net(loop.x)
        first, second = F.cross_entropy(y, loop.y), loop.head(y).float().square().mean()
    loop.scaler.scale(first).backward(retain_graph=True)
    second.backward()  # HERE
    loop.end()


def always_skipped(loop: Loop) -> None:
    loop.scaler.scale(loop.loss(FP16) * float("inf")).backward()
    loop.scaler.step(loop.optimizer)  # HERE
    loop.scaler.update()  # HERE


def unscaled_in_the_first_part(loop: Loop) -> None:
    loop.scaler.scale(loop.loss(FP16)).backward()
    loop.scaler.unscale_(loop.optimizer)  # HERE
    loop.scaler.scale(loop.loss(FP16)).backward()  # HERE
    loop.end()


def underflowing(loop: Loop) -> None:
    with loop.region(FP16):
        loss = F.cross_entropy(loop.net(loop.x), loop.y)  # HERE
    loop.scaler.scale(loss * 1e-9).backward()  # HERE
    loop.end()


def updates_lost(loop: Loop) -> None:
    F.cross_entropy(loop.net(loop.x).float(), loop.y).backward()
    loop.optimizer.step()  # HERE


def updates_lost_in_fp16(loop: Loop) -> None:
    F.cross_entropy(loop.net(loop.x).float(), loop.y).backward()
    loop.optimizer.step()  # HERE


def average_in_bf16(loop: Loop) -> None:
    loop.loss().backward()
    loop.optimizer.step()
    with torch.no_grad():
        for mean, weight in zip(loop.average, loop.weights, strict=True):
            mean.mul_(0.9999).add_(weight.to(BF16), alpha=1e-4)  # HERE


def average_by_lerp(loop: Loop) -> None:
    loop.loss().backward()
    loop.optimizer.step()
    with torch.no_grad():
        for mean, weight in zip(loop.average, loop.weights, strict=True):
            mean.lerp_(weight.to(BF16), 1e-3)  # HERE


def losses_summed_in_bf16(loop: Loop) -> None:
    loss = loop.loss()
    loss.backward()
    loop.total += loss.detach().to(BF16)  # HERE


def gradients_summed_in_bf16(loop: Loop) -> None:
    for part in range(8):
        loop.optimizer.zero_grad()
        loop.loss(BF16, loop.x[part : part + 1], loop.y[part : part + 1]).backward()
        for total, p in zip(loop.kept, loop.weights, strict=True):
            total.add_(p.grad)  # HERE
    for total, p in zip(loop.kept, loop.weights, strict=True):
        p.grad = total.float() / 8
        total.zero_()


def optimizer_inside(loop: Loop) -> None:
    loop.loss().backward()
    with loop.region():
        loop.optimizer.step()  # HERE


def weights_by_data(loop: Loop) -> None:
    with loop.region():
        loss = F.cross_entropy(loop.net(loop.x), loop.y)
        loop.weights[0].data = loop.weights[0].data * 0.99  # HERE
        loss = loss + F.cross_entropy(loop.net(loop.x), loop.y)  # HERE
    loss.backward()


def weights_by_data_in_place(loop: Loop) -> None:
    with loop.region():
        loss = F.cross_entropy(loop.net(loop.x), loop.y)
        loop.weights[0].data.mul_(0.5)  # HERE
        loss = loss + F.cross_entropy(loop.net(loop.x), loop.y)
    loss.backward()


def evaluation_outside(loop: Loop) -> None:
    loop.loss().backward()
    loop.optimizer.step()
    loop.net.eval()
    with torch.no_grad():
        loop.net(loop.x)  # HERE
    loop.net.train()


def never_cleared(loop: Loop) -> None:
    loop.loss().backward()  # HERE
    loop.optimizer.step()  # HERE


def two_formats(loop: Loop) -> None:
    policy = nc.Policy("mine").with_rules(nc.Rule("aten.linear", "full"))
    with nc.autocast(DEVICE, BF16, policy=policy), torch.autocast(DEVICE, BF16):  # HERE
        loss = F.cross_entropy(loop.net(loop.x), loop.y)  # HERE
    loss.backward()


# a step, and a part of the kind that is to be found first; of others that are true, too
LOOPS: dict[Callable[[Loop], None], str] = {
    no_region: "no region", backward_inside: "backward in a region", loss_outside: "left the region",
    loss_by_hand: "left the region", without_scaler: "without a scaler", past_the_scaler: "scaled",
    scaler_without_need: "an unneeded scaler", clipped_too_early: "clip before",
    values_clipped_too_early: "clip before",
    clipped_by_hand: "clip before", unscaled_twice: "scale", one_loss_unscaled: "scaled",
    second_backward_unscaled: "scaled", loss_of_a_head_unscaled: "scaled", always_skipped: "skipped",
    unscaled_in_the_first_part: "unscale", underflowing: "underflow", updates_lost: "update",
    updates_lost_in_fp16: "update|without a scaler", average_in_bf16: "average", average_by_lerp: "average",
    losses_summed_in_bf16: "sum", gradients_summed_in_bf16: "gradients", optimizer_inside: "optimizer step",
    weights_by_data: "region", weights_by_data_in_place: "region", evaluation_outside: "evaluation",
    never_cleared: "clear", two_formats: "hidden",
    **WRONG_SCALES,
}  # fmt: skip
LOW = {updates_lost: BF16, updates_lost_in_fp16: FP16}


def judged(wrong: Callable[[Loop], None], kind: str, net: str) -> Said:
    """It alone, at its line."""
    loop = Loop(net, LOW.get(wrong, torch.float32), 1e-6 if wrong in LOW else 1e-3)
    steps = {"end", "step"} & {*wrong.__code__.co_names} or wrong.__name__ == "moved_by_hand"

    def step() -> None:
        if wrong is not never_cleared:
            loop.optimizer.zero_grad()
        wrong(loop)
        if not steps:
            loop.optimizer.step()

    found = nc.check_training(step)
    wrong_ones = [finding for finding in found.findings if finding.kind != "weights cast again"]
    said = placed([(f.file, f.line) for f in wrong_ones], lines_of(wrong), str(found))
    kinds = [f.kind for f in wrong_ones]
    is_true = said.word != RIGHT or (kind.split("|")[0] in kinds[0] and all(re.search(kind, one) for one in kinds))
    if not is_true:
        return Said(PLACE, f"wanted {kind} alone in {wrong.__name__}:\n{found}")
    return said


def faults() -> Iterator[Fault]:
    for wrong, kind in LOOPS.items():
        for net in NETS:
            if wrong is not two_formats or not net:  # which needs regions of both
                name = f"{wrong.__name__}{net}"
                yield Fault(name, wrong.__name__, "check_training", partial(judged, wrong, kind, net), lambda: True)
