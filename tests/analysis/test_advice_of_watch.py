"""What `nc.watch` advises of an overflow: a rule where one helps, and what else where it does not."""

import contextlib
from pathlib import Path

import pytest
import torch
from torch import nn

import narrowcast as nc


def first(function, policy="native"):
    with nc.watch() as watched, nc.autocast("cpu", torch.float16, policy=policy):
        function()
    return watched.first


def shown(function):
    with nc.watch() as watched, nc.autocast("cpu", torch.float16):
        function()
    return " ".join(str(watched).split())


def test_what_fp32_holds_in_part_is_not_called_finite():
    """exp(144) is infinite in fp32, too: no rule is printed."""
    z = torch.tensor([20.0, 144.0], dtype=torch.float16)
    found = first(lambda: z.exp() * 0 + z)
    assert "1 of 2 values that are not finite here are finite, and 1 are not: fp32 overflows, too" in found.sentence
    assert "[[rule]]" not in shown(lambda: z.exp() * 0 + z) and "scale its inputs" in found.advice


def test_a_format_that_the_code_asks_for_has_no_rule_on_the_screen():
    """As in the finding's own words."""
    x = torch.full((64,), 3e3)
    text = shown(lambda: x.sum(0, dtype=torch.float16))
    assert "[[rule]]" not in text and "ask for torch.float32 there" in text


def test_readers_of_what_only_fp32_holds_are_named():
    """A product of 6e5 is cast to fp16 again by the next layer."""
    layer, x = torch.nn.Linear(8, 8), torch.full((2, 8), 800.0, dtype=torch.float16)
    assert "Calls that read it in fp16 overflow there, too" in shown(lambda: layer(x * x))


def test_zeros_of_whole_numbers_are_counted():
    """A mean over nothing divides by a count."""
    x, lengths = torch.ones(3, 2, requires_grad=True), torch.tensor([[2], [0], [1]])
    found = first(lambda: (x / lengths).sum().backward())
    assert found.id.op == "aten.div.Tensor" and "1 of 3 elements of other is zero" in found.sentence


class Large(torch.nn.Module):
    """One layer, or one product, that overflows in fp16."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x) if self.layer is not None else x @ x.mT


def _filled(layer):
    for parameter in layer.parameters():
        torch.nn.init.constant_(parameter, 30.0)
    return layer.half()


@pytest.mark.parametrize(
    ("layer", "shape", "op"),
    [
        (lambda: torch.nn.Linear(64, 4), (2, 64), "aten.linear.default"),
        (lambda: torch.nn.Linear(64, 4, bias=False), (2, 64), "aten.linear.default"),
        (lambda: torch.nn.Linear(64, 4, bias=False), (2, 3, 64), "aten.linear.default"),
        (lambda: None, (2, 3, 4096), "aten.matmul.default"),
        (lambda: None, (3, 4096), "aten.matmul.default"),
        (lambda: torch.nn.Conv1d(3, 4, 3), (1, 3, 8), "aten.conv1d.default"),
        (lambda: torch.nn.Conv2d(3, 4, 3), (1, 3, 8, 8), "aten.conv2d.default"),
        (lambda: torch.nn.Conv3d(3, 4, 3), (1, 3, 4, 4, 4), "aten.conv3d.default"),
        (lambda: torch.nn.ConvTranspose1d(3, 4, 3), (1, 3, 8), "aten.conv_transpose1d.default"),
        (lambda: torch.nn.ConvTranspose2d(3, 4, 3), (1, 3, 8, 8), "aten.conv_transpose2d.input"),
    ],
)
def test_rules_printed_where_no_region_is_open_match_in_one(layer, shape, op):
    """Without one a kernel calls addmm or convolution: programs call linear and conv2d, which a region sees."""
    layer = layer()
    model = Large(layer if layer is None else _filled(layer))
    x = torch.full(shape, 300.0 if layer is not None else 8.0, dtype=torch.float16)
    with nc.watch() as watched, torch.no_grad():
        model(x)
    (rule,) = watched.first.rules
    assert rule.op == op and "Rules hold inside nc.autocast, and none is open here" in watched.first.advice
    policy = nc.Policy.native().with_rules(rule)
    with nc.record() as ledger, torch.no_grad(), nc.autocast("cpu", torch.float16, policy=policy):
        assert model(x).isfinite().all()
    assert str(rule) in ledger.matches and "rule without effect" not in {advice.kind for advice in ledger.advice}


def test_whole_numbers_that_a_cast_makes_infinite_are_named_by_their_own_type():
    """Their largest magnitude is that before the cast."""
    with nc.watch() as watched:
        torch.arange(0, 80000, 10000).to(torch.float16).cos()
    assert "the cast from i64 to fp16 overflows: its largest magnitude is 7e+04" in watched.first.sentence


def test_what_a_low_product_has_made_zero_is_kept_in_fp32_though_fp32_gives_infinity_of_it():
    """A reciprocal of a product that fell below fp16: fp32 of the zeros is infinite, of the exact product it is not."""
    with nc.watch() as watched, nc.autocast("cpu", torch.float16):
        base = torch.nn.functional.linear(torch.full((4, 8), 0.05), 2 * torch.eye(8))
        low = base.cumprod(-1)
        low.reciprocal()
    assert [rule.op for rule in watched.first.rules] == ["aten.cumprod.default"]


def test_one_rule_for_several_calls_stands_once():
    """A screen whose rules are pasted loads."""
    x = torch.full((4,), 300.0, dtype=torch.float16)
    with nc.watch() as watched, nc.autocast("cpu", torch.float16):
        x * x
        x * (2 * x)
    rules = [str(todo.rule) for todo in watched.todos if todo.rule]
    assert len(watched.findings) == 2 and len(rules) == len(set(rules)) == 1


@pytest.mark.parametrize("inside", [False, True])
def test_no_rule_is_about_an_optimizer_or_a_norm_by_hand(inside):
    """No region belongs there: what is read is converted. In a region, or a module, a rule holds."""
    x = torch.full((64,), 300.0, dtype=torch.float16)
    region = nc.autocast("cpu", torch.float16) if inside else contextlib.nullcontext()
    with nc.watch() as watched, region:
        x.square().sum()
    assert watched.first.made_by == "format" and bool(watched.first.rules) == inside
    assert inside or watched.first.todo == "Convert what it reads, x.float(), or keep it in fp32."


def test_a_tensor_without_a_finite_value_has_no_range():
    """And shares are percents."""
    with nc.watch() as watched, nc.autocast("cpu", torch.float16):
        torch.full((4,), 300.0, dtype=torch.float16).square()
    assert "result: fp16 [4], 100% infinite" in str(watched.first)


class Variance(nn.Module):
    """The mean of squares minus the square of the mean, of values far from zero: below zero, once they are rounded."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 64)
        with torch.no_grad():
            self.a.bias.fill_(40.0)
            self.a.weight.mul_(0.3)

    def forward(self, x):
        h = self.a(x)
        mean = h.mean(-1, keepdim=True)
        return (h - mean) / torch.sqrt((h * h).mean(-1, keepdim=True) - mean * mean + 1e-5)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_what_rounded_further_back_is_tried_too(dtype):
    """Means are between the product that rounds and the root: the rule about it makes the model finite."""
    torch.manual_seed(0)
    model, x = Variance(), torch.randn(1024, 16)
    with nc.watch() as seen, nc.autocast("cpu", dtype):
        model(x)
    assert seen.first.id.op == "aten.sqrt.default" and "No format" not in seen.first.advice
    policy = nc.Policy.native().with_rules(*seen.first.rules)
    with torch.no_grad(), nc.autocast("cpu", dtype, policy=policy):
        found = model(x)
    assert found.isfinite().all() and torch.allclose(found.float(), model(x), atol=0.02)


class Weighted(torch.nn.Module):
    """Weights of classes by their counts, converted to the format of the logits, in which they are zero."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x, counts):
        logits = self.layer(x)
        weights = (1 / counts).to(logits.dtype)  # CONVERTED
        return (logits * (weights / weights.sum())).sum()


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_conversion_of_the_program_that_underflows_is_named_by_its_line(is_compiled):
    """The quotient behind it has no format that helps; and no epsilon does."""
    model, arguments = Weighted(), (torch.randn(3, 8), torch.tensor([1e9, 2e9, 3e9, 4e9]))
    if is_compiled:
        compiled = nc.compile(model, under="fp16", backend="aot_eager")
        with nc.watch() as watched:
            compiled(*arguments)
        found = watched.first
    else:
        found = first(lambda: model(*arguments))
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = next(n for n, text in enumerate(lines, 1) if text.endswith("# CONVERTED"))
    assert found.id.op == "aten.div.Tensor", str(found)
    assert f"the conversion at {Path(__file__).name}:{line} in fp32, it is finite" in found.advice, found.advice
    assert "Convert to torch.float32 there" in found.advice and not found.rules


def test_a_rule_that_leaves_most_values_infinite_is_not_advised():
    """A softmax in fp32 has other zeros than one in fp16, and zeros all the same."""
    logits = torch.zeros(4, 64)
    logits[:, 0], logits[:, 1:13] = 200.0, 180.0

    def entropy():
        shares = (logits.half() @ torch.eye(64)).softmax(-1).half()
        return (shares * shares.log()).sum()

    found = first(entropy)
    assert not found.rules and "keep its inputs off that value" in found.advice, found.advice


class Halved(torch.autograd.Function):
    """Its backward overflows in fp16."""

    @staticmethod
    def forward(ctx, v):
        return v.sign()

    @staticmethod
    def backward(ctx, g):
        return (g.half() * 1e9).float()


def test_an_overflow_in_a_custom_backward_is_not_said_of_an_op_without_a_gradient():
    """The product of what is detached follows the Function, and makes no node of autograd: no rule is about it."""
    v = torch.ones(4, requires_grad=True)

    def step():
        spikes = Halved.apply(v)
        state = v - 0.3 * spikes.detach()
        (spikes * state.detach()).sum().backward()

    found = first(step)
    assert found.id.op == "aten.mul.Tensor" and found.line == Halved.backward.__code__.co_firstlineno + 2
    assert found.forward is None and not found.rules


class Vanishing(nn.Module):
    """Products that vanish in fp16, one after the other, below a logarithm; ReLU makes zeros besides."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential()
        for _ in range(8):
            layer = nn.Linear(16, 16, bias=False)
            layer.weight.data *= 0.15
            self.layers.extend([layer, nn.ReLU()])

    def forward(self, x):
        logarithm = self.layers(x).float().log()
        return logarithm - logarithm.mean()


def test_a_long_way_that_fp32_mends_in_part_has_no_rules():
    """Some calls of it are named, and how many more: eight rules that leave infinities are no advice."""
    model, x = Vanishing(), torch.rand(8, 16)
    with torch.no_grad():
        found = first(lambda: model(x))
    assert found.id.op == "aten.log.default" and not found.rules, found
    assert "and 4 more calls before these in fp32, all but" in found.advice and "nc.repair" in found.advice
    assert "layers.14" in found.advice and "layers.8" not in found.advice
