"""Blocks that a framework opens, or switches off, inside a region of ours: said, and ruled where that is asked for."""

import warnings

import pytest
import torch
from torch import nn

import narrowcast as nc

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RELU_FULL = nc.Policy.native().with_rules(nc.Rule("aten.relu", "full"), name="mine")


class Framework(nn.Module):
    """Opens its own region, and one that is off with another inside."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor):
        with torch.autocast("cpu", dtype=torch.float16):
            y = torch.relu(self.a(x))
        with torch.autocast("cpu", enabled=False):
            z = torch.relu(self.b(x))
            with torch.autocast("cpu", dtype=torch.bfloat16):
                w = torch.relu(self.b(x))
        return y, z, torch.relu(self.b(x)), w


def eager(model, x, policy):
    with nc.autocast("cpu", BF16, policy=policy):
        return model(x)


FRONT_ENDS = {
    "eager": eager,
    "compile": lambda m, x, policy: nc.compile(m, under=policy, backend="aot_eager")(x),
    "traced by another backend": lambda m, x, policy: eager(torch.compile(m, backend="aot_eager"), x, policy),
    "export": lambda m, x, policy: nc.export(m, (x,), under=policy).module()(x),
    "script": lambda m, x, policy: nc.script(m, under=policy)(x),
    "convert": lambda m, x, policy: nc.script(torch.jit.script(m), under=policy)(x),
    "trace": lambda m, x, policy: nc.trace(m, x, under=policy)(x),
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("front_end", FRONT_ENDS)
@pytest.mark.filterwarnings("ignore")
def test_torchs_blocks_rule_unless_the_policy_is_to_hold_in_them(front_end):
    """What is off stays off; a block's own format stays; all front ends alike, bit for bit."""
    model, x = Framework(), torch.randn(2, 4)
    for policy, formats in ((RELU_FULL, (FP16, FP32, FP32, BF16)), (RELU_FULL.with_inner("policy"), (FP32,) * 4)):
        found = FRONT_ENDS[front_end](model, x, policy)
        assert tuple(t.dtype for t in found) == formats
        assert all(torch.equal(a, b) for a, b in zip(found, eager(model, x, policy), strict=True))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore")
def test_inner_is_asked_of_a_region_in_any_code():
    """In eager, scripted and compiled code; and of a policy file, whose setting a region may overrule."""

    def asked(x):
        with nc.autocast("cpu", torch.bfloat16, policy=RELU_FULL, inner="policy"):  # noqa: SIM117
            with torch.autocast("cpu", dtype=torch.float16):
                return torch.relu(x @ x)

    x = torch.randn(4, 4)
    assert {f(x).dtype for f in (asked, nc.script(asked), nc.compile(asked, backend="aot_eager"))} == {FP32}
    text = 'extends = "native"\ninner = "policy"\n[[rule]]\nop = "aten.relu"\naction = "full"\n'
    policy = nc.Policy.parse(text)
    assert policy.effective_inner == "policy" and nc.Policy.parse(policy.to_toml()) == policy
    for inner, dtype in ((None, FP32), ("native", FP16)):
        with nc.autocast("cpu", BF16, policy=policy, inner=inner), torch.autocast("cpu", dtype=FP16):
            assert torch.relu(x @ x).dtype is dtype
    with pytest.raises(nc.errors.PolicyError, match="native"):
        nc.autocast("cpu", BF16, policy=RELU_FULL, inner="rule")


def test_a_block_for_another_device_type_hides_nothing_then():
    """torch counts nesting, not device types: by default any block of torch's hides our region."""
    x = torch.randn(4, 4)
    with nc.autocast("cpu", BF16, policy=RELU_FULL, inner="policy"), torch.autocast("xpu", enabled=False):
        assert torch.relu(x @ x).dtype is FP32


def test_gradients_in_an_inner_block_are_the_policys():
    """Weights are cast once, to each format that is used, and keep their gradients."""
    policy = RELU_FULL.with_inner("policy")
    model, x = Framework(), torch.randn(2, 4)
    with nc.autocast("cpu", BF16, policy=policy):
        first, *rest = model(x)
        again = model(x)[0]
    (first + again + sum(rest)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_hidden_region_says_so_once():
    """A warning at the user's line, without any recording; none where the policy holds, or changes no op that runs."""
    model, x = Framework(), torch.randn(2, 4)

    def said(policy):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            eager(model, x, policy)
        return [str(w.message) for w in found if w.category is nc.errors.RegionWarning]

    (text,) = said(RELU_FULL)
    assert "hides policy mine" in text and "aten.relu" in text and 'inner="policy"' in text
    unused = nc.Policy.native().with_rules(nc.Rule("aten.gelu", "full"))
    assert not said(RELU_FULL.with_inner("policy")) and not said(unused) and not said(nc.Policy.native())
    # a plugin enters one region for each step of a training run
    region = nc.autocast("cpu", BF16, policy=RELU_FULL)
    with pytest.warns(nc.errors.RegionWarning) as found:
        for _ in range(3):
            with region:
                model(x)
    assert len(found) == 1


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("front_end", ["record", "eager", "compile", "export", "script"])
def test_recordings_and_explanations_count_the_calls_that_are_kept_from_the_policy(front_end):
    """With the line of the block, or in a graph that of the first call in it."""
    model, x = Framework(), torch.randn(2, 4)
    if front_end == "record":
        with nc.record() as ledger:
            eager(model, x, RELU_FULL)
    else:
        ledger = nc.explain(model, (x,), under=RELU_FULL, front_end=front_end).ledger
    found = {advice.kind: advice for advice in ledger.advice}
    hidden, off = found["hidden policy"], found["switched off"]
    start = Framework.forward.__code__.co_firstlineno
    assert hidden.line - start in (1, 2) and "hides policy mine for 2 calls" in hidden.what
    assert off.line - start in (3, 4) and "off for 4 calls" in off.what
    assert __file__ == hidden.file == off.file
    assert set(found) == {"hidden policy", "switched off"}


def test_a_block_that_is_native_inside_a_native_region_hides_nothing():
    """Nothing is said where there is nothing to say."""
    model, x = Framework(), torch.randn(2, 4)
    with nc.record() as ledger:
        eager(model, x, nc.Policy.native())
    assert {advice.kind for advice in ledger.advice} == {"switched off"}


class Adjacent(nn.Module):
    """Two regions that begin at one place: the outer one rules again where the inner one has ended."""

    def __init__(self, outer, inner):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.outer, self.inner = nn.Linear(8, 8), nn.Linear(8, 8), outer, inner

    def forward(self, x):
        with self.outer():
            with self.inner():
                a = self.first(x)
            b = self.second(x)
        return a, b, x * 2


HIGH = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full"), name="high")
NESTED = {
    "high": lambda: nc.autocast("cpu", torch.bfloat16, policy=HIGH),
    "safe": lambda: nc.autocast("cpu", torch.bfloat16, policy="safe"),
    "torch": lambda: torch.autocast("cpu", torch.bfloat16),
    "off": lambda: torch.autocast("cpu", enabled=False),
}


@pytest.mark.parametrize("outer", NESTED)
@pytest.mark.parametrize("inner", NESTED)
def test_the_outer_of_two_regions_that_begin_together_rules_after_the_inner(outer, inner):
    """In exported and compiled code as in eager code."""
    model, x = Adjacent(NESTED[outer], NESTED[inner]), torch.randn(4, 8)
    expected = model(x)
    for found in (nc.export(model, (x,)).module()(x), nc.compile(model, backend="aot_eager")(x)):
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(expected, found, strict=True))


class Twice(nn.Module):
    """A weight that two regions cast, in a third."""

    def __init__(self, outer, inner):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.outer, self.inner = nn.Linear(4, 4), outer, inner

    def forward(self, x: torch.Tensor):
        with self.outer():
            with self.inner():
                y = self.a(x)
            with self.inner():
                return self.a(y * 1.5)


CACHES = {
    "torch's": lambda: torch.autocast("cpu", dtype=BF16),
    "safe": lambda: nc.autocast("cpu", BF16, policy="safe"),
    "off": lambda: nc.autocast("cpu", BF16, cache_enabled=False),
    "checked": lambda: nc.autocast("cpu", BF16, cache_enabled="checked"),
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("outer", CACHES)
@pytest.mark.parametrize("inner", ["torch's", "checked"])
def test_regions_inside_share_casts_of_weights_as_in_eager_code(outer, inner):
    """Two uses of a weight add up their gradients in fp32, or in the low format. Regions whose casts are checked share
    them where one of ours is around.
    """
    model, x = Twice(CACHES[outer], CACHES[inner]), torch.randn(2, 4)

    def gradient(call):
        model.zero_grad()
        call(x).sum().backward()
        return model.a.weight.grad

    in_eager_code = gradient(model)
    assert torch.equal(gradient(nc.compile(model, backend="aot_eager")), in_eager_code)
