"""`nc.diff` of programs that are written otherwise: what they return decides, in whatever order operands stand."""

import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import narrowcast as nc
from narrowcast.results import RunDifferences


def found(a, b, x, under=None):
    asked = {"under": under} if under else {}
    return nc.diff(nc.capture(a, (x,), **asked), nc.capture(b, (x,), **asked))


class AllPlaces(nn.Module):
    """Logits of all places, of which the last is returned."""

    def __init__(self):
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(40, 64), nn.Linear(64, 64), nn.Linear(64, 40)

    def forward(self, ids):
        return (30 * torch.tanh(self.head(F.silu(self.layer(self.embed(ids)))) / 30))[:, -1]


class LastPlace(nn.Module):
    """The same of the last place alone; perhaps without the softcap."""

    def __init__(self, other, cap=True):
        super().__init__()
        self.embed, self.layer, self.head, self.cap = other.embed, other.layer, other.head, cap

    def forward(self, ids):
        logits = self.head(F.silu(self.layer(self.embed(ids)))[:, -1])
        return 30 * torch.tanh(logits / 30) if self.cap else logits


def test_what_is_returned_is_compared_where_its_calls_are_no_pair():
    """A softcap that one of them lacks, of logits of other shapes."""
    torch.manual_seed(0)
    trainer, ids = AllPlaces(), torch.randint(0, 40, (4, 12))
    with torch.no_grad():
        trainer.head.weight.mul_(30)
    assert found(trainer, LastPlace(trainer), ids).verdict in ("alike", "round-off")
    wrong = found(trainer, LastPlace(trainer, cap=False), ids)
    assert wrong.verdict == "values differ" and wrong.outputs_apart > 0.01
    again = RunDifferences.of_data(wrong.data())
    assert again.outputs_apart == wrong.outputs_apart
    assert {"aten.tanh.default", "aten.div.Tensor"} <= {one.id.op for one in wrong.alone}, "what one of them has alone"


class Written(nn.Module):
    """Linear layers as einsum, and a bias that is added to a view of it."""

    def __init__(self, other):
        super().__init__()
        self.layer = other

    def forward(self, x):
        return torch.relu(torch.einsum("bte,oe->bto", x, self.layer.weight) + self.layer.bias)


def test_a_bias_may_be_added_to_a_view_of_a_product():
    """In bf16, too, where the sum is in fp32."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    for under in (None, "bf16"):
        assert found(nn.Sequential(layer, nn.ReLU()), Written(layer), torch.randn(4, 24, 64), under).producers == []


class Residual(nn.Module):
    """A block whose sum and product have their operands in one order, or in the other."""

    def __init__(self, layer, is_swapped, by=1.0):
        super().__init__()
        self.layer, self.is_swapped, self.by = layer, is_swapped, by

    def forward(self, x):
        y = self.layer(x * self.by)
        gate = torch.sigmoid(y)
        return gate * y + x if self.is_swapped else x + y * gate


@pytest.mark.parametrize("under", [None, "bf16"])
def test_operands_may_be_swapped(under):
    """Then nothing differs; and of a fault before them not they are named, but it."""
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 32), torch.randn(8, 32)
    assert found(Residual(layer, False), Residual(layer, True), x, under).verdict in ("alike", "round-off")
    wrong = found(Residual(layer, False), Residual(layer, True, by=1.2), x, under)
    assert wrong.verdict == "values differ" and "add" not in str([row.a for row in wrong.producers])


class Unfolded(nn.Module):
    """A convolution as a product of patches, with zeros around, or with what is mirrored."""

    def __init__(self, conv, mode):
        super().__init__()
        self.conv, self.mode = conv, mode

    def forward(self, x):
        patches = F.unfold(F.pad(x, (1, 1, 1, 1), mode=self.mode), 3)
        return (self.conv.weight.flatten(1) @ patches + self.conv.bias[:, None]).view(len(x), -1, *x.shape[2:])


@pytest.mark.parametrize("under", [None, "bf16"])
def test_results_of_other_shapes_are_compared_as_they_are_returned(under):
    """The product is of one row for each channel; its view has the shape of the convolution's result."""
    torch.manual_seed(0)
    conv, x = nn.Conv2d(3, 8, 3, padding=1), torch.randn(2, 3, 12, 12)
    assert found(conv, Unfolded(conv, "constant"), x, under).verdict != "values differ"
    assert found(conv, Unfolded(conv, "reflect"), x, under).verdict == "values differ"


class Slices(nn.Module):
    """Writes into empty memory, part by part, or joins the parts; without the head's term if `is_wrong`."""

    def __init__(self, is_written, is_wrong=False):
        super().__init__()
        torch.manual_seed(0)
        self.head, self.tail, self.is_written, self.is_wrong = nn.Linear(8, 4), nn.Linear(8, 4), is_written, is_wrong

    def forward(self, x):
        head, tail = self.head(x).log_softmax(-1), self.tail(x).log_softmax(-1)
        if not self.is_written:
            return torch.cat([head[:, :3], tail if self.is_wrong else tail + head[:, 3:]], -1)
        out = torch.empty(x.shape[0], 7)
        out[:, :3], out[:, 3:] = head[:, :3], tail + head[:, 3:]
        return out


@pytest.mark.parametrize("is_wrong", [False, True])
def test_what_a_model_writes_into_its_output_is_compared(is_wrong):
    """No call of the run makes the output as a whole."""
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = nc.diff(nc.capture(Slices(True), x), nc.capture(Slices(False, is_wrong), x))
    assert found.verdict == "values differ" if is_wrong else found.verdict in ("alike", "round-off"), str(found)


class Heads(nn.Module):
    """Attention of four heads, by sdpa."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        return self.out(self.mixed(*(layer(x) for layer in (self.q, self.k, self.v))))

    @staticmethod
    def mixed(*parts):
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in parts)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Permuted(Heads):
    """The same heads in another order, which the last layer undoes."""

    def __init__(self, other):
        super().__init__()
        self.load_state_dict(other.state_dict())

    def forward(self, x):
        order = (torch.tensor([2, 0, 3, 1])[:, None] * 8 + torch.arange(8)).flatten()
        parts = (F.linear(x, layer.weight[order], layer.bias[order]) for layer in (self.q, self.k, self.v))
        return F.linear(self.mixed(*parts), self.out.weight[:, order], self.out.bias)


@pytest.mark.parametrize("under", [None, "bf16", "fp16"])
def test_a_permutation_that_is_undone_is_no_difference(under):
    """Also where one run alone is in a low format: unrelated values that give the same outputs are no fault."""
    torch.manual_seed(0)
    model, x = Heads(), 2 * torch.randn(4, 10, 32)
    result = nc.diff(nc.capture(model, (x,)), nc.capture(Permuted(model), (x,), **({"under": under} if under else {})))
    assert result.verdict in ("round-off", "formats differ") and not result.producers and not result.alone


class Recurrent(nn.Module):
    """Linear attention as products of whole sequences, or step by step; perhaps with a normalizer that decays."""

    def __init__(self, other=None, decay=1.0):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.steps, self.decay = other is not None, decay
        if other is not None:
            self.load_state_dict(other.state_dict())

    def forward(self, x):
        q, k, v = F.elu(self.q(x)) + 1, F.elu(self.k(x)) + 1, self.v(x)
        if not self.steps:
            weights = (q @ k.mT).tril()
            return self.out((weights @ v) / weights.sum(-1, keepdim=True))
        state, norm, results = torch.zeros(len(x), 16, 16), torch.zeros(len(x), 16), []
        for t in range(x.shape[1]):
            state = state + k[:, t, :, None] * v[:, t, None, :]
            norm = norm * self.decay + k[:, t]  # the fault
            given = (q[:, t, None] @ state).squeeze(1)
            results.append(given / (q[:, t] * norm).sum(-1, keepdim=True))
        return self.out(torch.stack(results, 1))


def test_calls_of_one_op_with_unrelated_results_are_no_pair():
    """The products of a step are no pair of those of a sequence: all lines between what agrees are named."""
    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(3, 8, 16)
    assert found(model, Recurrent(model), x).verdict in ("alike", "round-off")
    wrong = found(model, Recurrent(model, decay=0.5), x)
    line = Recurrent.forward.__code__.co_firstlineno + 8
    assert wrong.verdict == "values differ" and any(one.place.endswith(f":{line}") for one in wrong.alone)


class Turned(nn.Module):
    """A rotation by complex numbers, or by sines and cosines; perhaps with another sign."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.kind = nn.Linear(32, 32), nn.Linear(32, 32), kind

    def forward(self, x):
        x = self.first(x).float()
        angle = torch.arange(12.0)[:, None] * 10.0 ** -torch.arange(0, 2, 1 / 8)
        if self.kind == "complex":
            turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angle), angle)
            return self.last(torch.view_as_real(turned).flatten(-2))
        a, b = x[..., 0::2], x[..., 1::2]
        sine = angle.sin() * (-1 if self.kind == "wrong" else 1)
        return self.last(torch.stack([a * angle.cos() - b * sine, a * angle.sin() + b * angle.cos()], -1).flatten(-2))


def test_complex_numbers_choose_nothing():
    """They are neither floats nor whole numbers: a fault that is visible in bf16 is reported."""
    x = 2 * torch.randn(3, 12, 32)
    runs = {kind: nc.capture(Turned(kind), (x,), under="bf16") for kind in ("real", "wrong")}
    exact = nc.capture(Turned("complex"), (x,))
    assert nc.diff(exact, runs["real"]).verdict == "formats differ"
    assert nc.diff(exact, runs["wrong"]).verdict == "values differ"


class Silu(torch.autograd.Function):
    """With a backward that lacks a term."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * x * torch.sigmoid(x) * (1 - torch.sigmoid(x))


@pytest.mark.parametrize("wrong", [False, True])
def test_gradients_that_are_far_off_are_reported_in_low_formats(wrong):
    """Their bound along a backward in bf16 is above 1: together they are near, unless a backward is wrong."""
    torch.manual_seed(0)
    first, last, x = nn.Linear(32, 32), nn.Linear(32, 4), torch.randn(16, 32)
    right = nn.Sequential(first, nn.SiLU(), last)

    class Other(nn.Sequential):
        def forward(self, x):
            h = first(x)
            return last(Silu.apply(h) if wrong else h * torch.sigmoid(h))

    runs = nc.capture(right, (x,), backward=True), nc.capture(Other(*right), (x,), backward=True, under="bf16")
    result = nc.diff(*runs)
    assert result.verdict == ("values differ" if wrong else "formats differ")
    lines = {int(one.place.rpartition(":")[2]) for one in result.alone}
    first = inspect.getsourcelines(Silu.backward)[1]
    assert bool(lines & set(range(first, first + 4))) is wrong


class Routed(nn.Module):
    """Experts one by one, each with the rows of its own."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32)) for _ in range(4))

    def forward(self, x):
        weights, chosen = self.gate(x).float().softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == number)
            made = expert(x[rows]) * weights[rows, slot, None]
            out = out.index_add(0, rows, made.to(out.dtype))
        return out


class Grouped(nn.Module):
    """The same with the weights of all experts in one tensor."""

    def __init__(self, other, activation=F.silu):
        super().__init__()
        stacked = (torch.stack([e[n].weight.detach() for e in other.experts]) for n in (0, 2))
        biases = (torch.stack([e[n].bias.detach() for e in other.experts]) for n in (0, 2))
        self.gate, self.activation = other.gate, activation
        self.first, self.second = map(nn.Parameter, stacked)
        self.first_bias, self.second_bias = map(nn.Parameter, biases)

    def forward(self, x):
        weights, chosen = self.gate(x).float().softmax(-1).topk(2, -1)
        share = torch.zeros(len(x), 4).scatter(1, chosen, weights)
        hidden = torch.baddbmm(self.first_bias[:, None], x.expand(4, -1, -1), self.first.transpose(1, 2))
        each = torch.baddbmm(self.second_bias[:, None], self.activation(hidden), self.second.transpose(1, 2))
        return torch.einsum("te,eth->th", share, each)


class Shifted(nn.Module):
    """A scale and a shift of one layer, in two parts; or of two layers, and what is added at the end four times."""

    def __init__(self, other=None):
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 8)
        self.layers = nn.ModuleList([nn.Linear(16, 32)] if other is None else [nn.Linear(16, 16), nn.Linear(16, 16)])
        self.offset = nn.Parameter(torch.randn(8) if other is None else other.offset.detach().repeat_interleave(4))
        if other is not None:
            self.first.load_state_dict(other.first.state_dict())
            self.last.load_state_dict(other.last.state_dict())
            for layer, weight, bias in zip(
                self.layers, other.layers[0].weight.chunk(2), other.layers[0].bias.chunk(2), strict=True
            ):
                layer.load_state_dict({"weight": weight, "bias": bias})

    def forward(self, x):
        hidden = F.silu(self.first(x))
        made = [layer(hidden) for layer in self.layers]
        scale, shift = made if len(made) == 2 else made[0].chunk(2, -1)
        out = self.last(x * (1 + scale) + shift)[..., None]
        return (out + self.offset.view(8, -1)).expand(-1, -1, 4).flatten(1)


class Apart(nn.Module):
    """Three layers with new biases, all zero, and one after them; or one layer for the three (fused)."""

    def __init__(self, fused=None):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)] if fused is None else [nn.Linear(16, 48)])
        self.out = nn.Linear(16, 16)
        if fused is not None:
            with torch.no_grad():
                self.parts[0].weight.copy_(torch.cat([part.weight for part in fused.parts]))
                self.out.weight.copy_(fused.out.weight)
        for layer in (*self.parts, self.out):
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        q, k, v = (part(x) for part in self.parts) if len(self.parts) == 3 else self.parts[0](x).chunk(3, -1)
        return self.out((q @ k.t() / 4).softmax(-1) @ v)


def grouped(activation=F.silu):
    routed = Routed()
    return routed, Grouped(routed, activation)


def shifted():
    whole = Shifted()
    return whole, Shifted(whole)


def apart():
    separate = Apart()
    return separate, Apart(separate)


@pytest.mark.parametrize("under", [None, "bf16"])
@pytest.mark.parametrize(("make", "width"), [(grouped, 32), (shifted, 16), (apart, 16)], ids=["moe", "shift", "fused"])
def test_gradients_of_weights_in_other_parts_are_alike(make, width, under):
    """Stacked weights of experts, of one layer or of two, of three with biases that are all zero."""
    for seed in range(3):
        torch.manual_seed(seed)
        a, b = make()
        x = torch.randn(24, width)
        runs = [
            nc.capture(model, (x,), backward=lambda out: out.float().square().mean(), under=under) for model in (a, b)
        ]
        difference = nc.diff(*runs)
        assert difference.verdict in ("round-off", "alike", "formats differ"), difference
        compared = {name for row in difference.gradients for name in row.a}
        assert compared == {name for name, _ in a.named_parameters()} - {"offset"}


def test_outputs_that_only_calls_without_a_partner_make_differ_in_a_low_format():
    """Nearly three times as far apart as a call's round-off, where all calls that have a partner are nearer."""
    torch.manual_seed(0)
    x = torch.randn(24, 32)
    assert found(*grouped(), x, "bf16").verdict != "values differ"
    difference = found(*grouped(lambda h: F.silu(h) * 1.1), x, "bf16")
    assert difference.verdict == "values differ" and difference.alone


class Edges(nn.Module):
    """A layer of a graph network that adds up over edges, each node's own among them."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(10, 6)

    def forward(self, x, edges):
        own = torch.arange(len(x))
        source, target = torch.cat([edges, torch.stack([own, own])], 1)
        degree = torch.zeros(len(x)).index_add(0, target, torch.ones(len(target)))
        weight = (degree[source] * degree[target]).rsqrt()
        h = self.layer(x)
        return torch.zeros_like(h).index_add(0, target, h[source] * weight[:, None].to(h.dtype))


class Matrix(nn.Module):
    """The same with a matrix; perhaps without a node's own edge, so that one has none."""

    def __init__(self, other, own):
        super().__init__()
        self.layer, self.own = other.layer, own

    def forward(self, x, edges):
        links = torch.zeros(len(x), len(x)).index_put((edges[1], edges[0]), torch.ones(edges.shape[1]), accumulate=True)
        links = links + torch.eye(len(x)) if self.own else links
        degree = links.sum(1).rsqrt()
        return (links * degree[:, None] * degree) @ self.layer(x)


@pytest.mark.parametrize("under", [None, "bf16"])
def test_one_program_that_returns_nan_differs_from_one_that_does_not(under):
    """At the first call that does: a difference without a bound was within every bound."""
    torch.manual_seed(0)
    a, x, edges = Edges(), torch.randn(15, 10), torch.randint(1, 15, (2, 50))
    asked = {"under": under} if under else {}
    runs = [nc.capture(model, (x, edges), **asked) for model in (a, Matrix(a, True), Matrix(a, False))]
    assert nc.diff(*runs[:2]).verdict in ("alike", "round-off", "formats differ")
    difference = nc.diff(runs[0], runs[2])
    assert difference.verdict == "values differ"
    assert "it is the first that returns NaN in b" in str(difference).replace("\n   ", "")


def test_another_number_behind_a_mask_is_no_difference():
    """-10000 as BERT has it, and -inf leave the same of a softmax."""

    class Masked(nn.Module):
        def __init__(self, lowest, scale):
            super().__init__()
            self.lowest, self.scale, self.layer = lowest, scale, nn.Linear(16, 16)

        def forward(self, x):
            scores = (x @ self.layer(x).t() * self.scale).masked_fill(torch.ones(8, 8).triu(1).bool(), self.lowest)
            return scores.softmax(-1) @ x

    a, x = Masked(float("-inf"), 0.25), torch.randn(8, 16)
    for scale, verdicts in ((0.25, ("alike", "round-off")), (0.3, ("values differ",))):
        b = Masked(-10000.0, scale)
        b.load_state_dict(a.state_dict())
        difference = found(a, b, x)
        assert difference.verdict in verdicts, difference
        assert "-10000" not in str(difference)


def test_weights_in_another_order_are_not_accused_of_another_fault():
    """A projection whose rows stand in another order, as for another layout of rotary embeddings, is undone later."""

    class Rotated(nn.Module):
        def __init__(self, order, factor):
            super().__init__()
            self.layer, self.order, self.factor = nn.Linear(16, 16, bias=False), order, factor

        def forward(self, x):
            h = self.layer(x)
            h = h if self.order is None else h[:, self.order]
            return torch.cat([h[:, ::2] * self.factor, h[:, 1::2].neg()], 1).softmax(-1) @ torch.ones(16, 4).cumsum(0)

    torch.manual_seed(0)
    order, x = torch.randperm(16), torch.randn(8, 16)
    a = Rotated(None, 1.0)
    for factor in (1.0, 1.5):
        b = Rotated(order, factor)
        with torch.no_grad():
            b.layer.weight[order] = a.layer.weight
        difference = found(a, b, x)
        assert (difference.verdict == "values differ") is (factor > 1)
        assert "same weight" not in str(difference)
