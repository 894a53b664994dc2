"""Recurrent layers for cuda, explained and scripted where there is none: one call of the library's kernel, all cast."""

import pytest
import torch
from torch import nn

import narrowcast as nc

BF16 = torch.bfloat16
KERNEL = "aten._cudnn_rnn.default"


class Model(nn.Module):
    """A recurrent layer, and a head."""

    def __init__(self, layer):
        super().__init__()
        self.rnn, self.head = layer, nn.LazyLinear(4)
        self.head(self.rnn(torch.randn(2, 5, 8))[0])

    def forward(self, x):
        return self.head(self.rnn(x)[0])


LAYERS = {
    "lstm": lambda: nn.LSTM(8, 16, 2, batch_first=True),
    "lstm of two directions, in training": lambda: nn.LSTM(8, 16, bidirectional=True, dropout=0.1, num_layers=2),
    "lstm with projections": lambda: nn.LSTM(8, 16, proj_size=6, bias=False),
    "gru": lambda: nn.GRU(8, 16, batch_first=True),
    "rnn": lambda: nn.RNN(8, 16, nonlinearity="relu"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_explained_for_cuda(name):
    """Its input, each weight and the states come in fp16, to which torch casts them in a bf16 region, too."""
    model = Model(LAYERS[name]())
    found = nc.explain(model, (torch.randn(2, 5, 8),), under=BF16, device="cuda")
    casts = [cast.argument for cast in found.ledger.casts if cast.op == KERNEL]
    states = ["hx", "cx"] if isinstance(model.rnn, nn.LSTM) else ["hx"]
    assert sorted(casts) == sorted(["input", *["weight"] * len(list(model.rnn.parameters())), *states])
    calls = {kind.op: kind.computes for kind in found.ledger.calls}
    assert calls[KERNEL] == "fp16" and calls["aten.linear.default"] == "bf16" and "Recurrent" not in found.note
    assert not any("addmm" in op or "tanh" in op or "mkldnn" in op for op in calls)


def test_a_rule_about_the_layer_holds():
    """By the kernel's name, and by the module; `lower` brings it into the region's format."""
    model, args = Model(LAYERS["gru"]()), (torch.randn(2, 5, 8),)
    rules = {
        nc.Rule("aten._cudnn_rnn", "full"): "fp32",
        nc.Rule("aten.*", "full", module="rnn"): "fp32",
        nc.Rule("aten._cudnn_rnn", "lower"): "bf16",
    }
    for rule, format in rules.items():
        region = nc.autocast("cuda", BF16, policy=nc.Policy.native().with_rules(rule))
        found = nc.explain(model, args, under=region)
        assert {kind.computes for kind in found.ledger.calls if kind.op == KERNEL} == {format}
        assert found.rules[0].calls == 1


def test_on_another_device_and_for_packed_sequences_the_note_says_that_it_is_not_known():
    """What xpu calls is written down nowhere; of packed sequences the sizes are values."""
    model = Model(LAYERS["gru"]())
    found = nc.explain(model, (torch.randn(2, 5, 8),), under=BF16, device="xpu")
    assert "Recurrent layers run another kernel on xpu" in found.note

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(8, 16)

        def forward(self, x):
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]))
            return self.rnn(packed)[0].data

    found = nc.explain(Packed(), (torch.randn(5, 2, 8),), under=BF16, device="cuda")
    assert "Recurrent layers run another kernel on cuda" in found.note


@pytest.mark.parametrize("name", LAYERS)
def test_scripted_for_cuda(name):
    """The layer is cast as a whole; on the cpu such a script casts nothing, and runs."""
    model, x = Model(LAYERS[name]()).eval(), torch.randn(2, 5, 8)
    region = nc.autocast("cuda", BF16)
    found = nc.explain(model, (x,), under=region, front_end="script")
    assert {"input", "hx", "params"} <= {cast.argument for cast in found.ledger.casts if cast.op == KERNEL}
    assert torch.equal(nc.script(model, under=region)(x), model(x))
