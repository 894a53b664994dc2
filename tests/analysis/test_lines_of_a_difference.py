"""`nc.diff` of programs that are written otherwise: the line of the fault is in the first advice."""

import inspect
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import narrowcast as nc


def lines_of(made, mark):
    """The numbers of the lines of a class or function that end in a mark."""
    lines, first = inspect.getsourcelines(made)
    return {first + n for n, line in enumerate(lines) if line.rstrip().endswith(mark)}


def first_advice(difference):
    """The first advice in one line."""
    text = str(difference).replace("\n   ", " ")
    return next(line for line in text.splitlines() if line.startswith("1. "))


def names(difference, made, mark):
    """Whether the first advice names a line with a mark."""
    places = re.split("[,;:) ]+", first_advice(difference))
    return any(str(line) in places for line in lines_of(made, mark))


class Sorted(nn.Module):
    """Attention over the words of rows of several lengths, which may be sorted by their length for it."""

    def __init__(self, is_sorted, fault=""):
        super().__init__()
        self.is_sorted, self.fault = is_sorted, fault
        self.embed, self.score, self.head = nn.Embedding(30, 24), nn.Linear(24, 1), nn.Linear(24, 3)

    def forward(self, ids, lengths):
        if not self.is_sorted:
            x = torch.tanh(self.embed(ids))
            scores = self.score(x)[..., 0].masked_fill(torch.arange(ids.shape[1]) >= lengths[:, None], -1e4)
            pooled = (scores.softmax(-1)[..., None] * x).sum(1)
            return self.head(pooled / 0.75)  # unscaled
        order = lengths.argsort(descending=True)
        ids, lengths = ids[order], lengths[order]
        x = torch.tanh(self.embed(ids))
        scores = self.score(x).squeeze(-1)
        if self.fault != "unmasked":
            scores = scores.masked_fill(torch.arange(ids.shape[1]) >= lengths[:, None], -1e4)
        weights = scores.softmax(-1)[:, None]  # unmasked
        pooled = torch.bmm(weights, x)[:, 0]
        pooled = pooled if self.fault == "unscaled" else pooled / 0.75
        return self.head(pooled)[order if self.fault == "unsorted" else order.argsort()]  # unsorted


@pytest.mark.parametrize("fault", ["", "unmasked", "unscaled", "unsorted"])
def test_rows_in_another_order_do_not_hide_a_fault(fault):
    """Everything between is the same in another order, of which the last step is the first that is not."""
    torch.manual_seed(0)
    a, b = Sorted(False), Sorted(True, fault)
    b.load_state_dict(a.state_dict())
    lengths = torch.tensor([4, 9, 2, 12, 7, 5])
    given = (torch.randint(1, 30, (6, 12)), lengths)
    difference = nc.diff(nc.capture(a, given), nc.capture(b, given))
    if not fault:
        assert difference.verdict in ("alike", "round-off"), difference
    else:
        assert difference.verdict == "values differ" and names(difference, Sorted, f"# {fault}"), difference


class Divergence(nn.Module):
    """A reconstruction and a divergence: of torch.distributions, or by hand, perhaps with another sign."""

    def __init__(self, by_hand, sign=1):
        super().__init__()
        self.by_hand, self.sign = by_hand, sign
        self.encode, self.both, self.decode = nn.Linear(30, 32), nn.Linear(32, 12), nn.Linear(6, 30)
        self.mean, self.spread = nn.Linear(32, 6), nn.Linear(32, 6)

    def forward(self, x, noise):
        h = F.silu(self.encode(x))
        mean, spread = (self.mean(h), self.spread(h)) if self.by_hand else self.both(h).chunk(2, 1)
        logits = self.decode(mean + noise * (spread / 2).exp())
        if not self.by_hand:
            likely = torch.distributions.Bernoulli(logits=logits).log_prob(x).sum(1)
            q, p = (
                torch.distributions.Normal(mean, (spread / 2).exp()),
                torch.distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean)),
            )
            return (torch.distributions.kl_divergence(q, p).sum(1) - likely).mean()
        made = F.binary_cross_entropy_with_logits(logits, x, reduction="sum") / len(x)
        apart = -0.5 * (1 + spread - mean**2 - spread.exp())
        apart = apart.sum() / len(x)
        return made + apart if self.sign == 1 else made - apart  # sign


def test_what_a_forward_makes_is_named_before_its_backward():
    """Another sign of a term of the loss differs in both."""
    torch.manual_seed(0)
    a, x = Divergence(False), (torch.rand(8, 30).round(), torch.randn(8, 6))
    a.both.weight.data.mul_(4)
    for sign in (1, -1):
        b = Divergence(True, sign)
        b.load_state_dict(a.state_dict())
        for layer, weight, bias in zip((b.mean, b.spread), a.both.weight.chunk(2), a.both.bias.chunk(2), strict=True):
            layer.load_state_dict({"weight": weight, "bias": bias})
        difference = nc.diff(*(nc.capture(model, x, backward=lambda loss: 0 + loss) for model in (a, b)))
        if sign == 1:
            assert difference.verdict in ("alike", "round-off"), difference
        else:
            assert names(difference, Divergence, "# sign"), difference


class Gated(nn.Module):
    """A gated layer, whole or in two shards that are added; perhaps with the bias of both."""

    def __init__(self, other=None, biases=1):
        super().__init__()
        self.other, self.biases = other, biases
        self.up, self.gate, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)
        if other is not None:
            parts = [slice(0, 32), slice(32, 64)]
            self.fused = nn.ModuleList(nn.Linear(32, 64) for _ in parts)
            self.rows = nn.ModuleList(nn.Linear(32, 32, bias=False) for _ in parts)
            for part, fused, row in zip(parts, self.fused, self.rows, strict=True):
                weight = torch.cat([other.gate.weight[part], other.up.weight[part]])
                bias = torch.cat([other.gate.bias[part], other.up.bias[part]])
                fused.load_state_dict({"weight": weight, "bias": bias})
                row.load_state_dict({"weight": other.down.weight[:, part]})
            self.bias = nn.Parameter(other.down.bias.detach().clone())
            del self.up, self.gate, self.down, self.other

    def forward(self, x):
        if hasattr(self, "up"):
            return x + self.down(F.gelu(self.gate(x)) * self.up(x))
        parts = []
        for fused, row in zip(self.fused, self.rows, strict=True):
            gate, up = fused(x).chunk(2, -1)
            parts.append(row(F.gelu(gate) * up))
        added = parts[0] + parts[1]
        return x + (added + self.bias * self.biases)  # twice


@pytest.mark.parametrize("under", [None, "bf16"])
def test_weights_of_one_range_are_not_one_weight(under):
    """New layers of one size have nearly one range; in a low format that is not enough to take them for the same."""
    torch.manual_seed(0)
    a, x = Gated(), torch.randn(14, 32)
    a.down.weight.data.mul_(3)
    a.down.bias.data.normal_()
    for biases in (1, 2):
        runs = [nc.capture(a, (x,)), nc.capture(Gated(a, biases), (x,), **({"under": under} if under else {}))]
        difference = nc.diff(*runs)
        if biases == 1:
            assert difference.verdict != "values differ", difference
        else:
            assert names(difference, Gated, "# twice"), difference


@pytest.mark.parametrize("divisor", [4, 1])
def test_a_loss_that_is_not_divided_is_named_by_its_line(divisor):
    """The programs have the same calls: what differs is a number that one of them lacks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 5))
    x, y = torch.randn(12, 16), torch.randint(0, 5, (12,))

    def whole():
        F.cross_entropy(model(x), y).backward()

    def parts():
        for part in range(0, 12, 3):
            loss = F.cross_entropy(model(x[part : part + 3]), y[part : part + 3]) / divisor  # divided
            loss.backward()

    runs = []
    for program in (whole, parts):
        model.zero_grad()
        with nc.capture() as run:
            program()
        runs.append(run)
    difference = nc.diff(*runs)
    if divisor == 4:
        assert difference.verdict in ("alike", "round-off"), difference
    else:
        assert difference.verdict == "values differ" and names(difference, parts, "# divided"), difference
