"""`nc.diff` of programs that are written otherwise and sound: in a low format, what they come to decides."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import narrowcast as nc
from narrowcast.results import RunDifferences


def region(under):
    return nc.autocast("cpu", under) if under else nullcontext()


def is_silent(a, b):
    """Whether nothing is said to differ but formats."""
    difference = nc.diff(a, b)
    return difference.verdict in ("alike", "round-off", "formats differ"), difference


class Normed(nn.Module):
    """Convolutions over time, before which all that came before is normed: whole, or in chunks with a state."""

    def __init__(self, chunk=0):
        super().__init__()
        self.chunk, self.first, self.last = chunk, nn.Conv1d(5, 12, 1), nn.Conv1d(12, 4, 1)
        self.layers = nn.ModuleList(nn.Conv1d(12, 12, 3, dilation=2**n) for n in range(3))
        self.gains = nn.ParameterList(torch.rand(12, 1) + 0.5 for _ in range(3))

    def whole(self, x):
        x = self.first(x)
        count = x.shape[1] * torch.arange(1, x.shape[2] + 1)
        for n, (layer, gain) in enumerate(zip(self.layers, self.gains, strict=True)):
            mean = x.sum(1).cumsum(-1) / count
            variance = x.square().sum(1).cumsum(-1) / count - mean**2
            h = (x - mean[:, None]) / torch.sqrt(variance + 1e-4)[:, None] * gain
            x = x + F.leaky_relu(layer(F.pad(h, (2 * 2**n, 0))), 0.2)
        return self.last(x)

    def part(self, x, states):
        x = torch.einsum("oc,bct->bot", self.first.weight[..., 0], x) + self.first.bias[:, None]
        time = x.shape[-1]
        for n, (layer, gain, state) in enumerate(zip(self.layers, self.gains, states, strict=True)):
            step = 2**n
            sums = state["sum"][..., None] + x.sum(1).cumsum(-1)
            squares = state["squares"][..., None] + x.square().sum(1).cumsum(-1)
            state["sum"], state["squares"] = sums[..., -1], squares[..., -1]
            count = x.shape[1] * torch.arange(state["seen"] + 1, state["seen"] + time + 1)
            state["seen"] += time
            mean = sums / count
            h = (x - mean[:, None]) * gain / torch.sqrt(squares / count - mean.square() + 1e-4)[:, None]
            kept = torch.cat([state["tail"], h], -1)
            state["tail"] = kept[..., -2 * step :]
            taps = (layer.weight[..., k] @ kept[..., k * step : k * step + time] for k in range(3))
            x = x + F.leaky_relu(sum(taps) + layer.bias[:, None], 0.2)
        return F.conv1d(x, self.last.weight, self.last.bias)

    def forward(self, x):
        if not self.chunk:
            return self.whole(x)
        zeros = {"sum": x.new_zeros(len(x)), "squares": x.new_zeros(len(x)), "seen": 0}
        states = [{**zeros, "tail": x.new_zeros(len(x), 12, 2 * 2**n)} for n in range(3)]
        return torch.cat([self.part(part, states) for part in x.split(self.chunk, -1)], -1)


@pytest.mark.parametrize("seed", range(3))
def test_a_stream_is_the_whole(seed):
    """Other steps of the time in one call; of several results only statistics can be compared."""
    torch.manual_seed(seed)
    a, b = Normed(), Normed(4)
    for layer in a.layers:
        layer.weight.data.mul_(2)
    b.load_state_dict(a.state_dict())
    x = torch.randn(3, 5, 16) * torch.linspace(0.4, 2, 16) + 0.7
    is_sound, difference = is_silent(nc.capture(a, (x,)), nc.capture(b, (x,), under="bf16"))
    assert is_sound, difference


class Twin(nn.Module):
    """Two networks at once, their weights in stacks."""

    def __init__(self, one, other):
        super().__init__()
        pairs = [(a, b) for a, b in zip(one, other, strict=True) if isinstance(a, nn.Linear)]
        self.weights = nn.ParameterList(torch.stack([a.weight.t(), b.weight.t()]).detach() for a, b in pairs)
        self.biases = nn.ParameterList(torch.stack([a.bias[None], b.bias[None]]).detach() for a, b in pairs)

    def forward(self, x):
        h = torch.baddbmm(self.biases[0], x.expand(2, -1, -1), self.weights[0]).relu()
        return torch.baddbmm(self.biases[1], h, self.weights[1]).squeeze(-1)


def critics(separate, under, is_sound=True):
    """Three steps of two critics that learn the smaller value of their targets, which follow them: separate networks
    and optimizers, or one of both, and steps by hand. Returns the run.
    """
    torch.manual_seed(0)
    nets = [nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)) for _ in range(2)]
    for net in nets:
        net[2].weight.data.mul_(4)
    data = [(torch.randn(24, 8), torch.randn(24, 8), torch.randn(24), (torch.rand(24) < 0.4).float()) for _ in range(3)]
    if separate:
        learned = nn.ModuleList(nets)
        target = copy.deepcopy(learned)
        optimizer = torch.optim.SGD(learned.parameters(), 0.02)
        with nc.capture() as run:
            for x, following, reward, done in data:
                with region(under):
                    with torch.no_grad():
                        values = [net(following).squeeze(-1).float() for net in target]
                        wanted = reward + 0.95 * (1 - done) * torch.min(*values)
                    loss = sum(F.mse_loss(net(x).squeeze(-1).float(), wanted) for net in learned)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    for new, old in zip(learned.parameters(), target.parameters(), strict=True):
                        old.lerp_(new, 0.1)
        return run
    learned = Twin(*nets)
    target, weights = copy.deepcopy(learned), list(learned.parameters())
    with nc.capture() as run:
        for x, following, reward, done in data:
            with region(under):
                with torch.no_grad():
                    both = target(following).float()
                    least = both.amin(0) if is_sound else both.mean(0)
                    wanted = torch.where(done > 0, reward, reward + 0.95 * least)
                loss = (learned(x).float() - wanted).square().mean(1).sum()
            with torch.no_grad():
                for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
                    weight.sub_(gradient, alpha=0.02)
                for new, old in zip(weights, target.parameters(), strict=True):
                    old.mul_(0.9).add_(new, alpha=0.1)
    return run


FORMATS = [(None, None), (None, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float16, None)]


@pytest.mark.parametrize("under", FORMATS, ids=["fp32", "fp32-bf16", "bf16", "fp16-fp32"])
def test_stacked_networks_are_separate_ones(under):
    """Neither gradients nor most results can be compared; all that can be is alike."""
    separate = critics(True, under[0])
    is_sound, difference = is_silent(separate, critics(False, under[1]))
    assert is_sound, difference
    assert not is_silent(separate, critics(False, under[1], is_sound=False))[0]


class Quantiles(nn.Module):
    """Blocks that each take away what they explain; quantiles of the rest."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(3))
        self.spread = nn.Linear(16, 2)

    def forward(self, x):
        out = 0
        for block in self.blocks:
            made = block(x).float()
            x, out = x - made, out + made[:, :4]
        spread = F.softplus(self.spread(x).float())
        return torch.stack([out - spread[:, :1], out, out + spread[:, 1:]], -1)


def of_quantiles(model, x, y, by_hand, under):
    """Three steps of a loss with a kink; returns the run."""
    levels = torch.tensor([0.1, 0.5, 0.9])
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with nc.capture() as run:
        for _ in range(3):
            with region(under):
                apart = y[..., None] - model(x)
                if by_hand:
                    loss = torch.where(apart > 0, levels * apart, (levels - 1) * apart).mean()
                else:
                    loss = torch.maximum(levels * apart, (levels - 1) * apart).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return run


@pytest.mark.parametrize("under", FORMATS[1:], ids=["fp32-bf16", "bf16", "fp16-fp32"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_later_steps_of_a_low_format_are_further_apart(under, seed):
    """The gradient of a bias after three steps of a loss with kinks."""
    torch.manual_seed(seed)
    a, x, y = Quantiles(), torch.randn(24, 16), torch.randn(24, 4)
    b = copy.deepcopy(a)
    is_sound, difference = is_silent(of_quantiles(a, x, y, False, under[0]), of_quantiles(b, x, y, True, under[1]))
    assert is_sound, difference


class Slots(nn.Module):
    """Experts with few slots each: tokens in slots by a mask of all, or copied one by one; perhaps with the second
    choices in the slots of the first.
    """

    experts, slots = 4, 8

    def __init__(self, by_index, restarts=False):
        super().__init__()
        self.by_index, self.restarts = by_index, restarts
        self.router = nn.Linear(24, self.experts, bias=False)
        self.up = nn.Parameter(torch.randn(self.experts, 24, 32) / 5)
        self.down = nn.Parameter(torch.randn(self.experts, 32, 24) / 6)

    def forward(self, x):
        shares = self.router(x).float().softmax(-1)
        if not self.by_index:
            first = F.one_hot(shares.argmax(-1), self.experts)
            second = F.one_hot(shares.masked_fill(first == 1, -1).argmax(-1), self.experts)
            places = (first.cumsum(0) - 1) * first, (second.cumsum(0) - 1 + first.sum(0, keepdim=True)) * second
            combine = 0
            for chosen, place in zip((first, second), places, strict=True):
                kept = chosen * (place < self.slots)
                where = F.one_hot((place * kept).sum(-1), self.slots).float()
                combine = combine + torch.einsum("s,se,sc->sec", (shares * chosen).sum(-1), kept.float(), where)
            given = torch.einsum("sec,sm->ecm", (combine > 0).to(x.dtype), x)
            made = torch.einsum("ecf,efm->ecm", torch.einsum("ecm,emf->ecf", given, self.up).relu(), self.down)
            return x + torch.einsum("sec,ecm->sm", combine, made.float())
        gates, who = shares.topk(2, -1)
        order = torch.cat([who[:, 0], who[:, 1]])
        rank = (order[:, None] == order[None, :]).tril(-1).sum(1)
        if self.restarts:
            rank[len(x) :] -= torch.bincount(who[:, 0], minlength=self.experts)[who[:, 1]]
        slot = torch.where(rank < self.slots, order * self.slots + rank, self.experts * self.slots)
        tokens = torch.arange(len(x)).repeat(2)
        given = x.new_zeros(self.experts * self.slots + 1, 24).index_copy(0, slot, x[tokens])
        parts = given[:-1].split(self.slots)
        made = torch.cat([(part @ self.up[n]).relu() @ self.down[n] for n, part in enumerate(parts)])
        made = torch.cat([made, torch.zeros_like(made[:1])])[slot].float() * gates.t().reshape(-1, 1)
        return x + made[: len(x)] + made[len(x) :]


@pytest.mark.parametrize("under", [FORMATS[0], FORMATS[3]], ids=["fp32", "fp16-fp32"])
def test_choices_do_not_excuse_what_no_call_has_shown(under):
    """Where the values by which calls choose agree, outputs far apart are not due to other choices."""
    torch.manual_seed(0)
    a, tokens = Slots(False), []
    while len(tokens) < 16:  # those with a clear choice, which rounding does not change
        token = torch.randn(24)
        best = a.router(token).sort(descending=True).values
        tokens += [token] if (best[:2] - best[1:3]).min() > 0.25 else []
    for restarts in (False, True):
        b = Slots(True, restarts)
        b.load_state_dict(a.state_dict())
        runs = [
            nc.capture(model, (torch.stack(tokens),), **({"under": asked} if asked else {}))
            for model, asked in zip((a, b), under, strict=True)
        ]
        is_sound, difference = is_silent(*runs)
        assert is_sound is not restarts, difference


class Bands(nn.Module):
    """The logarithm of the power in bands of frequencies: by a Fourier transform, or by two convolutions."""

    def __init__(self, by_hand):
        super().__init__()
        self.by_hand = by_hand
        centres = torch.arange(8)[:, None] * 4 + 2
        self.register_buffer("filters", (1 - (torch.arange(33) - centres).abs() / 3).clamp(min=0))

    def forward(self, x):
        if not self.by_hand:
            spectrum = torch.stft(x, 64, 16, window=torch.hann_window(64), center=False, return_complex=True)
            return torch.log10(torch.clamp(self.filters @ spectrum.abs() ** 2, min=1e-8))
        angle = torch.arange(33)[:, None] * torch.arange(64) * (2 * torch.pi / 64)
        waves = torch.cat([angle.cos(), -angle.sin()]) * torch.hann_window(64)
        real, imaginary = F.conv1d(x[:, None], waves[:, None], stride=16).chunk(2, 1)
        power = real**2 + imaginary**2
        return torch.log10(torch.clamp(torch.einsum("mf,bft->bmt", self.filters, power), min=1e-8))


@pytest.mark.parametrize("seed", range(4))
def test_an_operand_that_cannot_be_compared_may_be_rounded_otherwise(seed):
    """The filters of both are equal; the powers, whose names and shapes are others, are not known to be."""
    torch.manual_seed(seed)
    a, b, x = Bands(False), Bands(True), torch.randn(2, 400)
    b.load_state_dict(a.state_dict())
    is_sound, difference = is_silent(nc.capture(a, (x,)), nc.capture(b, (x,)))
    assert is_sound, difference


def test_outputs_alone_are_a_comparison():
    """No call of one program is one of the other, and what both return is compared, or is not."""
    assert RunDifferences("a", "b", output_difference=0.0).verdict == "alike"
    assert RunDifferences("a", "b", output_difference=1e-8).verdict == "round-off"
    assert RunDifferences("a", "b").verdict == "not compared"


@pytest.mark.parametrize("under", ["bf16", "fp16"])
def test_gradients_that_cancel_are_explained_by_the_calls_of_one_program(under):
    """The mean square of vectors of one length has no gradient but round-off, whose size is that of the format."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8)), torch.randn(6, 16)

    class Unit(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return F.normalize(self.model(x), dim=-1)

    runs = [nc.capture(Unit(), (x,), under=low, backward=lambda y: y.float().square().mean()) for low in (None, under)]
    silent, difference = is_silent(*runs)
    assert silent, str(difference)


MASKED = torch.rand(3, 50, generator=torch.Generator().manual_seed(1)) < 0.3


def beside(h, size, columns=4):
    """Values of another size in each row, as outliers, far pairs and masks are."""
    return torch.cat([torch.full((3, columns), size), h], -1)


def set_in_part(h, index, value):
    """A copy whose part is written in place."""
    copied = h.clone()
    copied[index] = value
    return copied


RAW = torch.randn(3, 30, generator=torch.Generator().manual_seed(2)) * 1e4
FLATTENED = {
    "exp": lambda h: h.masked_fill(MASKED, -1e4).exp(),
    "sigmoid": lambda h: (h + MASKED * -1e4).sigmoid(),
    "topk": lambda h: (torch.tensor([0.0, -1e9, -1e9])[:, None] + h.log_softmax(-1)).flatten().topk(3).values,
    "kthvalue": lambda h: h.masked_fill(MASKED, 1e9).kthvalue(5).values,
    "clamp": lambda h: torch.where(MASKED, 1e10, h.square()).clamp(max=5.0),
    "gelu": lambda h: F.gelu(beside(h, -500.0)),
    "softcap": lambda h: 30 * torch.tanh(beside(h, 5e3) / 30),
    "reciprocal": lambda h: 1 / beside(h.abs() + 0.1, 1e6),
    "quotient": lambda h: beside(h, 5e4) / torch.cat([torch.full((4,), 5e4), torch.ones(50)]),
    "sign": lambda h: beside(h, 5e3).sign() + 0.1 * h.mean(),
    "log2": lambda h: (beside(h, 5e3).abs() + 1e-3).log2(),
    "batch norm": lambda h: F.batch_norm(torch.cat([RAW, h], -1), None, None, training=True),
    "glu": lambda h: F.glu(torch.cat([RAW, h[:, :30]], -1)),
    "a row set": lambda h: set_in_part(h, 1, 3.0) * 2,
    "a column set": lambda h: h - set_in_part(h, (slice(None), 0), 0.0),
}


class Halves(nn.Module):
    """A product, whole or in halves, and what is computed of it."""

    def __init__(self, form, in_halves=False):
        super().__init__()
        self.linear, self.form, self.in_halves = nn.Linear(64, 50), FLATTENED[form], in_halves

    def forward(self, x):
        if not self.in_halves:
            return self.form(self.linear(x).float())
        a, b = self.linear.weight.split(32, 1)
        return self.form((x[:, :32] @ a.T + x[:, 32:] @ b.T + self.linear.bias).float())


@pytest.mark.parametrize("form", FLATTENED)
def test_what_drops_the_largest_of_its_inputs_differs_by_what_is_left(form):
    """Round-off of small elements is small beside a mask, and as large as ever once an op has flattened or dropped it;
    a kernel that is off by a tenth of what is left is found.
    """
    torch.manual_seed(0)
    a, b, x = Halves(form), Halves(form, in_halves=True), torch.randn(3, 64)
    b.load_state_dict(a.state_dict())
    with torch.no_grad():
        low = nc.capture(a, (x,), under="bf16")
        assert nc.diff(nc.capture(a, (x,)), low).verdict == "formats differ"
        assert nc.diff(low, nc.capture(b, (x,), under="bf16")).verdict in ("round-off", "alike")
        own = a.form
        a.form = lambda h: own(h) * 1.1
        assert nc.diff(low, nc.capture(a, (x,), under="bf16")).verdict == "values differ"


@pytest.mark.parametrize("low", [0, 1])
def test_a_recurrent_layer_of_both_directions_is_two_of_one(low):
    """Their flags say how it is computed: in other formats, too. Under `safe`: a cpu may have no bf16 LSTM."""
    torch.manual_seed(0)
    both, last = nn.LSTM(8, 12, bidirectional=True, batch_first=True), nn.Linear(24, 4)
    ways = [nn.LSTM(8, 12, batch_first=True) for _ in range(2)]
    for way, suffix in zip(ways, ("", "_reverse"), strict=True):
        for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"):
            setattr(way, name, getattr(both, name + suffix))

    def as_one(x):
        return last(both(x)[0])

    def as_two(x):
        return last(torch.cat([ways[0](x)[0], ways[1](x.flip(1))[0].flip(1)], -1))

    x, region = torch.randn(2, 7, 8), nc.autocast("cpu", torch.bfloat16, policy="safe")
    with torch.no_grad():
        runs = [nc.capture(f, (x,), under=region if n == low else None) for n, f in enumerate((as_one, as_two))]
    assert nc.diff(*runs).verdict == "formats differ"
