"""Loops that keep what rounding takes, or lose it elsewhere; evaluations; and gradients of several scales."""

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import narrowcast as nc

_GENERATOR = torch.Generator().manual_seed(0)
X, Y = torch.randn(32, 16, generator=_GENERATOR), torch.randint(0, 4, (32,), generator=_GENERATOR)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


class WithoutDefaults(torch.optim.Optimizer):
    """An optimizer whose groups have no options."""

    def __init__(self, parameters):
        super().__init__(parameters, {})


class Kahan(WithoutDefaults):
    """SGD on weights in bf16 that keeps what is rounded away."""

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            rest = self.state[p].setdefault("rest", torch.zeros_like(p))
            rest.sub_(1e-3 * p.grad)
            before = p.clone()
            p.add_(rest)
            rest.add_(before - p)


class Stochastic(WithoutDefaults):
    """SGD on weights in bf16 that rounds them at random, by their bits."""

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            bits = (p.float() - 1e-3 * p.grad.float()).view(torch.int32)
            bits = (bits + torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32)) & -65536
            p.copy_(bits.view(torch.float32))


@pytest.mark.parametrize("optimizer", [Kahan, Stochastic])
def test_weights_in_bf16_that_lose_nothing_are_right_in_a_region_too(optimizer):
    """Of AdamW's weights it is said that they are in a low format."""

    def checked(make):
        model = net().bfloat16()
        trained = make(model.parameters())

        def step():
            trained.zero_grad()
            with nc.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(X.bfloat16()).float(), Y)
            loss.backward()
            trained.step()

        return nc.check_training(step)

    assert not checked(optimizer).findings
    assert "weights in a low format" in checked(lambda p: torch.optim.AdamW(p, 1e-3)).kinds


@pytest.mark.parametrize("is_overwritten", [False, True])
def test_a_master_that_the_weights_overwrite_keeps_nothing(is_overwritten):
    """Each step begins from the weights that were rounded."""
    model = net().bfloat16()
    master = copy.deepcopy(model).float()
    optimizer = torch.optim.SGD(master.parameters(), 1e-4)

    def step():
        if is_overwritten:
            master.load_state_dict(model.state_dict())
        model.zero_grad()
        F.cross_entropy(model(X.bfloat16()).float(), Y).backward()
        for wide, low in zip(master.parameters(), model.parameters(), strict=True):
            wide.grad = low.grad.float()
        optimizer.step()
        model.load_state_dict(master.state_dict())

    assert nc.check_training(step).kinds == (("updates lost in rounding",) if is_overwritten else ())


@pytest.mark.parametrize(
    ("region", "kinds"),
    [
        (lambda: nc.autocast("cpu", torch.bfloat16), ()),
        (contextlib.nullcontext, ("evaluation without the region",)),
        (lambda: nc.autocast("cpu", torch.float16), ("evaluation in another format",)),
    ],
)
@pytest.mark.parametrize("is_eval", [False, True])
def test_an_evaluation_is_one_without_eval_too(region, kinds, is_eval):
    """What runs without gradients is an evaluation, in the formats that training has."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        optimizer.zero_grad()
        with nc.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(X), Y)
        loss.backward()
        optimizer.step()
        model.train(not is_eval)
        with torch.no_grad(), region():
            model(X)
        model.train()

    assert nc.check_training(step).kinds == kinds


@pytest.mark.parametrize("changes", [False, True])
def test_a_scale_that_changes_within_an_accumulation_is_found(changes):
    """Gradients of both scales are added up, and divided by one."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step():
        optimizer.zero_grad()
        with nc.autocast("cpu", torch.float16):
            losses = [F.cross_entropy(model(X[n::4]), Y[n::4]) / 4 for n in range(4)]
        for n, loss in enumerate(losses):
            scaler.scale(loss).backward()
            if changes and n == 1:
                scaler.update(512.0)
        scaler.step(optimizer)
        scaler.update(1024.0 if changes else None)

    checked = nc.check_training(step)
    assert checked.kinds == (("gradients of several scales",) if changes else ())
    assert all("scaler.update(), once" in finding.todo for finding in checked.findings)


def test_two_scalers_of_one_optimizer_are_to_be_one():
    """No update is in the wrong place."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scalers = [torch.amp.GradScaler("cpu", init_scale=scale) for scale in (1024.0, 256.0)]

    def step():
        optimizer.zero_grad()
        with nc.autocast("cpu", torch.float16):
            losses = [F.cross_entropy(model(X[n::2]), Y[n::2]) for n in range(2)]
        for scaler, loss in zip(scalers, losses, strict=True):
            scaler.scale(loss).backward()
        scalers[1].step(optimizer)
        scalers[1].update()

    checked = nc.check_training(step)
    assert checked.kinds == ("gradients of several scales",)
    assert "by the scaler that steps it" in checked.findings[0].todo


@pytest.mark.parametrize("between", [False, True])
def test_an_update_between_steps_with_gradients_that_autograd_gave_is_found(between):
    """The loop hands them to the weights itself; the second step divides by another scale."""
    models = [net(), net()]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)

    def step():
        for model in models:
            with nc.autocast("cpu", torch.float16):
                loss = F.cross_entropy(model(X), Y)
            weights = list(model.parameters())
            for weight, gradient in zip(weights, torch.autograd.grad(scaler.scale(loss), weights), strict=True):
                weight.grad = gradient
        scaler.step(optimizers[0])
        if between:
            scaler.update()
        scaler.step(optimizers[1])
        scaler.update()

    assert nc.check_training(step).kinds == (("a scale updated before all steps",) if between else ())


@pytest.mark.parametrize("to_none", [False, True])
def test_gradients_that_stay_in_one_memory_have_the_scale_of_their_own_step(to_none):
    """Zeroed in place, they lie where those of the step before were, whose scale was another."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)

    def step():
        optimizer.zero_grad(set_to_none=to_none)
        with nc.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(X), Y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    assert nc.check_training(step, steps=3).kinds == ()
