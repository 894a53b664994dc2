"""`nc.check_training`: each fault of a loop at its line, and what the report says."""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import narrowcast as nc
from narrowcast.errors import RunError

sys.path.insert(0, str(Path(__file__).parent))

from training_loops import BF16, FP16, Loop, clipped_fp16, plain_bf16, region, scaled_fp16

HERE, MODEL = Path(__file__).name, "training_loops.py"


# -- planted faults ----------------------------------------------------------------------------------------------------


def forward_outside(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    with region(BF16):
        loss = cross_entropy(loop.net(loop.x), loop.y)
    out = loop.net.head(loop.x.view(4, -1).repeat(1, 3)[:, :144])  # HERE: forward outside of the region
    (loss + cross_entropy(out, loop.y)).backward()
    loop.optimizer.step()


def no_region(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    cross_entropy(loop.net(loop.x), loop.y).backward()  # HERE: no region
    loop.optimizer.step()


def loss_outside(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    with region(BF16):
        out = loop.net(loop.x)
    loss = cross_entropy(out, loop.y)  # HERE: left the region in a low format
    loss.backward()
    loop.optimizer.step()


def backward_inside(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    with region(BF16):
        loss = cross_entropy(loop.net(loop.x), loop.y)
        loss.backward()  # HERE: backward in a region
    loop.optimizer.step()


def optimizer_inside(loop: Loop) -> None:
    loop.optimizer.zero_grad()
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


def decayed_before_unscale(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    with region(FP16):
        loss = cross_entropy(loop.net(loop.x), loop.y)
    loop.scaler.scale(loss).backward()
    for weight in loop.net.parameters():
        weight.grad += 0.01 * weight.detach()  # HERE: added before unscale
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()


def noise_before_unscale(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    with region(FP16):
        loss = cross_entropy(loop.net(loop.x), loop.y)
    loop.scaler.scale(loss).backward()
    for weight in loop.net.parameters():
        weight.grad.add_(torch.randn_like(weight), alpha=0.01)  # HERE: added before unscale
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()


def cast_again(loop: Loop) -> None:
    loop.optimizer.zero_grad()
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
    loop.optimizer.zero_grad()
    with nc.autocast("cpu", BF16, policy=policy):
        with region(BF16):  # HERE: hidden policy
            out = loop.net(loop.x)
        loss = cross_entropy(out, loop.y)
    loss.backward()
    loop.optimizer.step()


def underflow(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    with region(FP16):
        loss = cross_entropy(loop.net(loop.x), loop.y) * 1e-6
    loop.scaler.scale(loss / 1024).backward()
    loop.scaler.step(loop.optimizer)
    loop.scaler.update()


def low_statistics(loop: Loop) -> None:
    loop.net.body[1].to(BF16)
    loop.optimizer.zero_grad()
    with region(BF16):
        loss = cross_entropy(loop.net(loop.x), loop.y)
    loss.backward()
    loop.optimizer.step()


def without_scaler(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    with region(FP16):
        loss = cross_entropy(loop.net(loop.x), loop.y)
    loss.backward()
    loop.optimizer.step()


def scaler_without_need(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    with region(BF16):
        loss = cross_entropy(loop.net(loop.x), loop.y)
    loop.scaler.scale(loss).backward()
    loop.scaler.step(loop.optimizer)  # HERE: an unneeded scaler
    loop.scaler.update()


WRONG = {
    "forward outside of the region": forward_outside, "no region": no_region,
    "left the region in a low format": loss_outside, "backward in a region": backward_inside,
    "optimizer step in a region": optimizer_inside, "clip before unscale": clip_before_unscale,
    "added before unscale": decayed_before_unscale,
    "weights cast again": cast_again, "evaluation without the region": evaluation_outside,
    "hidden policy": somebody_elses_region, "gradients underflow": underflow,
    "batch norm statistics in a low format": low_statistics, "fp16 without a scaler": without_scaler,
    "an unneeded scaler": scaler_without_need,
}  # fmt: skip


def line_of(kind: str, step: Callable[[Loop], None]) -> int:
    start = step.__code__.co_firstlineno
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(n for n, line in enumerate(lines, 1) if n > start and line.endswith(f"# HERE: {kind}"))


@pytest.mark.parametrize(
    ("kind", "step"), [*WRONG.items(), ("clip before unscale", values_clipped_before_unscale),
                         ("added before unscale", noise_before_unscale)],
    ids=[*(step.__name__ for step in WRONG.values()), "values_clipped", "noise"],
)  # fmt: skip
def test_each_fault_is_found_at_its_line(kind: str, step: Callable[[Loop], None]) -> None:
    """All planted faults fail the check and carry advice, except casting weights again, which only costs time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = nc.check_training(step, (Loop(),))
    assert kind in found.kinds, str(found)
    assert bool(found) is (kind in ("weights cast again", "no region"))  # which cost time, and are not wrong
    finding = next(f for f in found.findings if f.kind == kind)
    assert Path(finding.file).name in (HERE, MODEL) and finding.todo
    text = Path(__file__).read_text(encoding="utf-8")
    if f"# HERE: {kind}" in text and step in (*WRONG.values(), values_clipped_before_unscale):
        has_mark = any(
            line.endswith(f"# HERE: {kind}")
            for line in text.splitlines()[step.__code__.co_firstlineno : step.__code__.co_firstlineno + 12]
        )
        if has_mark:
            assert finding.line == line_of(kind, step), str(found)


def test_a_fault_says_nothing_else() -> None:
    """A fault is one finding, not three."""
    for step in (forward_outside, loss_outside, clip_before_unscale, cast_again, evaluation_outside):
        assert len(nc.check_training(step, (Loop(),)).kinds) == 1, step.__name__


def test_the_report_is_text_and_json(tmp_path: Path) -> None:
    """The text names the remedy within 25 lines of 80 columns, and the file is read back as an equal result."""
    found = nc.check_training(clip_before_unscale, (Loop(),))
    text = str(found)
    assert "scaler.unscale_(optimizer)" in text and HERE in text
    assert all(len(line) <= 80 for line in text.splitlines()) and len(text.splitlines()) <= 25
    found.save(tmp_path / "check.json")
    again = nc.load(tmp_path / "check.json")
    assert again == found


def test_bad_input_is_refused() -> None:
    """No steps at all, or a tensor in place of the step, raises a RunError."""
    with pytest.raises(RunError, match="steps=0"):
        nc.check_training(lambda: None, steps=0)
    with pytest.raises(RunError, match="cannot be called"):
        nc.check_training(Loop().x)  # type: ignore[arg-type]


def test_a_step_without_an_optimizer_is_told() -> None:
    """A loop that only computes gradients is checked as far as it goes, and a note says what was missing."""
    loop = Loop()

    def step() -> None:
        with region(BF16):
            cross_entropy(loop.net(loop.x), loop.y).backward()

    found = nc.check_training(step)
    assert any("No torch.optim.Optimizer stepped" in note for note in found.notes)


def test_our_scaler_is_seen_as_torchs_is() -> None:
    """`nc.Scaler` gets the same verdicts as `GradScaler`, and its scale is the same after the check."""
    for step, kinds in ((scaled_fp16, ()), (clipped_fp16, ()), (clip_before_unscale, ("clip before unscale",))):
        loop = Loop()
        loop.scaler = nc.Scaler("cpu", init_scale=1024.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert nc.check_training(step, (loop,)).kinds == kinds
        assert loop.scaler.get_scale() == 1024.0


def test_a_compiled_model_is_looked_into() -> None:
    """Under torch.compile a right loop has no findings, and an evaluation without the region still has one."""
    loop = Loop()
    loop.net = torch.compile(loop.net, backend="aot_eager")  # type: ignore[assignment]
    assert nc.check_training(scaled_fp16, (loop,)).kinds == ()
    assert nc.check_training(evaluation_outside, (loop,)).kinds == ("evaluation without the region",)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SGD])
def test_a_scale_by_hand_in_a_closure_is_a_scale(kind):
    """The loss is multiplied and its gradients are divided where the optimizer asks for them."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(2, 24), torch.nn.Tanh(), torch.nn.Linear(24, 1))
    optimizer, x = kind(net.parameters(), lr=0.1), torch.rand(50, 2)

    def closure():
        optimizer.zero_grad()
        with torch.autocast("cpu", FP16):
            loss = torch.nn.functional.mse_loss(net(x).float(), x.sum(1, keepdim=True))
        (loss * 256.0).backward()
        for parameter in net.parameters():
            parameter.grad.div_(256.0)
        return loss

    assert nc.check_training(lambda: optimizer.step(closure)).verdict == "sound"


def test_a_lazy_module_stays_what_it_has_become():
    """Its first call makes it another module, also where that is in the steps; the next step runs."""
    net = torch.nn.Sequential(torch.nn.LazyLinear(8), torch.nn.ReLU(), torch.nn.LazyLinear(2))

    def step():
        with torch.autocast("cpu", BF16):
            y = net(torch.ones(4, 6))
        y.float().square().mean().backward()
        torch.optim.SGD(net.parameters(), 0.1).step()

    nc.check_training(step)
    step()
    assert type(net[0]) is torch.nn.Linear


def penalty_after_unscale(loss, net, scaler, optimizer):
    """A penalty in fp32 is added to gradients that are unscaled already, as it has to be."""
    scaler.scale(loss()).backward()
    scaler.unscale_(optimizer)
    (1e-3 * sum(p.square().sum() for p in net.parameters())).backward()
    scaler.step(optimizer)


def probe_before(loss, net, scaler, optimizer):
    """Gradients with a scale of the loop's own are looked at, divided by hand, and cleared."""
    (loss() * 256.0).backward()
    sum((p.grad / 256.0).norm() for p in net.parameters())
    optimizer.zero_grad()
    scaler.scale(loss()).backward()
    scaler.step(optimizer)


def step_without_scale(loss, net, scaler, optimizer):
    """A second update in fp32 needs no scale."""
    scaler.scale(loss()).backward()
    scaler.step(optimizer)
    optimizer.zero_grad()
    with nc.autocast("cpu", enabled=False):
        net(torch.ones(1, 5)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("order", [penalty_after_unscale, probe_before, step_without_scale])
def test_gradients_that_no_scaler_divides_need_no_scale(order):
    """Losses that are not scaled are wrong only where their gradients are divided by the scale."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(5, 32), torch.nn.SiLU(), torch.nn.Linear(32, 3))
    optimizer, scaler = torch.optim.SGD(net.parameters(), 0.05), torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, y = torch.randn(8, 5), torch.arange(8) % 3

    def loss():
        with torch.autocast("cpu", FP16):
            return cross_entropy(net(x).float(), y)

    def step():
        optimizer.zero_grad()
        order(loss, net, scaler, optimizer)
        scaler.update()

    assert nc.check_training(step).verdict in ("sound", "costs time")


def test_representations_whose_gradients_are_taken_by_themselves_are_no_weights():
    """Made in a region, and leaves afterwards: what is computed of them in fp32 is a loss, no forward of a model."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.SiLU(), torch.nn.Linear(32, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        parts = torch.randn(12, 8).split(4)
        optimizer.zero_grad()
        with torch.no_grad(), nc.autocast("cpu", torch.bfloat16):
            rows = torch.cat([torch.nn.functional.normalize(model(part).float(), dim=-1) for part in parts])
        rows = rows.detach().requires_grad_()
        torch.nn.functional.cross_entropy(rows @ rows.T, torch.arange(12)).backward()
        for part, gradient in zip(parts, rows.grad.split(4), strict=True):
            with nc.autocast("cpu", torch.bfloat16):
                again = torch.nn.functional.normalize(model(part).float(), dim=-1)
            again.backward(gradient)
        optimizer.step()

    assert "forward outside of the region" not in nc.check_training(step).kinds
