"""Differences of programs that are written otherwise: whether later calls pass them on or cancel them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.analysis.diff.alignment import Aligned
from narrowcast.analysis.diff.given_numbers import is_number, scaled_before
from narrowcast.analysis.diff.sides import Side


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


def test_lines_between_what_both_compute_are_named():
    """Subtractions that order alone has paired are not between: all lines up to the next layer are named, in both."""
    x = torch.randn(3, 8, 16)
    joined, gate, forgets = (nc.capture(model, (x,)) for model in (Sink(False), Sink(True), Sink(True, forgets=True)))
    assert not nc.diff(joined, gate).front
    found = nc.diff(joined, forgets)
    first = Sink.forward.__code__.co_firstlineno
    places = {int(one.place.rpartition(":")[2]) - first for one in found.front}
    assert {4, 5, 6, 7, 8, 9, 10} >= places >= {9} and {one.run for one in found.front} == {"a", "b"}, str(found)
    assert "compute differently" in str(found) and str(first + 9) in str(found)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 48), nn.Linear(48, 24)
        self.scale = nn.Parameter(torch.full((24,), 0.5))

    def forward(self, x):
        return x + self.scale * self.down(F.gelu(self.up(self.norm(x))))


class Blocks(nn.Module):
    """Blocks whose branches are scaled; checkpointed, with one op for the scale and the sum."""

    def __init__(self, fused):
        super().__init__()
        self.blocks, self.head, self.fused = nn.ModuleList(Scaled() for _ in range(4)), nn.Linear(24, 5), fused

    def part(self, block, x):
        y = block.norm(x)
        y = block.down(F.gelu(block.up(y)))
        return torch.addcmul(x, block.scale, y)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(self.part, block, x, use_reentrant=False) if self.fused else block(x)
        return self.head(x)


def test_what_a_backward_computes_in_another_order_is_no_fault_where_what_reads_it_agrees():
    """Of the second model, made in the block, no gradient is left."""
    torch.manual_seed(5)
    first, x, y = Blocks(fused=False), torch.randn(16, 24) * 2, torch.randint(5, (16,))
    with torch.no_grad():
        for block in first.blocks:
            block.norm.weight.uniform_(0.2, 1.8)
    with nc.capture() as a:
        F.cross_entropy(first(x), y).backward()
    with nc.capture() as b:
        second = Blocks(fused=True)
        second.load_state_dict(first.state_dict())
        F.cross_entropy(second(x), y).backward()
        del second
    found = nc.diff(a, b)
    assert found.verdict in ("alike", "round-off"), str(found)


def test_a_part_of_sequences_one_by_one_or_padded_is_no_outcome():
    """A module gives as many rows as each sequence has; the other program masks what it gives of the rest."""
    torch.manual_seed(0)
    sequences, first, last = [torch.randn(n, 12) for n in (3, 7, 5, 2)], nn.Linear(12, 24), nn.Linear(24, 2)
    with nc.capture() as a:
        last(torch.stack([first(x).relu().mean(0) for x in sequences]))
    with nc.capture() as b:
        lengths = torch.tensor([len(x) for x in sequences])
        mask = torch.arange(7) < lengths[:, None]
        padded = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        last((first(padded).relu() * mask[..., None]).sum(1) / lengths[:, None])
    found = nc.diff(a, b)
    assert found.verdict in ("alike", "round-off"), str(found)  # as the kernels of the processor round


def test_numbers_that_are_one_but_for_rounding_are_no_other_arguments():
    assert not is_number(str(1 - 0.9), "0.1") and is_number("0.1", "0.1001") and is_number("1e-08", "1e-06")


def test_a_number_that_stands_before_a_call_or_in_it_is_the_same():
    """Decay: `gradient.add(weight, alpha=0.001)`, or `gradient + 0.001 * weight`; another alpha is another."""
    torch.manual_seed(0)
    weight, gradient = torch.randn(4, 8), torch.randn(4, 8)

    def side(function):
        with nc.capture() as run:
            function()
        return Side([run])

    inside = side(lambda: gradient.add(weight, alpha=1e-3))
    before = side(lambda: gradient.mul(1.02) + weight * 1.02e-3)  # a run in a low format has led a little apart
    other = side(lambda: gradient.add(weight, alpha=2e-3))
    found = []
    for sides in ((inside, before), (inside, other)):
        added = [next(x for x in one.bundles if x.id.op == "aten.add.Tensor") for one in sides]
        found.append(scaled_before(sides, Aligned((added[0],), (added[1],), "")))
    assert found == [{"alpha", "other"}, set()]


def test_gradients_far_apart_behind_equal_outputs_are_told_in_low_formats_too():
    """A loss is another, and conditions decide alike, since what they read is equal."""
    torch.manual_seed(0)
    model, x, y = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)), torch.randn(64, 16), torch.randn(64, 4)

    def run(loss):
        model.zero_grad()
        with nc.capture() as run:
            with nc.autocast("cpu", torch.bfloat16):
                given = model(x).float()
                given = torch.where(given > given.mean(), given, given.exp().log())
            loss(given).backward()
        return run

    both = (lambda given: (given - y).square().mean()), (lambda given: (given - y).abs().mean())
    found = nc.diff(*map(run, both))
    assert found.verdict == "values differ", str(found)
    again = nc.diff(run(both[0]), run(lambda given: F.mse_loss(given, y)))
    assert again.verdict != "values differ", str(again)


def test_ends_without_a_partner_are_compared_by_their_values():
    """Logarithms of probabilities, written out and wrong; of another size they are said not to be compared."""
    torch.manual_seed(0)
    weight, x = torch.randn(8, 8), torch.randn(4, 8)

    def run(last):
        with nc.capture() as run:
            last(F.linear(x, weight))
        return run

    def log_softmax(y):
        return y.log_softmax(-1)

    wrong = nc.diff(run(log_softmax), run(lambda y: y - 2 * torch.logsumexp(y, -1, keepdim=True)))
    assert wrong.verdict == "values differ" and wrong.front, wrong
    right = nc.diff(run(log_softmax), run(lambda y: y - torch.logsumexp(y, -1, keepdim=True)))
    assert right.verdict == "round-off", right
    other = nc.diff(run(log_softmax), run(lambda y: y[:, :3].exp() - 2))
    assert "what the runs come to is not compared" in str(other.notes), other
    right = nc.diff(run(log_softmax), run(lambda y: y - torch.logsumexp(y, -1, keepdim=True)))
    assert right.verdict == "round-off" and "come to" not in str(right.notes), right


class NormByHand(nn.Module):
    """A group norm after a convolution, by torch or by hand, there with another divisor."""

    def __init__(self, by_hand, correction=0):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv1d(8, 8, 3, padding=1), nn.GroupNorm(4, 8)
        self.by_hand, self.correction = by_hand, correction

    def forward(self, x):
        x = self.conv(x)
        if not self.by_hand:
            return F.softplus(self.norm(x)).square().mean()
        groups = x.reshape(x.shape[0], 4, -1)
        variance = groups.var(-1, keepdim=True, correction=self.correction)
        normal = ((groups - groups.mean(-1, keepdim=True)) * torch.rsqrt(variance + 1e-5)).view_as(x)
        return F.softplus(normal * self.norm.weight[:, None] + self.norm.bias[:, None]).square().mean()


def _on_a_device_with_tf32(run):
    run.environment |= {"device_type": "cuda"}
    run.environment["flags"] = {**run.environment["flags"], "backends.cudnn.allow_tf32": True}
    return run


@pytest.mark.parametrize(("correction", "moved"), [(0, 0.0), (0, 4e-4), (1, 0.0)])
def test_convolutions_that_may_round_to_tf32_hide_no_other_fault(correction, moved):
    """That a device may compute them so says nothing of the rest, if both runs gave the same; moved: what another
    kernel's rounding does to the convolution, which is no fault.
    """
    x = torch.randn(3, 8, 5)
    hand = NormByHand(True, correction)
    with torch.no_grad():
        hand.conv.weight *= 1 + moved
    runs = [_on_a_device_with_tf32(nc.capture(model, (x,), backward=True)) for model in (NormByHand(False), hand)]
    found = nc.diff(*runs)
    assert (found.verdict == "values differ") == bool(correction), str(found)


class Folded(nn.Module):
    """A convolution before a norm of fixed statistics, which may be folded into its weight; and a layer after it."""

    def __init__(self, is_folded, factor=1.0):
        super().__init__()
        torch.manual_seed(0)
        conv, norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)
        with torch.no_grad():
            norm.running_mean.normal_(), norm.running_var.uniform_(0.3, 3), norm.weight.uniform_(0.5, 2)
        self.first = nn.Sequential(conv, norm).eval()
        if is_folded:
            self.first = torch.nn.utils.fusion.fuse_conv_bn_eval(conv.eval(), norm)
        self.factor = factor

    def forward(self, x):
        weight = self.last.weight
        if self.factor != 1.0:  # the value is the same, the gradient is not
            weight = weight.detach() + self.factor * (weight - weight.detach())
        return F.conv2d(torch.relu(self.first(x)), weight, self.last.bias)


@pytest.mark.parametrize("low", [None, torch.bfloat16])
def test_the_gradient_of_a_folded_weight_is_that_of_another_weight(low):
    """Outputs and all other gradients are alike; one that is not is found."""
    x, region = torch.randn(2, 3, 10, 10), {} if low is None else {"under": low}
    whole = nc.capture(Folded(False), (x,), backward=True, **region)
    found = nc.diff(whole, nc.capture(Folded(True), (x,), backward=True, **region))
    assert found.verdict == "round-off", str(found)
    assert "first.0.weight" not in {name for row in found.gradients for name in row.a}


def test_a_gradient_that_is_off_beside_folded_weights_is_found():
    """The last layer has its weights in both, and another gradient in one."""
    x = torch.randn(2, 3, 10, 10)
    runs = [nc.capture(model, (x,), backward=True) for model in (Folded(False), Folded(True, factor=1.1))]
    assert nc.diff(*runs).verdict == "values differ"


class Weighed(nn.Module):
    """A layer in a low format, and arithmetic in fp32 behind it, in one form or the other. factor: of its gradient."""

    def __init__(self, by_hand, factor=1.0):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.by_hand, self.factor = nn.Linear(16, 16), by_hand, factor

    def forward(self, x):
        y = self.layer(x).float()
        powers = torch.softmax(y, -1) if not self.by_hand else y.exp() / y.exp().sum(-1, keepdim=True)
        if self.factor != 1.0:
            powers = powers.detach() + self.factor * (powers - powers.detach())
        return (powers * torch.linspace(0, 1, 16)).sum()


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.0, 1.2])
def test_low_calls_that_gave_the_same_excuse_nothing_behind_them(factor, low):
    """The layer's results have the same bits in both runs: what is behind it is judged as in fp32."""
    x = torch.randn(32, 16)
    runs = [nc.capture(model, (x,), under=low, backward=True) for model in (Weighed(False), Weighed(True, factor))]
    found = nc.diff(*runs)
    assert (found.verdict == "values differ") == (factor != 1.0), str(found)
