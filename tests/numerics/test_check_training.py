"""`nc.check_training`: each fault of a loop at its line, and nothing of loops that are right."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import narrowcast as nc
from narrowcast.errors import RunError
from narrowcast.report.training import TrainingCheck

BF16, FP16 = torch.bfloat16, torch.float16
HERE = Path(__file__).name


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


@pytest.mark.parametrize("step", RIGHT, ids=lambda step: step.__name__)
def test_nothing_is_said_of_a_right_loop(step: Callable[[Loop], None]) -> None:
    loop = Loop()
    found = nc.check_training(step, (loop,))
    assert found.findings == (), str(found)
    assert found and "Nothing is wrong" in str(found) and found.steps == 2


def test_our_scaler_is_seen_as_torchs_is() -> None:
    for step, kinds in ((scaled_fp16, ()), (clipped_fp16, ()), (clip_before_unscale, ("clip before unscale",))):
        loop = Loop()
        loop.scaler = nc.Scaler("cpu", init_scale=1024.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert nc.check_training(step, (loop,)).kinds == kinds
        assert loop.scaler.get_scale() == 1024.0


def test_a_compiled_model_is_looked_into() -> None:
    loop = Loop()
    loop.net = torch.compile(loop.net, backend="aot_eager")  # type: ignore[assignment]
    assert nc.check_training(scaled_fp16, (loop,)).kinds == ()
    assert nc.check_training(evaluation_outside, (loop,)).kinds == ("evaluation without the region",)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_nothing_changes(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    loop = Loop(optimizer, **({"momentum": 0.9} if optimizer is torch.optim.SGD else {}))
    scaled_fp16(loop)
    before, gradients = loop.state(), [p.grad for p in loop.net.parameters()]
    groups = [*loop.optimizer.param_groups]
    nc.check_training(scaled_fp16, (loop,), steps=3)
    assert all(map(torch.equal, loop.state(), before))
    assert all(p.grad is g for p, g in zip(loop.net.parameters(), gradients, strict=True))
    assert all(
        a is b for a, b in zip(loop.optimizer.param_groups, groups, strict=True)
    )  # who holds one, holds it still


def test_gradients_are_as_the_first_forward_found_them() -> None:
    loop = Loop()
    plain_bf16(loop)
    before = [(p.grad, p.grad.clone()) for p in loop.net.parameters() if p.grad is not None]

    def step() -> None:
        with region(BF16):
            loss = cross_entropy(loop.net(loop.x), loop.y)
        loss.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad(set_to_none=False)

    nc.check_training(step)
    after = [p.grad for p in loop.net.parameters()]
    assert all(a is g and torch.equal(g, v) for a, (g, v) in zip(after, before, strict=True))


def test_a_step_that_raises_leaves_all_as_it_was() -> None:
    loop = Loop(torch.optim.AdamW)

    def step() -> None:
        plain_bf16(loop)
        raise KeyError("the step's own")

    before = loop.state()
    with pytest.raises(KeyError, match="the step's own"):
        nc.check_training(step)
    assert all(map(torch.equal, loop.state(), before))


# -- planted faults ----------------------------------------------------------------------------------------------------


def forward_outside(loop: Loop) -> None:
    with region(BF16):
        features = loop.net.body(loop.x)
    out = loop.net.head(features.float())  # HERE: forward outside of the region
    cross_entropy(out, loop.y).backward()
    loop.optimizer.step()


def no_region(loop: Loop) -> None:
    cross_entropy(loop.net(loop.x), loop.y).backward()  # HERE: no region
    loop.optimizer.step()


def loss_outside(loop: Loop) -> None:
    with region(BF16):
        out = loop.net(loop.x)
    loss = cross_entropy(out, loop.y)  # HERE: left the region in a low format
    loss.backward()
    loop.optimizer.step()


def backward_inside(loop: Loop) -> None:
    with region(BF16):
        loss = cross_entropy(loop.net(loop.x), loop.y)
        loss.backward()  # HERE: backward in a region
    loop.optimizer.step()


def optimizer_inside(loop: Loop) -> None:
    with region(BF16):
        loss = cross_entropy(loop.net(loop.x), loop.y)
    loss.backward()
    with region(BF16):
        loop.optimizer.step()  # HERE: optimizer step in a region


def clip_before_unscale(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    with region(FP16):
        loss = cross_entropy(loop.net(loop.x), loop.y)
    loop.scaler.scale(loss).backward()
    clip_grad_norm_(loop.net.parameters(), 0.1)  # HERE: clip before unscale
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()


def values_clipped_before_unscale(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    with region(FP16):
        loss = cross_entropy(loop.net(loop.x), loop.y)
    loop.scaler.scale(loss).backward()
    clip_grad_value_(loop.net.parameters(), 0.1)  # HERE: clip before unscale
    loop.scaler.unscale_(loop.optimizer)
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()


def cast_again(loop: Loop) -> None:
    for x, y in zip(loop.x.split(2), loop.y.split(2), strict=True):
        with region(BF16):
            loss = cross_entropy(loop.net(x), y)
        loss.backward()
    loop.optimizer.step()


def evaluation_outside(loop: Loop) -> None:
    plain_bf16(loop)
    loop.net.eval()
    with torch.no_grad():
        loop.net(loop.x)  # HERE: evaluation without the region
    loop.net.train()


def somebody_elses_region(loop: Loop) -> None:
    policy = nc.Policy("mine").with_rules(nc.Rule("aten.linear", "full"))
    with nc.autocast("cpu", BF16, policy=policy):
        with region(BF16):  # HERE: hidden policy
            out = loop.net(loop.x)
        loss = cross_entropy(out, loop.y)
    loss.backward()
    loop.optimizer.step()


def underflow(loop: Loop) -> None:
    with region(FP16):
        loss = cross_entropy(loop.net(loop.x), loop.y) * 1e-6
    loop.scaler.scale(loss / 1024).backward()
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()


def low_statistics(loop: Loop) -> None:
    loop.net.body[1].to(BF16)
    with region(BF16):
        loss = cross_entropy(loop.net(loop.x), loop.y)
    loss.backward()
    loop.optimizer.step()


def without_scaler(loop: Loop) -> None:
    with region(FP16):
        loss = cross_entropy(loop.net(loop.x), loop.y)
    loss.backward()
    loop.optimizer.step()


def scaler_without_need(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    with region(BF16):
        loss = cross_entropy(loop.net(loop.x), loop.y)
    loop.scaler.scale(loss).backward()
    loop.scaler.step(loop.optimizer)  # HERE: a scaler without need
    loop.scaler.update()


WRONG = {
    "forward outside of the region": forward_outside, "no region": no_region,
    "left the region in a low format": loss_outside, "backward in a region": backward_inside,
    "optimizer step in a region": optimizer_inside, "clip before unscale": clip_before_unscale,
    "weights cast again": cast_again, "evaluation without the region": evaluation_outside,
    "hidden policy": somebody_elses_region, "gradients underflow": underflow,
    "batch norm statistics in a low format": low_statistics, "fp16 without a scaler": without_scaler,
    "a scaler without need": scaler_without_need,
}  # fmt: skip


def line_of(kind: str, step: Callable[[Loop], None]) -> int:
    start = step.__code__.co_firstlineno
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(n for n, line in enumerate(lines, 1) if n > start and line.endswith(f"# HERE: {kind}"))


@pytest.mark.parametrize(
    ("kind", "step"), [*WRONG.items(), ("clip before unscale", values_clipped_before_unscale)],
    ids=[*(step.__name__ for step in WRONG.values()), "values_clipped"],
)  # fmt: skip
def test_each_fault_is_found_at_its_line(kind: str, step: Callable[[Loop], None]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = nc.check_training(step, (Loop(),))
    assert kind in found.kinds, str(found)
    assert bool(found) is (kind == "weights cast again")  # which costs time, and is not wrong
    finding = next(f for f in found.findings if f.kind == kind)
    assert Path(finding.file).name == HERE and finding.todo
    text = Path(__file__).read_text(encoding="utf-8")
    if f"# HERE: {kind}" in text and step in (*WRONG.values(), values_clipped_before_unscale):
        has_mark = any(
            line.endswith(f"# HERE: {kind}")
            for line in text.splitlines()[step.__code__.co_firstlineno : step.__code__.co_firstlineno + 12]
        )
        if has_mark and kind not in ("no region", "evaluation without the region"):  # whose line is the model's
            assert finding.line == line_of(kind, step), str(found)


def test_a_fault_says_nothing_else() -> None:
    """A fault is one finding, not three."""
    for step in (forward_outside, loss_outside, clip_before_unscale, cast_again, evaluation_outside):
        assert len(nc.check_training(step, (Loop(),)).kinds) == 1, step.__name__


def test_the_report_is_text_and_json(tmp_path: Path) -> None:
    found = nc.check_training(clip_before_unscale, (Loop(),))
    text = str(found)
    assert "scaler.unscale_(optimizer)" in text and HERE in text
    assert all(len(line) <= 80 for line in text.splitlines()) and len(text.splitlines()) <= 25
    found.save(tmp_path / "check.json")
    import json

    again = TrainingCheck.from_data(json.loads((tmp_path / "check.json").read_text()))
    assert again == found


def test_bad_input_is_refused() -> None:
    with pytest.raises(RunError, match="steps=0"):
        nc.check_training(lambda: None, steps=0)
    with pytest.raises(RunError, match="cannot be called"):
        nc.check_training(Loop().x)  # type: ignore[arg-type]


def test_a_step_without_an_optimizer_is_told() -> None:
    loop = Loop()

    def step() -> None:
        with region(BF16):
            cross_entropy(loop.net(loop.x), loop.y).backward()

    found = nc.check_training(step)
    assert any("no optimizer stepped" in note for note in found.notes)
