"""`nc.parity`: how far two programs of one model are apart, by which cause, from which module on."""

import copy
import math
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import narrowcast as nc
from narrowcast.analysis.parity.sampler import sampled_from
from narrowcast.errors import CheckError, RunError
from narrowcast.reports.results.parity import distance_in_nats
from narrowcast.testing import assert_parity

VOCABULARY, WIDTH = 40, 16
IDS = torch.randint(0, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(5))


class Attention(nn.Module):
    scale = 0.25

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.window = 100

    def forward(self, x):
        scores = self.q(x) @ self.k(x).transpose(-1, -2) * self.scale
        here = torch.arange(x.shape[1])
        apart = here[:, None] - here
        scores = scores.masked_fill((apart < 0) | (apart > self.window), float("-inf"))
        return self.o(scores.softmax(-1) @ self.v(x))


class Block(nn.Module):
    activation = staticmethod(F.gelu)

    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(self.activation(self.up(x)))


class Decoder(nn.Module):
    """A language model; what it does to its logits is an attribute of its class."""

    finish = staticmethod(lambda logits: logits)

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(64, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids, first=0):
        x = self.embedding(ids) + self.places[first : first + ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.finish(self.head(self.norm(x)))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    return Decoder().eval()


def other(model, **finish):
    """A copy, of a subclass whose logits go through something."""
    made = copy.deepcopy(model)
    if finish:
        made.__class__ = type("Finished", (Decoder,), {name: staticmethod(f) for name, f in finish.items()})
    return made


def first(found):
    return found.causes[0]


def test_the_same_model_is_alike(model):
    found = nc.parity(model, copy.deepcopy(model), IDS)
    assert found.verdict == "alike" and found.distance.rms == 0 and not found.is_over, found


def test_what_it_computes_with_is_left_as_it_is(model):
    """Both models: their weights, attributes, modes and hooks."""
    a, b = model, copy.deepcopy(model).bfloat16()
    b.blocks[0].norm.eps = 1e-2
    before = [copy.deepcopy(m.state_dict()) for m in (a, b)]
    nc.parity(a, b, IDS)
    for m, kept in zip((a, b), before, strict=True):
        assert all(torch.equal(kept[name], value) for name, value in m.state_dict().items())
        assert not any(x._forward_hooks or x._forward_pre_hooks for x in m.modules())
    assert b.blocks[0].norm.eps == 1e-2 and b.head.weight.dtype is torch.bfloat16


def test_other_weights_are_named_and_put_back(model):
    """The parameter, and that with a's value nothing is left; the share is its module's."""
    b = copy.deepcopy(model)
    with torch.no_grad():
        b.blocks[1].up.weight.mul_(1.5)
    found = nc.parity(model, b, IDS)
    assert found.verdict == "weights" and first(found).is_confirmed and first(found).after == 0, found
    assert "blocks.1.up.weight" in first(found).what and first(found).module == "blocks.1.up"
    largest = max(found.shares, key=lambda share: share.amount)
    assert largest.module.startswith("blocks.1.") and largest.amount == pytest.approx(found.distance.rms)
    assert math.fsum(share.amount for share in found.shares) == pytest.approx(found.distance.rms)


class Fused(nn.Module):
    """The same decoder by another author: q, k and v are one product, other names, transposed weights."""

    def __init__(self, model):
        super().__init__()
        self.wte, self.wpe = copy.deepcopy(model.embedding), nn.Parameter(model.places.detach().clone())
        self.layers = nn.ModuleList(map(FusedBlock, model.blocks))
        self.final, self.out = copy.deepcopy(model.norm), nn.Parameter(model.head.weight.detach().t().contiguous())

    def forward(self, ids):
        x = self.wte(ids) + self.wpe[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.final(x) @ self.out


class FusedBlock(nn.Module):
    def __init__(self, block):
        super().__init__()
        attention = block.attention
        self.ln, self.proj = copy.deepcopy(block.norm), copy.deepcopy(attention.o)
        self.fc, self.fo = copy.deepcopy(block.up), copy.deepcopy(block.down)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        parts = attention.q, attention.k, attention.v
        with torch.no_grad():
            self.qkv.weight.copy_(torch.cat([part.weight for part in parts]))
            self.qkv.bias.copy_(torch.cat([part.bias for part in parts]))

    def forward(self, x):
        q, k, v = self.qkv(self.ln(x)).chunk(3, -1)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = (q @ k.transpose(-1, -2) * 0.25).masked_fill(~mask, float("-inf"))
        x = x + self.proj(scores.softmax(-1) @ v)
        return x + self.fo(F.gelu(self.fc(x)))


def test_a_port_with_fused_and_transposed_weights(model):
    """Weights are found by value: the port is the same, and a weight that is changed in it is named."""
    found = nc.parity(model, Fused(model), IDS)
    assert found.verdict in ("alike", "round-off") and not found.is_over, found
    b = Fused(model)
    with torch.no_grad():
        b.layers[2].qkv.weight[WIDTH + 3] *= 3
    found = nc.parity(model, b, IDS)
    assert found.verdict == "weights" and "layers.2.qkv.weight" in first(found).what, found
    assert first(found).is_confirmed


ATTRIBUTES = {
    "eps": ("eps", lambda b: [setattr(block.norm, "eps", 1e-2) for block in b.blocks], "blocks.0.norm"),
    "scale": ("scale", lambda b: setattr(b.blocks[1].attention, "scale", 0.4), "blocks.1.attention"),
    "window": ("window", lambda b: setattr(b.blocks[2].attention, "window", 2), "blocks.2.attention"),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_is_named_with_both_values(model, name):
    word, change, module = ATTRIBUTES[name]
    a = copy.deepcopy(model)
    for block in a.blocks:
        block.attention.scale = 0.25  # an attribute of the object in both
    b = copy.deepcopy(a)
    change(b)
    found = nc.parity(a, b, IDS)
    assert found.verdict == "attribute" and first(found).is_confirmed, found
    assert first(found).what.startswith(word) and first(found).module == module, found


CODE = {
    "softcap": ("calls", lambda b: other(b, finish=lambda x: torch.tanh(x / 2) * 2)),
    "another activation": ("calls", lambda b: _with_activation(b, F.silu)),
    "another approximation": ("attribute", lambda b: _with_activation(b, lambda x: F.gelu(x, approximate="tanh"))),
}


def _with_activation(model, function):
    made = copy.deepcopy(model)
    for block in made.blocks:
        block.activation = function
    return made


@pytest.mark.parametrize("name", ["softcap", "another activation", "another approximation"])
def test_what_the_code_does_is_named_with_its_line(model, name):
    verdict, make = CODE[name]
    found = nc.parity(model, make(model), IDS)
    assert found.verdict == verdict and first(found).place.startswith(__file__), found
    assert found.is_over


def test_a_temperature_is_the_sampler_s(model):
    """Logits that one program divides."""
    found = nc.parity(model, other(model, finish=lambda x: x / 0.8), IDS)
    assert found.verdict == "sampler" and "temperature 0.8" in first(found).what, found


@pytest.mark.parametrize("region", [(None, "bf16"), None], ids=["region", "weights"])
def test_formats_are_a_cause_that_goes_away_with_a_s(model, region):
    b = model if region else copy.deepcopy(model).bfloat16()
    found = nc.parity(model, b, IDS, under=region)
    assert found.verdict == "format" and first(found).is_confirmed and first(found).after <= 1e-6, found


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4, bias=False), nn.Parameter(torch.randn(4, WIDTH, WIDTH))

    def forward(self, x):
        weight, expert = self.gate(x).softmax(-1).topk(1)
        return x + torch.einsum("btd,btdo->bto", x, self.experts[expert[..., 0]]) * weight


def test_other_experts_are_told_apart_from_what_remains():
    """Choices of a are replayed in b: what is left are the formats."""
    torch.manual_seed(0)
    many = 1024  # rows, so that some choose between experts that are nearly alike
    model = nn.Sequential(nn.Embedding(many, WIDTH), Router(), Router(), nn.Linear(WIDTH, many)).eval()
    ids = torch.randperm(many)[None]
    found = nc.parity(model, model, ids, under=(None, "bf16"))
    assert found.routed and {row.op for row in found.routed} == {"aten.topk.default"}, found
    assert [cause.kind for cause in found.causes] == ["routing", "format"], found
    assert found.causes[1].after == 0 and found.causes[0].after == found.causes[1].before


def test_tokens_that_are_others_are_said_first(model):
    longer = torch.cat([torch.zeros(2, 1, dtype=torch.int64), IDS], 1)
    found = nc.parity(nc.Case(model, IDS), nc.Case(model, longer))
    assert found.verdict == "tokens" and "b begins with 1 more" in first(found).what, found


def kept(model, values):
    """A run with log-probabilities of an engine."""
    with nc.capture() as run, torch.no_grad():
        model(IDS)
    run.keep_tokens(IDS[:, 1:], values)
    return run


def of_tokens(log_probabilities):
    return log_probabilities[:, :-1].gather(-1, IDS[:, 1:, None])[..., 0]


def top_k(logits, k):
    least = logits.topk(k).values[..., -1:]
    return logits.masked_fill(logits < least, float("-inf")).log_softmax(-1)


SAMPLERS = {
    "temperature 0.6": lambda x: (x / 0.6).log_softmax(-1),
    "top-k 20": lambda x: top_k(x, 20),  # tokens that are cut off have -inf
    "log_softmax in bf16": lambda x: x.bfloat16().log_softmax(-1),
}


@pytest.mark.parametrize("what", SAMPLERS)
def test_what_an_engine_did_to_its_logits_is_found_by_its_numbers(model, what):
    with torch.no_grad():
        values = of_tokens(SAMPLERS[what](model(IDS)))
    found = nc.parity(model, kept(model, values), IDS)
    assert found.verdict == "sampler" and what in first(found).what and first(found).is_confirmed, found


def test_a_padded_vocabulary_is_found(model):
    """The engine's softmax leaves out rows that only pad."""
    padded = other(model, finish=lambda x: torch.cat([x, x[..., :8] - 1], -1))
    with torch.no_grad():
        values = of_tokens(model(IDS).log_softmax(-1))
    found = nc.parity(padded, kept(model, values), IDS)
    assert found.verdict == "sampler" and f"vocabulary of {VOCABULARY}, not {VOCABULARY + 8}" in first(found).what, (
        found
    )


def in_steps(model, wrong=False):
    """An engine: token by token, all of the past read again each time."""

    def engine(ids):
        outputs = [model(ids[:, : n + 1], int(wrong and n > 5)) for n in range(ids.shape[1])]
        return torch.cat([output[:, -1:] for output in outputs], 1)

    return engine


def test_an_engine_that_calls_the_model_in_pieces(model):
    """Its rounding is that of other shapes; a position that is wrong from some token on is not."""
    found = nc.parity(model, in_steps(model), IDS)
    assert found.verdict in ("batch shape", "alike", "round-off") and not found.is_over, found
    found = nc.parity(model, in_steps(model, wrong=True), IDS)
    assert found.verdict == "cache or position" and first(found).is_confirmed, found


def test_an_engine_in_a_thread_of_its_own(model):
    """A capture of a module holds its calls in any thread, and parity goes on with the module itself."""
    b = copy.deepcopy(model)
    b.blocks[0].norm.eps = 1e-2

    def serve():
        with torch.no_grad():
            outputs.append(b(IDS))
            b.head(torch.randn(2, WIDTH))  # no call of the module

    outputs: list[torch.Tensor] = []
    with nc.capture().of(b) as run:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        thread.join(60)
    assert run.calls and run.calls[0].id.module_path == "embedding", run
    assert sum(call.id.module_path == "head" for call in run.calls) == 1
    run.keep_tokens(IDS[:, 1:], of_tokens(outputs[0].log_softmax(-1)))
    found = nc.parity(model, run, IDS)
    assert found.verdict == "attribute" and first(found).module == "blocks.0.norm" and first(found).is_confirmed, found
    assert not b._forward_hooks and not b._forward_pre_hooks
    assert pickle.loads(pickle.dumps(run)).calls == run.calls


def test_saved_runs_alone_say_what_is_likely(model, tmp_path):
    """Nothing runs again: a cause has no figures, and there are no shares; a note says so."""
    b = copy.deepcopy(model)
    b.blocks[1].norm.eps = 1e-2
    with torch.no_grad():
        files = [nc.capture(m, IDS, tokens=IDS).save(tmp_path / f"{n}.json.gz") for n, m in enumerate((model, b))]
    found = nc.parity(*files)
    assert found.verdict == "attribute" and "argument eps 1e-05 in a, 0.01 in b" in first(found).what, found
    assert not first(found).is_confirmed and not found.shares and any("no shares" in note for note in found.notes)


def test_models_of_other_things_are_compared_by_their_outputs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)).eval()
    b = copy.deepcopy(model)
    b[1].running_mean += 0.3
    found = nc.parity(model, b, torch.randn(2, 3, 8, 8))
    assert found.distance.unit == "relative" and found.verdict == "attribute", found
    assert "running_mean" in first(found).what and first(found).after == 0


def test_padding_is_left_out_by_its_mask(model):
    """Of keyword arguments with an attention mask; of tokens that are -100."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, input_ids, attention_mask):
            return self.inner(input_ids)

    mask = torch.ones_like(IDS)
    mask[1, 8:] = 0
    found = nc.parity(Masked(), Masked(), {"input_ids": IDS, "attention_mask": mask})
    assert found.distance.count == 11 + 7
    found = nc.parity(model, model, IDS, tokens=IDS.masked_fill(mask == 0, -100))
    assert found.distance.count == 11 + 7


def test_errors_come_at_once(model):
    """Dropout, and a run without log-probabilities."""
    dropping = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, VOCABULARY))
    with pytest.raises(RunError, match=r"draws what it drops, with p=0.1"):
        nc.parity(dropping, dropping, IDS)
    with nc.capture() as run, torch.no_grad():
        model(IDS)
    with pytest.raises(RunError, match="b has no log-probabilities"):
        nc.parity(model, run, IDS)
    with pytest.raises(RunError, match="every token is -100"):
        nc.parity(model, model, IDS, tokens=torch.full_like(IDS, -100))


def test_an_assertion_names_the_cause(model):
    b = copy.deepcopy(model)
    b.norm.eps = 1e-1
    with pytest.raises(CheckError, match=r"eps 1e-05 in a, 0\.1 in b"):
        assert_parity(model, b, IDS)
    found = assert_parity(model, b, IDS, max_nats=10.0)
    assert found.verdict == "attribute" and not found.is_over
    assert_parity(model, copy.deepcopy(model), IDS)


def test_distances_in_nats():
    """Against their formulas; what is NaN in both is no difference."""
    found = distance_in_nats([-1.0, -2.0, -4.0], [-1.5, -2.0, -3.0], limit=0.7)
    assert found.rms == pytest.approx(math.sqrt((0.25 + 1) / 3)) and found.largest == 1.0 and found.at == 2
    assert found.k1 == found.mean == pytest.approx(0.5 / 3) and found.ratio == pytest.approx(math.e) and found.over == 1
    r = [math.exp(0.5), 1.0, math.exp(-1.0)]
    assert found.k3 == pytest.approx(sum(x - 1 - math.log(x) for x in r) / 3)
    assert distance_in_nats([-math.inf], [-math.inf]).rms == 0
    assert math.isinf(distance_in_nats([math.nan], [-1.0]).rms)
    assert math.isnan(distance_in_nats([], []).rms)


def test_numbers_that_calls_do_not_explain_are_the_sampler_s(model, tmp_path):
    """Of a run alone: its calls agree, and it kept something else."""
    with torch.no_grad():
        values = of_tokens(model(IDS).log_softmax(-1))
    values = values + torch.linspace(-1, 1, values.numel()).view(values.shape)
    found = nc.parity(model, kept(model, values).save(tmp_path / "run.json.gz"), IDS)
    assert found.verdict == "sampler" and found.is_over, found


def test_what_draws_by_a_function_is_refused():
    with pytest.raises(RunError, match="two runs differ, with another seed"):
        nc.parity(lambda x: F.dropout(x, 0.5), nn.ReLU(), torch.randn(2, 8))


def test_a_square_weight_that_is_transposed_is_the_same():
    """Under the same name; and one that is another as well is named."""

    class Turned(nn.Module):
        def __init__(self, layers):
            super().__init__()
            self.layers = nn.ModuleList(copy.deepcopy(layer) for layer in layers)
            for layer in self.layers:
                layer.weight = nn.Parameter(layer.weight.detach().t().contiguous())

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(x @ layer.weight + layer.bias)
            return x

    class Straight(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    torch.manual_seed(0)
    a = Straight()
    b, x = Turned(a.layers), torch.randn(4, 8)
    assert not nc.parity(a, b, x).is_over
    with torch.no_grad():
        b.layers[1].weight[2] *= 2
    found = nc.parity(a, b, x)
    assert found.verdict == "weights" and first(found).is_confirmed and first(found).module == "layers.1", found
    assert first(found).what.startswith("1 parameter differs"), found


def test_programs_that_are_written_otherwise_and_round_otherwise_are_alike():
    """A batch norm that is folded into the layer before it: other calls and weights, and a distance of rounding."""
    torch.manual_seed(0)
    a = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()).eval()
    a[1].running_mean.normal_()
    b = nn.Sequential(copy.deepcopy(a[0]), nn.Tanh())
    with torch.no_grad():
        factor = a[1].weight / (a[1].running_var + a[1].eps).sqrt()
        b[0].weight *= factor[:, None]
        b[0].bias.copy_((a[0].bias - a[1].running_mean) * factor + a[1].bias)
    found = nc.parity(a, b, torch.randn(4, 8))
    assert found.verdict in ("round-off", "alike") and not found.is_over, found


class Gated(nn.Module):
    """x plus down(silu(gate(x)) * up(x)); fused: gate and up are one weight, row by row in turn."""

    def __init__(self, of=None):
        super().__init__()
        self.down = nn.Linear(32, 16) if of is None else copy.deepcopy(of.down)
        self.is_fused = of is not None
        if of is None:
            self.gate, self.up = nn.Linear(16, 32, bias=False), nn.Linear(16, 32, bias=False)
        else:
            self.both = nn.Parameter(torch.stack([of.gate.weight, of.up.weight], 1).flatten(0, 1).detach())

    def forward(self, x):
        if self.is_fused:
            gate, up = (x @ self.both.t()).unflatten(-1, (-1, 2)).unbind(-1)
        else:
            gate, up = self.gate(x), self.up(x)
        return x + self.down(F.silu(gate) * up)


def test_weights_in_rows_by_turns_are_paired():
    """A port that interleaves two weights; one bias is another, in a module beside them."""
    torch.manual_seed(0)
    a = nn.Sequential(Gated(), Gated(), Gated())
    b = nn.Sequential(*map(Gated, a))
    x = torch.randn(5, 16)
    assert nc.parity(a, b, x).verdict in ("alike", "round-off")
    with torch.no_grad():
        b[2].down.bias.add_(0.1)
    found = nc.parity(a, b, x)
    assert (found.verdict, first(found).module, first(found).is_confirmed) == ("weights", "2.down", True), found


@pytest.mark.parametrize("name", ["wpe", "layers.1.qkv.weight"])
def test_rows_in_another_order_are_other_weights(model, name):
    """Positions that are off by one; two heads of k that are swapped in a fused weight."""
    b = Fused(model)
    with torch.no_grad():
        rows = b.get_parameter(name)
        rows = rows if name == "wpe" else rows[WIDTH : 2 * WIDTH]
        rows.copy_(rows.roll(WIDTH // 2, 0))
    found = nc.parity(model, b, IDS)
    assert found.verdict == "weights" and name in first(found).what and first(found).is_confirmed, found


def test_weights_that_are_folded_hide_no_other():
    """A batch norm that is folded into its convolution; another convolution differs."""
    torch.manual_seed(0)
    a = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    a[1].running_mean.normal_(), a[1].running_var.uniform_(0.3, 3)
    b = copy.deepcopy(a)
    b[0], b[1] = torch.nn.utils.fuse_conv_bn_eval(b[0], b[1]), nn.Identity()
    x = torch.randn(3, 3, 8, 8)
    assert not nc.parity(a, b, x).is_over
    with torch.no_grad():
        b[3].weight[2].mul_(1.3)
    found = nc.parity(a, b, x)
    assert (found.verdict, first(found).module) == ("weights", "3") and first(found).is_confirmed, found
    assert any("come no nearer" in note or "comes no nearer" in note for note in found.notes), found.notes


class Averages(nn.Module):
    """Writes to its buffer, and to what its linear layer returns."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.linear(x).add_(1.0).sub(self.mean)


def test_what_a_copy_writes_to_is_not_a_s():
    """Buffers and results of a that a copy of b is given: in its forward it writes to them."""
    torch.manual_seed(0)
    a = nn.Sequential(Averages(), Averages())
    b = copy.deepcopy(a)
    b(torch.randn(5, 8) + 4)
    with torch.no_grad():
        b[1].linear.bias.add_(0.1)
    before = [{name: value.clone() for name, value in m.state_dict().items()} for m in (a, b)]
    found = nc.parity(a, b, torch.randn(5, 8))
    assert {"weights", "attribute"} <= {cause.kind for cause in found.causes}, found
    for m, kept in zip((a, b), before, strict=True):
        assert all(torch.equal(kept[name], value) for name, value in m.state_dict().items())
    assert math.fsum(share.amount for share in found.shares) == pytest.approx(found.distance.rms)


def test_a_batch_norm_that_trains_is_named():
    a = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).eval()
    b = copy.deepcopy(a)
    b[1].train()
    found = nc.parity(a, b, torch.randn(6, 4))
    assert found.verdict == "attribute" and "training False in a, True in b" in first(found).what, found


class Table(nn.Module):
    """Turns by angles of a table whose size is its author's choice."""

    def __init__(self, size):
        super().__init__()
        self.linear, self.size = nn.Linear(8, 8, bias=False), size
        self.register_buffer("angles", torch.linspace(0.1, 1, size))

    def forward(self, x):
        x = self.linear(x)
        return torch.cat([x[..., : self.size] * self.angles.cos(), x[..., self.size :]], -1)


def test_attributes_of_other_kinds_and_sizes_are_tried(model):
    """A window that one side does not have; a buffer of another size."""
    a, b = copy.deepcopy(model), copy.deepcopy(model)
    for one, window in ((a, 3), (b, None)):
        for block in one.blocks:
            block.attention.window = window
            block.attention.__class__ = MaybeWindow
    found = nc.parity(a, b, IDS)
    assert found.verdict == "attribute" and "window 3 in a, None in b" in first(found).what, found
    torch.manual_seed(0)
    a, b = Table(2), Table(4)
    b.linear.load_state_dict(a.linear.state_dict())
    found = nc.parity(a, b, torch.randn(3, 8))
    assert found.verdict == "attribute" and first(found).is_confirmed, found


class MaybeWindow(Attention):
    def forward(self, x):
        window, self.window = self.window, 100 if self.window is None else self.window
        try:
            return super().forward(x)
        finally:
            self.window = window


def test_an_adapter_that_is_merged_in_one_layer_alone_is_found(model):
    """The module whose calls only a makes."""

    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.down, self.up = (
                base,
                nn.Parameter(torch.randn(2, WIDTH)),
                nn.Parameter(torch.randn(WIDTH, 2)),
            )

        def forward(self, x):
            return self.base(x) + 0.1 * (x @ self.down.t() @ self.up.t())

    a, b = copy.deepcopy(model), copy.deepcopy(model)
    for n in (0, 2):
        a.blocks[n].attention.q = Adapted(a.blocks[n].attention.q)
    with torch.no_grad():
        adapted = a.blocks[0].attention.q
        b.blocks[0].attention.q.weight.add_(0.1 * (adapted.up @ adapted.down))
    found = nc.parity(a, b, IDS)
    assert found.verdict == "calls" and first(found).module == "blocks.2.attention.q", found
    assert first(found).is_confirmed


def test_in_low_formats_a_fault_below_rounding_is_found(model):
    """With kernels that round otherwise; without the fault they are alike."""

    class Reordered(Attention):
        def forward(self, x):
            return super().forward(x.flip(1)).flip(1) if self.window < 0 else super().forward(x)

    def unlike(one):
        for block in one.blocks:
            block.activation = lambda x: 0.5 * x * (1 + torch.erf(x * 0.5**0.5))
        return one

    a = copy.deepcopy(model).bfloat16()
    b = unlike(copy.deepcopy(a))
    assert not nc.parity(a, b, IDS).is_over
    b.blocks[1].norm.eps = 3e-2
    found = nc.parity(a, b, IDS)
    assert found.is_over and found.verdict == "attribute" and "eps" in first(found).what, found


def test_functions_and_runs_that_only_round_otherwise_are_not_over(model):
    """A port as a function, and runs of both alone."""
    b = Fused(model)
    assert not nc.parity(lambda ids: model(ids), lambda ids: b(ids), IDS).is_over
    with torch.no_grad():
        runs = [nc.capture(one, IDS, tokens=IDS) for one in (model, b)]
    assert not nc.parity(*runs).is_over


@pytest.mark.parametrize(("temperature", "k", "p"), [(0.7, 40, 0.8), (0.8, 10, 1.0), (0.6, 40, 1.0)])
def test_a_temperature_before_a_cut_is_found(temperature, k, p):
    """Top-k, top-p and neither, of logits that were divided."""
    logits = torch.randn(60, VOCABULARY, generator=torch.Generator().manual_seed(1)) * 2
    divided = logits.double() / temperature
    ordered, places = divided.sort(-1, descending=True)
    shares = ordered.softmax(-1)
    is_out = ((shares.cumsum(-1) - shares) >= p) | (torch.arange(VOCABULARY) >= k)
    cut = divided.scatter(1, places, ordered.masked_fill(is_out, -math.inf))
    ids = cut.softmax(-1).multinomial(1, generator=torch.Generator().manual_seed(2))
    kept = cut.log_softmax(-1).gather(1, ids)[:, 0]
    what, left = sampled_from(logits, ids[:, 0].tolist(), kept.tolist(), 1e-2)
    assert f"temperature {temperature}" in what and left < 1e-5
    assert ("top-p 0.8" in what) == (p < 1) and ("top-k 10" in what) == (k == 10)


@pytest.mark.parametrize("is_saved", [False, True])
def test_weights_that_an_engine_gets_between_its_calls_are_said(model, tmp_path, is_saved):
    """Two prompts, one before an update of the engine's weights and one after it; by `.data`, as engines do."""
    engine = copy.deepcopy(model)
    with nc.capture().of(engine) as run, torch.no_grad():
        kept = engine(IDS[:1])
        engine.head.weight.data.mul_(1.2)
        kept = torch.cat([kept, engine(IDS[1:])])
    run.keep_tokens(IDS[:, 1:], kept.log_softmax(-1)[:, :-1].gather(-1, IDS[:, 1:, None])[..., 0])
    assert run.weights_changed == [2]
    found = nc.parity(model, nc.load(run.save(tmp_path / "run.json.gz"), nc.Run) if is_saved else run, IDS)
    assert found.verdict == "weights" and "from call 2" in first(found).what, found


class WithActivation(nn.Module):
    """Layers with one activation that all share, or one each; of other layers the last sine is a fault."""

    def __init__(self, is_shared, has_fault=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 50)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.acts = nn.ModuleList([nn.GELU()] * 3 if is_shared else [nn.GELU() for _ in range(3)])
        self.has_fault = has_fault

    def forward(self, ids):
        x = self.embed(ids)
        for number, (layer, act) in enumerate(zip(self.layers, self.acts, strict=True)):
            y = act(layer(x))
            x = x + (torch.sin(y) if self.has_fault and number == 1 else y)
        return self.head(x)


def test_a_module_that_layers_share_is_no_cache():
    """It is called several times in one forward: a fault beside it is none of a cache, or of positions."""
    ids = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(0))
    found = nc.parity(WithActivation(False), WithActivation(True, has_fault=True), ids)
    assert found.verdict not in ("alike", "round-off", "cache or position", "batch shape"), str(found)


@pytest.mark.parametrize("seed", [1, 3, 8])
def test_square_weights_of_another_seed_are_other_weights(seed):
    """None is taken for another one's transpose since it happens to be nearer so."""

    def mlp(number):
        torch.manual_seed(number)
        return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))

    found = nc.parity(mlp(0), mlp(seed), torch.randn(4, 16, generator=torch.Generator().manual_seed(5)))
    assert found.verdict == "weights" and found.causes[0].is_confirmed


class Scaled(nn.Module):
    """Logits that are multiplied by an attribute, as several models do."""

    def __init__(self, scale):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.scale = nn.Embedding(50, 16), nn.Linear(16, 50), scale

    def forward(self, ids):
        return self.head(self.embed(ids)) * self.scale


def test_a_scale_of_logits_in_a_module_is_an_attribute():
    """No sampler stands between two models: the attribute is what can be changed."""
    ids = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(0))
    found = nc.parity(Scaled(2.0), Scaled(4.0), ids)
    assert found.verdict == "attribute" and "scale 2 in a, 4 in b" in found.causes[0].what, str(found)


class Returns(nn.Module):
    """A layer, and what is made of its result."""

    def __init__(self, output):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.output = nn.Linear(8, 8), output

    def forward(self, x):
        return self.output(self.layer(x))


OUTPUTS = {
    "not compared": [
        (lambda y: (y, y * 2), lambda y: y),
        (lambda y: y, lambda y: y[:, :4] * 1.0),
        (lambda y: y, lambda y: y.argmax(-1)),
    ],
    "calls": [
        (lambda y: y.argmax(-1), lambda y: y.argmin(-1)),
        (torch.fft.fft, lambda y: 2 * torch.fft.fft(y)),
        (lambda y: y.sum().item(), lambda y: 2 * y.sum().item()),
        (lambda y: y, lambda y: y.masked_fill(y == y.max(), math.nan)),
    ],
    "alike": [
        (lambda y: {"a": y, "b": 2 * y}, lambda y: {"b": 2 * y, "a": y}),
        (lambda y: (y, 2 * y), lambda y: {"a": y, "b": 2 * y}),
        (lambda y: (y * math.nan, y), lambda y: (y * math.nan, y)),
    ],
}


@pytest.mark.parametrize(("verdict", "outputs"), [(name, pair) for name, pairs in OUTPUTS.items() for pair in pairs])
def test_outputs_are_compared_by_name_whatever_they_are_or_it_is_said(verdict, outputs):
    """What has no partner never passes as alike."""
    found = nc.parity(*map(Returns, outputs), torch.randn(3, 8, generator=torch.Generator().manual_seed(0)))
    is_calls = verdict == "not compared" and found.verdict == "calls"  # which makes the difference, with its line
    assert (found.verdict == verdict or is_calls) and found.is_over == (verdict != "alike"), found
    assert any("outputs are not compared" in note for note in found.notes) == (verdict == "not compared"), found


class LastOtherwise(Scaled):
    def forward(self, ids):
        logits = super().forward(ids)
        return torch.cat([logits[:, :-1], logits[:, -1:].flip(-1)], 1)


def test_the_logits_after_the_last_token_are_compared():
    """No given token is predicted by them; they are what a model goes on with."""
    ids = torch.randint(0, 50, (2, 8), generator=torch.Generator().manual_seed(0))
    found = nc.parity(Scaled(1.0), LastOtherwise(1.0), ids, max_nats=1e-3)
    assert found.verdict == "calls" and found.is_over and "after the last" in first(found).what, found


class OfTwoSizes(nn.Module):
    """An output that is large, and one that is small."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        return 1e4 * torch.ones(4), y


def test_each_output_is_measured_by_itself():
    """A small one that is off was hidden by a large one."""
    torch.manual_seed(0)
    a = OfTwoSizes()
    b = copy.deepcopy(a)
    with torch.no_grad():
        b.layer.weight.mul_(1.05)
    found = nc.parity(a, b, (torch.randn(4, 8),))
    assert found.verdict == "weights" and found.distance.rms > 0.02, found


def test_what_is_not_finite_and_what_is_given_otherwise_is_said():
    """NaN in b was a cache or a position; other inputs were two lines that are the same."""
    layer, x = nn.Linear(8, 4), torch.randn(4, 8)
    found = nc.parity(layer, lambda x: layer(x) * float("nan"), (x,))
    assert "outputs of one are not finite where those of the other are" in str(found).replace("\n  ", " ")
    found = nc.parity(nc.Case(layer, (x,)), nc.Case(layer, (x + 1,)))
    assert any("inputs with other values" in note for note in found.notes), found.notes
    run = nc.capture(layer, (x,))
    found = nc.parity(run, run)
    assert found.verdict == "alike" and found.distance.rms == 0
