"""Traces of ops that cast inside."""

import pytest
import torch
from torch import nn

import narrowcast as nc

pytestmark = pytest.mark.filterwarnings("ignore")
BF16 = torch.bfloat16


class Recurrent(nn.Module):
    """A recurrent layer, and a linear one that reads what it gives."""

    def __init__(self, kind, **options):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.last = kind(16, 16, **options), nn.LazyLinear(4)

    def forward(self, x):
        return self.last(self.layer(x)[0])


@pytest.mark.parametrize(
    "model",
    [
        Recurrent(nn.LSTM),
        Recurrent(nn.LSTM, num_layers=2, bidirectional=True),
        Recurrent(nn.RNN),
        Recurrent(nn.RNN, nonlinearity="relu"),
        lambda x: torch.einsum("bij,bjk->bik", x, x),
    ],
    ids=["lstm", "two ways", "rnn_tanh", "rnn_relu", "einsum"],
)
@pytest.mark.parametrize("policy", ["native", "safe"])
def test_a_trace_casts_what_casts_inside(model, policy):
    """Torch records a composite op without the casts that eager autocast makes in it; the trace has them before it."""
    x = torch.randn(4, 16, 16)
    policy = nc.Policy.native().repairing() if policy == "native" else policy  # not every cpu has a bf16 LSTM
    with nc.autocast("cpu", BF16, policy=policy):
        expected = model(x)
    assert torch.equal(nc.trace(model, x, dtype=BF16, policy=policy)(x), expected)


def test_a_trace_asks_the_policy_about_a_composite_op():
    """A rule about the op, or about what it calls, holds; so does a region that is off."""
    model, x = Recurrent(nn.RNN).eval(), torch.randn(4, 16, 16)
    model(x)
    for rule in (nc.Rule("aten.rnn_tanh", "full"), nc.Rule("aten.linear", "full")):
        policy = nc.Policy.native("cpu").with_rules(rule)
        with nc.autocast("cpu", BF16, policy=policy):
            expected = model(x)
        assert torch.equal(nc.trace(model, x, dtype=BF16, policy=policy)(x), expected)
    assert torch.equal(nc.trace(model, x, region=nc.autocast("cpu", BF16, enabled=False))(x), model(x))


class Convolution(nn.Module):
    """A convolution, and something that no list names."""

    def __init__(self, kind, **options):
        super().__init__()
        torch.manual_seed(0)
        self.layer = kind(4, 4, 3, **options)

    def forward(self, x):
        return torch.relu(self.layer(x))


class InARegion(nn.Module):
    """Calls a trace in a region."""

    def __init__(self, trace):
        super().__init__()
        self.trace = trace

    def forward(self, x: torch.Tensor):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.trace(x)


CONVOLUTIONS = [
    (kind, options)
    for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    for options in ({}, {"bias": False, "groups": 2}, {"padding": "same"})
    if "Transpose" not in kind.__name__ or "padding" not in options
]


@pytest.mark.parametrize(("kind", "options"), CONVOLUTIONS, ids=lambda v: v.__name__ if isinstance(v, type) else str(v))
def test_a_traced_convolution_is_the_one_that_was_called(kind, options):
    """torch.jit.trace writes every convolution as `aten::_convolution`: rules about the one it stands for hold."""
    model = Convolution(kind, **options)
    x = torch.randn(2, 4, *[6] * (int(kind.__name__[-2])))
    plain, ours = torch.jit.trace(model, x), nc.trace(model, x)
    rule = nc.Rule(f"aten.{'conv_transpose' if 'Transpose' in kind.__name__ else 'conv'}{kind.__name__[-2:]}", "full")
    with nc.autocast("cpu", BF16):
        expected, in_a_region = model(x), ours(x)
    assert expected.dtype is BF16
    for made in (nc.convert(plain, dtype=BF16), nc.script(InARegion(plain)), nc.script(InARegion(ours))):
        assert torch.equal(made(x), expected) and made(x).dtype is BF16
    assert torch.equal(in_a_region, expected)
    assert nc.convert(plain, dtype=BF16, policy=nc.Policy.native().with_rules(rule))(x).dtype is torch.float32


class RegionInside(nn.Module):
    """A region of ours, under a policy, around one layer; the other is open to the caller."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with nc.autocast("cpu", torch.float16, policy="safe"):
            y = self.a(x)
        return y, self.b(x)


def test_a_region_of_ours_inside_traced_code_is_marked():
    """As torch's own: a script that calls the trace casts what that left open, and nothing else."""
    model, x = RegionInside(), torch.randn(2, 4)
    traced = nc.trace(model, x)
    assert [y.dtype for y in traced(x)] == [torch.float16, torch.float32]
    with nc.autocast("cpu", BF16):
        expected = model(x)
        assert all(torch.equal(a, b) for a, b in zip(traced(x), expected, strict=True))
    scripted = nc.script(InARegion(traced))
    assert all(torch.equal(a, b) for a, b in zip(scripted(x), expected, strict=True))
    with nc.record():
        again = nc.trace(model, x)
    assert str(again.graph).count("prim::Enter") == str(traced.graph).count("prim::Enter")
