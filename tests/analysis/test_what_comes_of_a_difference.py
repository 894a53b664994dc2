"""Differences of programs that are written otherwise: whether later calls pass them on or cancel them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import narrowcast as nc


class Attention(nn.Module):
    """Attention by hand, with a product for each of query, key and value."""

    def __init__(self, factor=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.factor = nn.Linear(32, 96), nn.Linear(32, 32), factor

    def projected(self, x):
        return [F.linear(x, w, b) for w, b in zip(self.qkv.weight.chunk(3), self.qkv.bias.chunk(3), strict=True)]

    def forward(self, x):
        q, k, v = self.projected(x)
        scores = (q @ k.transpose(-1, -2)) * (self.factor * 32**-0.5)
        return x + self.out(scores.softmax(-1) @ v)


class Fused(Attention):
    """The same with one product; with the same weights, for they are made with the same seed."""

    def projected(self, x):
        return self.qkv(x).chunk(3, -1)


class Twice(nn.Module):
    """Sums in one order or the other, after something else: each sum has another partner by its place."""

    def __init__(self, is_reversed):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.bias, self.is_reversed = nn.Linear(32, 32), nn.Parameter(torch.randn(32)), is_reversed

    def forward(self, x):
        y = torch.einsum("btc,dc->btd", x, self.layer.weight)
        return x + (y + self.bias) if self.is_reversed else (x + y) + self.bias


class Windows(nn.Module):
    """Writes windows into memory in fp32, one after the other, or computes all at once."""

    def __init__(self, is_written):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.is_written = nn.Linear(32, 32), is_written

    def forward(self, x):
        if not self.is_written:
            return self.layer(x).float()
        out = torch.empty_like(x, dtype=torch.float32)
        for n in range(0, x.shape[1], 4):
            out[:, n : n + 4] = self.layer(x[:, n : n + 4]).float()
        return out


class Recurrent(nn.Module):
    """A recurrent cell, and the same by hand; exchanged: two of its gates have changed places."""

    def __init__(self, by_hand, exchanged=False):
        super().__init__()
        torch.manual_seed(0)
        self.cell, self.by_hand, self.exchanged = nn.LSTMCell(32, 32), by_hand, exchanged

    def forward(self, x):
        w, r, one, two = self.cell.parameters()
        h = c = torch.zeros(x.shape[0], 32)
        outputs = []
        for t in range(x.shape[1]):
            if not self.by_hand:
                h, c = self.cell(x[:, t], (h, c))
                outputs.append(h)
                continue
            i, f, g, o = (F.linear(x[:, t], w, one) + F.linear(h, r, two)).chunk(4, -1)
            i, f = (f, i) if self.exchanged else (i, f)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        return torch.stack(outputs, 1)


X = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1))
ALIKE = ("alike", "round-off", "formats differ")


def compared(a, b, first, second):
    with torch.no_grad():
        return nc.diff(nc.capture(a, X, under=first), nc.capture(b, X, under=second))


@pytest.mark.parametrize(("first", "second"), [(None, None), ("bf16", "bf16"), (None, "bf16"), ("fp16", "fp16")])
@pytest.mark.parametrize(
    "pair",
    [(Attention, Fused), (lambda: Twice(False), lambda: Twice(True)), (lambda: Windows(False), lambda: Windows(True)),
     (lambda: Recurrent(False), lambda: Recurrent(True))],
    ids=["fused", "sums", "windows", "recurrent"],
)  # fmt: skip
def test_what_later_calls_cancel_is_no_difference(pair, first, second):
    """Programs that are written otherwise, in either format and in both."""
    difference = compared(pair[0](), pair[1](), first, second)
    assert difference.verdict in ALIKE, difference


@pytest.mark.parametrize(("first", "second"), [(None, None), ("bf16", "bf16"), (None, "bf16")])
def test_a_factor_that_nothing_makes_up_for_is_named_in_low_formats_too(first, second):
    """The output is within the bound that rounding has there; what it is computed of is not."""
    difference = compared(Attention(), Fused(0.5), first, second)
    assert difference.verdict == "values differ", difference
    assert difference.first_value.a[0].op == "aten.mul.Tensor" and difference.first_value.given, difference


@pytest.mark.parametrize(("first", "second"), [("bf16", "bf16"), (None, "bf16")])
def test_outputs_far_apart_are_values_that_differ_in_other_formats_too(first, second):
    """A call is named, whether or not it has a partner."""
    difference = compared(Recurrent(False), Recurrent(True, exchanged=True), first, second)
    assert difference.verdict == "values differ" and (difference.alone or difference.producers), difference
    assert "no call beyond round-off" not in str(difference)
