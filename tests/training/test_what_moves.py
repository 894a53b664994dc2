"""`nc.check_training`: updates, averages and sums that rounding keeps in place, judged by what moved; right twins."""

import copy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import narrowcast as nc

sys.path.insert(0, str(Path(__file__).parent))

from small_loops import BF16, Loop, found_at, is_right, region

UPDATES, AVERAGE, SUM, GRADIENTS = (
    "updates lost in rounding", "an average in a low format", "a sum in a low format",
    "gradients added up in a low format",
)  # fmt: skip
HALVES = (slice(0, 4), slice(4, 8))

# -- updates -----------------------------------------------------------------------------------------------------------


def low_weights(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    loop.low_loss().backward()
    loop.optimizer.step()  # HERE


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=["loop", "foreach", "fused"])
def test_updates_below_half_a_unit_are_lost_whichever_kernel_makes_them(options: dict[str, bool]) -> None:
    """With lr=1e-5, bf16 weights round to their old values; the elements are counted, and fp32 advised."""
    loop = Loop(BF16)
    loop.optimizer = torch.optim.AdamW(loop.weights, lr=1e-5, **options)
    check = found_at(low_weights, loop, UPDATES)
    assert "of 172 elements in bf16" in check.findings[0].what
    assert "model.float()" in check.findings[0].todo


def test_updates_by_hand_that_make_new_weights_are_lost_too() -> None:
    """A tensor assigned to `weight.data` is an update, though no optimizer and no op in place made it."""

    def step(loop: Loop) -> None:
        loop.low_loss().backward()
        for weight in loop.weights:
            weight.data = weight.data - 1e-5 * weight.grad  # HERE
            weight.grad = None

    found_at(step, Loop(BF16), UPDATES)


def test_weights_that_move_by_the_sign_of_their_gradients_are_weights() -> None:
    """What they are moved by is not followed, and whose they are is known all the same."""

    def step(loop: Loop) -> None:
        loop.net.zero_grad()
        loop.low_loss().backward()
        with torch.no_grad():
            for weight in loop.weights:
                weight.add_(weight.grad.sign(), alpha=-1e-5)  # HERE

    found_at(step, Loop(BF16), UPDATES)


def test_weights_in_fp32_and_a_region_are_what_is_advised() -> None:
    """fp32 keeps updates of the same size, so the advice has no finding itself."""
    is_right(lambda loop: loop.train(loop.loss()), Loop(lr=1e-5))


def test_weights_in_bf16_that_move_far_enough_are_left_alone() -> None:
    """A low format is no fault by itself: with a large learning rate most updates survive rounding."""
    is_right(lambda loop: loop.train(loop.low_loss()), Loop(BF16, lr=0.3))


class Precise(torch.optim.Optimizer):
    """Weights in a low format, moved by little without a loss."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for weight in self.param_groups[0]["params"]:
            self.move(weight, self.state[weight], weight.grad * -1e-5)

    def move(self, weight: torch.Tensor, held: dict[str, torch.Tensor], update: torch.Tensor) -> None:
        raise NotImplementedError


class Kahan(Precise):
    def move(self, weight: torch.Tensor, held: dict[str, torch.Tensor], update: torch.Tensor) -> None:
        rest = held.setdefault("rest", torch.zeros_like(weight))
        rest.add_(update)
        before = weight.clone()
        weight.add_(rest)
        rest.add_(before.sub_(weight))


class Stochastic(Precise):
    def move(self, weight: torch.Tensor, held: dict[str, torch.Tensor], update: torch.Tensor) -> None:
        bits = (weight.float() + update.float()).view(torch.int32)
        bits = (bits + torch.randint_like(bits, 0, 1 << 16)) & -65536
        weight.copy_(bits.view(torch.float32))


class StochasticInPlace(Precise):
    def move(self, weight: torch.Tensor, held: dict[str, torch.Tensor], update: torch.Tensor) -> None:
        moved = weight.float() + update.float()
        bits = moved.view(torch.int32)
        bits.add_(torch.randint_like(bits, 0, 1 << 16)).bitwise_and_(-65536)
        weight.copy_(moved)


class Dithered(Precise):
    def move(self, weight: torch.Tensor, held: dict[str, torch.Tensor], update: torch.Tensor) -> None:
        unit = weight.float().abs() * 2**-8
        weight.copy_(weight.float() + update.float() + (torch.rand_like(unit) - 0.5) * unit)


class Copied(Precise):
    def move(self, weight: torch.Tensor, held: dict[str, torch.Tensor], update: torch.Tensor) -> None:
        wide = held.setdefault("wide", weight.float())
        weight.copy_(wide.add_(update))


class Plain(Precise):
    def move(self, weight: torch.Tensor, held: dict[str, torch.Tensor], update: torch.Tensor) -> None:
        weight.copy_(weight.float() + update.float())


@pytest.mark.parametrize("kind", [Kahan, Stochastic, StochasticInPlace, Dithered, Copied])
def test_what_rounds_at_random_or_holds_the_rest_loses_nothing(kind: Callable[[Any], Precise]) -> None:
    """Kahan summation, stochastic rounding, dither and fp32 copies let small updates add up over steps."""
    loop = Loop(BF16)
    loop.optimizer = kind(loop.weights)
    is_right(lambda loop: loop.train(loop.low_loss()), loop)


def test_the_same_optimizer_without_either_loses_updates() -> None:
    """So what is said of the others is not for their being the user's own."""
    loop = Loop(BF16)
    loop.optimizer = Plain(loop.weights)
    assert nc.check_training(lambda: loop.train(loop.low_loss())).kinds == (UPDATES,)


def test_copies_of_the_weights_in_fp32_outside_of_the_model_lose_nothing() -> None:
    """The optimizer moves the fp32 copies, and the model's bf16 weights only receive rounded values."""
    loop = Loop(BF16)
    wide = [weight.detach().float() for weight in loop.weights]
    loop.optimizer = torch.optim.AdamW(wide, lr=1e-5)

    def step(loop: Loop) -> None:
        loop.net.zero_grad()
        loop.low_loss().backward()
        for copied, weight in zip(wide, loop.weights, strict=True):
            copied.grad = weight.grad.float()
        loop.optimizer.step()
        with torch.no_grad():
            for copied, weight in zip(wide, loop.weights, strict=True):
                weight.copy_(copied)

    is_right(step, loop)


# -- averages ----------------------------------------------------------------------------------------------------------


def averaged_in_place(loop: Loop) -> None:
    loop.train(loop.loss())
    with torch.no_grad():
        for mean, weight in zip(loop.average.parameters(), loop.weights, strict=True):
            mean.mul_(0.999).add_(weight, alpha=0.001)  # HERE


def averaged_by_lerp(loop: Loop) -> None:
    loop.train(loop.loss())
    for mean, weight in zip(loop.average.parameters(), loop.weights, strict=True):
        mean.detach().lerp_(weight.detach().to(mean.dtype), 0.001)  # HERE


def averaged_in_a_list(loop: Loop) -> None:
    loop.train(loop.loss())
    means, weights = [p.data for p in loop.average.parameters()], [w.data for w in loop.weights]
    torch._foreach_lerp_(means, [w.to(means[0].dtype) for w in weights], 0.001)  # HERE


def averaged_and_copied(loop: Loop) -> None:
    loop.train(loop.loss())
    for mean, weight in zip(loop.average.parameters(), loop.weights, strict=True):
        mean.data.copy_(0.999 * mean.data + 0.001 * weight.data.to(mean.dtype))  # HERE


class Shadow(Loop):
    """Averages in a dict, as homegrown ones are."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.means = {name: weight.detach().to(dtype) for name, weight in self.net.named_parameters()}


def averaged_in_a_dict(loop: Any) -> None:
    loop.train(loop.loss())
    for name, weight in loop.net.named_parameters():
        mean = loop.means[name]
        loop.means[name] = (0.999 * mean + 0.001 * weight.detach().to(mean.dtype)).clone()  # HERE


def averaged_in_slices(loop: Loop) -> None:
    """Python writes the slice that was added to onto itself."""
    loop.train(loop.loss())
    for mean, weight in zip(loop.average.parameters(), loop.weights, strict=True):
        mean.data[:] += 0.001 * (weight.data.to(mean.dtype) - mean.data)  # HERE


AVERAGES = [averaged_in_place, averaged_by_lerp, averaged_in_a_list, averaged_and_copied, averaged_in_slices]


@pytest.mark.parametrize("step", AVERAGES, ids=lambda step: step.__name__)
def test_an_average_in_bf16_stands_still_and_one_in_fp32_does_not(step: Callable[[Loop], None]) -> None:
    """A thousandth of the difference is lost in bf16's rounding, and the advised fp32 copy of the model moves."""
    loop = Loop()
    loop.average.to(BF16)
    check = found_at(step, loop, AVERAGE)
    assert "copy.deepcopy(model).float()" in check.findings[0].todo
    loop.average = copy.deepcopy(loop.net).float()
    is_right(step, loop)


def test_an_average_that_is_made_anew_each_time_stands_still_too() -> None:
    """Averages in a dict are other tensors after each step, and are still known as the same averages."""
    found_at(averaged_in_a_dict, Shadow(BF16), AVERAGE)
    is_right(averaged_in_a_dict, Shadow(torch.float32))


def through_a_low_format(loop: Loop, low: torch.dtype) -> None:
    loop.train(loop.loss())
    with torch.no_grad():
        for mean, weight in zip(loop.average.parameters(), loop.weights, strict=True):
            mean.copy_(mean.to(low).lerp(weight.to(low), 0.001))  # HERE


def after_a_low_format(loop: Loop, low: torch.dtype) -> None:
    loop.train(loop.loss())
    with torch.no_grad():
        for mean, weight in zip(loop.average.parameters(), loop.weights, strict=True):
            mean.copy_((mean.to(low) * 0.999).float() + 0.001 * weight)  # HERE


def copies(loop: Loop, low: torch.dtype) -> None:
    loop.train(loop.loss())
    with torch.no_grad():
        for mean, weight in zip(loop.average.parameters(), loop.weights, strict=True):
            mean.copy_(weight.to(low))


def adds_low_terms(loop: Loop, low: torch.dtype) -> None:
    loop.train(loop.loss())
    with torch.no_grad():
        for mean, weight in zip(loop.average.parameters(), loop.weights, strict=True):
            mean.mul_(0.999).add_(weight.to(low), alpha=0.001)


@pytest.mark.parametrize("step", [through_a_low_format, after_a_low_format], ids=lambda step: step.__name__)
def test_an_average_in_fp32_that_goes_through_a_low_format_stands_still(step: Callable[..., None]) -> None:
    """It is in fp32, and what it is computed in is not."""
    check = found_at(partial(step, low=BF16), Loop(), AVERAGE)
    assert "go through bf16" in check.findings[0].what
    assert check.findings[0].todo == "Compute it in fp32: leave out the conversion before it is written."
    is_right(partial(step, low=torch.float32), Loop())


@pytest.mark.parametrize("step", [copies, adds_low_terms], ids=lambda step: step.__name__)
def test_what_is_written_from_low_values_of_others_loses_nothing(step: Callable[..., None]) -> None:
    """A copy of the weights, and low terms that an average in fp32 adds."""
    is_right(partial(step, low=BF16), Loop())


def test_whole_numbers_that_become_low_are_no_values_in_fp32() -> None:
    """Between a step and the next, labels are converted: nothing is said, and all is looked at."""
    loop = Loop()

    def step() -> None:
        loop.train(loop.loss())
        torch.arange(4).to(BF16)

    assert "not inspected" not in str(nc.check_training(step))


@pytest.mark.parametrize("low", [BF16, torch.float16, torch.float32])
def test_weights_in_fp32_that_an_own_step_rounds_are_told(low: torch.dtype) -> None:
    """At the line that writes them, where most stay; not with a rate at which they move."""
    loop = Loop()

    def step(rate: float) -> None:
        loop.net.zero_grad()
        loop.loss().backward()
        with torch.no_grad():
            for weight in loop.weights:
                weight.copy_((weight - rate * weight.grad.sign()).to(low))  # HERE

    with torch.no_grad():
        for weight in loop.weights:
            weight.copy_(weight.to(low))
    if low is torch.float32:
        assert nc.check_training(step, (1e-5,)).kinds == ()
        return
    check = nc.check_training(step, (1e-5,))
    assert check.kinds == ("updates lost in rounding",), str(check)
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert "# HERE" in lines[check.findings[0].line - 1]


class Ranges(Loop):
    """The least values that an observer of activations has seen, on a scale where the decay moves them by a unit."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.low = torch.linspace(-3.95, -3.7, 16).to(dtype)


def ranges_with_decay(loop: Any) -> None:
    loop.train(loop.loss())
    with torch.no_grad():
        loop.low.mul_(0.9975).add_(loop.x.amin(0) * 1.2, alpha=0.0025)  # HERE


def test_an_average_that_moves_by_its_decay_alone_is_found() -> None:
    """The product is rounded a whole unit down, and what is added is lost: it drifts, and does not stay."""
    found_at(ranges_with_decay, Ranges(BF16), AVERAGE)
    is_right(ranges_with_decay, Ranges(torch.float32))


# -- sums --------------------------------------------------------------------------------------------------------------


class Summing(Loop):
    """A loop with a running loss."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.total = torch.zeros((), dtype=dtype)


def summed_in_place(loop: Any) -> None:
    loss = loop.loss()
    loop.train(loss)
    loop.total += loss.detach()  # HERE


def summed_anew(loop: Any) -> None:
    loss = loop.loss()
    loop.train(loss)
    loop.total = loop.total + loss.detach().to(loop.total.dtype)  # HERE


def summed_in_a_step(loop: Any) -> None:
    total = torch.zeros((), dtype=loop.total.dtype)
    with region():
        for loss in cross_entropy(loop.net(loop.x), loop.y).expand(600):
            total = total + loss.to(total.dtype)  # HERE
    loop.train(total.float() / 600)


def summed_from_a_number(loop: Any) -> None:
    loss = loop.loss()
    loop.train(loss)
    loop.number = getattr(loop, "number", 0.0) + loss.detach().to(loop.total.dtype)  # HERE


@pytest.mark.parametrize(
    "step", [summed_in_place, summed_anew, summed_in_a_step, summed_from_a_number], ids=lambda step: step.__name__
)
def test_a_loss_summed_in_bf16_is_found_and_one_in_fp32_is_right(step: Callable[[Any], None]) -> None:
    """Totals in place, as new tensors, within one step and begun from a Python number are all found."""
    check = found_at(step, Summing(BF16), SUM)
    term = "loss.float()" if step is summed_in_a_step else "loss.detach().float()"
    assert f"total + {term}" in check.findings[0].todo
    is_right(step, Summing(torch.float32))


def test_a_loss_of_two_parts_is_no_sum() -> None:
    """Adding two bf16 terms rounds once, unlike a growing total in which later terms vanish."""
    is_right(lambda loop: loop.train(loop.low_loss().to(BF16) + loop.low_loss().to(BF16)), Loop(BF16, lr=0.3))


@pytest.mark.parametrize("parts", [5, 600])
def test_a_sum_of_parts_is_reported_by_what_it_has_lost(parts: int) -> None:
    """A loss of five heads rounds as any low call does, though some are small; of 600 equal parts most are lost."""

    def step(loop: Loop) -> None:
        losses = [loop.low_loss().to(BF16), *(loop.low_loss().to(BF16) * 0.001).expand(parts)]
        loop.train(sum(losses))  # HERE

    if parts == 5:
        is_right(step, Loop(BF16, lr=0.3))
    else:
        found_at(step, Loop(BF16, lr=0.3), SUM)


def test_a_vector_that_is_cleared_and_summed_in_each_step_is_followed() -> None:
    """Losses of classes, in a region or not: clearing begins another sum, and so does whatever else is written."""

    def step(loop: Loop, many: int) -> None:
        loop.train(loop.loss())
        loop.per_class = getattr(loop, "per_class", torch.zeros(4, dtype=BF16)).zero_()
        for _ in range(many):
            loop.per_class.add_(torch.tensor([1.0, 2.0, 0.5, 0.1], dtype=BF16))  # HERE

    found_at(lambda loop: step(loop, 600), Loop(torch.float32), SUM)
    is_right(lambda loop: step(loop, 8), Loop(torch.float32))


def accumulated_in_bf16(loop: Loop) -> None:
    loop.optimizer.zero_grad()
    for rows in HALVES:
        loop.low_loss(rows).backward()  # HERE
    loop.optimizer.step()


def test_gradients_of_several_backwards_in_bf16_are_found_and_in_fp32_are_right() -> None:
    """Gradients have the format of their weights, so only bf16 weights round each part that is added."""
    found_at(accumulated_in_bf16, Loop(BF16, lr=0.3), GRADIENTS)

    def as_advised(loop: Loop) -> None:
        loop.optimizer.zero_grad()
        for rows in HALVES:
            loop.loss(rows).backward()
        loop.optimizer.step()

    is_right(as_advised, Loop())


def test_two_losses_with_a_backward_each_are_no_accumulation() -> None:
    """Two terms are added once, as a single backward of their sum would add them."""

    def step(loop: Loop) -> None:
        loop.optimizer.zero_grad()
        loop.low_loss().backward()
        loop.low_loss().square().backward()
        loop.optimizer.step()

    is_right(step, Loop(BF16, lr=0.3))


def accumulated_by_hand(loop: Loop, dtype: torch.dtype = BF16) -> None:
    totals = [torch.zeros_like(weight, dtype=dtype) for weight in loop.weights]
    for rows in HALVES:
        loop.optimizer.zero_grad()
        loop.loss(rows).backward()
        for total, weight in zip(totals, loop.weights, strict=True):
            total.add_(weight.grad)  # HERE
    for total, weight in zip(totals, loop.weights, strict=True):
        weight.grad = total.float()
    loop.optimizer.step()


def accumulated_in_a_list(loop: Loop) -> None:
    totals = [torch.zeros_like(weight, dtype=BF16) for weight in loop.weights]
    for rows in HALVES:
        loop.optimizer.zero_grad()
        loop.loss(rows).backward()
        torch._foreach_add_(totals, [weight.grad.to(BF16) for weight in loop.weights])  # HERE
    for total, weight in zip(totals, loop.weights, strict=True):
        weight.grad = total.float()
    loop.optimizer.step()


def test_gradients_added_by_hand_in_bf16_are_found_and_in_fp32_are_right() -> None:
    """Totals outside of the model are followed too, through add_ as through _foreach_add_."""
    found_at(accumulated_by_hand, Loop(), GRADIENTS)
    found_at(accumulated_in_a_list, Loop(), GRADIENTS)
    is_right(lambda loop: accumulated_by_hand(loop, torch.float32), Loop())


def test_a_momentum_in_bf16_by_hand_is_no_accumulation() -> None:
    """A buffer that decays by 0.9 keeps room for new gradients, unlike a sum that only grows."""
    loop = Loop()
    momenta = [torch.zeros_like(weight, dtype=BF16) for weight in loop.weights]

    def step(loop: Loop) -> None:
        loop.optimizer.zero_grad()
        loop.loss().backward()
        for momentum, weight in zip(momenta, loop.weights, strict=True):
            weight.grad.copy_(momentum.mul_(0.9).add_(weight.grad))
        loop.optimizer.step()

    is_right(step, loop)


# -- weights that are rounded between two steps ------------------------------------------------------------------------


def _in_memory(loop: Loop, dtype: torch.dtype) -> None:
    loop.net.load_state_dict({name: value.to(dtype) for name, value in loop.net.state_dict().items()})  # HERE


def _there_and_back(loop: Loop, dtype: torch.dtype) -> None:
    loop.net.to(dtype)
    loop.net.float()  # HERE


def _averaged(loop: Loop, dtype: torch.dtype) -> None:
    for weight in loop.weights:
        weight.data.copy_(weight.data.to(dtype))  # HERE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rounds", [_in_memory, _there_and_back, _averaged])
def test_weights_that_go_through_a_low_format_between_steps_are_told(
    rounds: Callable[[Loop, torch.dtype], None], dtype: torch.dtype
) -> None:
    """Saved and loaded, converted and converted back, copied: the line that widens them again; in fp32 nothing."""

    def step(loop: Loop) -> None:
        rounds(loop, dtype)
        loop.optimizer.zero_grad()
        loop.loss().backward()
        loop.optimizer.step()

    loop = Loop()
    loop.optimizer = torch.optim.AdamW(loop.weights, lr=1e-4)
    check = nc.check_training(step, (loop,))
    kinds = () if dtype is torch.float32 else ("weights rounded between steps",)
    assert check.kinds == kinds, str(check)
    if kinds:
        lines = Path(__file__).read_text(encoding="utf-8").splitlines()
        assert "# HERE" in lines[check.findings[0].line - 1]
        assert {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype] in check.findings[0].what


def test_weights_of_one_of_two_optimizers_are_told() -> None:
    """The other one's step comes in between, as in adversarial training."""
    loop, other = Loop(), Loop()

    def step() -> None:
        _there_and_back(loop, torch.bfloat16)
        for one in (loop, other):
            one.train(one.loss())

    assert nc.check_training(step).kinds == ("weights rounded between steps",)


def test_weights_loaded_from_a_low_checkpoint_are_right() -> None:
    """They are representable before the first step alone."""
    loop = Loop()
    loop.net.load_state_dict({name: value.bfloat16() for name, value in loop.net.state_dict().items()})

    def step() -> None:
        loop.optimizer.zero_grad()
        loop.loss().backward()
        loop.optimizer.step()

    assert nc.check_training(step).kinds == ()


# -- closures, losses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clears", [False, True])
@pytest.mark.parametrize("make", [lambda w: torch.optim.SGD(w, 0.1), lambda w: torch.optim.LBFGS(w, 0.1, max_iter=3)])
def test_gradients_that_a_closure_adds_to_used_ones_are_told(make: Callable[[Any], Any], clears: bool) -> None:
    """`optimizer.step(closure)` runs backwards inside of the step."""
    loop = Loop()
    loop.optimizer = make(loop.weights)

    def closure() -> torch.Tensor:
        if clears:
            loop.optimizer.zero_grad()
        loss = loop.loss()
        loss.backward()
        return loss

    check = nc.check_training(lambda: loop.optimizer.step(closure))
    assert check.kinds == (() if clears else ("gradients never cleared",)), str(check)


@pytest.mark.parametrize("is_wide", [False, True])
def test_a_loss_that_is_never_finite_is_told(is_wide: bool) -> None:
    """A sum of squares that fp16 cannot hold, whose root has zero gradients; in fp32 it is right."""
    loop = Loop(torch.float32)
    targets = torch.full((8, 4), 3000.0)

    def step() -> None:
        loop.optimizer.zero_grad()
        with region(torch.float16):
            output = loop.net(loop.x)
        difference = output.float() - targets if is_wide else output - targets.half()
        loss = difference.square().sum().sqrt()
        loop.scaler.scale(loss).backward()
        loop.end()

    kinds = nc.check_training(step).kinds
    assert ("a loss that is never finite" in kinds) is not is_wide


@pytest.mark.parametrize(
    ("updates", "scale", "is_wrong"), [(1, 64.0, True), (1, 2.0**40, True), (3, 2.0**40, True), (3, 64.0, False)]
)
def test_a_scaler_made_in_each_step_is_told_where_its_scale_matters(updates: int, scale: float, is_wrong: bool) -> None:
    """One for each optimizer step, or for an inner run of several, which is wrong where steps are skipped."""
    loop = Loop()

    def step() -> None:
        loop.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for _ in range(updates):
            loop.optimizer.zero_grad()
            loop.scaler.scale(loop.loss(dtype=torch.float16)).backward()
            loop.scaler.step(loop.optimizer)
            loop.scaler.update()

    assert ("a scaler made in each step" in nc.check_training(step).kinds) is is_wrong


# -- written in parts, and inside of a forward -------------------------------------------------------------------------


class Book(Loop):
    """A table of eight rows, and a counter, which the network's forward may update."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = torch.randn(8, 6).to(dtype)
        self.seen = torch.tensor(512.0, dtype=dtype)
        self.copy = copy.deepcopy(self.net).to(dtype)


def rows_one_by_one(loop: Any) -> None:
    loop.train(loop.loss())
    for k in range(8):
        loop.table[k] = loop.table[k] * 0.999 + loop.x[k, :6].to(loop.table.dtype) * 0.0005  # HERE


def rows_by_index(loop: Any) -> None:
    loop.train(loop.loss())
    index = torch.arange(8) % 4 * 2
    loop.table[index] = 0.999 * loop.table[index] + 0.0005  # HERE


def copied_before_the_forward(loop: Any) -> None:
    with torch.no_grad():
        for weight, mean in zip(loop.net.parameters(), loop.copy.parameters(), strict=True):
            mean.data = mean.data * 0.999 + weight.data.to(mean.dtype) * 0.001  # HERE
        for weight in loop.net.parameters():
            weight.mul_(1.01)
    loop.train(loop.loss())


@pytest.mark.parametrize("step", [rows_one_by_one, rows_by_index, copied_before_the_forward], ids=lambda s: s.__name__)
def test_an_average_is_followed_in_each_of_its_parts(step: Callable[[Loop], None]) -> None:
    """Each row is a value of its own, and a tensor that was made by the step before is kept from it."""
    found_at(step, Book(BF16), AVERAGE)
    is_right(step, Book(torch.float32))


class Counting(torch.nn.Module):
    """A forward that counts its calls, or averages what it gives, in buffers."""

    def __init__(self, net: torch.nn.Module, dtype: torch.dtype, how: str) -> None:
        super().__init__()
        self.net, self.how = net, how
        self.register_buffer("seen", torch.tensor(512.0, dtype=dtype))
        self.register_buffer("mean", torch.ones(16, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.how == "in place":
                self.seen += 1  # HERE
            elif self.how == "anew":
                self.seen = self.seen + 1  # HERE
            else:
                self.mean.copy_(self.mean * 0.999 + x[0, :16].to(self.mean.dtype) * 0.0005)  # HERE
        return self.net(x)


@pytest.mark.parametrize("how", ["in place", "anew", "average"])
def test_what_a_forward_keeps_in_its_buffers_is_followed(how: str) -> None:
    """A counter at 512 in bf16 stays there, an average that is copied back loses what is added; not so in fp32."""

    def loop_of(dtype: torch.dtype) -> tuple[Callable[[], None], Counting]:
        torch.manual_seed(0)
        model = Counting(torch.nn.Linear(16, 4), dtype, how)
        optimizer, x = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.randn(8, 16)

        def step() -> None:
            optimizer.zero_grad()
            with region():
                loss = cross_entropy(model(x).float(), torch.arange(8) % 4)
            loss.backward()
            optimizer.step()

        return step, model

    step, model = loop_of(BF16)
    check = nc.check_training(step)
    lines = Path(__file__).read_text().split("\n")
    kinds = {finding.kind: lines[finding.line - 1] for finding in check.findings}
    assert list(kinds) == [AVERAGE if how == "average" else SUM] and all("# HERE" in line for line in kinds.values())
    assert float(model.seen) == 512 and bool((model.mean == 1).all()), "the check leaves them as they were"
    assert nc.check_training(loop_of(torch.float32)[0])


@pytest.mark.parametrize("is_everywhere", [False, True])
def test_a_loop_that_has_diverged_before_is_no_sound_one(is_everywhere: bool) -> None:
    """Where all weights are NaN nothing moves, and where one is it spreads in the first step."""
    loop = Loop()
    with torch.no_grad():
        for weight in loop.weights if is_everywhere else [loop.weights[0][0, :1]]:
            weight.fill_(torch.nan)

    def step() -> None:
        loop.train(loop.loss())

    check = nc.check_training(step)
    assert check.verdict == "wrong", str(check)
    assert ("weights that are not finite" in check.kinds) is is_everywhere, str(check)


def test_what_accumulation_in_a_low_format_loses_is_measured():
    """As much as by hand: over 8 backwards, whatever clips the gradients afterwards."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.randn(8, 4, 16).bfloat16()

    def step():
        optimizer.zero_grad()
        for batch in batches:
            (model(batch).float().square().mean() / 8).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()

    kept = [(torch.zeros_like(p), torch.zeros_like(p, dtype=torch.float32)) for p in model.parameters()]
    for batch in batches:
        optimizer.zero_grad()
        (model(batch).float().square().mean() / 8).backward()
        for p, (low, exact) in zip(model.parameters(), kept, strict=True):
            low.add_(p.grad), exact.add_(p.grad.float())
    off = sum(float((low.float() - exact).square().sum()) for low, exact in kept)
    far = (off / sum(float(exact.square().sum()) for _, exact in kept)) ** 0.5
    found = nc.check_training(step, steps=1)
    (what,) = (one.what for one in found.findings if one.kind == "gradients added up in a low format")
    assert "of 8 backwards" in what and f"{far:.1e} off" in what, (what, far)


def test_a_copy_of_weights_for_later_is_no_average():
    """What their update has lost is told of the weights alone."""
    loop, kept = Loop(torch.bfloat16, lr=1e-4), {}

    def step():
        loop.train(loop.low_loss())
        kept.update({name: value.clone() for name, value in loop.net.state_dict().items()})

    assert [found.kind for found in nc.check_training(step).findings] == ["updates lost in rounding"]
