"""`nc.diff` of loops whose optimizers are set otherwise, or which do not clear gradients, or evaluate other weights."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import narrowcast as nc


def loop(by_hand=False, decay=0.9, momentum=0.9, clears=True, groups=False, evaluates="average", losses=False):
    """Four steps with an average of the weights, and an evaluation after them; the port writes out the layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    x, y = torch.randn(24, 8), torch.randn(24, 4)
    held = [*model.parameters()]
    divided = [{"params": held[:2]}, {"params": held[2:]}] if groups else held
    optimizer = torch.optim.SGD(divided, 0.1, momentum=momentum, nesterov=momentum > 0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: decay**step)
    average = [p.detach().clone() for p in held]

    def forward(weights):
        if not by_hand:
            return torch.func.functional_call(model, dict(zip(dict(model.named_parameters()), weights, strict=True)), x)
        return torch.tanh(x @ weights[0].T + weights[1]) @ weights[2].T + weights[3]

    with nc.capture() as run:
        for _ in range(4):
            out = forward(held)
            loss = (out - y).square().mean() if by_hand else F.mse_loss(out, y)
            if clears:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                torch._foreach_lerp_(average, held, 0.5)
        with torch.no_grad():
            result = forward(average if evaluates == "average" else held)
            if losses:
                result.square().mean()
    return run


def first_advice(difference):
    """What is to be done first, and why."""
    return f"{difference.todos[0].what}: {difference.todos[0].why}"


def test_a_setting_of_an_optimizer_is_named_from_the_step_on_in_which_it_is_another():
    """With both values and both lines; parameter groups that are divided otherwise and set alike are no difference."""
    whole = loop()
    assert nc.diff(whole, loop(by_hand=True, groups=True)).verdict in ("alike", "round-off")
    slower = nc.diff(whole, loop(by_hand=True, decay=0.5))
    assert first_advice(slower).startswith(
        "Give both runs the same lr in SGD: from step 2 on: lr 0.09 in a, 0.05 in b (test_settings_of_a_difference.py:"
    ), slower
    straight = nc.diff(whole, loop(by_hand=True, momentum=0.0, groups=True)).other_step
    settings = [(one.name, one.a, one.b) for one in straight.settings]
    assert straight.number == 1 and settings == [("momentum", "0.9", "0"), ("nesterov", "True", "False")]
    assert not nc.diff(whole, loop(by_hand=True)).other_step


def test_settings_are_in_the_file_of_a_run(tmp_path):
    """Each step with its line, its settings, and how many calls came before."""
    run = loop(groups=True)
    loaded = nc.load(run.save(tmp_path / "run"))
    assert loaded.optimizer_steps == run.optimizer_steps and len(run.optimizer_steps) == run.steps == 4
    assert run.optimizer_steps[1].settings["lr"] == {"0.09": 212}
    assert 0 < run.optimizer_steps[0].calls < run.optimizer_steps[1].calls < len(run.calls)


def test_gradients_that_one_program_does_not_clear():
    """Its backward adds to those of the step before, which is the first that differs."""
    assert nc.diff(loop(clears=False), loop(True, clears=False)).verdict in ("alike", "round-off")
    found = nc.diff(loop(), loop(by_hand=True, clears=False))
    assert first_advice(found).startswith("Inspect which gradients are added up"), found
    assert "the backward of b adds to those that are there already" in first_advice(found), found


@pytest.mark.parametrize("losses", [False, True])
def test_evaluation_of_other_weights_after_training_that_is_alike(losses):
    """Its outputs differ, whether or not one number is all that is made of them."""
    assert nc.diff(loop(losses=losses), loop(True, losses=losses)).verdict in ("alike", "round-off")
    found = nc.diff(loop(losses=losses), loop(by_hand=True, evaluates="weights", losses=losses))
    assert found.verdict == "values differ" and found.front, found


class Added(nn.Module):
    """A layer, and what it adds to."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return x + self.layer(x)


def test_what_a_function_returns_is_compared_and_not_what_its_modules_do():
    """The sum of one function is made in a module, that of the other around it."""
    block, x = Added(), torch.randn(8, 16)
    runs = [nc.capture(model, (x,)) for model in (block, lambda x: block(x), lambda x: x + block.layer(x))]
    assert {nc.diff(a, b).verdict for a in runs for b in runs} == {"alike"}
    other = nc.diff(runs[0], nc.capture(lambda x: x * 1.1 + block.layer(x), (x,)))
    assert other.verdict == "values differ" and other.output_difference > 0.01, other


def test_a_weight_that_one_program_does_not_use_is_told():
    """A gain of ones changes no output before it is trained: a note says that less has a gradient."""
    torch.manual_seed(0)
    x, weight, runs = torch.randn(5, 8), torch.randn(8, 8), []
    for uses in (True, False):
        held = [nn.Parameter(weight.clone()), nn.Parameter(torch.ones(8))]
        optimizer = torch.optim.SGD(held, lr=0.1)
        with nc.capture() as run:
            ((x * held[1] if uses else x) @ held[0].T).square().mean().backward()
            optimizer.step()
        runs.append(run)
    assert any("72 elements of parameters have a gradient in a, 64 in b" in note for note in nc.diff(*runs).notes)


def test_a_function_that_returns_tokens_has_the_outputs_of_its_modules():
    """As one that generates has: what its model returned says how far apart two runs are."""
    torch.manual_seed(0)
    layer, x = nn.Linear(8, 4), torch.randn(3, 8)
    run = nc.capture(lambda x: layer(x).argmax(-1), (x,))
    assert [run.tensors[n].shape for n in run.returned] == [(3, 4)]
    assert nc.capture(lambda x: layer(x).exp(), (x,)).returned != run.returned
