"""`nc.diff` of loops of training that mean the same: batches in parts, in another order, decays and clips elsewhere."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import narrowcast as nc

FORMATS = [torch.float32, torch.bfloat16]


def region(dtype):
    return torch.autocast("cpu", dtype, enabled=dtype is not torch.float32)


def net(inputs=10, outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


def captured(loop, *args):
    """A run of a loop whose model is gone when it ends."""
    torch.manual_seed(1)
    x, y = torch.randn(12, 10), torch.randn(12, 3)
    with nc.capture() as run:
        loop(net(), x, y, *args)
    return run


def whole(model, x, y, dtype, order=None, decay=0.0, clip=None, momentum=0.0):
    """Two steps, with all rows at once. clip: of gradients in place."""
    optimizer = torch.optim.SGD(model.parameters(), 0.3, weight_decay=decay, momentum=momentum)
    for _ in range(2):
        optimizer.zero_grad()
        rows = slice(None) if order is None else order
        with region(dtype):
            loss = F.mse_loss(model(x[rows]).float(), y[rows])
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


def in_parts(model, x, y, dtype, share=3.0):
    """The same in three micro-batches."""
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    for _ in range(2):
        optimizer.zero_grad()
        for rows in torch.arange(12).chunk(3):
            with region(dtype):
                loss = F.mse_loss(model(x[rows]).float(), y[rows])
            (loss / share).backward()
        optimizer.step()


def with_a_penalty(model, x, y, dtype, decay=0.1):
    """The optimizer's decay, in the loss."""
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    for _ in range(2):
        optimizer.zero_grad()
        with region(dtype):
            loss = F.mse_loss(model(x).float(), y)
        (loss + decay / 2 * sum(p.square().sum() for p in model.parameters())).backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_a_batch_in_parts_in_another_order_and_a_decay_in_the_loss_train_alike(dtype):
    """The gradients of the steps agree, or what these have changed of the weights; where they do not, it is told."""
    run = captured(whole, dtype)
    assert set(run.parameters) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    order = torch.tensor([7, 3, 11, 0, 5, 9, 1, 10, 2, 8, 6, 4])
    for other in (captured(in_parts, dtype), captured(whole, dtype, order)):
        assert nc.diff(run, other).verdict != "values differ", str(nc.diff(run, other))
    assert nc.diff(run, captured(in_parts, dtype, 2.0)).verdict == "values differ"
    decayed = captured(whole, dtype, None, 0.1)
    assert nc.diff(decayed, captured(with_a_penalty, dtype)).verdict != "values differ"
    found = nc.diff(decayed, captured(with_a_penalty, dtype, 0.2))
    assert found.verdict == "values differ" and any(row.is_beyond for row in found.gradients)


def adversaries(is_joined, weight, dtype):
    """A critic of real and made rows, in one call or two."""
    torch.manual_seed(1)
    real, noise = torch.randn(10, 6), torch.randn(10, 4)
    made, critic = net(4, 6), net(6, 1)
    steps = torch.optim.SGD(made.parameters(), 0.1), torch.optim.SGD(critic.parameters(), 0.1)
    ones, zeros = torch.ones(10, 1), torch.zeros(10, 1)
    for _ in range(2):
        with region(dtype):
            fake = made(noise)
            if is_joined:
                loss = F.mse_loss(critic(torch.cat([real, fake.detach()])).float(), torch.cat([ones, zeros]))
            else:
                on_real, on_fake = (critic(rows).float() for rows in (real, fake.detach()))
                loss = (F.mse_loss(on_real, ones) + weight * F.mse_loss(on_fake, zeros)) / 2
        steps[1].zero_grad()
        loss.backward()
        steps[1].step()
        steps[0].zero_grad()
        with region(dtype):
            loss = F.mse_loss(critic(fake).float(), ones)
        loss.backward()
        steps[0].step()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_two_models_of_one_class_are_told_apart_by_the_weights_they_began_with(dtype):
    """Which of them is called first differs, and so do their names. In bf16 four steps hide a weight of 2."""
    runs = []
    for is_joined, weight in ((False, 1.0), (True, 1.0), (False, 2.0 if dtype is None else 4.0)):
        with nc.capture() as run:
            adversaries(is_joined, weight, dtype)
        runs.append(run)
    assert nc.diff(runs[0], runs[1]).verdict != "values differ", str(nc.diff(runs[0], runs[1]))
    assert nc.diff(runs[2], runs[1]).verdict == "values differ"


class Slots(nn.Module):
    """A softmax over queries, whose bias has no gradient in theory; values are computed once, or each time."""

    def __init__(self, is_hoisted, scale=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.v = nn.Linear(8, 8), nn.Linear(8, 8)
        self.is_hoisted, self.scale = is_hoisted, scale

    def forward(self, x):
        state, values = x[:, :4], self.v(x)
        for _ in range(2):
            weights = (self.q(state) @ x.mT * self.scale).softmax(1)
            state = weights @ (values if self.is_hoisted else self.v(x))
        return state


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_a_gradient_that_is_zero_in_theory_differs_by_its_noise(dtype):
    """It is as far off as it is large; the others are alike."""
    x = torch.randn(3, 6, 8)
    loss = lambda y: y.float().square().mean()
    models = (Slots(False), Slots(True), Slots(True, 1.5))
    a, b, wrong = (nc.capture(model, (x,), under=dtype, backward=loss) for model in models)
    assert nc.diff(a, b).verdict != "values differ", str(nc.diff(a, b))
    assert nc.diff(a, wrong).verdict == "values differ"


def per_sample(model, x, y, is_mapped, power=2.0):
    """The norm of each row's own gradient."""

    def loss(weights, row, label):
        out = torch.func.functional_call(model, weights, (row[None],))
        return F.cross_entropy(out.float(), label[None])

    weights = dict(model.named_parameters())
    if is_mapped:
        gradients = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(weights, x, y)["weight"]
    else:
        losses = [F.cross_entropy(model(row[None]).float(), label[None]) for row, label in zip(x, y, strict=True)]
        gradients = torch.stack([torch.autograd.grad(one, model.weight)[0] for one in losses])
    return gradients.abs().pow(power).sum((1, 2)).sqrt()


class PerSample(nn.Module):
    def __init__(self, *how):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.how = nn.Linear(8, 5), how

    def forward(self, x, y):
        with torch.enable_grad():
            return per_sample(self.net, x, y, *self.how).detach()


@pytest.mark.parametrize("dtype", [None, "bf16"])
def test_gradients_inside_of_a_forward_show_in_its_output(dtype):
    """No parameter keeps one: what a backward computes differently there is another step, if outputs are alike."""
    inputs = torch.randn(5, 8), torch.arange(5)
    a, b, wrong = (nc.capture(PerSample(*how), inputs, under=dtype) for how in ((False,), (True,), (True, 1.0)))
    assert nc.diff(a, b).verdict != "values differ", str(nc.diff(a, b))
    assert nc.diff(a, wrong).verdict == "values differ"


class Ensemble(nn.Module):
    def __init__(self, is_mapped, factor=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.nets = nn.ModuleList([copy.deepcopy(net(8, 3)) for _ in range(3)])
        self.is_mapped, self.factor = is_mapped, factor

    def forward(self, x):
        if not self.is_mapped:
            return torch.stack([each(x) for each in self.nets]).mean(0)
        weights, _ = torch.func.stack_module_state(list(self.nets))
        outputs = torch.func.vmap(lambda w: torch.func.functional_call(self.nets[0], w, (x,)))(weights)
        return outputs.mean(0) * self.factor


def test_a_low_format_bounds_what_its_calls_without_a_partner_make():
    """A loop in fp32 beside a vmap in bf16: no pair of calls computes in bf16."""
    x = torch.randn(6, 8)
    a = nc.capture(Ensemble(False), (x,))
    b, wrong = (nc.capture(Ensemble(True, factor), (x,), under="bf16") for factor in (1.0, 1.5))
    assert nc.diff(a, b).verdict != "values differ", str(nc.diff(a, b))
    assert nc.diff(a, wrong).verdict == "values differ"


def adapted(_, x, y, dtype, by_function, rate=0.2):
    """Steps of a layer by the gradient of a loss after an inner step (MAML), by torch.autograd.grad or torch.func."""
    torch.manual_seed(0)
    model = nn.Linear(10, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.3)

    def loss(parameters, rows):
        with region(dtype):
            return (torch.func.functional_call(model, parameters, (x[rows],)).float() - y[rows]).square().mean()

    for _ in range(2):
        optimizer.zero_grad()
        if by_function:
            own = dict(model.named_parameters())
            inner = torch.func.grad(loss)(own, slice(0, 6))
            loss({name: p - rate * inner[name] for name, p in own.items()}, slice(6, 12)).backward()
        else:
            with region(dtype):
                first = F.mse_loss(model(x[:6]).float(), y[:6])
            w, b = torch.autograd.grad(first, [model.weight, model.bias], create_graph=True)
            with region(dtype):
                out = F.linear(x[6:], model.weight - rate * w, model.bias - rate * b).float()
                second = F.mse_loss(out, y[6:])
            second.backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_calls_inside_of_training_are_other_steps_where_all_weights_end_the_same(dtype):
    """Inner steps are made of other calls, and which is whose partner is not known; another rate is told."""
    a = captured(adapted, dtype, False)
    same = nc.diff(a, captured(adapted, dtype, True))
    assert same.verdict == "round-off" and max(row.difference for row in same.gradients) < 1e-6
    assert nc.diff(a, captured(adapted, dtype, True, 0.05)).verdict == "values differ"


@pytest.mark.parametrize("formats", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)], ids=str)
def test_a_scale_before_a_call_of_the_backward_or_in_it_is_one(formats):
    """Dropout by hand divides after it multiplies; a mask without the scale is told."""

    def trains(model, x, y, dtype, by_hand, share=0.75):
        with region(dtype):
            hidden = model[0](x).relu()
            torch.manual_seed(5)
            if by_hand:
                keep = torch.empty_like(hidden).bernoulli_(0.75)
                hidden = hidden * keep / share
            else:
                hidden = F.dropout(hidden, 0.25, True)
            out = model[2](hidden)
        F.mse_loss(out.float(), y).backward()

    a = captured(trains, formats[0], False)
    expected = "formats differ" if formats[0] is torch.float32 else "round-off"
    assert nc.diff(a, captured(trains, formats[1], True)).verdict == expected
    assert nc.diff(a, captured(trains, formats[1], True, 1.0)).verdict == "values differ"


def trained_as_built(order, scale=1.0):
    """Return the run of a whole script: it makes the model, fills it, and trains it by hand."""
    with nc.capture() as run:
        torch.manual_seed(0)
        layers = {name: nn.Linear(6, 6) for name in order}
        torch.manual_seed(1)
        for layer in (layers["a"], layers["b"]):
            nn.init.orthogonal_(layer.weight)
            layer.weight.data.copy_(layer.weight.data * scale)
            nn.init.trunc_normal_(layer.bias, std=0.1)
        model = nn.Sequential(layers["a"], nn.Tanh(), layers["b"])
        average = copy.deepcopy(model)
        for _ in range(2):
            loss = model(torch.linspace(-1, 1, 24).view(4, 6)).square().mean()
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, of_average, gradient in zip(model.parameters(), average.parameters(), gradients, strict=True):
                    p.sub_(gradient, alpha=0.5)
                    of_average.lerp_(p, 0.1)
        average(torch.ones(1, 6))
    return run


def test_what_fills_new_parameters_is_no_part_of_a_run():
    """Whatever the order in which a program makes its layers; steps and averages of weights are."""
    run = trained_as_built("ab")
    ops = {call.id.op for call in run.calls}
    assert "aten.uniform_.default" not in ops and {"aten.sub_.Tensor", "aten.lerp_.Scalar"} <= ops, ops
    assert run.steps == 2 and run.calls_before_step and any("fill new parameters" in note for note in run.notes)
    same = nc.diff(run, trained_as_built("ba"))
    assert same.verdict == "alike" and not same.unaligned, str(same)
    assert nc.diff(run, trained_as_built("ab", scale=1.1)).verdict == "values differ"
