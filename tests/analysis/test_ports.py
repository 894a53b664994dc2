"""`nc.diff` of a model and its port, as users make them: silent where it is right, and at the line where it is not."""

import copy
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import narrowcast as nc
from narrowcast.results import RunDifferences

sys.path.insert(0, str(Path(__file__).parent))
from test_lines_of_a_difference import names
from test_sound_in_low_formats import is_silent, region

WIDTH, HEADS, LENGTH = 64, 4, 16
ANGLES = torch.arange(LENGTH)[:, None] * torch.exp(torch.arange(4) * -1.7)  # of half of a head
COSINES, SINES = ANGLES.cos(), ANGLES.sin()


class FusedByHeads(nn.Module):
    """One projection whose rows are, head by head, those of query, key and value, as GPT-NeoX has it."""

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        heads = self.qkv(self.norm(x)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        q, k, v = heads.chunk(3, -1)
        r = 2 * COSINES.shape[-1]
        cosines, sines = COSINES.repeat(1, 2), SINES.repeat(1, 2)
        q, k = (
            torch.cat([t * cosines + torch.cat([-t[..., r // 2 :], t[..., : r // 2]], -1) * sines, rest], -1)
            for t, rest in ((whole[..., :r], whole[..., r:]) for whole in (q, k))
        )
        weights = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
        return x + self.out((weights @ v).transpose(1, 2).flatten(2))


class InThree(nn.Module):
    """The same with a projection each."""

    def __init__(self, fused):
        super().__init__()
        self.norm, self.out = copy.deepcopy(fused.norm), copy.deepcopy(fused.out)
        rows = (
            fused.qkv.weight.detach().unflatten(0, (HEADS, 3, -1)),
            fused.qkv.bias.detach().unflatten(0, (HEADS, 3, -1)),
        )
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        for n, part in enumerate(self.parts):
            part.weight.data.copy_(rows[0][:, n].flatten(0, 1))
            part.bias.data.copy_(rows[1][:, n].flatten())

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (part(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.parts)
        r = 2 * COSINES.shape[-1]
        q, k = (
            torch.cat([one * COSINES - two * SINES, two * COSINES + one * SINES, whole[..., r:]], -1)
            for whole, one, two in ((t, *t[..., :r].chunk(2, -1)) for t in (q, k))
        )
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("under", [(None, "bf16"), ("fp16", None), ("bf16", "bf16"), (None, None)])
@pytest.mark.parametrize("seed", range(2))
def test_a_fused_projection_may_have_its_rows_in_any_order(under, seed):
    """With equal inputs and equal results, weights in another order are no other weights."""
    torch.manual_seed(seed)
    fused, x = nn.Sequential(FusedByHeads(), FusedByHeads()), torch.randn(2, LENGTH, WIDTH)
    both = (fused, nn.Sequential(*map(InThree, fused)))
    runs = [nc.capture(model, (x,), under=low) for model, low in zip(both, under, strict=True)]
    silent, difference = is_silent(*runs)
    assert silent, str(difference)


class Layer(nn.Module):
    """A layer of a decoder that looks at an image, with torch's attention, which scales the query."""

    def __init__(self):
        super().__init__()
        self.among, self.look = (nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in range(2))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))

    def forward(self, x, memory, queries):
        h = x + queries
        x = self.norms[0](x + self.among(h, h, x)[0])
        x = self.norms[1](x + self.look(x + queries, memory, memory)[0])
        return self.norms[2](x + self.down(F.relu(self.up(x))))


class Heads(nn.Module):
    """The same attention with a weight for each head, which divides the scores."""

    def __init__(self, of):
        super().__init__()
        self.out = nn.Parameter(of.out_proj.weight.detach().unflatten(1, (HEADS, -1)).clone())
        self.last = nn.Parameter(of.out_proj.bias.detach().clone())
        self.weight = nn.Parameter(of.in_proj_weight.detach().view(3, HEADS, WIDTH // HEADS, WIDTH).clone())
        self.bias = nn.Parameter(of.in_proj_bias.detach().view(3, HEADS, 1, -1).clone())

    def forward(self, *of):
        q, k, v = (torch.einsum("btd,hed->bhte", x, w) + b for x, w, b in zip(of, self.weight, self.bias, strict=True))
        scores = torch.einsum("bhqe,bhke->bhqk", q, k) / math.sqrt(q.shape[-1])
        return torch.einsum("bhqk,bhke,dhe->bqd", scores.softmax(-1), v, self.out) + self.last


class Ported(nn.Module):
    """The layer with these."""

    def __init__(self, of):
        super().__init__()
        self.up, self.down, self.norms = map(copy.deepcopy, (of.up, of.down, of.norms))
        self.among, self.look = Heads(of.among), Heads(of.look)

    def forward(self, x, memory, queries):
        h = x + queries
        x = self.norms[0](x + self.among(h, h, x))
        x = self.norms[1](x + self.look(x + queries, memory, memory))
        return self.norms[2](x + self.down(self.up(x).relu()))


class Decoder(nn.Module):
    """Layers, each of which is given the queries."""

    def __init__(self, layers, queries, head):
        super().__init__()
        self.layers, self.queries, self.head = nn.ModuleList(layers), nn.Parameter(queries), head

    def forward(self, memory):
        x = torch.zeros(len(memory), *self.queries.shape)
        for layer in self.layers:
            x = layer(x, memory, self.queries)
        return self.head(x)


def decoders(seed):
    """One, and its port."""
    torch.manual_seed(seed)
    layers = [Layer(), Layer()]
    with torch.no_grad():
        for parameter in nn.ModuleList(layers).parameters():
            parameter.mul_(1.5).add_(torch.randn_like(parameter) * 0.1)
    queries, head = torch.randn(6, WIDTH), nn.Linear(WIDTH, 7)
    ported = Decoder(map(Ported, layers), queries.clone(), copy.deepcopy(head))
    return Decoder(layers, queries, head), ported, torch.randn(3, LENGTH, WIDTH)


def trained(model, memory, under):
    """A forward and backward in a block, and the norms of gradients, in the order of its parameters."""
    with nc.capture() as run:
        with region(under):
            out = model(memory)
        (out.float() - torch.cos(torch.arange(out.numel())).view_as(out)).square().mean().backward()
        for parameter in model.parameters():
            parameter.grad.double().square().sum().sqrt()
    return run


@pytest.mark.parametrize("under", [(None, None), (None, "bf16"), ("bf16", "bf16"), ("fp16", None)])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_gradients_judge_a_backward_and_norms_of_them_are_in_any_order(under, seed):
    """Where outputs and gradients are alike, the steps of a backward are another way to the same."""
    *models, memory = decoders(seed)
    runs = [trained(model, memory, low) for model, low in zip(models, under, strict=True)]
    silent, difference = is_silent(*runs)
    assert silent, str(difference)


class Words(nn.Module):
    """A causal model whose places are counted from a mask of floats, or are a range."""

    def __init__(self, counted, fault=False):
        super().__init__()
        self.counted, self.fault = counted, fault
        self.words, self.places = nn.Embedding(20, WIDTH), nn.Embedding(LENGTH + 2, WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 20)

    def forward(self, ids):
        keep = torch.ones(ids.shape)
        places = (keep.cumsum(1) * keep - 1).long() + 2 if self.counted else torch.arange(ids.shape[1]) + 2
        x = self.words(ids) + self.places(places)
        q, k, v = (part(self.norm(x)).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.counted:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH if self.fault else WIDTH // HEADS)
            y = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf).softmax(-1) @ v
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("is_faulty", [False, True])
@pytest.mark.parametrize("under", [(None, "bf16"), ("bf16", "bf16")])
def test_places_that_are_counted_excuse_no_difference(under, is_faulty):
    """Indices that were computed from constants are chosen by nothing that differs: outputs that are apart are told."""
    torch.manual_seed(0)
    model, port, ids = Words(True), Words(False, is_faulty), torch.randint(0, 20, (2, LENGTH))
    for part in (model.q, model.k, model.v, model.out):
        part.weight.data.mul_(3)
    port.load_state_dict(model.state_dict())
    runs = [nc.capture(each, (ids,), under=low) for each, low in zip((model, port), under, strict=True)]
    silent, difference = is_silent(*runs)
    assert silent is not is_faulty, str(difference)


class Placed(nn.Module):
    """Features in other units, then places added: a table, or computed anew."""

    def __init__(self, computed, fault=False):
        super().__init__()
        self.computed, self.fault = computed, fault
        self.enter, self.norm, self.head = nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)
        rates = torch.exp(torch.arange(WIDTH // 2) * (-4.0 / WIDTH))
        angles = torch.arange(LENGTH)[:, None] * rates
        self.register_buffer("table", torch.cat([angles.sin(), angles.cos()], 1))

    def forward(self, x):
        if not self.computed:
            return self.head(self.norm(self.enter((x.clamp_min(-3) + 1.0) / 2.0) + self.table))
        h = self.enter(torch.where(x < -3, -3.0, x) * 0.5 + 0.5)
        angles = torch.outer(torch.arange(h.shape[1]).float(), torch.exp(torch.arange(WIDTH // 2) * (-4.0 / WIDTH)))
        both = [angles.sin(), angles.cos()]  # places
        places = torch.stack(both, -1).flatten(1) if self.fault else torch.cat(both, 1)  # places
        return self.head(self.norm(h + places))  # places


@pytest.mark.parametrize("under", [(None, "bf16"), ("bf16", "bf16"), (None, None)])
def test_a_change_of_units_that_is_undone_does_not_hide_a_later_fault(under):
    """Neither in the backward, which reads what the forward saved."""
    torch.manual_seed(0)
    plain, port, x = Placed(False), Placed(True, fault=True), torch.randn(3, LENGTH, 8)
    port.load_state_dict(plain.state_dict())
    runs = [
        nc.capture(model, (x,), under=low, backward=lambda y: y.square().mean())
        for model, low in zip((plain, port), under, strict=True)
    ]
    assert names(nc.diff(*runs), Placed, "# places"), nc.diff(*runs)


def test_a_deep_copy_makes_memory_and_no_values():
    """What lies in it when it is assigned is no result: nothing is compared there, whatever it is."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()  # with buffers
    with nc.capture() as run, torch.no_grad():
        copy.deepcopy(model)(torch.ones(1, 4))
    assigned = [call for call in run.calls if call.id.op.startswith("aten.set_.")]
    assert assigned and not any(call.outputs for call in assigned)
    assert sum(bool(call.outputs) for call in run.calls) == 2


class Routed(nn.Module):
    """Two layers of experts, two a token: all at once, or one after another; a fault leaves shares that sum to less."""

    def __init__(self, looped, fault=False):
        super().__init__()
        self.looped, self.fault, width, experts = looped, fault, 16, 4
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.routers = nn.ModuleList(nn.Linear(width, experts, bias=False) for _ in range(2))
        self.up = nn.ParameterList(torch.randn(experts, width, 2 * width) / 4 for _ in range(2))
        self.down = nn.ParameterList(torch.randn(experts, 2 * width, width) / 6 for _ in range(2))

    def forward(self, x):
        for n, (router, up, down) in enumerate(zip(self.routers, self.up, self.down, strict=True)):
            h = self.norm(x)
            shares, chosen = router(h).softmax(-1).topk(2)
            if not (self.fault and n == 1):  # shares
                shares = shares / shares.sum(-1, keepdim=True)  # shares
            x = x + (self.one_by_one if self.looped else self.together)(h, shares, chosen, up, down)
        return x

    def together(self, h, shares, chosen, up, down):
        y = torch.einsum("tkh,tkhw->tkw", torch.einsum("tw,tkwh->tkh", h, up[chosen]).relu(), down[chosen])
        return (shares[..., None] * y).sum(1)

    def one_by_one(self, h, shares, chosen, up, down):
        out = torch.zeros_like(h)
        for n in range(len(up)):
            token, place = torch.where(chosen == n)
            y = (h[token] @ up[n]).relu() @ down[n]
            out = out.index_add(0, token, y.to(h.dtype) * shares[token, place, None].to(h.dtype))
        return out


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("under", [("bf16", "bf16"), ("bf16", None), (None, None)])
def test_choices_excuse_what_few_rows_show(under, fault):
    """Of a router whose scores are rounded few tokens choose another expert: a difference in most rows is another."""
    torch.manual_seed(0)
    plain, port, x = Routed(False), Routed(True, fault), torch.randn(64, 16)
    port.load_state_dict(plain.state_dict())
    found = nc.diff(*(nc.capture(model, (x,), under=low) for model, low in zip((plain, port), under, strict=True)))
    assert (found.verdict == "values differ") is fault, found


def test_outputs_that_are_far_apart_are_no_pass():
    """What excuses them may be all that is wrong, or not: nothing is said, and a command exits with 2."""
    found = RunDifferences("a", "b", outputs_unexplained=0.4)
    assert found.verdict == "not compared" and "4.0e-01 apart, and" in " ".join(str(found).split())


class Averaged:
    """Trains, and evaluates an average of the weights: by torch's ops on lists, or key by key."""

    def __init__(self, by_key, fault=False):
        self.by_key, self.share = by_key, 0.8 if fault else 0.2
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.average = copy.deepcopy(self.model)
        self.batches = [(torch.randn(16, 8), torch.randint(0, 4, (16,))) for _ in range(5)]

    def run(self, low):
        optimizer, kept = torch.optim.SGD(self.model.parameters(), 0.5), dict(self.average.state_dict())
        for x, labels in self.batches:
            with region(low):
                loss = F.cross_entropy(self.model(x).float(), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                if not self.by_key:
                    torch._foreach_lerp_(list(kept.values()), list(self.model.parameters()), self.share)
                for name, value in self.model.named_parameters() if self.by_key else ():
                    kept[name] = kept[name] + self.share * (value - kept[name])  # average
        self.average.load_state_dict(kept)
        with region(low), torch.no_grad():
            return self.average(torch.ones(3, 8))


@pytest.mark.parametrize(("under", "fault"), [((None, "bf16"), False), ((None, None), False), ((None, None), True)])
def test_weights_that_a_run_computes_are_made_by_its_calls(under, fault):
    """Those of a model that is evaluated are averages of the trained ones: steps explain them, or a call is named."""
    runs = []
    for by_key, low in zip((False, True), under, strict=True):
        averaged = Averaged(by_key, by_key and fault)
        with nc.capture() as run:
            averaged.run(low)
        runs.append(run)
    found = nc.diff(*runs)
    if fault:
        assert names(found, Averaged, "# average"), found
    else:
        assert found.verdict in ("round-off", "formats differ"), found


def turned(x, angles):
    """Both programs call it."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class Decoding(nn.Module):
    """Attention over all tokens, or prompt and rest; positions of the rest begin anew by a fault."""

    def __init__(self, parts, fault=False):
        super().__init__()
        self.parts, self.fault = parts, fault
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def heads(self, part, x):
        return part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def forward(self, x):
        angles = torch.arange(LENGTH)[:, None] * torch.exp(torch.arange(WIDTH // HEADS // 2) * -0.5)
        if not self.parts:
            q, k, v = (self.heads(part, x) for part in (self.q, self.k, self.v))
            q, k = turned(q, angles), turned(k, angles)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(y.transpose(1, 2).flatten(2))
        keys, values, given = [], [], []
        for start, x_of in ((0, x[:, :10]), (10, x[:, 10:])):
            own = angles[start : start + x_of.shape[1]]
            q, k = self.heads(self.q, x_of), self.heads(self.k, x_of)
            if self.fault:  # places
                q = turned(q, angles[: x_of.shape[1]])  # places
            else:
                q = turned(q, own)
            keys.append(turned(k, own))
            values.append(self.heads(self.v, x_of))
            k, v = torch.cat(keys, 2), torch.cat(values, 2)
            seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(start)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
            given.append(self.out(y.transpose(1, 2).flatten(2)))
        return torch.cat(given, 1)


@pytest.mark.parametrize("fault", [False, True])
def test_of_a_function_that_both_programs_call_the_line_of_the_call_is_named(fault):
    """What is wrong is what one of them passes to it."""
    torch.manual_seed(0)
    plain, parts, x = Decoding(False), Decoding(True, fault), torch.randn(2, LENGTH, WIDTH)
    parts.load_state_dict(plain.state_dict())
    found = nc.diff(nc.capture(plain, (x,)), nc.capture(parts, (x,)))
    assert names(found, Decoding, "# places") if fault else found.verdict == "round-off", found


class Joined(nn.Module):
    """Heads joined as they should be, or without being put in order: no call makes that difference, but a view."""

    def __init__(self, in_order):
        super().__init__()
        self.in_order, self.qkv, self.out = in_order, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        y = y.transpose(1, 2) if self.in_order else y  # order
        y = y.reshape(x.shape)
        return self.out(y)


@pytest.mark.parametrize("low", [None, "bf16"])
def test_a_view_that_gives_other_parts_is_named(low):
    """By its line, beside that of the call which reads the parts."""
    torch.manual_seed(0)
    right, wrong, x = Joined(True), Joined(False), torch.randn(2, LENGTH, WIDTH)
    wrong.load_state_dict(right.state_dict())
    run, other = (nc.capture(model, (x,), under=low) for model in (right, wrong))
    assert any(Path(file).name == Path(__file__).name for file, _ in run.calls[-1].views)
    assert names(nc.diff(run, other), Joined, "# order")
