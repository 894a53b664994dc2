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


class Sink(nn.Module):
    """Attention with a column of scores that leads nowhere: joined to the scores, or as a gate on the result."""

    def __init__(self, by_gate, forgets=False):
        super().__init__()
        torch.manual_seed(0)
        self.by_gate, self.forgets = by_gate, forgets
        self.qkv, self.out, self.sink = nn.Linear(16, 48), nn.Linear(16, 8), nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.transpose(-1, -2) / 4
        if not self.by_gate:
            scores = torch.cat([scores, self.sink.expand(*scores.shape[:-1], 1)], -1)
            weights = (scores - scores.amax(-1, keepdim=True)).softmax(-1)
            return self.out(weights[..., :-1] @ v)
        total = torch.logsumexp(scores, -1, keepdim=True)
        mixed = torch.exp(scores - total) @ v
        gate = torch.sigmoid(total if self.forgets else total - self.sink)  # the fault
        return self.out(mixed * gate)


def test_stretch_ends_at_a_call_that_is_surely_of_both():
    """Subtractions that order alone has paired do not end it: all lines up to the next layer are named, in both."""
    x = torch.randn(3, 8, 16)
    joined, gate, forgets = (nc.capture(model, (x,)) for model in (Sink(False), Sink(True), Sink(True, forgets=True)))
    assert not nc.diff(joined, gate).unsure
    found = nc.diff(joined, forgets)
    fault = Sink.forward.__code__.co_firstlineno + 9
    assert {one.run for one in found.unsure} == {"a", "b"} and {str(one.read_by) for one in found.alone} == {
        "out aten.linear.default #1"
    }, str(found)
    places = {one.place.rpartition(":")[2] for one in [*found.alone, *found.unsure] if one.run == "b"}
    assert str(fault) in places, (fault, places)
    text = " ".join(str(found).split())
    assert "compute differently" in text and str(fault) in text.partition("first read by out")[0], text
