"""`nc.check_training`: losses that are not scaled, steps skipped, gradients not cleared, weights written in regions."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, relu, softplus
from torch.nn.utils import clip_grad_norm_

import narrowcast as nc

sys.path.insert(0, str(Path(__file__).parent))

from small_loops import BF16, FP16, Loop, found_at, is_right, region

pytestmark = pytest.mark.filterwarnings("ignore")
UNSCALED, SKIPPED, LATE, CLEARED, STALE = (
    "a loss that is not scaled", "every step is skipped", "gradients added after unscale_", "gradients never cleared",
    "weights written in an open region",
)  # fmt: skip
HALVES = (slice(0, 4), slice(4, 8))


def two_losses(loop: Loop) -> tuple[torch.Tensor, torch.Tensor]:
    loop.optimizer.zero_grad()
    with region(FP16):
        out = loop.net(loop.x)
        return cross_entropy(out, loop.y), out.float().square().mean()


# -- losses and scales -------------------------------------------------------------------------------------------------


def second_backward_unscaled(loop: Loop) -> None:
    first, second = two_losses(loop)
    loop.scaler.scale(first).backward(retain_graph=True)
    second.backward()  # HERE
    loop.end()


def second_term_unscaled(loop: Loop) -> None:
    first, second = two_losses(loop)
    (loop.scaler.scale(first) + second).backward()  # HERE
    loop.end()


def sum_scaled(loop: Loop) -> None:
    first, second = two_losses(loop)
    loop.scaler.scale(first + second).backward()
    loop.end()


def terms_scaled(loop: Loop) -> None:
    first, second = two_losses(loop)
    (loop.scaler.scale(first) + loop.scaler.scale(second)).backward()
    loop.end()


def each_scaled(loop: Loop) -> None:
    first, second = two_losses(loop)
    loop.scaler.scale(first).backward(retain_graph=True)
    (loop.scaler.scale(second) / 2).backward()
    loop.end()


def scaled_by_the_number(loop: Loop) -> None:
    first, second = two_losses(loop)
    loop.scaler.scale(first).backward(retain_graph=True)
    (second * loop.scaler.get_scale()).backward()
    loop.end()


def energy_and_forces(loop: Loop) -> None:
    """Gradients of an unscaled energy are asked for, and reach no weight."""
    loop.optimizer.zero_grad()
    x = loop.x.clone().requires_grad_()
    with region(FP16):
        energy = loop.net(x).float().sum()
    (forces,) = torch.autograd.grad(energy, x, create_graph=True)
    loop.scaler.scale(energy.square() + mse_loss(forces, torch.zeros_like(x))).backward()
    loop.end()


def forces_in_the_region(loop: Loop) -> None:
    """A gradient that is differentiated itself is a part of the forward."""
    loop.optimizer.zero_grad()
    x = loop.x.clone().requires_grad_()
    with region(FP16):
        energy = loop.net(x).float().sum()
        (forces,) = torch.autograd.grad(energy, x, create_graph=True)
        loss = energy.square() + mse_loss(forces, torch.zeros_like(x))
    loop.scaler.scale(loss).backward()
    loop.end()


@pytest.mark.parametrize("ours", [False, True], ids=["torch", "ours"])
@pytest.mark.parametrize("step", [second_backward_unscaled, second_term_unscaled], ids=lambda step: step.__name__)
def test_one_of_two_losses_that_is_not_scaled_is_found(step: Callable[[Loop], None], ours: bool) -> None:
    """It is found in a backward of its own and as a term of a sum, and scaling the whole sum is right."""
    loop = Loop()
    loop.scaler = nc.Scaler("cpu", init_scale=1024.0) if ours else loop.scaler
    found_at(step, loop, UNSCALED)
    is_right(sum_scaled, loop)  # as is advised


def test_a_loss_that_an_optimizers_own_kernel_unscales_has_to_be_scaled_too() -> None:
    """A fused AdamW divides by the scale inside its kernel, where no op shows the division."""
    loop = Loop()
    loop.optimizer = torch.optim.AdamW(loop.weights, fused=True)
    found_at(second_backward_unscaled, loop, UNSCALED)
    is_right(sum_scaled, loop)


@pytest.mark.parametrize(
    "step",
    [terms_scaled, each_scaled, scaled_by_the_number, energy_and_forces, forces_in_the_region],
    ids=lambda step: step.__name__,
)
def test_losses_that_are_scaled_some_other_way_are_right(step: Callable[[Loop], None]) -> None:
    """Scaled terms, a factor of get_scale() and gradients that are part of the forward give no finding."""
    is_right(step, Loop())


@pytest.mark.parametrize("make", [nc.Scaler, torch.amp.GradScaler])
def test_a_scaler_that_the_steps_make_is_known_beside_others(make: Callable[[str], torch.amp.GradScaler]) -> None:
    """Its losses are scaled, though its scale was met only when it was updated; others live on from other loops."""
    other, is_scaled = make("cpu"), True
    other.scale(torch.ones(()))

    def step(loop: Loop) -> None:
        if loop.scaler is other:
            loop.scaler = make("cpu")
        for _ in range(2):
            first, second = two_losses(loop)
            (loop.scaler.scale(first) + (loop.scaler.scale(second) if is_scaled else second)).backward()
            loop.end()

    loop = Loop()
    loop.scaler = other
    is_right(step, loop)
    loop.scaler, is_scaled = other, False
    assert UNSCALED in {finding.kind for finding in nc.check_training(lambda: step(loop)).findings}


def test_losses_with_scales_of_their_own_are_right() -> None:
    """Two backwards of `nc.Scaler`, each with a loss_id and so a scale of its own, give no finding."""
    loop = Loop()
    loop.scaler = nc.Scaler("cpu", init_scale=1024.0)

    def step(loop: Loop) -> None:
        first, second = two_losses(loop)
        loop.scaler.backward(first, loop.optimizer, loss_id="first", retain_graph=True)
        loop.scaler.backward(second, loop.optimizer, loss_id="second")
        loop.end()

    is_right(step, loop)


def times(factor: float) -> Callable[[Loop], None]:
    def step(loop: Loop) -> None:
        loop.optimizer.zero_grad()
        loop.scaler.scale(loop.loss(dtype=FP16) * factor).backward()
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()  # HERE

    return step


def test_a_loop_whose_steps_are_all_skipped_is_wrong() -> None:
    """An infinite loss brings the scale down to 1 without one step taken, and nc.watch is advised."""
    loop = Loop()
    loop.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    check = found_at(times(float("inf")), loop, SKIPPED)
    assert not check
    assert check.steps == 3  # until the scale was one
    assert "with nc.watch(): step()" in check.findings[0].todo


def test_a_scale_that_is_too_high_at_first_is_no_fault() -> None:
    """More steps are run, until one passes; what a scaler plans is a note."""
    loop = Loop()
    loop.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    check = nc.check_training(times(1.0), (loop,), steps=1)
    assert check.findings == (), str(check)
    assert check.steps > 1
    assert any("steps skipped" in note for note in check.notes)


# -- gradients ---------------------------------------------------------------------------------------------------------


def unscaled_after_the_first(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    for number, rows in enumerate(HALVES):
        loop.scaler.scale(loop.loss(rows, FP16)).backward()
        if number == 0:
            loop.scaler.unscale_(loop.optimizer)  # HERE
    clip_grad_norm_(loop.weights, 1.0)
    loop.end()


def unscaled_after_the_last(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    for number, rows in enumerate(HALVES):
        loop.scaler.scale(loop.loss(rows, FP16)).backward()
        if number == 1:
            loop.scaler.unscale_(loop.optimizer)
    clip_grad_norm_(loop.weights, 1.0)
    loop.end()


def test_gradients_unscaled_in_the_first_of_two_parts_are_found() -> None:
    """The second backward adds scaled gradients to unscaled ones; unscaling after the last one is right."""
    found_at(unscaled_after_the_first, Loop(), LATE)
    is_right(unscaled_after_the_last, Loop())


def unscaled_and_divided(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss(dtype=FP16)).backward()
    loop.scaler.unscale_(loop.optimizer)
    for weight in loop.weights:
        weight.grad /= loop.scaler.get_scale()  # HERE
    loop.end()


def divided_and_unscaled(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss(dtype=FP16)).backward()
    inverse = 1 / loop.scaler.get_scale()
    for weight in loop.weights:
        weight.grad = weight.grad * inverse  # HERE
    loop.end()


def divided_by_hand_alone(loop: Loop) -> None:
    """Once; and what is divided to be shown is not what is used."""
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.loss(dtype=FP16)).backward()
    (loop.weights[0].grad / loop.scaler.get_scale()).norm()
    torch._foreach_mul_([weight.grad for weight in loop.weights], 1 / loop.scaler.get_scale())
    loop.optimizer.step()


@pytest.mark.parametrize("step", [unscaled_and_divided, divided_and_unscaled], ids=lambda step: step.__name__)
def test_gradients_that_are_divided_by_the_scale_twice_are_found(step: Callable[[Loop], None]) -> None:
    """Dividing by hand as well as through the scaler leaves gradients too small by the whole scale."""
    found_at(step, Loop(), "gradients unscaled twice")


def test_gradients_that_are_divided_by_hand_alone_are_right_and_ones_that_nobody_divides_are_not() -> None:
    """One division is enough before a plain optimizer.step(), which itself never unscales."""
    is_right(divided_by_hand_alone, Loop())

    def step(loop: Loop) -> None:
        loop.optimizer.zero_grad()
        loop.scaler.scale(loop.loss(dtype=FP16)).backward()
        loop.optimizer.step()  # HERE

    found_at(step, Loop(), "an optimizer steps with scaled gradients")


def scaled_again(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    loop.scaler.scale(loop.scaler.scale(loop.loss(dtype=FP16))).backward()  # HERE
    loop.end()


def test_a_loss_that_is_scaled_twice_is_found() -> None:
    """Nested calls of scaler.scale multiply twice, while the scaler divides once."""
    loop = Loop()
    loop.scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
    found_at(scaled_again, loop, "a loss that is scaled twice")


def one_term_scaled_again(loop: Loop) -> None:
    first, second = two_losses(loop)
    loop.scaler.scale(first + 0.5 * loop.scaler.scale(second)).backward()  # HERE
    loop.end()


def a_logarithm_of_a_scaled_term(loop: Loop) -> None:
    """Its gradients do not depend on the scale."""
    first, second = two_losses(loop)
    loop.scaler.scale(first + loop.scaler.scale(second).log()).backward()
    loop.end()


def test_a_loss_of_which_one_term_is_scaled_twice_is_found() -> None:
    """A part is too large by the scale, and no part too small."""
    loop = Loop()
    loop.scaler = torch.amp.GradScaler("cpu", init_scale=32.0)
    found_at(one_term_scaled_again, loop, "a loss that is scaled twice")
    is_right(a_logarithm_of_a_scaled_term, Loop())


class Masters(Loop):
    """Weights in bf16, and copies in fp32 that are trained, by gradients of halves of a batch."""

    def __init__(self, clears: bool = True, copies: bool = True, adds: bool = True) -> None:
        super().__init__()
        self.net.to(torch.bfloat16)
        self.clears, self.copies, self.adds = clears, copies, adds
        self.masters = [weight.detach().float() for weight in self.net.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, 0.01)
        self.kept: dict[str, torch.Tensor] = {}

    def step(self) -> None:
        weights = [*self.net.parameters()]
        sums = [torch.zeros_like(master) for master in self.masters]
        for half in HALVES if self.adds else [slice(None)]:
            if self.clears:
                self.net.zero_grad()
            cross_entropy(self.net(self.x[half].to(torch.bfloat16)).float(), self.y[half]).backward()
            for total, weight in zip(sums, weights, strict=True):
                total.add_(weight.grad.float())
        for master, total, weight in zip(self.masters, sums, weights, strict=True):
            master.grad = total if self.adds else weight.grad.float()
        self.optimizer.step()
        for weight, master in zip(weights, self.masters, strict=True) if self.copies else ():
            weight.data.copy_(master)
        self.kept = {name: value.clone() for name, value in self.net.state_dict().items()}


@pytest.mark.parametrize("adds", [True, False])
def test_copies_of_weights_are_trained_by_sums_of_gradients(adds: bool) -> None:
    """What is copied for them is used by their optimizer, and a copy of weights for later is no average."""
    never = "weights that never move"
    for clears, copies, kind in ((True, True, ""), (False, True, CLEARED), (True, False, never)):
        kinds = [one.kind for one in nc.check_training(Masters(clears, copies, adds).step).findings]
        assert [one for one in kinds if one != "gradients added up in a low format"] == [kind] * bool(kind), kinds


class Pair(Loop):
    """Two models, each with an optimizer, and one loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.second = torch.optim.AdamW(self.head.parameters())

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.second.zero_grad()
        with region(FP16):
            loss = cross_entropy(self.head(self.net(self.x)), self.y)
        self.scaler.scale(loss).backward()


def second_clipped_while_scaled(loop: Any) -> None:
    loop.backward()
    loop.scaler.unscale_(loop.optimizer)
    clip_grad_norm_([*loop.weights, *loop.head.parameters()], 1.0)  # HERE
    loop.scaler.step(loop.optimizer)
    loop.scaler.step(loop.second)
    loop.scaler.update()


def second_past_the_scaler(loop: Any) -> None:
    loop.backward()
    loop.scaler.step(loop.optimizer)
    loop.second.step()  # HERE
    loop.scaler.update()


def test_what_is_wrong_with_one_of_two_optimizers_is_found() -> None:
    """The first optimizer is used correctly; only the second model is clipped too early or steps past the scaler."""
    found_at(second_clipped_while_scaled, Pair(), "clip before unscale")
    found_at(second_past_the_scaler, Pair(), "an optimizer steps with scaled gradients")


def test_a_loss_whose_gradients_are_all_subnormal_underflows() -> None:
    """A few bits are left of each, and a scale could save all of them."""

    def step(loop: Loop) -> None:
        loop.optimizer.zero_grad()
        loop.scaler.scale(loop.loss(dtype=FP16) * 1e-8).backward()
        loop.end()

    assert nc.check_training(step, (Loop(),)).kinds == ("gradients underflow",)


ACTIVATIONS: dict[str, Any] = {
    "square": lambda x: relu(x).square(),
    "cube": lambda x: x.tanh().pow(3),
    "root": lambda x: (x.abs() + 1).sqrt(),
    "exp": lambda x: (-x.abs()).exp(),
    "product": lambda x: x * x.sigmoid(),
}


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_factors_of_gradients_are_none(activation: Any) -> None:
    """The gradient of a square is computed with a multiple of the activation, which is large; the gradients are not."""
    torch.manual_seed(0)
    first, second, x, y = nn.Linear(16, 32), nn.Linear(32, 4), torch.randn(32, 16), torch.randint(0, 4, (32,))
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)

    def step(weight: float) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", FP16):
            loss = cross_entropy(second(activation(first(x))), y) * weight
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    assert "gradients underflow" not in nc.check_training(step, (1.0,)).kinds
    assert "gradients underflow" in nc.check_training(step, (2.0**-30,)).kinds


@pytest.mark.parametrize("divides", [False, True])
def test_a_penalty_on_gradients_is_scaled_once_they_are_divided(divides: bool) -> None:
    """With a backward of its own; of gradients that are still scaled it changes with the scale."""
    torch.manual_seed(0)
    model, real = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 1)), torch.randn(16, 8)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), torch.amp.GradScaler("cpu", init_scale=64.0)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", FP16):
            loss = softplus(-model(real).float()).mean()
        scaler.scale(loss).backward()
        x = real.clone().requires_grad_()
        with torch.autocast("cpu", FP16):
            total = model(x).float().sum()
        (gradient,) = torch.autograd.grad(scaler.scale(total), x, create_graph=True)
        if divides:
            gradient = gradient / scaler.get_scale()
        scaler.scale(gradient.square().sum(1).mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    assert ("scaled gradients in a loss" in nc.check_training(step).kinds) is not divides


def test_weights_that_an_optimizer_has_are_no_average() -> None:
    """Copies of the model's weights in bf16, where its masters should be: their updates are lost."""
    torch.manual_seed(0)
    model, x = nn.Linear(16, 16), torch.randn(8, 16)
    masters = [p.detach().bfloat16() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, 1e-5)

    def step() -> None:
        model(x).square().mean().backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad, p.grad = p.grad.to(master), None
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)

    assert "updates lost in rounding" in nc.check_training(step).kinds


def test_copies_of_gradients_that_are_divided_by_hand_are_right() -> None:
    """Weights and gradients are fp16, and the optimizer has copies of both in fp32."""
    loop = Loop(FP16)
    wide = [weight.detach().float() for weight in loop.weights]
    loop.optimizer = torch.optim.AdamW(wide, lr=1e-5)

    def step(loop: Loop) -> None:
        loop.net.zero_grad()
        (loop.low_loss() * 1024).backward()
        if not all(bool(weight.grad.isfinite().all()) for weight in loop.weights):
            return
        for copied, weight in zip(wide, loop.weights, strict=True):
            copied.grad = weight.grad.float() / 1024
        loop.optimizer.step()
        with torch.no_grad():
            for copied, weight in zip(wide, loop.weights, strict=True):
                weight.copy_(copied)

    is_right(step, loop)


def test_gradients_that_are_zero_in_theory_do_not_underflow() -> None:
    """The mean square of what a norm gives is constant: what flows back is round-off, whatever the scale is."""
    loop = Loop()
    loop.net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16))
    loop.optimizer = torch.optim.AdamW(loop.net.parameters())

    def step(loop: Loop, factor: float = 1.0, goal: float | torch.Tensor = 0.0) -> None:
        loop.optimizer.zero_grad()
        with region(FP16):
            loss = (loop.net(loop.x).float() - goal).square().mean() * factor
        loop.scaler.scale(loss).backward()
        loop.end()

    is_right(step, loop)
    check = nc.check_training(step, (loop, 1e-9, loop.x))  # the distance from a goal is not constant
    assert check.kinds == ("gradients underflow",), str(check)


def test_a_small_part_of_the_gradients_underflows_only_where_a_scale_would_save_it() -> None:
    """A branch that counts a hundred millionth, as LayerScale's do at first: nobody sees it beside gradients near one;
    below them a scale is missing.
    """
    loop = Loop()
    loop.net = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)])
    loop.optimizer = torch.optim.AdamW(loop.net.parameters())

    def step(loop: Loop, factor: float = 1.0) -> None:
        loop.optimizer.zero_grad()
        with region(FP16):
            x = loop.net[0](loop.x)
            loss = cross_entropy(loop.net[2](x + 1e-8 * loop.net[1](x.relu())), loop.y)
        loop.scaler.scale(loss * factor).backward()
        loop.end()

    is_right(step, loop)
    assert nc.check_training(step, (loop, 1e-3)).kinds == ("gradients underflow",)


def test_a_penalty_on_a_gradient_in_fp32_is_outside_of_the_region_on_purpose() -> None:
    """A forward that only its gradient penalty needs is no forward that was left out of the region."""

    def step(loop: Loop) -> None:
        x = loop.x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(loop.net(x).sum(), x, create_graph=True)
        loop.train(loop.loss() + (slope.norm(2, -1) - 1).square().mean())

    is_right(step, Loop())


def never_cleared(loop: Loop) -> None:
    loop.loss().backward()  # HERE
    loop.optimizer.step()


def test_gradients_that_nobody_clears_are_found() -> None:
    """Each step adds to the gradients of all before it, and optimizer.zero_grad() is advised."""
    check = found_at(never_cleared, Loop(), CLEARED)
    assert "optimizer.zero_grad()" in check.findings[0].todo


def cleared_by_none(loop: Loop) -> None:
    never_cleared(loop)
    for weight in loop.weights:
        weight.grad = None


def cleared_in_place(loop: Loop) -> None:
    loop.optimizer.zero_grad(set_to_none=False)
    never_cleared(loop)


def cleared_by_hand(loop: Loop) -> None:
    for weight in loop.weights:
        if weight.grad is not None:
            weight.grad *= 0
    never_cleared(loop)


def polluted_and_cleared(loop: Loop) -> None:
    """Of two players the second's backward reaches the first's gradients after its step: they are cleared in time."""
    loop.train(loop.loss())
    loop.loss().backward()


@pytest.mark.parametrize(
    "step", [cleared_by_none, cleared_in_place, cleared_by_hand, polluted_and_cleared], ids=lambda step: step.__name__
)
def test_gradients_that_are_cleared_in_some_way_are_right(step: Callable[[Loop], None]) -> None:
    """None, zeros in place and a factor of zero all count, as does clearing only before the next step."""
    is_right(step, Loop())


def test_accumulation_over_calls_of_the_step_is_right() -> None:
    """Clearing gradients in every second call, after the optimizer's step, is clearing them."""
    parts = iter(range(8))

    def step(loop: Loop) -> None:
        (loop.loss() / 2).backward()
        if next(parts) % 2:
            loop.optimizer.step()
            loop.optimizer.zero_grad()

    check = nc.check_training(step, (Loop(),), steps=4)
    assert check, str(check)


# -- regions -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("open_region", [region, lambda: nc.autocast("cpu", BF16)], ids=["torch", "ours"])
def test_weights_written_between_two_forwards_of_a_region_are_found(open_region: Callable[[], object]) -> None:
    """The cached cast of a weight is stale once it is written; a new region, or an earlier write, is right."""

    def wrong(loop: Loop) -> None:
        with open_region():
            first = cross_entropy(loop.net(loop.x), loop.y)
            for weight in loop.weights:
                weight.data.add_(0.01)  # HERE
            second = cross_entropy(loop.net(loop.x), loop.y)
        loop.train(first + second)

    def as_advised(loop: Loop) -> None:
        with open_region():
            first = cross_entropy(loop.net(loop.x), loop.y)
        for weight in loop.weights:
            weight.data.add_(0.01)
        with open_region():
            second = cross_entropy(loop.net(loop.x), loop.y)
        loop.train(first + second)

    def before_all(loop: Loop) -> None:
        with open_region():
            for weight in loop.weights:
                weight.data.mul_(0.99)
            loss = cross_entropy(loop.net(loop.x), loop.y)
        loop.train(loss)

    found_at(wrong, Loop(), STALE)
    is_right(as_advised, Loop())
    is_right(before_all, Loop())


def test_a_head_in_fp32_after_the_region_is_right_if_its_input_was_cast() -> None:
    """An explicit `.float()` after the region shows that full precision is wanted there."""
    loop = Loop()
    head = nn.Linear(4, 4)

    def step(loop: Loop) -> None:
        with region():
            features = loop.net(loop.x)
        loop.train(cross_entropy(head(torch.relu(features.float())), loop.y))

    is_right(step, loop)


def test_a_low_key_stored_in_a_queue_in_fp32_is_right() -> None:
    """Widening a detached low tensor as it is stored loses nothing that a region could have kept."""
    loop, queue = Loop(), torch.zeros(4, 16)
    joined = [torch.zeros(4, 16)]

    def step(loop: Loop) -> None:
        with torch.no_grad(), region():
            key = loop.net(loop.x)
        queue[:, :8] = key.T
        queue.index_copy_(1, torch.arange(8), key.T.float())
        joined[0] = torch.cat([joined[0][:, 8:], key.T], 1)
        loop.train(loop.loss())

    is_right(step, loop)


# -- closures, several losses, and what is clipped after it was divided twice ------------------------------------------


def own_scaler() -> nc.Scaler:
    """A scaler of ours, at the scale of that of a loop."""
    return nc.Scaler("cpu", init_scale=1024.0)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SGD])
def test_a_closure_that_clips_scaled_gradients_is_found(kind: type[torch.optim.Optimizer], clips: bool) -> None:
    """What an optimizer computes after its closure, by gradients that are divided, is right."""
    loop = Loop()
    optimizer, scaler = kind(loop.net.parameters(), lr=0.1), own_scaler()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        with region(FP16):
            loss = cross_entropy(loop.net(loop.x), loop.y)
        scaler.scale(loss).backward()
        if clips:
            clip_grad_norm_(loop.net.parameters(), 0.1)
        return loss

    def step() -> None:
        scaler.step(optimizer, closure)
        scaler.update()

    found = nc.check_training(step)
    assert [one.kind for one in found.findings] == ["clip before unscale"] * clips, found


@pytest.mark.parametrize("clears", [None, "to none", "to zero"])
def test_gradients_of_losses_with_scales_of_their_own_that_nobody_clears_are_found(clears: str | None) -> None:
    """Each backward divides its gradients and adds them itself; two of one step are no fault."""
    loop = Loop()
    scaler = own_scaler()

    def step() -> None:
        if clears is not None:
            loop.optimizer.zero_grad(set_to_none=clears == "to none")
        with region(FP16):
            out = loop.net(loop.x)
            first, second = cross_entropy(out, loop.y), out.float().square().mean()
        scaler.backward(first, loop.optimizer, loss_id="first", retain_graph=True)
        scaler.backward(second, loop.optimizer, loss_id="second")
        scaler.step(loop.optimizer)
        scaler.update()

    found = nc.check_training(step)
    assert {one.kind for one in found.findings} == ({CLEARED} if clears is None else set()), found


@pytest.mark.parametrize("divides", [False, True])
@pytest.mark.parametrize("limit", [0.5, 1e6])
def test_gradients_divided_twice_are_found_behind_a_clip(limit: float, divides: bool) -> None:
    """A clip at a limit does not show by what they were divided before."""
    loop = Loop()

    def step() -> None:
        loop.optimizer.zero_grad()
        with region(FP16):
            loss = cross_entropy(loop.net(loop.x), loop.y)
        loop.scaler.scale(loss).backward()
        loop.scaler.unscale_(loop.optimizer)
        for parameter in loop.net.parameters() if divides else ():
            assert parameter.grad is not None
            parameter.grad.div_(loop.scaler.get_scale())
        clip_grad_norm_(loop.net.parameters(), limit)
        loop.end()

    found = nc.check_training(step)
    assert [one.kind for one in found.findings] == ["gradients unscaled twice"] * divides, found
