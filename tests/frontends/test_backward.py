"""Backward precision: under which autocast it is compiled, the check at run time, and rules about its ops."""

import re

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.core.policy import installed_torch
from narrowcast.errors import BackwardError, RegionError
from narrowcast.frontends.graphs.compiled import watch_graphs

KEYWORDS = {"device_type": "cpu", "dtype": torch.bfloat16}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


class Case:
    """A product that stays in fp32, so that its backward shows what is on when it runs."""

    def __init__(self):
        self.layer, self.x = nn.Linear(64, 64), torch.randn(4, 64)
        self.weights = torch.randn(4, 64)

    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return x @ self.layer.weight.t()

    def gradient(self, call, around_backward=None, policy=None):
        self.layer.zero_grad()
        with nc.autocast("cpu", policy=policy):
            loss = (call(self.x) * self.weights).sum()
            if around_backward == "region":
                loss.backward()
        if around_backward is None:
            loss.backward()
        elif around_backward != "region":
            with around_backward:
                loss.backward()
        return self.layer.weight.grad.clone()

    def compiled(self, **options):
        return nc.compile(self.forward, backend="aot_eager", **options)


@pytest.fixture
def case():
    return Case()


def test_each_choice_is_eager_in_that_place(case):
    """Outside of regions, inside the region of the forward, inside another one."""
    outside = case.gradient(case.forward)
    assert torch.equal(case.gradient(case.compiled()), outside)
    assert torch.equal(case.gradient(case.compiled(backward="off")), outside)
    inside = case.gradient(case.forward, "region")
    assert not torch.equal(inside, outside)
    assert torch.equal(case.gradient(case.compiled(backward="same_as_forward"), "region"), inside)
    other = case.gradient(case.forward, torch.autocast("cpu", torch.float16))
    listed = case.compiled(backward=[{"device_type": "cpu", "dtype": torch.float16}])
    assert torch.equal(case.gradient(listed, torch.autocast("cpu", torch.float16)), other)


def test_same_as_forward_takes_the_policy_along(case):
    """Our kernels decide in the backward as they do in eager code."""
    policy = nc.Policy.native().with_rules(nc.Rule("aten.mm", "full"), nc.Rule("aten.gelu", "full"))
    expected = case.gradient(case.forward, "region", policy)
    assert torch.equal(case.gradient(case.compiled(backward="same_as_forward"), "region", policy), expected)
    assert not torch.equal(expected, case.gradient(case.forward, "region"))


@pytest.mark.parametrize(
    "backward, place, says",
    [
        ("as_eager", "region", "called under autocast('cpu', torch.bfloat16)"),
        ("off", "region", "compiled for no autocast"),
        ("same_as_forward", None, "it was called under no autocast"),
        ([KEYWORDS], None, "compiled for autocast('cpu', torch.bfloat16)"),
        ([KEYWORDS], "fp16", "it was called under autocast('cpu', torch.float16)"),
    ],
)
def test_another_state_than_assumed_is_an_error(case, backward, place, says):
    """That says which; not silent wrongness."""
    around = torch.autocast("cpu", torch.float16) if place == "fp16" else place
    with pytest.raises(BackwardError) as caught:
        case.gradient(case.compiled(backward=backward), around)
    assert says in str(caught.value)
    assert not torch.is_autocast_enabled("cpu")


def test_the_check_holds_for_models_without_regions(case):
    """A plain fp32 model whose backward() is called inside a region."""
    layer, x = nn.Linear(8, 8), torch.randn(2, 8)
    out = nc.compile(layer, backend="aot_eager")(x)
    with torch.autocast("cpu"), pytest.raises(BackwardError):
        out.sum().backward()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_gradients_inside_a_forward_are_those_of_eager_code(fresh_dynamo, backend):
    """Forces of an energy: with `same_as_forward` bit for bit; else refused, in words that name no carrier of ours."""

    class Energy(nn.Sequential):
        def forward(self, x):
            x = x.detach().requires_grad_()
            energy = super().forward(x).sum()
            return energy, -torch.autograd.grad(energy, x)[0]

    torch.manual_seed(0)
    model, x = Energy(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1)), torch.randn(4, 3)
    policy = nc.Policy.native().with_rules(nc.Rule("aten.tanh", "full"))
    with nc.autocast("cpu", policy=policy):
        expected = model(x)
    compiled = nc.compile(model, under=policy, backend=backend, backward="same_as_forward")
    assert all(map(torch.equal, compiled(x), expected))
    torch._dynamo.reset()
    compiled = nc.compile(model, under=policy, backend=backend)
    if installed_torch() >= "2.15":  # which follows autograd.grad itself
        assert all(map(torch.equal, compiled(x), expected))
        return
    with pytest.raises(BackwardError, match=r"torch\.autograd\.grad in a model") as caught:
        compiled(x)
    assert not re.search("maia|mtia|ipu|quint|'off'", str(caught.value))


@pytest.mark.parametrize("wrong", ["sometimes", 3, [{"device": "cpu"}], ["cpu"]])
def test_a_choice_that_is_none_is_an_error(wrong):
    """At once, not at the first backward."""
    with pytest.raises(RegionError):
        nc.compile(nn.Linear(2, 2), backward=wrong)


def two_layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 16, bias=False))


def products(graph):
    """Formats of the products of the backward, by direction."""
    found = {}
    for step in graph.joint_after.steps.values():
        if step.op == "aten.mm.default" and step.direction != "forward":
            formats = {graph.joint_after.values[o.value].type for o in step.operands}
            found.setdefault(step.direction, set()).update(formats)
    return found


@pytest.mark.parametrize(
    "rule, expected",
    [
        (None, {"dgrad": {"bf16"}, "wgrad": {"bf16"}}),
        ("backward.aten.mm", {"dgrad": {"fp32"}, "wgrad": {"fp32"}}),
        ("wgrad.aten.mm", {"dgrad": {"bf16"}, "wgrad": {"fp32"}}),
        ("dgrad.aten.mm", {"dgrad": {"fp32"}, "wgrad": {"bf16"}}),
    ],
)
def test_rules_about_the_backward(rule, expected):
    """Gradients of weights and of inputs apart; the forward is as it was."""
    model, x = two_layers(), torch.randn(4, 16)
    policy = nc.Policy.native().with_rules(*([nc.Rule(rule, "full")] if rule else []))
    with watch_graphs() as graphs:
        out = nc.compile(model, under=policy, backend="aot_eager")(x)
    assert products(graphs[0]) == expected
    assert torch.equal(out, _in_region(model, x))
    out.float().sum().backward()
    assert model[0].weight.grad.dtype is torch.float32


def test_wgrad_in_fp32_is_nearer_to_exact():
    """What such a rule is for."""
    errors = {}
    for name, rules in (("bf16", []), ("fp32", [nc.Rule("wgrad.aten.mm", "full")])):
        torch._dynamo.reset()
        model, x = two_layers(), torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
        reference = two_layers()
        out = nc.compile(model, under=nc.Policy.native().with_rules(rules), backend="aot_eager")(x)
        out.float().square().mean().backward()
        reference(x).square().mean().backward()
        exact = reference[2].weight.grad
        errors[name] = ((model[2].weight.grad - exact).norm() / exact.norm()).item()
    assert errors["fp32"] < errors["bf16"]


def _hidden(x, layer):
    return torch.tanh(layer(x))


class InParts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = two_layers()[0], nn.Linear(16, 16)

    def forward(self, x):
        return self.last(_hidden(x, self.first))


@pytest.mark.parametrize(
    ("where", "changed"),
    [
        ({}, {"first", "last"}),
        ({"module": "last"}, {"last"}),
        ({"module": "fir*"}, {"first"}),
        ({"module_class": "Linear"}, {"first", "last"}),
        ({"module_class": "Conv2d"}, set()),
        ({"function": "*._hidden"}, {"first"}),
        ({"function": "*InParts.forward"}, {"first", "last"}),
    ],
)
def test_a_rule_about_the_backward_holds_where_the_calls_of_the_forward_are(where, changed):
    """A call of the backward has the place of the call whose gradients it makes: module, class, function."""
    torch.manual_seed(0)
    model, x, found = InParts(), torch.randn(64, 16), []
    for rules in ([], [nc.Rule("wgrad.aten.mm", "full", **where)]):
        model.zero_grad()
        policy = nc.Policy.native().with_rules(rules)
        nc.compile(model, under=policy, backend="aot_eager")(x).float().square().sum().backward()
        found.append({name: part.weight.grad.clone() for name, part in model.named_children()})
        torch._dynamo.reset()
    assert {name for name in found[0] if not torch.equal(found[0][name], found[1][name])} == changed


@pytest.mark.parametrize("rule", ["backward.aten.mm", "dgrad.aten.mm", "wgrad.aten.mm"])
def test_the_gradient_of_an_input_is_no_weights(rule):
    """Of a saliency map, or an adversarial input: a leaf as weights are, but no parameter."""
    model, given, found = two_layers().requires_grad_(False), torch.randn(64, 16), []
    for rules in ([], [nc.Rule(rule, "full")]):
        x = given.clone().requires_grad_()
        policy = nc.Policy.native().with_rules(rules)
        nc.compile(model, under=policy, backend="aot_eager")(x).float().square().sum().backward()
        found.append(x.grad)
        torch._dynamo.reset()
    assert torch.equal(*found) is rule.startswith("wgrad")


def test_another_rule_is_another_graph():
    """Also where AOTAutograd's caches know nothing of rules."""
    model, x = two_layers(), torch.randn(4, 16)
    for rule, expected in (("wgrad.aten.mm", "fp32"), (None, "bf16"), ("wgrad.aten.mm", "fp32")):
        policy = nc.Policy.native().with_rules(*([nc.Rule(rule, "full")] if rule else []))
        with watch_graphs() as graphs:
            nc.compile(model, under=policy, backend="aot_eager")(x)
        assert products(graphs[0])["wgrad"] == {expected}
        torch._dynamo.reset()


@pytest.mark.parametrize("rule", ["backward.aten.*", "wgrad.aten.convolution_backward"])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_rules_about_ops_that_give_several_gradients(rule, backend):
    """Convolutions and norms; also below Inductor's decompositions."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3))
    policy = nc.Policy.native().with_rules(nc.Rule(rule, "full"))
    x = torch.randn(2, 3, 9, 9)
    out = nc.compile(model, under=policy, backend=backend)(x)
    out.float().square().mean().backward()
    reference = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).square().mean().backward()
    for found, parameter in zip(reference, model.parameters(), strict=True):
        assert found.dtype is torch.float32
        # forward in bf16 (2^-8), backward of what it gave in fp32; biases before a norm have gradients near zero
        assert (found - parameter.grad).norm() < 0.05 * parameter.grad.norm() + 1e-3


def test_eager_regions_refuse_rules_about_the_backward():
    """They could not be kept; the error names the rule's line."""
    policy = nc.Policy.parse('extends = "native"\n[[rule]]\nop = "dgrad.aten.mm"\naction = "full"\n', "p.toml")
    with pytest.raises(RegionError, match="about the backward") as caught:
        nc.autocast("cpu", policy=policy)
    assert str(caught.value.where[0]).startswith("p.toml:3") or str(caught.value.where[0]).startswith("p.toml:2")
    assert nc.Policy.parse(policy.to_toml()) == policy


def _in_region(model, x):
    with nc.autocast("cpu"):
        return model(x)
