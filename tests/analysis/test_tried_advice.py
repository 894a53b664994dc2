"""What `nc.compare` advises was run: rules that help, lines that ask for a low format themselves, or where to look."""

import math
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.analysis.compare.isolating import runs_alone
from narrowcast.reports.results.saved import parse

TEXT = Path(__file__).read_text().split("\n")
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
RULES = re.compile(r"\[\[rule\]\]\n(?:\w+ = .*\n)+")


class Between(nn.Module):
    """A function between two layers."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.function = nn.Linear(16, 16), nn.Linear(16, 16), function

    def forward(self, x):
        return self.down(self.function(self.up(x)))


def error(model, under):
    """Of the output under a policy or in a format, against fp32; infinity for one that is not finite."""
    with torch.no_grad():
        expected = model(X)
        with under:
            found = model(X).float()
    return float((found - expected).norm() / expected.norm()) if bool(found.isfinite().all()) else math.inf


def positions(y):
    at = torch.arange(1001, 1009).to(y.dtype)  # rounded
    return y * torch.cos(at[:, None] * 0.7)


def positions_made_low(y):
    at = torch.arange(1001, 1009, dtype=y.dtype)  # rounded
    return y * torch.cos(at[:, None] * 0.7)


@pytest.mark.parametrize("function", [positions, positions_made_low])
def test_a_line_that_rounds_whole_numbers_is_named_and_no_rule_is_shown(function):
    """Neither a cast nor memory that is filled is reached by a rule, and the cosine that suffers is not to blame."""
    found = nc.compare(Between(function), (X,), under="bf16")
    [asked] = found.remedy.asked
    assert "# rounded" in TEXT[asked.line - 1] and asked.rounds_whole and found.remedy.error < 0.02, found
    assert "rounds whole numbers beyond 256" in " ".join(str(found).split()) and "[[rule]]" not in str(found)


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("made", ["exported", "scripted", "compiled, of low weights"])
def test_what_helps_code_that_was_made_is_looked_for_in_its_original(made):
    model, low = Between(positions_made_low), X.to(torch.bfloat16)
    if made == "exported":
        found = nc.compare(nc.export(model, (X,), under="bf16"), (X,), reference=model)
    elif made == "scripted":
        found = nc.compare(nc.script(WithPositions(), under="bf16"), (X,), reference=WithPositions())
    else:
        found = nc.compare(nc.compile(model.bfloat16(), backend="aot_eager"), (low,))
    [asked] = found.remedy.asked
    assert "# rounded" in TEXT[asked.line - 1] and found.remedy.error < 0.02, found
    assert "looked for in eager code, under native in bf16" in " ".join(str(found).split())


@pytest.mark.usefixtures("fresh_dynamo")
def test_where_low_weights_are_to_blame_a_region_is_advised(monkeypatch):
    """One that keeps exponentials in fp32, as native does on cuda."""
    region = nc.autocast("cpu", torch.bfloat16, policy="native:cuda")
    monkeypatch.setattr("narrowcast.analysis.compare.advising.observed_region", lambda *asked: region)
    model = Between(lambda y: torch.log(torch.exp(y * 0.01)) * 100).bfloat16()
    found = nc.compare(nc.compile(model, backend="aot_eager"), (X.to(torch.bfloat16),))
    assert found.verdict == "round-off" and not found.remedy.rules, found
    assert "1. Make it in a region (under=), of weights in fp32" in str(found)


class WithPositions(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor):
        y = self.up(x)
        at = torch.arange(1001, 1009, dtype=y.dtype)  # rounded
        return y * torch.cos(at[:, None] * 0.7)


def silent(y):
    return torch.where(torch.arange(8)[:, None] == 0, torch.zeros_like(y), y)


FAULTS = {
    "epsilon": ("fp16", lambda y: silent(y) * torch.rsqrt(silent(y).square().mean(-1, keepdim=True) + 1e-8), 1),
    "difference": ("bf16", lambda y: (y + 100) - (y + 100).mean(-1, keepdim=True), 1),
    "variance": ("bf16", lambda y: y / ((y + 20).square().mean(-1) - (y + 20).mean(-1).square())[:, None], 1),
    "product": ("bf16", lambda y: ((y + 9) @ (y + 9).mT - (y + 9).square().sum(-1)) @ y, 2),
    "overflow": ("fp16", lambda y: 400 * y / ((400 * y) * (400 * y)).sum(-1, keepdim=True).sqrt(), 1),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_rules_on_the_screen_lead_to_the_error_that_stands_beside_them(name):
    """Also where two of them help only together; the verdict stays there."""
    dtype, function, number = FAULTS[name]
    model = Between(function)
    found = nc.compare(model, (X,), under=dtype)
    printed = RULES.findall(f"{found}\n")
    assert len(printed) == number and "VERDICT" in str(found), found
    policy = nc.Policy.parse('extends = "native"\n\n' + "\n".join(printed))
    low = torch.float16 if dtype == "fp16" else torch.bfloat16
    before, left = (error(model, nc.autocast("cpu", low, policy=p)) for p in (None, policy))
    assert left <= min(before, 1) / 2 and left == pytest.approx(found.remedy.error, rel=1e-3), found


@pytest.mark.parametrize("name", ["difference", "overflow", positions])
def test_of_compiled_code_the_same_is_advised_as_of_eager_code(name):
    """Rules and lines are tried on what it was compiled of, in the region that it was compiled for."""
    dtype, function, _ = ("bf16", name, 0) if callable(name) else FAULTS[name]
    model = Between(function)
    eager = nc.compare(model, (X,), under=dtype)
    found = nc.compare(nc.compile(model, under=dtype, backend="aot_eager"), (X,))
    assert found.remedy is not None and found.remedy.rules == eager.remedy.rules, found
    assert found.remedy.asked == eager.remedy.asked and found.remedy.error == pytest.approx(eager.remedy.error), found
    assert [each.what for each in found.todos] == [each.what for each in eager.todos]
    assert "in eager code" in str(found) and "in eager code" not in str(eager)


@torch.library.custom_op("narrowcast_tests::doubled", mutates_args=())
def doubled(y: torch.Tensor) -> torch.Tensor:
    return (y.float() * (2.0 if y.dtype == torch.float32 else 2.2)).to(y.dtype)


def test_an_op_without_a_bound_that_adds_an_error_is_named_before_rules():
    """Rules about other calls help where it then computes in fp32, in which it is right."""
    doubled.register_fake(torch.empty_like)
    with torch.no_grad():
        found = nc.compare(Between(doubled), (X,), under="bf16")
    assert found.todos[0].what.startswith("Look at narrowcast_tests.doubled.default"), found
    assert found.todos[1].rule and "no bound of its own is known" in found.todos[0].why


def test_where_nothing_helps_the_call_at_which_the_error_grows_is_named(monkeypatch):
    """The subtraction, and not one of the layers; no rule is shown."""
    monkeypatch.setattr("narrowcast.analysis.compare.advising._HELPS", 0.0)
    found = nc.compare(Between(FAULTS["difference"][1]), (X,), under="bf16")
    assert found.remedy is None and found.growth.id.op == "aten.sub.Tensor" and found.tried, found
    [todo] = found.todos
    assert todo.what.startswith("Find the rules that help: nc.repair") and not todo.rule
    assert todo.why.endswith(f" at aten.sub.Tensor ({__file__}:{found.growth.line})"), todo


class Weighted(torch.autograd.Function):
    """Its gradients are weighted by whole numbers that bf16 does not hold."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * torch.cos(torch.arange(1001, 1009).to(gradient.dtype))[:, None]


def test_a_gradient_that_is_off_is_measured_where_the_output_is_right():
    """By its own error, with the parameter's name."""
    found = nc.compare(Between(Weighted.apply), (X,), under="bf16", backward=True)
    assert found.verdict == "fault" and found.remedy is not None and "gradient of up" in str(found), found


def test_a_sound_model_runs_not_once_more_and_what_was_tried_is_saved():
    """Six runs, and one for each op that is tried alone."""
    sound = nc.compare(Between(torch.tanh), (X,), under="bf16")
    assert sound.verdict == "round-off" and (sound.runs, sound.tried, sound.remedy) == (9, 0, None), sound
    found = nc.compare(Between(FAULTS["product"][1]), (X,), under="bf16")
    again = parse(found.to_json())
    assert again.remedy == found.remedy and again.growth == found.growth and str(again) == str(found)


def test_a_gradient_that_is_zero_in_theory_says_nothing_of_what_a_format_holds():
    """Of the bias of keys the terms cancel in the softmax: what is left is fp32's own round-off."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return (self.query(x) @ self.key(x).mT / 4).softmax(-1) @ x

    run = nc.capture(Attention(), (X,), backward=True)
    assert run.headroom().verdict == "fits", run.headroom()


def test_what_underflows_is_to_be_scaled_and_no_call_is_to_be_looked_at():
    """A tiny loss in fp16: no rule about a call of the forward brings its gradient back."""

    class Tiny(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 1)

        def forward(self, x):
            return self.last(nn.functional.gelu(self.first(x)))

    torch.manual_seed(0)
    compared = nc.compare(Tiny(), (torch.randn(8, 16),), under="fp16", backward=lambda out: out.float().mean() * 1e-9)
    assert compared.verdict == "round-off"
    assert [todo.what for todo in compared.todos] == ["Scale the loss (nc.Scaler), or use bf16"]


def test_a_step_of_an_optimizer_is_not_to_blame_for_gradients():
    """Its moments are as wrong as what it reads; the loss is near what rounding leaves of it."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(32, 64), nn.PReLU(), nn.Linear(64, 64), nn.PReLU(), nn.Linear(64, 8))
    x = torch.randn(64, 32)
    target = model(x).detach() + 0.01 * torch.randn(64, 8)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step():
        optimizer.zero_grad()
        loss = (model(x).float() - target).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    found = nc.compare(step, under="bf16")
    assert found.verdict == "round-off" and max(g.relative_error for g in found.gradients) > 0.1
    assert not [todo.what for todo in found.todos if "addcmul" in todo.what or "lerp" in todo.what]


def test_what_fp32_rounding_leaves_of_a_sum_is_no_place_where_the_error_grows():
    """Weights of a softmax sum to one: what that leaves is zero but for rounding, and its relative error is large."""

    class Left(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x):
            h = self.a(x).float()
            left = 1 - h.softmax(-1).sum(-1, keepdim=True)
            return torch.sin(self.b(torch.tanh(h)).float() * 300) + left

    found = nc.compare(Left(), (X,), under="bf16")
    assert found.verdict == "round-off" and found.growth.id.op == "aten.sin.default", found


def test_gradients_that_no_rule_helps_get_no_advice_about_outputs():
    """A rounding that gradients pass straight through moves them by 9 %; nc.repair is about outputs."""

    class Codes(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(5)
            self.encode = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3))
            self.decode = nn.Linear(3, 16)

        def forward(self, x):
            z = torch.tanh(self.encode(x).float()) * 4
            z = z + (z.round() - z).detach()
            return (self.decode(z / 4).float() - x).pow(2).mean()

    found = nc.compare(Codes(), (torch.randn(20, 16),), under="bf16", backward=True)
    assert found.verdict == "round-off" and max(g.relative_error for g in found.gradients) > 0.05
    assert not found.todos, found


@pytest.mark.parametrize("factor", [100.0, 400.0])
def test_what_overflows_in_fp32_at_other_elements_is_the_models_own(factor):
    """An exponential by hand, in fp32 in either run: which elements overflow is due to what it reads."""

    def by_hand(x):
        e = torch.exp(factor * x.float())
        return e / e.sum(-1, keepdim=True)

    torch.manual_seed(0)
    model = nn.Sequential(Between(torch.relu), nn.Linear(16, 8))
    found = nc.compare(lambda x: by_hand(model(x) * 3), (torch.randn(200, 16),), under="bf16")
    assert found.verdict == "not compared" and "aten.exp" in found.todos[0].why, found


def test_a_run_gets_no_rule_about_a_mask_that_fills_in_infinities():
    """A row that is masked whole: softmax is NaN, in any format."""
    masked = torch.zeros(2, 5, dtype=torch.bool)
    masked[1] = True
    layer = nn.Linear(8, 8)
    with torch.no_grad(), nc.capture() as run, nc.autocast("cpu", torch.bfloat16):
        (layer(torch.randn(2, 5, 8)) @ torch.randn(2, 8, 5)).masked_fill(masked[:, None], -torch.inf).softmax(-1)
    assert run.verdict == "not finite" and not [todo.rule for todo in run.todos if todo.rule], run.todos


def test_large_models_run_less_often_with_single_ops_low():
    """As many calls in all: sixteen runs of a thousand; what is asked for is done in any case."""
    assert [runs_alone(None, calls) for calls in (0, 10, 1000, 2000, 4000, 10**6)] == [16, 16, 16, 8, 4, 4]
    assert [runs_alone(asked, 4000) for asked in (0, 3, 40)] == [0, 3, 40]


class Chooses(nn.Module):
    """Gives each row to the expert that scores it highest."""

    def __init__(self):
        super().__init__()
        self.inner, self.score = nn.Linear(8, 8), nn.Linear(8, 16)
        self.experts = nn.Parameter(3 * torch.randn(16, 8))

    def forward(self, x):
        hidden = torch.tanh(self.inner(x))
        return hidden + self.experts[self.score(hidden).argmax(-1)]


def chooses_otherwise(model, x):
    """Whether a region gives a row to another expert."""
    with torch.no_grad():
        expected = model(x)
        with torch.autocast("cpu", torch.bfloat16):
            found = model(x)
    return bool(((found - expected).norm() / expected.norm()) > 0.05)


def test_a_choice_at_a_near_tie_is_no_reason_for_a_rule():
    """The rule helped on these inputs alone: on others it would make the next tie. The note says so."""
    torch.manual_seed(0)
    model = Chooses()
    drawn = (torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(2000))
    x = next(x for x in drawn if chooses_otherwise(model, x))
    found = nc.compare(model, (x,), under="bf16")
    assert found.verdict == "round-off"
    assert not any(todo.rule for todo in found.todos) and not any("nc.repair" in todo.what for todo in found.todos)
    (note,) = [note for note in found.notes if "near tie" in note]
    assert "on these inputs" in note and "inputs 3% off" in note


def test_what_is_wrong_on_inputs_nearby_too_is_still_advised():
    """A cosine of large angles is wrong for all of them."""

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return torch.cos(self.layer(x) * 40)

    torch.manual_seed(0)
    found = nc.compare(Turned(), (torch.randn(16, 8),), under="bf16")
    assert any(todo.rule for todo in found.todos) and not any("near tie" in note for note in found.notes)


def test_no_rule_is_said_to_make_finite_what_fp32_does_not():
    """fp16 overflows in a product, and fp32 three factors later: with a rule the two are alike, and not finite."""

    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            hidden = self.layer(x * 1e4) @ self.layer.weight * 1e4
            return torch.exp(hidden.float().abs() * 1e3), hidden.float() / 1e9

    torch.manual_seed(0)
    found = nc.compare(Grows(), (torch.randn(4, 8),), under="fp16")
    assert found.verdict == "not finite"
    assert not any("run so, it is finite" in todo.why for todo in found.todos)


class Reduces(nn.Module):
    """Reduces otherwise in a region."""

    def forward(self, x):
        how = "mean" if torch.is_autocast_enabled("cpu") else "sum"
        index = (torch.arange(8) % 3)[:, None].expand_as(x)
        return torch.zeros(3, 16).scatter_reduce(0, index, x * 1, how, include_self=False)


def test_an_argument_that_differs_is_the_advice_and_no_search_for_rules():
    """No rule changes it."""
    found = nc.compare(nn.Sequential(nn.Linear(16, 16), Float(), Reduces()), (X,), under="bf16")
    (todo,) = found.todos
    assert found.verdict == "fault" and "scatter_reduce" in todo.what and "nc.repair" not in todo.what
    assert "its argument reduce is" in todo.why


class Float(nn.Module):
    """Gives fp32."""

    def forward(self, x):
        return x.float()


class Positions(torch.nn.Module):
    """Waves of positions, which are in the format of what a layer gives, or in fp32."""

    def __init__(self, is_rounded, steps):
        super().__init__()
        self.is_rounded, self.steps, self.linear = is_rounded, steps, torch.nn.Linear(16, 16)

    def forward(self, x):
        y = self.linear(x)
        positions = torch.arange(64.0) * self.steps
        if self.is_rounded:
            positions = positions.to(y.dtype).float()
        return torch.sin(positions)[:, None] + 0.02 * y.float()


@pytest.mark.parametrize(("under", "steps"), [("bf16", 0.23), ("fp16", 0.23)])
def test_a_small_error_is_told_where_one_line_makes_nearly_all_of_it(under, steps):
    """It is round-off by its size. Of the same line in fp32, and of roundings that all calls share, nothing is said."""
    torch.manual_seed(0)
    x, unit = torch.randn(64, 16), {"bf16": 2.0**-7, "fp16": 2.0**-10}[under]
    found = nc.compare(Positions(True, steps), (x,), under=under)
    assert found.verdict == "round-off"
    assert 1.2 < found.outputs[0].relative_error / unit < 4
    assert f"asks for {under} itself" in found.todos[0].what
    assert not nc.compare(Positions(False, steps), (x,), under=under).todos
    layers = [layer for _ in range(12) for layer in (torch.nn.Linear(16, 16), torch.nn.Tanh())]
    for layer in layers[::2]:
        layer.weight.data.mul_(3)
    many = nc.compare(torch.nn.Sequential(*layers), (x,), under=under)
    assert many.outputs[0].relative_error > 1.2 * unit
    assert not many.todos, str(many)
