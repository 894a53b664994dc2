"""`nc.check_training` on loops as people write them: nothing is said of right ones, and faults by hand are found."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler, custom_bwd, custom_fwd
from torch.func import functional_call
from torch.nn.functional import binary_cross_entropy_with_logits, conv1d, cross_entropy, mse_loss, relu
from torch.nn.utils import clip_grad_norm_

import narrowcast as nc

sys.path.insert(0, str(Path(__file__).parent))

from training_loops import RIGHT as IMAGE_STEPS, Loop as Images

BF16, FP16 = torch.bfloat16, torch.float16


def region(dtype: torch.dtype) -> Any:
    return torch.autocast("cpu", dtype)


class Loop:
    """A model of sixteen numbers in and four out."""

    def __init__(self, init_scale: float = 1024.0) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        self.weights = list(self.net.parameters())
        self.optimizer = torch.optim.AdamW(self.weights)
        self.other = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
        self.second = torch.optim.AdamW(self.other.parameters())
        self.scaler = GradScaler("cpu", init_scale=init_scale)
        self.x, self.y = torch.randn(8, 16), torch.arange(8) % 4

    def loss(self, dtype: torch.dtype = FP16) -> torch.Tensor:
        with region(dtype):
            return cross_entropy(self.net(self.x), self.y)

    def backward(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def train_in_bf16(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


# -- right loops -------------------------------------------------------------------------------------------------------


def each_optimizer_clipped(loop: Loop) -> None:
    with region(FP16):
        loss = cross_entropy(loop.net(loop.x), loop.y) + loop.other(loop.x).float().square().mean()
    loop.second.zero_grad()
    loop.backward(loss)
    for optimizer, model in ((loop.optimizer, loop.net), (loop.second, loop.other)):
        loop.scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.01)
    loop.scaler.step(loop.second)
    loop.step()


def adversaries(loop: Loop) -> None:
    generator, critic = loop.net, loop.other
    wide = torch.eye(4, 16)
    with region(FP16):
        fake = generator(loop.x) @ wide
        real, wrong = critic(loop.x), critic(fake.detach())
        loss = binary_cross_entropy_with_logits(real, torch.ones(8, 1))
        loss = loss + binary_cross_entropy_with_logits(wrong, torch.zeros(8, 1))
    loop.second.zero_grad()
    loop.scaler.scale(loss).backward()
    loop.scaler.step(loop.second)
    critic.requires_grad_(False)
    with region(FP16):
        loss = binary_cross_entropy_with_logits(critic(fake), torch.ones(8, 1))
    loop.backward(loss)
    loop.step()
    critic.requires_grad_(True)


def saturated_hinge(loop: Loop) -> None:
    with region(FP16):
        out = loop.net(loop.x)
        loss = relu(out - 100).mean() + cross_entropy(out, loop.y)
    loop.backward(loss)
    loop.step()


def reweighted(loop: Loop) -> None:
    """Weights of examples, by the gradient through one virtual step in fp32 (Ren et al. 2018)."""
    shares = torch.zeros(8, requires_grad=True)
    named = dict(loop.net.named_parameters())
    losses = cross_entropy(functional_call(loop.net, named, (loop.x,)), loop.y, reduction="none")
    gradients = torch.autograd.grad((losses * shares).sum(), list(named.values()), create_graph=True)
    moved = {name: p - 0.1 * g for (name, p), g in zip(named.items(), gradients, strict=True)}
    after = cross_entropy(functional_call(loop.net, moved, (loop.x.flip(0),)), loop.y.flip(0))
    (wanted,) = torch.autograd.grad(after, shares)
    with region(FP16):
        loss = (cross_entropy(loop.net(loop.x), loop.y, reduction="none") * (-wanted).clamp_min(0).add(0.1)).sum()
    loop.backward(loss)
    loop.step()


def masked_and_averaged(loop: Loop) -> None:
    loop.backward(loop.loss())
    loop.weights[0].grad.mul_(torch.ones(32, 16))
    for weight in loop.weights:
        weight.grad.mul_(1 / torch.tensor(8.0))
    loop.step()


def clipped_at_a_scaled_limit(loop: Loop) -> None:
    loop.backward(loop.loss())
    clip_grad_norm_(loop.weights, 0.1 * loop.scaler.get_scale())
    loop.step()


def scaled_by_hand(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    (loop.loss() * 1024).backward()
    for weight in loop.weights:
        weight.grad.div_(1024)
    clip_grad_norm_(loop.weights, 0.1)
    loop.optimizer.step()


def with_a_teacher(loop: Loop) -> None:
    loop.other.eval()
    with torch.no_grad():
        wanted = loop.other(loop.x).expand(8, 4)
    with region(BF16):
        loss = mse_loss(loop.net(loop.x), wanted)
    loop.train_in_bf16(loss)


def with_a_teacher_in_fp16(loop: Loop) -> None:
    loop.other.eval().requires_grad_(False)
    with torch.no_grad(), region(FP16):
        wanted = loop.other(loop.x).float().expand(8, 4)
    with region(BF16):
        loss = mse_loss(loop.net(loop.x), wanted)
    loop.train_in_bf16(loss)


def augmented_and_measured(loop: Loop) -> None:
    x = conv1d(loop.x[:, None], torch.ones(1, 1, 3), padding=1)[:, 0]
    with region(BF16):
        loss = cross_entropy(loop.net(x), loop.y)
    loop.train_in_bf16(loss)
    with torch.no_grad():
        loop.weights[0] @ loop.weights[0].T


def low_frozen_batch_norm(loop: Loop) -> None:
    norm = nn.BatchNorm1d(16).bfloat16().eval().requires_grad_(False)
    with region(BF16):
        loss = cross_entropy(loop.net(norm(loop.x.bfloat16())), loop.y)
    loop.train_in_bf16(loss)


class Product(torch.autograd.Function):
    """A product with a backward of its own, in the formats of the region."""

    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return a.mm(b)

    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        return gradient.mm(b.t()), a.t().mm(gradient)


def custom_function(loop: Loop) -> None:
    with region(FP16):
        loss = cross_entropy(Product.apply(loop.net(loop.x), torch.eye(4)), loop.y)
    loop.backward(loss)
    loop.step()


def evaluated_in_a_part(loop: Loop) -> None:
    loop.train_in_bf16(loop.loss(BF16))
    with torch.no_grad(), region(BF16):
        loop.net[2](torch.zeros(1, 32))


def optimizer_with_products(loop: Loop) -> None:
    class Whitened(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for weight in self.param_groups[0]["params"]:
                rows = weight.grad.flatten(1) if weight.dim() > 1 else weight.grad[None]
                weight.sub_((rows @ rows.T @ rows).view_as(weight) * 0.01)

    loop.optimizer = Whitened(loop.weights, lr=0.1)
    loop.train_in_bf16(loop.loss(BF16))


def closure_that_scales(loop: Loop) -> None:
    if not isinstance(loop.optimizer, torch.optim.LBFGS):
        loop.optimizer = torch.optim.LBFGS(loop.weights, max_iter=2)  # type: ignore[assignment]
        loop.scaler = nc.Scaler("cpu", init_scale=256.0)

    def closure() -> torch.Tensor:
        loss = loop.loss()
        loop.backward(loss)
        return loss

    loop.scaler.step(loop.optimizer, closure)
    loop.scaler.update()


def closure_with_a_loss_in_fp32(loop: Loop) -> None:
    """Products of what was converted on purpose, in the closure of an optimizer that calls it several times."""
    if not isinstance(loop.optimizer, torch.optim.LBFGS):
        loop.optimizer = torch.optim.LBFGS(loop.weights, max_iter=2)  # type: ignore[assignment]

    def closure() -> torch.Tensor:
        loop.optimizer.zero_grad()
        with region(BF16):
            out = loop.net(loop.x)
        gram = out.float().T @ out.float()
        loss = mse_loss(gram, torch.eye(4))
        loss.backward()
        return loss

    loop.optimizer.step(closure)


class Gram(nn.Module):
    """A loss of distances, without weights."""

    def forward(self, e: torch.Tensor) -> torch.Tensor:
        return torch.log1p((e @ e.T).square().sum())


def distances_outside(loop: Loop) -> None:
    """A matrix product of embeddings, which a bias has made fp32, is a part of a loss in fp32."""
    weight, bias = loop.weights[0], torch.zeros(32)
    with region(BF16):
        e = loop.x @ weight.T + bias
    loop.train_in_bf16(torch.log1p((e @ e.T).square().sum()) + Gram()(e))


def two_optimizers_by_a_scaler(loop: Loop) -> None:
    both_unscaled(loop)
    loop.scaler.step(loop.optimizer)
    loop.scaler.step(loop.second)
    loop.scaler.update()


def two_optimizers_by_one_question(loop: Loop) -> None:
    both_unscaled(loop)
    if all(bool(p.grad.isfinite().all()) for p in [*loop.weights, *loop.other.parameters()] if p.grad is not None):
        loop.optimizer.step()
        loop.second.step()
    loop.scaler.update()


def both_unscaled(loop: Loop) -> None:
    """One loss of both models, and its gradients, unscaled."""
    loop.optimizer.zero_grad()
    loop.second.zero_grad()
    with region(FP16):
        loss = cross_entropy(loop.net(loop.x), loop.y) + loop.other(loop.x).float().square().mean()
    loop.scaler.scale(loss).backward()
    for optimizer in (loop.optimizer, loop.second):
        loop.scaler.unscale_(optimizer)


RIGHT = [
    distances_outside, two_optimizers_by_a_scaler, two_optimizers_by_one_question,
    each_optimizer_clipped, adversaries, saturated_hinge, reweighted, masked_and_averaged, clipped_at_a_scaled_limit,
    scaled_by_hand, with_a_teacher, with_a_teacher_in_fp16, augmented_and_measured, low_frozen_batch_norm,
    custom_function, evaluated_in_a_part, optimizer_with_products,
    closure_that_scales, closure_with_a_loss_in_fp32,
]  # fmt: skip


@pytest.mark.parametrize("step", IMAGE_STEPS, ids=lambda step: step.__name__)
def test_nothing_is_said_of_a_right_loop_of_images(step: Callable[[Images], None]) -> None:
    """Clipping, accumulation, penalties and parts in fp32 give no finding, and the report says so."""
    found = nc.check_training(step, (Images(),))
    assert found.findings == (), str(found)
    assert found and "No fault was found" in str(found) and found.steps == 2


@pytest.mark.parametrize("step", RIGHT, ids=lambda step: step.__name__)
def test_nothing_is_said_of_a_right_loop(step: Callable[[Loop], None]) -> None:
    """Unusual but correct loops, such as GANs, distillation and manual scaling, raise no false alarm."""
    found = nc.check_training(step, (Loop(),))
    assert found.findings == (), str(found)
    assert sum(found.calls.values()), found


def test_accumulation_with_a_region_for_each_part_is_right_and_costs_time() -> None:
    """As torch's documentation writes it; what is advised instead finds nothing."""
    loop = Loop()

    def as_documented() -> None:
        for _ in range(2):
            loop.scaler.scale(loop.loss() / 2).backward()
        loop.step()
        loop.optimizer.zero_grad()

    def as_advised() -> None:
        with region(FP16):
            for _ in range(2):
                loss = cross_entropy(loop.net(loop.x), loop.y) / 2
                with torch.autocast("cpu", enabled=False):
                    loop.scaler.scale(loss).backward()
        loop.step()
        loop.optimizer.zero_grad()

    found = nc.check_training(as_documented)
    assert found.kinds == ("weights cast again",)
    assert found
    assert "No fault was found in the precision of this loop, and 1 thing costs time" in " ".join(str(found).split())
    assert nc.check_training(as_advised).findings == ()


# -- faults by hand ----------------------------------------------------------------------------------------------------


def clipped_by_a_number(loop: Loop) -> None:
    loop.backward(loop.loss())
    norm = torch.stack([weight.grad.norm() for weight in loop.weights]).norm().item()
    for weight in loop.weights:
        weight.grad.mul_(min(1, 0.1 / norm))  # HERE
    loop.step()


def clipped_into_new_tensors(loop: Loop) -> None:
    loop.backward(loop.loss())
    norm = sum((weight.grad**2).sum() for weight in loop.weights).sqrt()
    for weight in loop.weights:
        weight.grad = weight.grad * (0.1 / norm).clamp(max=1)  # HERE
    loop.step()


@pytest.mark.parametrize("step", [clipped_by_a_number, clipped_into_new_tensors], ids=lambda step: step.__name__)
def test_clips_by_hand_are_found_at_their_lines(step: Callable[[Loop], None]) -> None:
    """Scaled gradients multiplied by a factor from their norm are clipped, in place or as new tensors."""
    found = nc.check_training(step, (Loop(),))
    assert found.kinds == ("clip before unscale",), str(found)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert "# HERE" in lines[found.findings[0].line - 1]
    assert found.findings[0].line > step.__code__.co_firstlineno


def test_gradients_that_a_cast_makes_zero_underflow() -> None:
    """With a scale of 1, a tiny loss has gradients below fp16's range, and the finding names the cast."""
    loop = Loop(init_scale=1.0)

    def step() -> None:
        with region(FP16):
            loss = cross_entropy(loop.net(loop.x), loop.y) * 1e-9
        loop.backward(loss)
        loop.step()

    found = nc.check_training(step)
    assert found.kinds == ("gradients underflow",), str(found)
    assert "become zero when it is cast" in found.findings[0].what


def test_a_model_in_fp16_without_region_and_scaler_is_found() -> None:
    """A model converted by `.half()` needs a scaler as much as one that a region casts; AdamW's eps is zero in fp16."""
    loop = Loop()
    loop.net.half()

    def step() -> None:
        loop.train_in_bf16(cross_entropy(loop.net(loop.x.half()).float(), loop.y))

    assert nc.check_training(step).kinds == ("an update that is not finite", "fp16 without a scaler")


@pytest.mark.parametrize("scale", [None, 64.0])
def test_a_penalty_on_a_jacobian_of_torch_func_is_in_fp32_on_purpose(scale):
    """Outside of the region, as one that is made with create_graph is; a forward there by mistake is still reported."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    x, y = torch.randn(8, 5), torch.arange(8) % 2

    def step(forward=lambda x: 0.0):
        weights = dict(model.named_parameters())
        rows = torch.func.vmap(torch.func.jacrev(lambda v: torch.func.functional_call(model, weights, (v,))))(x)
        with torch.autocast("cpu", torch.bfloat16 if scale is None else torch.float16):
            loss = cross_entropy(model(x), y)
        loss = loss + 0.01 * rows.square().sum((1, 2)).mean() + forward(x)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    assert nc.check_training(step).verdict == "sound"
    found = nc.check_training(lambda: step(lambda x: model(x).square().mean()))
    assert found.kinds == ("forward outside of the region",), str(found)


# -- weights that a loop destroys, or leaves where they are, and nothing else is wrong to see -------------------------


def test_a_norm_that_is_infinite_in_fp16_makes_every_gradient_zero() -> None:
    """It is divided by: no weight moves, and no gradient underflows."""
    loop = Loop(init_scale=8.0)
    with torch.no_grad():
        loop.net[2].weight.mul_(4000)

    def step() -> None:
        loop.backward(loop.loss())
        loop.scaler.unscale_(loop.optimizer)
        norm = sum(w.grad.half().pow(2).sum() for w in loop.weights if w.grad is not None).sqrt()
        for weight in loop.weights:
            assert weight.grad is not None
            weight.grad.mul_((1.0 / (norm + 1e-6)).clamp(max=1.0))
        loop.step()

    found = nc.check_training(step)
    assert found.kinds == ("weights that never move",) and not found
    assert "every element of every gradient is zero" in " ".join(str(found).split())


def test_weights_that_a_step_by_hand_makes_infinite_are_told() -> None:
    """A second moment in fp16 underflows, and with it 1e-8: the weights are divided by zero."""
    loop = Loop()
    squares = [torch.zeros_like(weight, dtype=FP16) for weight in loop.weights]

    def step() -> None:
        for weight in loop.weights:
            weight.grad = None
        (loop.loss(BF16) * 1e-4).backward()
        with torch.no_grad():
            for weight, square in zip(loop.weights, squares, strict=True):
                gradient = weight.grad
                assert gradient is not None
                square.copy_(gradient.half().square())
                weight.sub_(1e-3 * gradient / (square.sqrt() + 1e-8))

    found = nc.check_training(step)
    assert found.kinds == ("an update that is not finite",) and "held numbers before" in " ".join(str(found).split())
    assert all(bool(weight.isfinite().all()) for weight in loop.weights)


def test_gradients_that_are_zero_in_one_step_are_right() -> None:
    """A hinge that is satisfied at first: the next step moves the weights."""
    loop, margins = Loop(), [-10.0, 10.0]

    def step() -> None:
        with region(BF16):
            scores = loop.net(loop.x)
        loop.train_in_bf16(relu(scores.float().mean() + margins[0]))
        margins.reverse()

    assert nc.check_training(step)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_masters_that_take_scaled_copies_of_gradients_are_right(dtype: torch.dtype) -> None:
    """A model in a low format is a copy of what is trained: its gradients are converted, divided by the scale, clipped,
    and the weights written back.
    """
    loop = Loop()
    net = loop.net.to(dtype)
    masters = [weight.detach().float().requires_grad_() for weight in net.parameters()]
    optimizer = torch.optim.AdamW(masters)

    def step() -> None:
        with region(dtype):
            scores = net(loop.x)
        net.zero_grad()
        (cross_entropy(scores.float(), loop.y) * 1024.0).backward()
        for master, weight in zip(masters, net.parameters(), strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float() / 1024.0
        clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters, net.parameters(), strict=True):
                weight.copy_(master)

    found = nc.check_training(step)
    assert found, str(found)


def test_a_forward_outside_of_the_region_is_told_behind_a_gradient_that_nobody_differentiates() -> None:
    """Weights moved by a plain gradient of a loss in fp32 are not in fp32 on purpose."""
    loop = Loop()

    def step() -> None:
        named = dict(loop.net.named_parameters())
        with region(FP16):
            output = loop.net(loop.x)
        gradients = torch.autograd.grad(cross_entropy(output.float(), loop.y), list(named.values()))
        moved = {name: p - 0.1 * g for (name, p), g in zip(named.items(), gradients, strict=True)}
        loop.backward(cross_entropy(functional_call(loop.net, moved, (loop.x,)), loop.y))
        loop.step()

    assert "forward outside of the region" in nc.check_training(step).kinds


def one_optimizer_by_itself(loop: Loop) -> None:
    both_unscaled(loop)
    loop.scaler.step(loop.optimizer)
    loop.second.step()  # HERE
    loop.scaler.update()


def stepped_with_noise(loop: Loop) -> None:
    loop.backward(loop.loss())
    loop.scaler.unscale_(loop.optimizer)
    for weight in loop.weights:
        weight.grad.add_(torch.full_like(weight, 1e-4))
    loop.optimizer.step()  # HERE
    loop.scaler.update()


@pytest.mark.parametrize("step", [one_optimizer_by_itself, stepped_with_noise], ids=lambda step: step.__name__)
def test_a_step_beside_the_scaler_is_never_skipped(step: Callable[[Loop], None]) -> None:
    """What the scaler asks of one optimizer says nothing of another; what is added to an infinity leaves it so."""
    found = nc.check_training(step, (Loop(),))
    assert found.kinds == ("a step that is never skipped",), str(found)
    assert "# HERE" in Path(__file__).read_text().splitlines()[found.findings[0].line - 1]
