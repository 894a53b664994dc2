"""Loops in which a step is skipped, a part of a gradient is cleared, or a penalty is made of gradients."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import narrowcast as nc
from narrowcast.reports.results.saved import parse

FP16, BF16 = torch.float16, torch.bfloat16


def net(inputs=4, outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 16), nn.Softplus(), nn.Linear(16, outputs))


@pytest.mark.parametrize("scale", [256.0, 2.0**16, 2.0**20])
def test_one_scaler_of_two_adversaries(scale):
    """The step of one may be skipped: what the other's backward adds to its gradients is cleared, and its weights are
    cast again for a step of their own.
    """
    maker, critic = net(8, 16), net(16)
    of_maker, of_critic = (torch.optim.SGD(m.parameters(), 0.01) for m in (maker, critic))
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def step():
        real, noise = torch.randn(16, 16), torch.randn(16, 8)
        of_critic.zero_grad()
        with torch.autocast("cpu", FP16):
            loss = F.softplus(-critic(real)).mean() + F.softplus(critic(maker(noise).detach())).mean()
        scaler.scale(loss).backward()
        scaler.step(of_critic)
        of_maker.zero_grad()
        with torch.autocast("cpu", FP16):
            loss = F.softplus(-critic(maker(noise))).mean()
        scaler.scale(loss).backward()
        scaler.step(of_maker)
        scaler.update()

    assert not nc.check_training(step).findings


CLEARED = {
    "a slice": lambda g: g[:9].zero_(),
    "a slice is filled": lambda g: g[:9].fill_(0.0),
    "by index": lambda g: g.__setitem__(slice(9), 0),
    "through data": lambda g: g.data.__setitem__(slice(9), 0.0),
    "all": lambda g: g.zero_(),
}


@pytest.mark.parametrize("how", CLEARED)
def test_a_part_of_a_gradient_is_cleared(how):
    """One row is trained, as in textual inversion: the rest of the table is not, and that is meant."""
    table, model = nn.Embedding(10, 4), net().requires_grad_(False)
    optimizer = torch.optim.SGD(table.parameters(), 1.0)

    def step():
        with torch.autocast("cpu", BF16):
            loss = model(table(torch.arange(10))).float().square().mean()
        loss.backward()
        CLEARED[how](table.weight.grad)
        optimizer.step()
        optimizer.zero_grad()

    assert nc.check_training(step).kinds == (("weights that never move",) if how == "all" else ())


def _micro_batches(model, optimizer, read, to_none):
    """Gradients of four micro-batches, each cleared before the next; read: what reads them before that."""
    x, kept = torch.randn(16, 4), []

    def step():
        for part in x.chunk(4):
            optimizer.zero_grad(set_to_none=to_none)
            with torch.autocast("cpu", BF16):
                loss = model(part).float().square().mean()
            loss.backward()
            kept.append(read([p.grad for p in model.parameters()]))
        for number, weight in enumerate(model.parameters()):
            if all(kept[-4:]):
                weight.grad = sum(gradients[number] for gradients in kept[-4:]) / 4
        optimizer.step()

    return step


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_of_micro_batches_that_are_cleared_are_told(to_none):
    """Each step uses the last one's alone. Not where they are copied, or kept, and summed afterwards."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    check = nc.check_training(_micro_batches(model, optimizer, lambda gradients: None, to_none))
    assert [finding.kind for finding in check.findings][:1] == ["gradients cleared before they are used"], str(check)
    line = Path(__file__).read_text().splitlines()[check.findings[0].line - 1]
    assert ("loss.backward()" if to_none else "optimizer.zero_grad") in line
    reads = [lambda gradients: [g.clone() for g in gradients]] + [list] * to_none
    for read in reads:
        assert (
            "gradients cleared before they are used"
            not in nc.check_training(_micro_batches(model, optimizer, read, to_none)).kinds
        )


def test_a_closure_that_fills_gradients_with_zeros_clears_them():
    """What an optimizer has used is cleared inside of its next step."""
    model, x = net(), torch.randn(16, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure():
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast("cpu", BF16):
            loss = model(x).float().square().mean()
        loss.backward()
        return loss

    assert not nc.check_training(lambda: optimizer.step(closure)).findings


def test_frozen_weights_are_cast_each_time():
    """A graph of gradients keeps an old cast alive; no region does."""
    critic, maker = net(), net(4, 4)
    of_critic, of_maker = (torch.optim.SGD(m.parameters(), 0.05) for m in (critic, maker))

    def step():
        critic.requires_grad_(True)
        of_critic.zero_grad()
        x = torch.randn(8, 4).requires_grad_()
        with torch.autocast("cpu", BF16):
            loss, total = critic(torch.randn(8, 4)).float().mean(), critic(x).sum()
        slope = torch.autograd.grad(total, x, create_graph=True)[0].float()
        (loss + 10 * (slope.norm(dim=1) - 1).square().mean()).backward()
        of_critic.step()
        critic.requires_grad_(False)
        of_maker.zero_grad()
        with torch.autocast("cpu", BF16):
            loss = -critic(maker(torch.randn(8, 4))).float().mean()
        loss.backward()
        of_maker.step()

    assert not nc.check_training(step).findings


@pytest.mark.parametrize("mapped", [False, True])
def test_losses_scaled_inside_of_torch_func(mapped):
    """Nobody sees there by what a loss is multiplied; and nothing goes wrong in looking."""
    model, scale = net(), 1024.0
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights, x):
        return torch.func.functional_call(model, weights, (x,)).float().square().mean() * scale

    def step():
        x = torch.randn(4, 4)
        with torch.autocast("cpu", FP16):
            if mapped:
                rows = torch.vmap(torch.func.grad(lambda w, row: loss(w, row[None])), (None, 0))(weights, x)
                gradients = {name: rows[name].mean(0) for name in rows}
            else:
                gradients = torch.func.grad(loss)(weights, x)
        for name, weight in weights.items():
            weight.sub_(0.1 * gradients[name] / scale)

    found = nc.check_training(step)
    assert not found.findings and not any("not inspected" in note for note in found.notes), str(found)


WEIGHED = {"10": lambda p: 10 * p, "10.0": lambda p: 10.0 * p, "0.1": lambda p: 0.1 * p, "/ 2.0": lambda p: p / 2.0}


@pytest.mark.parametrize("factor", WEIGHED)
@pytest.mark.parametrize("divided", [False, True])
def test_a_penalty_of_scaled_gradients(factor, divided):
    """Whatever its weight in the loss: a short number is no scale."""
    model = net(5)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 1e-3), torch.amp.GradScaler("cpu", init_scale=128.0)

    def step():
        optimizer.zero_grad()
        x = torch.randn(16, 5, requires_grad=True)
        with torch.autocast("cpu", FP16):
            out = model(x)
        slope = torch.autograd.grad(scaler.scale(out.float().sum()), x, create_graph=True)[0]
        slope = slope / scaler.get_scale() if divided else slope
        loss = out.float().square().mean() + WEIGHED[factor]((slope.norm(dim=1) - 1).square().mean())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    assert nc.check_training(step).kinds == (() if divided else ("scaled gradients in a loss",))


@pytest.mark.parametrize("scale", [1024.0, 2.0**20])
def test_a_loss_that_is_infinite_before_it_is_scaled(scale):
    """A step that is skipped for its scale, too, is no excuse for it."""
    model = net(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", FP16):
            out = model(torch.randn(64, 4))
            loss = (out - 300.0).square().sum()
        grown = torch.where(loss.isfinite(), loss, loss.detach())
        scaler.scale(grown).backward()
        scaler.step(optimizer)
        scaler.update()

    found = nc.check_training(step, steps=4)
    assert {"a loss that is never finite", "every step is skipped"} & set(found.kinds), str(found)


def test_a_check_in_an_assert_names_what_it_found():
    """pytest shows no more than this."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        with torch.autocast("cpu", FP16):
            loss = model(torch.randn(8, 4)).float().square().mean()
        loss.backward()
        optimizer.step()

    found = nc.check_training(step)
    more = f" and {len(found.findings) - 1} more" if len(found.findings) > 1 else ""
    first = f"{found.kinds[0]} ({Path(__file__).name}:{found.findings[0].line})"
    assert "fp16 without a scaler" in found.kinds
    assert repr(found) == f"<TrainingCheck: wrong: {first}{more}; print shows it>"


@pytest.mark.parametrize("at", ["op", "step"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_step_that_the_scaler_would_skip_is_made_by_hand(at, by_hand):
    """Then nothing was skipped: the infinity is in the weights."""
    model = net(6, 2)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=2.0**26)
    with nc.watch(at=at) as watching:
        for _ in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", FP16):
                loss = F.cross_entropy(model(torch.randn(16, 6)), torch.arange(16) % 2)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            optimizer.step() if by_hand else scaler.step(optimizer)
            scaler.update()
    assert all(p.isfinite().all() for p in model.parameters()) is not by_hand
    assert bool(watching.findings) is by_hand and not watching.notes, str(watching)
    assert by_hand is not ("by a scaler" in str(watching)), str(watching)
    if by_hand and at == "op":
        assert "scaler.step(optimizer)" in str(watching)


def averaging(rounds):
    """Return a step with a target that is averaged outside of no_grad, which makes its weights results of an op."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    target, low = (copy.deepcopy(model).requires_grad_(False) for _ in range(2))
    low.bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        x = torch.randn(6, 8)
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                y = target(x)
            loss = F.mse_loss(model(x), y + 1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch._foreach_lerp_(list(target.parameters()), list(model.parameters()), 0.005)
        if rounds:
            with torch.no_grad():
                weights = [w.bfloat16() for w in model.parameters()]
                torch._foreach_lerp_(list(low.parameters()), weights, 0.0005)

    step()
    return step


@pytest.mark.parametrize("rounds", [False, True])
def test_weights_that_are_results_have_no_gradient_to_read(rounds):
    """torch warns where theirs is read, and the program may make errors of warnings."""
    step = averaging(rounds)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check = nc.check_training(step)
    assert check.verdict == ("wrong" if rounds else "sound") and not check.not_inspected, str(check)


def test_a_loop_that_could_not_be_inspected_is_not_sound(monkeypatch):
    """Where looking failed nothing is said of the loop as a whole, and an assertion does not hold."""
    monkeypatch.setattr("narrowcast.training.check.looking.LoopObserver.end_of_round", lambda self: 1 / 0)
    check = nc.check_training(averaging(False))
    assert check.verdict == "not inspected" and not check and check.not_inspected == check.steps, str(check)
    assert "Not all of this loop could be inspected" in str(check) and parse(check.to_json()).verdict == check.verdict


def of_two_networks(clears):
    """Two optimizers of one scaler, whose first scale is too high; the second's loss goes through the first network."""
    torch.manual_seed(0)
    judge, maker = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), nn.Linear(4, 8)
    optimizers = [torch.optim.Adam(net.parameters()) for net in (judge, maker)]
    scaler = torch.amp.GradScaler("cpu")
    real, seed = torch.randn(16, 8) * 5, torch.randn(16, 4)

    def step():
        for number, optimizer in enumerate(optimizers):
            if clears:
                optimizer.zero_grad()
            with nc.autocast("cpu", torch.float16):
                made = maker(seed)
                logits = judge(made) if number else judge(real) - judge(made.detach())
                loss = logits.float().square().mean() * 20
            scaler.scale(loss).backward()
            scaler.step(optimizer)
        scaler.update()

    return step


@pytest.mark.parametrize("clears", [True, False])
def test_gradients_that_are_never_cleared_are_told_where_their_steps_are_skipped(clears):
    """Infinity stays in them, so that all steps are skipped, and `nc.watch` finds nothing; cleared, they are sound."""
    kinds = nc.check_training(of_two_networks(clears)).kinds
    assert kinds == () if clears else kinds[0] == "gradients never cleared", kinds
