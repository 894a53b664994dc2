"""`nc.diff` of loops that are written otherwise: few lines where they part, and parameters that one alone trains."""

import copy
import inspect
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import narrowcast as nc
from narrowcast.core.ledger.identity import CallId
from narrowcast.reports.results.run_differences import RunRow


def line_of(made, mark):
    """The number of the line of a function that ends in a mark."""
    lines, first = inspect.getsourcelines(made)
    return next(first + n for n, line in enumerate(lines) if line.rstrip().endswith(f"# {mark}"))


def lines_named(difference):
    """The numbers of the lines of this file in the first advice, but those after which, and at which it is read."""
    text = " ".join(str(difference).split())
    first = re.split(r" \d\. (?=[A-Z])", text)[1]
    first = re.sub(r"; after [^;)]*|; first read by .*", "", first)
    return {int(n) for ns in re.findall(r"test_where_programs_part\.py:(\d+(?:, \d+)*)", first) for n in ns.split(", ")}


def models():
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 5)).requires_grad_(False)
    student = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 5))
    return teacher, student, nn.Parameter(torch.tensor(2.0))


def distilled():
    """A step with losses of torch, over a whole batch."""
    teacher, student, scale = models()
    optimizer = torch.optim.AdamW([*student.parameters(), scale], 0.01)
    x, y = torch.randn(30, 12), torch.randint(0, 5, (30,))
    with nc.capture() as run:
        logits = student(x) * scale.exp()
        soft = F.kl_div(F.log_softmax(logits / 3, -1), F.softmax(teacher(x) / 3, -1), reduction="batchmean") * 9
        (F.cross_entropy(logits, y) + soft).backward()
        optimizer.step()
    return run


def distilled_by_hand(fault=""):
    """The same in three micro-batches, without modules and with a loss that is written out."""
    teacher, student, scale = models()
    first, last = student[0], student[2]
    held = [*first.parameters(), *last.parameters(), scale]
    if fault == "frozen":
        first.requires_grad_(False)
    optimizer = torch.optim.AdamW(held[:-1] if fault == "in no optimizer" else held, 0.01)
    x, y = torch.randn(30, 12), torch.randint(0, 5, (30,))
    with nc.capture() as run:
        for xs, ys in zip(x.chunk(3), y.chunk(3), strict=True):
            hidden = F.gelu(F.linear(xs, teacher[0].weight, teacher[0].bias))
            target = F.linear(hidden, teacher[2].weight, teacher[2].bias)
            h = F.gelu(F.linear(xs, first.weight, first.bias))
            h = h.detach() if fault == "detached" else h
            logits = F.linear(h, last.weight, last.bias) * scale.exp()
            p = (target / (1 if fault == "temperature" else 3)).softmax(-1)  # temperature
            log_q = (logits / 3).log_softmax(-1)
            soft = (p * (p.log() - log_q)).sum(-1).mean()
            soft = soft * (3 if fault == "factor" else 9)  # factor
            if fault == "direction":
                soft = 9 * (log_q.exp() * (log_q - p.log())).sum(-1).mean()  # direction
            ((F.cross_entropy(logits, ys) + soft) / 3).backward()
        optimizer.step()
    return run


@pytest.mark.parametrize("fault", ["", "temperature", "factor", "direction"])
def test_where_loops_part_is_named_with_few_lines(fault):
    """Nearly all calls are without a partner; those with values that the other run has are not named."""
    found = nc.diff(distilled(), distilled_by_hand(fault))
    if not fault:
        assert found.verdict == "round-off" and not found.front and not found.untrained, str(found)
        return
    named = {n for n in lines_named(found) if n > distilled_by_hand.__code__.co_firstlineno}
    assert found.verdict == "values differ" and found.front, str(found)
    assert line_of(distilled_by_hand, fault) in named and len(named) <= 8, str(found)


@pytest.mark.parametrize("fault", ["frozen", "detached", "in no optimizer"])
def test_a_parameter_that_one_run_alone_trains_is_named_first(fault, tmp_path):
    """Also where no module has it and one step is compared: forward, loss and other gradients are the same."""
    found = nc.diff(distilled(), distilled_by_hand(fault))
    left, line = ["Sequential.0.weight", "Sequential.0.bias"], -3
    if fault == "in no optimizer":
        left, line = ["parameter 8"], -1
    assert found.verdict == "values differ" and [one.of for one in found.untrained] == left, str(found)
    assert f"1. Inspect how b trains {left[0]} of a" in " ".join(str(found).split()), str(found)
    first = line_of(distilled_by_hand, "temperature")
    assert {int(one.place.rpartition(":")[2]) - first for one in found.untrained} == {line}
    assert nc.load(found.save(tmp_path / "found")).untrained == found.untrained
    assert nc.diff(distilled_by_hand(fault), distilled()).untrained[0].run == "a"


def stepped(is_flat):
    """Two steps of SGD on one tensor of all parameters, in an own loop, or on each of them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
    backbone, x, y = copy.deepcopy(model).requires_grad_(False), torch.randn(10, 8), torch.arange(10) % 3
    shapes = {name: p.shape for name, p in model.named_parameters()}
    flat = torch.cat([p.detach().flatten() for p in model.parameters()]).requires_grad_()
    optimizer = torch.optim.SGD([flat] if is_flat else model.parameters(), 0.1)
    with nc.capture() as run:
        for _ in range(2):
            optimizer.zero_grad()
            pieces = flat.split([shape.numel() for shape in shapes.values()])
            given = {n: p.view(shape) for (n, shape), p in zip(shapes.items(), pieces, strict=True)}
            logits = torch.func.functional_call(model, given, (x,)) if is_flat else model(x)
            F.cross_entropy(logits + backbone(x), y).backward()
            optimizer.step()
    return run


def test_parameters_that_are_trained_as_one_are_trained():
    """The model's own stay where they are, and a frozen copy has their values in both runs."""
    found = nc.diff(stepped(False), stepped(True))
    assert found.verdict in ("alike", "round-off") and not found.untrained, str(found)


class Around(nn.Module):
    """A linear layer, and what is summed over neighbours after it, in the module or by the program."""

    def __init__(self, sums):
        super().__init__()
        self.lin, self.sums = nn.Linear(8, 8), sums

    def forward(self, x, edges):
        h = self.lin(x)
        return torch.zeros_like(h).index_add(0, edges[1], h[edges[0]]) if self.sums else h


def stepped_over_a_graph(is_by_hand, low):
    torch.manual_seed(0)
    layers = [Around(True) for _ in range(2)]
    if is_by_hand:
        layers = [layer.lin for layer in layers]
    x, edges = torch.randn(12, 8), torch.randint(0, 12, (2, 40))
    optimizer = torch.optim.AdamW([p for layer in layers for p in layer.parameters()], 0.01)
    with nc.capture() as run:
        with nc.autocast("cpu", torch.bfloat16, enabled=low):
            for layer in layers:
                if is_by_hand:
                    h = layer(x)
                    summed = torch.zeros_like(h).index_add(0, edges[1], h[edges[0]])
                else:
                    summed = layer(x, edges)
                x = summed.relu()
        x.float().square().mean().backward()
        optimizer.step()
    return run


@pytest.mark.parametrize("low", [False, True])
def test_what_layers_and_modules_around_them_return_is_no_pair(low):
    """One program calls layers, the other modules that do more; gradients are the same."""
    found = nc.diff(stepped_over_a_graph(True, low), stepped_over_a_graph(False, low))
    assert found.verdict in ("alike", "round-off"), str(found)


def test_calls_of_other_kinds_do_not_differ_in_format():
    """A sum in a low model's backward beside a softmax's in an fp32 loss, which order may pair, are two calls."""

    def row(*ops):
        calls = [(CallId("", op, 1, 1, "backward"),) for op in ops]
        return RunRow(*calls, "", "", "fp32", "bf16", "order", "round-off", 0.0, 0.0, 0.0, "sketches")

    assert not row("aten._log_softmax_backward_data.default", "aten.add.Tensor").differs_in_format
    assert row("aten.addmm.default", "aten.linear.default").differs_in_format
    assert row("aten.mul.Tensor", "aten.mul.Tensor").differs_in_format


@pytest.mark.parametrize("frozen", [False, True])
def test_moments_of_a_parameter_that_the_run_has_not_seen(frozen):
    """An optimizer keeps them of a parameter without a gradient, which no module has."""

    def run(frozen):
        torch.manual_seed(0)
        first, last, other = nn.Linear(8, 8), nn.Linear(8, 4), nn.Parameter(torch.randn(3, 3))
        optimizer = torch.optim.Adam([*first.parameters(), *last.parameters(), other])
        x = torch.randn(5, 8)
        (last(first(x)).square().mean() + other.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        first.requires_grad_(not frozen)
        with nc.capture() as run:
            last(first(x)).square().mean().backward()
            optimizer.step()
        return run

    runs = run(False), run(frozen)
    assert any(list(row) == ["value", "exp_avg", "exp_avg_sq"] for row in runs[1].parameters.values()), runs[
        1
    ].parameters
    assert [one.name for one in nc.diff(*runs).untrained] == ["Linear.weight", "Linear.bias"] * frozen


class Ranked(nn.Module):
    """A square weight, which may be transposed, and two heads, which may be one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.body, self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 3), nn.Linear(16, 2)

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        return self.a(hidden), self.b(hidden)


def adversaries(low=None):
    """Two models that train against each other, by two optimizers: the second loss leaves gradients in the first."""
    torch.manual_seed(0)
    model, judge, x = Ranked(), nn.Linear(5, 1), torch.randn(2, 32, 16)
    optimizers = [torch.optim.Adam(m.parameters(), 0.01) for m in (judge, model)]
    with nc.capture() as run:
        for batch in x:
            with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
                score = judge(torch.cat(model(batch), 1).detach())
                first = F.binary_cross_entropy_with_logits(score.float(), torch.zeros(32, 1))
            optimizers[0].zero_grad()
            first.backward()
            optimizers[0].step()
            with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
                score = judge(torch.cat(model(batch), 1))
                second = F.binary_cross_entropy_with_logits(score.float(), torch.ones(32, 1))
            optimizers[1].zero_grad()
            second.backward()
            optimizers[1].step()
    return run


def adversaries_by_hand(fault="", low=None):
    """The same with plain tensors: one weight transposed, both heads in one, no gradient in what does not step."""
    torch.manual_seed(0)
    model, judge, x = Ranked(), nn.Linear(5, 1), torch.randn(2, 32, 16)
    square, bias = model.body.weight.detach().t().clone().requires_grad_(), model.body.bias
    heads = torch.cat([model.a.weight, model.b.weight]).detach().t().clone().requires_grad_()
    ends = torch.cat([model.a.bias, model.b.bias]).detach().clone().requires_grad_()
    painters = torch.optim.Adam([square, bias, heads, ends], 0.01)
    judges = torch.optim.Adam(judge.parameters(), 0.01)

    def paint(batch):
        return torch.tanh(batch @ square + bias) @ heads + ends

    def score(painted):
        return (painted * judge.weight).sum(1) + judge.bias

    with nc.capture() as run:
        for batch in x:
            for optimizer in (judges, painters):
                optimizer.zero_grad()
                judge.requires_grad_(optimizer is judges)
                with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
                    if optimizer is judges:
                        with torch.no_grad():
                            painted = paint(batch)
                        loss = F.softplus(score(painted).float()).mean()
                    else:
                        loss = F.softplus(-score(paint(batch)).float()).mean()
                        if fault:
                            loss = loss + 0.1 * square.square().mean()  # fault
                loss.backward()
                optimizer.step()
    return run


def normed():
    """Three steps of Adam on a model with a norm of batches: its first bias has a gradient of rounding alone."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(3, 24, 12)
    optimizer = torch.optim.Adam(model.parameters(), 0.01, betas=(0.8, 0.9))
    with nc.capture() as run:
        for batch in x:
            optimizer.zero_grad()
            F.cross_entropy(model(batch), batch[:, :4].argmax(1)).backward()
            optimizer.step()
    return run


def normed_by_hand(one_vector=False, rate=0.01):
    """The same without Parameters: weights are tensors of a dict, or one vector, and each step makes new ones."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4)), torch.randn(3, 24, 12)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    shapes = {name: p.shape for name, p in weights.items()}
    if one_vector:
        weights = {"all": torch.cat([p.flatten() for p in weights.values()])}
    means, squares = ({name: torch.zeros_like(p) for name, p in weights.items()} for _ in range(2))

    def logits(weights, batch):
        if one_vector:
            parts = weights["all"].split([shape.numel() for shape in shapes.values()])
            weights = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
        hidden = batch @ weights["0.weight"].mT + weights["0.bias"]
        off = hidden - hidden.mean(0)
        hidden = off / (off.square().mean(0) + 1e-5).sqrt() * weights["1.weight"] + weights["1.bias"]
        return torch.tanh(hidden) @ weights["3.weight"].mT + weights["3.bias"]

    with nc.capture() as run:
        for step, batch in enumerate(x, 1):
            weights = {name: p.detach().requires_grad_() for name, p in weights.items()}
            scores = logits(weights, batch)
            rows = torch.arange(24)
            loss = (scores.exp().sum(1).log() - scores[rows, batch[:, :4].argmax(1)]).mean()
            gradients = torch.autograd.grad(loss, list(weights.values()))
            with torch.no_grad():
                for (name, p), g in zip(list(weights.items()), gradients, strict=True):
                    means[name] = 0.8 * means[name] + 0.2 * g
                    squares[name] = 0.9 * squares[name] + 0.1 * g * g
                    size = (squares[name] / (1 - 0.9**step)).sqrt() + 1e-8
                    weights[name] = p - rate * means[name] / (1 - 0.8**step) / size
    return run


class TestLoopsThatTrainAlike:
    """Where all weights have moved alike, by gradients of one mean, what is computed on the way is no fault."""

    @pytest.mark.parametrize("low", [None, torch.bfloat16], ids=["fp32", "bf16"])
    def test_gradients_that_no_step_uses_are_no_difference(self, low):
        """One loop leaves the second loss's gradients in the judge, the other asks for none; heads are one there."""
        found = nc.diff(adversaries(low), adversaries_by_hand(low=low))
        assert found.verdict == ("round-off" if low is None else "formats differ"), found.to_text(every=True)
        assert not found.todos[:1] or "formats" in found.todos[0].what

    def test_a_term_of_a_loss_is_found_in_loops_written_otherwise(self):
        """The weights have moved otherwise, and the line that makes it is named."""
        found = nc.diff(adversaries(), adversaries_by_hand("decay"))
        assert found.verdict == "values differ"
        assert line_of(adversaries_by_hand, "fault") in lines_named(found)

    @pytest.mark.parametrize("one_vector", [False, True])
    def test_weights_without_parameters_are_found_by_their_values(self, one_vector):
        """A run whose weights are plain tensors comes to those of the other; with another rate it does not."""
        found = nc.diff(normed(), normed_by_hand(one_vector))
        assert found.verdict == "round-off", found.to_text(every=True)
        assert nc.diff(normed(), normed_by_hand(one_vector, rate=0.02)).verdict == "values differ"


def detached(low, name="Adagrad"):
    """Two steps; a layer that the optimizer holds is detached, or not."""
    torch.manual_seed(0)
    stem, head, x = nn.Linear(6, 8), nn.Linear(8, 3), torch.randn(2, 12, 6)
    optimizer = getattr(torch.optim, name)([*stem.parameters(), *head.parameters()], 0.05)
    with nc.capture() as run:
        for batch in x:
            hidden = stem(batch)
            out = head((hidden.detach() if low else hidden).relu())
            optimizer.zero_grad()
            out.tanh().sum(1).square().mean().backward()
            optimizer.step()
    return run


def test_a_weight_of_which_an_optimizer_has_a_state_but_no_gradient_is_one():
    """Adagrad makes its states before any step: they are of weights with values."""
    found = nc.diff(detached(False), detached(True))
    assert found.verdict == "values differ" and found.untrained


class Rotated(nn.Module):
    """Two layers that turn what they read by one table, whose columns stand there twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x):
        angles = torch.arange(x.shape[0])[:, None] * 10.0 ** -torch.arange(8)
        table = torch.cat([angles, angles], -1)
        for layer in self.layers:
            y = layer(x)
            first, second = y.chunk(2, -1)
            x = x + torch.tanh(y * table.cos() + torch.cat([-second, first], -1) * table.sin())
        return x


class RotatedByHalves(nn.Module):
    """The same with a table of half the columns."""

    def __init__(self, model, fault):
        super().__init__()
        self.layers, self.fault = model.layers, fault

    def forward(self, x):
        angles = torch.outer(torch.arange(x.shape[0]), 10.0 ** -torch.arange(8))
        cos, sin = angles.cos(), angles.sin()
        for layer in self.layers:
            a, b = layer(x).chunk(2, -1)
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
            if self.fault == "scale":
                turned = turned * 0.9  # scale
            turned = turned.tanh()
            x = turned if self.fault == "residual" else x + turned
        return x


@pytest.mark.parametrize("fault", ["scale", "residual"])
def test_what_led_to_known_values_once_is_not_named_where_it_is_read_again(fault):
    """A table is in the other program with other columns; what the first layer makes of it is in both."""
    torch.manual_seed(0)
    model, x = Rotated(), torch.randn(20, 16)
    other = RotatedByHalves(model, fault)
    with torch.no_grad():
        found = nc.diff(nc.capture(model, (x,)), nc.capture(other, (x,)))
    assert found.verdict == "values differ"
    first = {run: next(new for new in found.front if new.run == run) for run in {new.run for new in found.front}}
    assert not any("cos" in new.id.op or "sin" in new.id.op for new in found.front), found
    if fault == "scale":
        assert first["b"].place.endswith(f":{line_of(RotatedByHalves.forward, 'scale')}"), found
    else:
        assert first["a"].id.op == "aten.add.Tensor", found
