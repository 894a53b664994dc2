"""Weights at rest: cast once and kept while they are as they were, and low copies to train with."""

import gc

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.frontends.eager import invalidate
from narrowcast.runtime.weights.at_rest import at_rest

BF16 = torch.bfloat16


class Net(nn.Module):
    """A convolution and two linear layers, with a result in each format."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.one, self.two = nn.Linear(8 * 64, 16), nn.Linear(16, 4)

    def forward(self, x):
        h = torch.tanh(self.one(torch.relu(self.conv(x)).flatten(1)))
        return self.two(h), torch.softmax(h, -1).float()


def net():
    torch.manual_seed(0)
    return Net(), torch.randn(4, 3, 8, 8)


def compiled(model, **options):
    torch._dynamo.reset()
    return nc.compile(model, under=BF16, backend="aot_eager", **options)


def called(model, x, **options):
    """The compiled model after its first call."""
    made = compiled(model, **options)
    with torch.no_grad():
        made(x)
    return made


def follows(made, model, x):
    """Whether the compiled model gives eager's bits now."""
    with torch.no_grad():
        with torch.autocast("cpu", BF16):
            expected = model(x)
        return all(torch.equal(a, b) for a, b in zip(made(x), expected, strict=True))


def test_weights_are_cast_once_and_anew_when_they_change():
    """In place, by a loaded state, by an optimizer, by .data, by another storage: the next call sees it."""
    model, x = net()
    model.eval()
    made = called(model, x)
    assert follows(made, model, x)
    count = at_rest.made
    assert follows(made, model, x)
    assert at_rest.made == count
    with torch.no_grad():
        model.one.weight.add_(0.5)
    assert follows(made, model, x)
    assert at_rest.made == count + 1
    model.load_state_dict({k: v + 0.25 if v.is_floating_point() else v for k, v in model.state_dict().items()})
    assert follows(made, model, x)
    model.one.weight.data.mul_(1.5)
    assert follows(made, model, x)
    model.two.weight.data = torch.randn_like(model.two.weight)
    assert follows(made, model, x)
    model.conv.weight.grad = torch.ones_like(model.conv.weight)
    torch.optim.AdamW(model.parameters(), fused=True).step()
    assert follows(made, model, x)
    with torch.inference_mode():
        assert follows(made, model, x)


def test_a_single_element_behind_the_counter_needs_to_be_said():
    """The one change that is not seen, and what to call."""
    model, x = net()
    model.eval()
    made = called(model, x)
    follows(made, model, x)
    model.one.weight.data[3, 100] += 100.0
    assert not follows(made, model, x)
    invalidate(model)
    assert follows(made, model, x)


def test_weights_may_stay_as_they_are():
    """With weights="cast" every call casts, and .data is always seen."""
    model, x = net()
    model.eval()
    made = called(model, x, weights="cast")
    model.one.weight.data[3, 100] += 100.0
    assert follows(made, model, x)


def test_copies_go_with_their_weights():
    """A model that is dropped takes its copies along; graphs share one copy per weight and format."""
    gc.collect()
    model, x = net()
    model.eval()
    before = len(at_rest)
    first, second = called(model, x), called(model, x, goal="fast")
    with torch.no_grad():
        first(x)
        second(x)
    held = len(at_rest) - before
    assert 0 < held <= len(list(model.parameters()))
    del model, first, second
    torch._dynamo.reset()
    gc.collect()
    assert len(at_rest) <= before


def test_a_weight_that_is_swapped_away_is_let_go():
    """torch.utils.swap_tensors refuses tensors that somebody refers to weakly."""
    nc.autocast("cpu", BF16)  # from the first region on torch's own ways to change weights are followed
    weight, other = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
    assert at_rest.find(weight, BF16)[0].sum() == 4
    torch.utils.swap_tensors(weight, other)
    assert at_rest.find(weight, BF16)[0].sum() == 0


def test_working_copies_train_with_eagers_bits():
    """Low copies of weights through a training run: losses and weights as with torch's own cache."""
    ends = []
    for working in (False, True):
        model, x = net()
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run = compiled(model, weights="working_copies" if working else "cast")
        for _ in range(5):
            optimizer.zero_grad()
            loss = sum(r.float().square().mean() for r in run(x))
            loss.backward()
            optimizer.step()
        ends.append((loss.item(), [p.detach().clone() for p in model.parameters()]))
    assert ends[0][0] == ends[1][0]
    assert all(torch.equal(a, b) for a, b in zip(ends[0][1], ends[1][1], strict=True))


@pytest.mark.parametrize("weights", ["folded", "working_copies"])
def test_inference_mode_first_and_training_after(weights):
    """A copy made under inference_mode may be saved for a backward."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[0].requires_grad_(False)
    run = compiled(model, weights=weights)
    x = torch.randn(2, 8)
    with torch.inference_mode():
        run(x)
    run(x).float().sum().backward()
    assert model[1].weight.grad is not None
    assert model[0].weight.grad is None


def test_a_working_copy_that_gets_no_gradient_gives_none():
    """As in eager code: zeros would have an optimizer decay the weight."""
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    run = compiled(lambda x: (model[0](x), model[1](x).detach()), weights="working_copies")
    run(torch.randn(2, 4))[0].float().sum().backward()
    assert model[0].weight.grad is not None
    assert model[1].weight.grad is None


class Consistency(nn.Module):
    """A pass without gradients whose results the other pass is to give, with the same weights."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))

    def forward(self, x):
        with torch.no_grad():
            wanted = self.net(x)
        return nn.functional.mse_loss(self.net(x + 1).float(), wanted.float())


def gradients(model, run, x):
    model.zero_grad()
    run(x).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("goal", ["exact", "fast", "memory"])
def test_a_working_copy_read_with_and_without_gradients_gives_them(goal):
    """A teacher pass under no_grad first: the gradients of the pass after it are eager's."""
    torch.manual_seed(0)
    model, x = Consistency(), torch.randn(8, 16)
    with torch.autocast("cpu", BF16):
        expected = gradients(model, model, x)
    found = gradients(model, compiled(model, goal=goal, weights="working_copies"), x)
    if goal == "exact":
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(torch.allclose(a, b, rtol=0.05, atol=1e-3) for a, b in zip(found, expected, strict=True))


def test_gradients_of_a_weight_that_is_cast_at_each_use_meet_in_fp32():
    """Without the cache eager casts a weight for each use, and adds up in the weight's format; working copies, too."""

    class Repeated(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x):
            for _ in range(4):
                x = torch.tanh(self.linear(x))
            return x.float().square().mean()

    torch.manual_seed(0)
    model, x = Repeated(), torch.randn(8, 32)
    with torch.autocast("cpu", BF16, cache_enabled=False):
        loss = model(x)
    loss.backward()
    expected = [p.grad for p in model.parameters()]
    torch._dynamo.reset()
    uncached = nc.autocast("cpu", BF16, cache_enabled=False)
    run = nc.compile(model, under=uncached, backend="aot_eager", weights="working_copies")
    found = gradients(model, run, x)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("options", [{}, {"goal": "fast"}, {"weights": "working_copies"}])
@pytest.mark.parametrize("grad", [True, False])
def test_weights_can_be_swapped_after_a_call(options, grad):
    """Nothing refers weakly to a weight when it is to be swapped, and the next call sees it."""
    torch.manual_seed(0)
    model, x = nn.Linear(16, 4), torch.randn(2, 16)
    run = compiled(model, **options)
    with torch.set_grad_enabled(grad):
        first = run(x).detach()
        torch.utils.swap_tensors(model.weight, nn.Parameter(2 * model.weight.detach()))
        torch.utils.swap_tensors(model.bias, nn.Parameter(2 * model.bias.detach()))
        assert torch.allclose(run(x), 2 * first, rtol=0.02)


@pytest.mark.parametrize("op", ["wgrad.aten.mm", "backward.aten.*"])
def test_rules_about_gradients_of_weights_are_refused_beside_low_copies(op):
    """Such a gradient is rounded to the copy's format; rules about other gradients hold."""
    policy = nc.Policy.native().with_rules([nc.Rule(op, "full")])
    with pytest.raises(nc.errors.GoalError, match=r"working_copies.*rounded"):
        nc.compile(nn.Linear(4, 4), under=policy, weights="working_copies")
    nc.compile(nn.Linear(4, 4), under=policy, weights="folded")
    nc.compile(
        nn.Linear(4, 4),
        under=nc.Policy.native().with_rules([nc.Rule("dgrad.aten.mm", "full")]),
        weights="working_copies",
    )
