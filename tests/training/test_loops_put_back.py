"""`nc.check_training` leaves all as it was: averages, schedules, flags, scalers, generators, whatever changes them."""

import copy
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LinearLR, ReduceLROnPlateau, SequentialLR, StepLR

import narrowcast as nc
from narrowcast.errors import RunError
from narrowcast.training.check.looking import LoopObserver

sys.path.insert(0, str(Path(__file__).parent))

from training_loops import Loop as Images, plain_bf16, region, scaled_fp16

BF16, FP16 = torch.bfloat16, torch.float16


class Loop:
    """A model, and steps of it that find nothing wrong."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        self.optimizer = optimizer(self.net.parameters(), lr=0.01)
        self.x, self.y = torch.randn(8, 16), torch.arange(8) % 4

    def loss(self, dtype: torch.dtype = BF16) -> torch.Tensor:
        with torch.autocast("cpu", dtype):
            return cross_entropy(self.net(self.x), self.y)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()


def values(*owners: Any) -> list[torch.Tensor]:
    """Copies of what modules hold."""
    return [tensor.clone() for owner in owners for tensor in owner.state_dict().values()]


def checked(step: Callable[[], Any], *modules: nn.Module) -> None:
    """The step is right, and modules are as they were."""
    before = values(*modules)
    assert nc.check_training(step).findings == ()
    assert all(map(torch.equal, values(*modules), before))


def test_averages_of_weights_are_put_back() -> None:
    """Both an AveragedModel and an average by hand, updated inside the step, have their old values after it."""
    loop = Loop()
    by_hand, averaged = copy.deepcopy(loop.net), torch.optim.swa_utils.AveragedModel(loop.net)

    def step() -> None:
        loop.step()
        averaged.update_parameters(loop.net)
        with torch.no_grad():
            for mean, weight in zip(by_hand.parameters(), loop.net.parameters(), strict=True):
                mean.mul_(0.9).add_(weight, alpha=0.1)

    checked(step, loop.net, by_hand, averaged)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: StepLR(o, 1, 0.5),
        lambda o: SequentialLR(o, [LinearLR(o), StepLR(o, 1, 0.5)], [1]),
        lambda o: ReduceLROnPlateau(o, patience=0),
    ],
    ids=["step", "sequential", "plateau"],
)
def test_schedules_are_put_back(make: Callable[[Any], Any]) -> None:
    """With the learning rate alone restored, the schedule would be two steps ahead of it."""
    loop = Loop()
    schedule = make(loop.optimizer)

    def step() -> None:
        loop.step()
        schedule.step(*([1.0] if isinstance(schedule, ReduceLROnPlateau) else []))

    before = copy.deepcopy((schedule.state_dict(), loop.optimizer.param_groups[0]["lr"]))
    checked(step, loop.net)
    after = (schedule.state_dict(), loop.optimizer.param_groups[0]["lr"])
    assert repr(after) == repr(before)


def test_weights_that_no_model_holds_are_put_back() -> None:
    """The values of a bare tensor are restored, and its gradient is None again."""
    weight = torch.randn(16, 4, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    x, y, before = torch.randn(8, 16), torch.arange(8) % 4, weight.detach().clone()

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", BF16):
            loss = cross_entropy(x @ weight, y)
        loss.backward()
        optimizer.step()

    nc.check_training(step)
    assert torch.equal(weight, before)
    assert weight.grad is None


@pytest.mark.parametrize("data", [True, False], ids=["data", "in place"])
def test_steps_by_hand_are_put_back(data: bool) -> None:
    """Assigning `weight.data` is undone like an update in place, and weights keep their memory addresses."""
    loop = Loop()

    def step() -> None:
        loop.net.zero_grad()
        loop.loss().backward()
        with torch.no_grad():
            for weight in loop.net.parameters():
                if data:
                    weight.data = weight.data - 0.1 * weight.grad
                else:
                    weight -= 0.1 * weight.grad

    places = [weight.data_ptr() for weight in loop.net.parameters()]
    checked(step, loop.net)
    assert [weight.data_ptr() for weight in loop.net.parameters()] == places


def test_state_in_fp32_of_weights_in_bf16_stays_in_fp32() -> None:
    """load_state_dict would round it to the weights' format."""

    class Precise(torch.optim.Optimizer):
        def __init__(self, weights: Any, lr: float) -> None:
            super().__init__(weights, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for weight in self.param_groups[0]["params"]:
                held = self.state[weight]
                held.setdefault("precise", weight.float())
                held["precise"].sub_(0.01 * weight.grad.float())
                weight.copy_(held["precise"])

    loop = Loop(Precise)
    loop.net.bfloat16()
    loop.x = loop.x.bfloat16()
    loop.step()
    held = [loop.optimizer.state[weight]["precise"] for weight in loop.net.parameters()]
    before = [tensor.clone() for tensor in held]
    nc.check_training(loop.step)
    after = [loop.optimizer.state[weight]["precise"] for weight in loop.net.parameters()]
    assert all(a is h and torch.equal(a, b) for a, h, b in zip(after, held, before, strict=True))


def test_flags_gradients_and_a_module_converted_in_the_step_are_put_back() -> None:
    """Modes, requires_grad and dtypes are restored, also those of a part that was called by itself."""
    loop = Loop()
    loop.net[2].eval()

    def step() -> None:
        loop.net.train()
        loop.net[0].bias.requires_grad_(False)
        loop.net[0].to(BF16)
        loop.step()
        with torch.no_grad():
            loop.net[2](torch.zeros(1, 32))  # a part, called once gradients are there

    nc.check_training(step)
    assert [module.training for module in loop.net] == [True, True, False]
    assert all(weight.requires_grad and weight.grad is None for weight in loop.net.parameters())
    assert loop.net[0].weight.dtype is torch.float32


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, nc.Scaler], ids=["torch", "ours"])
def test_a_step_that_raises_leaves_the_scaler_as_it_was(kind: Any) -> None:
    """Else the next step is told that unscale_ was called already."""
    loop, scaler = Loop(), kind("cpu")

    def step(raises: bool = False) -> None:
        loop.optimizer.zero_grad()
        scaler.scale(loop.loss(FP16)).backward()
        scaler.unscale_(loop.optimizer)
        if raises:
            raise KeyError("the step's own")
        scaler.step(loop.optimizer)
        scaler.update()

    step()
    before, rows = scaler.state_dict(), len(getattr(scaler, "history", ()))
    with pytest.raises(KeyError, match="the step's own"):
        nc.check_training(step, (True,))
    nc.check_training(step)
    assert scaler.state_dict() == before
    assert len(getattr(scaler, "history", ())) == rows
    step()


def test_a_generator_of_ones_own_is_put_back() -> None:
    """The batches drawn after the check are those that would have been drawn without it."""
    loop, numbers = Loop(), torch.Generator()
    before = numbers.get_state()

    def step() -> None:
        loop.x = torch.randn(8, 16, generator=numbers)
        loop.step()

    nc.check_training(step)
    assert torch.equal(numbers.get_state(), before)


def test_a_step_in_a_thread_of_its_own_is_put_back_and_told() -> None:
    """Weights are restored wherever they were changed, and a note says that other threads took part."""
    loop = Loop()
    before = values(loop.net)

    def step() -> None:
        thread = threading.Thread(target=loop.step, daemon=True)
        thread.start()
        thread.join(60)

    found = nc.check_training(step)
    assert all(map(torch.equal, values(loop.net), before))
    assert any("other threads" in note for note in found.notes)


def test_who_trains_in_another_thread_goes_on() -> None:
    """An unrelated model that another thread trains during the check keeps its updates."""
    loop, other = Loop(), Loop()
    go, done = threading.Event(), threading.Event()

    def train() -> None:
        go.wait(60)
        other.step()
        done.set()

    threading.Thread(target=train, daemon=True).start()

    def step() -> None:
        go.set()
        assert done.wait(60)
        loop.step()

    before = values(other.net)
    nc.check_training(step)
    assert not any(map(torch.equal, values(other.net), before))


def test_lbfgs_and_gradients_per_sample_run() -> None:
    """Weights change inside the step of LBFGS: casting them again is right. Under vmap parameters are wrapped."""
    loop = Loop(lambda weights, lr: torch.optim.LBFGS(weights, max_iter=3))

    def closure() -> torch.Tensor:
        loop.optimizer.zero_grad()
        loss = loop.loss()
        loss.backward()
        return loss

    checked(lambda: loop.optimizer.step(closure), loop.net)
    weights = {name: weight.detach() for name, weight in loop.net.named_parameters()}

    def of_sample(weights: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", BF16):
            return cross_entropy(torch.func.functional_call(loop.net, weights, (x[None],)), y[None])

    checked(lambda: torch.func.vmap(torch.func.grad(of_sample), (None, 0, 0))(weights, loop.x, loop.y), loop.net)


def test_a_step_that_runs_nothing_is_refused() -> None:
    """Calling a generator function or a coroutine function runs none of its code, so nothing was checked."""
    loop = Loop()

    def steps() -> Any:
        while True:
            yield loop.step()

    async def later() -> None:
        loop.step()

    for step in (steps, later):
        with pytest.raises(RunError, match="ran nothing"):
            nc.check_training(step)
    running = steps()
    checked(lambda: next(running), loop.net)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_nothing_changes(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    """Values are equal after three steps, and gradients and parameter groups are still the same objects."""
    loop = Images(optimizer, **({"momentum": 0.9} if optimizer is torch.optim.SGD else {}))
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
    """They are the same tensors with the same values, although the step zeroes them in place."""
    loop = Images()
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
    """The step's own exception reaches the caller, with weights, state and random numbers restored."""
    loop = Images(torch.optim.AdamW)

    def step() -> None:
        plain_bf16(loop)
        raise KeyError("the step's own")

    before = loop.state()
    with pytest.raises(KeyError, match="the step's own"):
        nc.check_training(step)
    assert all(map(torch.equal, loop.state(), before))


def test_what_a_step_makes_keeps_its_values() -> None:
    """Memory that no op made, and that nobody knew before the steps, is written to in them, and is somebody's later."""
    loop, made = Loop(), []

    def step() -> None:
        loop.step()
        numbers, more = torch.from_numpy(np.zeros(3)), nn.Linear(2, 2)
        numbers += 1
        with torch.no_grad():
            more.weight.fill_(3.0)
        made.extend([numbers, more.weight])

    checked(step, loop.net)
    assert [tensor.unique().tolist() for tensor in made] == [[1.0], [3.0]] * 2


def test_what_nobody_could_look_at_is_not_given_older_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where our own code fails, what the step made has its values, and what was there before may have the step's."""
    loop, made = Loop(), []

    def fails(*_: Any) -> None:
        raise ValueError("planted")

    def step() -> None:
        loop.step()
        made.append(torch.zeros(3).add_(1))

    monkeypatch.setattr(LoopObserver, "_before_op", fails)
    found = nc.check_training(step)
    assert any("planted" in note for note in found.notes)
    assert [tensor.tolist() for tensor in made] == [[1.0, 1.0, 1.0]] * 2


@pytest.mark.filterwarnings("ignore")
def test_buffers_of_scripts_and_gradients_that_nobody_has_asked_for_are_put_back() -> None:
    """A scripted batch norm's statistics and a gradient not yet read from Python are restored too."""
    script = torch.jit.script(nn.BatchNorm1d(4))
    weight = torch.ones(4, requires_grad=True)
    weight.sum().backward()  # Python has no object of the gradient yet
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step() -> None:
        script(torch.randn(8, 4))
        with torch.autocast("cpu", BF16):
            loss = (torch.randn(2, 4) @ weight).sum()
        loss.backward()
        optimizer.step()

    nc.check_training(step)
    assert int(script.num_batches_tracked) == 0
    assert script.running_var.tolist() == [1.0] * 4
    assert weight.grad is not None and weight.grad.tolist() == [1.0] * 4


def test_gradients_of_plain_tensors_are_as_before_where_the_step_makes_its_optimizer():
    """An optimizer that is first met after the backward has tensors whose gradients that made: they had none."""
    weight, data = torch.ones(4, 1, requires_grad=True), torch.ones(16, 4)

    def step() -> None:
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(2):
            (data @ weight).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    nc.check_training(step, steps=1)
    assert weight.grad is None and bool((weight == 1).all())
