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
    assert torch.equal(nc.trace(model, x, dtype=BF16, enabled=False)(x), model(x))
