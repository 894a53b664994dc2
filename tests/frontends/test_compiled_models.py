"""Compiled models as objects: their methods, copies, other compiled code around them, and compiling them again."""

import contextlib
import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc

pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.filterwarnings("ignore::FutureWarning")]
BF16, FP32 = torch.bfloat16, torch.float32
MINE = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full", module="last"), name="mine")


class Model(nn.Module):
    """Methods beside its call: plain ones, a generator, one that calls the model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.last(self.first(x))

    def encode(self, x):
        return self.first(x)

    def generate(self, x):
        return torch.cat([self(x), self.first(x)])

    def steps(self, x):
        for _ in range(2):
            x = self.first(x)
            yield x


def compiled(model=None, **options):
    return nc.compile(model or Model(), **{"under": BF16, "backend": "aot_eager", **options})


X = torch.randn(2, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.filterwarnings("ignore:narrowcast")
@pytest.mark.parametrize("goal", ["exact", "fast"])
def test_every_method_runs_in_the_region(goal):
    """Not its call alone; with the bits of eager code, generators included."""
    model = compiled(goal=nc.Goal.fast(verify=False) if goal == "fast" else goal, backend="eager")
    with nc.autocast("cpu", BF16):
        whole, first = Model()(X), Model().first(X)
    assert torch.equal(model.encode(X), first) and model.encode(X).dtype is BF16
    assert torch.equal(model.generate(X), torch.cat([whole, first]))
    assert [y.dtype for y in model.steps(X)] == [BF16, BF16]
    assert model.forward(X).dtype is BF16 and torch.equal(model.forward(X), model(X))
    assert not torch.is_autocast_enabled("cpu")


def test_a_method_that_is_not_compiled_says_so():
    """With what to write instead; torch's own methods, and a model without a region, say nothing."""
    model = compiled()
    with pytest.warns(UserWarning, match=r"Model.encode runs in the region.*narrowcast.compile\(model.encode"):
        model.encode(X)
    model.train().eval().requires_grad_(True).state_dict()
    assert nc.compile(Model(), backend="aot_eager").encode(X).dtype is FP32


def test_a_compiled_model_is_compiled_again_in_its_region():
    """Its policy and dtype stay; the same ones may be named, others are refused with what is there."""
    model = compiled(under=MINE)
    for again in (nc.compile(model, backend="eager"), compiled(model, under=MINE)):
        assert again(X).dtype is FP32 and again.encode.__wrapped__ and again._orig_mod is model._orig_mod
    with pytest.raises(nc.errors.RegionError, match=r"compiled already, with under=mine"):
        compiled(model, under="fp16")
    with pytest.raises(nc.errors.RegionError, match="compiled already"):
        compiled(model, under="safe")
    for other in ({"enabled": False}, {"cache_enabled": False}):  # of the region
        with pytest.raises(nc.errors.RegionError, match="compiled already"):
            nc.compile(model, under=nc.autocast("cpu", policy=MINE, **other))
    function = nc.compile(lambda x: x @ x.T, under=BF16, backend="aot_eager")
    assert nc.compile(function, backend="aot_eager")(X).dtype is BF16
    with pytest.raises(nc.errors.RegionError, match="compiled already"):
        nc.compile(function, under="fp16")


@pytest.mark.parametrize("outer", [torch.compile, nc.compile], ids=["torch", "ours"])
def test_code_that_is_compiled_as_a_whole_calls_compiled_models(outer):
    """Dynamo takes the model's call into its graph, in the model's region; so does compiling the model itself."""
    model = compiled(under=MINE)
    function = nc.compile(lambda x: x @ x.T, under=BF16, backend="aot_eager")

    def calls(x):
        return model(x), model._orig_mod.first(x), function(x)

    found = outer(calls, backend="aot_eager", fullgraph=True)(X)
    assert [y.dtype for y in found] == [FP32, FP32, BF16]
    assert torch.equal(found[0], model(X))
    assert torch.equal(outer(model, backend="aot_eager")(X), model(X))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save", "average"])
def test_compiled_models_are_copied(how):
    """A copy computes as the original did when it was copied, and is compiled at its first call."""
    model = compiled(under=MINE)
    expected = model(X)
    made = COPIES[how](model)
    assert torch.equal(made(X), expected)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(made(X), expected) and not torch.equal(model(X), expected)


def saved(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "save": saved,
    "average": torch.optim.swa_utils.AveragedModel,
}


@pytest.mark.parametrize("how", COPIES)
def test_pinned_models_are_copied(how):
    """With their pins."""
    model = nc.pin(Model(), "bf16")
    made = COPIES[how](model)
    assert made(X).dtype is BF16 and torch.equal(made(X), model(X))
    if how != "average":
        nc.unpin(made)
        assert made(X).dtype is FP32 and model(X).dtype is BF16


def test_state_dicts_go_round():
    """From one compiled model to another, and to the original."""
    model, other = compiled(), compiled()
    with torch.no_grad():
        model._orig_mod.first.weight.mul_(2)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(X), model(X))
    plain = Model()
    plain.load_state_dict(model._orig_mod.state_dict())
    with nc.autocast("cpu", BF16):
        assert torch.equal(plain(X), model(X))


class Recomputed(nn.Module):
    """A checkpointed block that draws a mask."""

    def __init__(self, keeps=True):
        super().__init__()
        torch.manual_seed(0)
        self.block, self.keeps = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)), keeps

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=self.keeps)


@pytest.mark.parametrize("under", [None, "bf16"])
@pytest.mark.parametrize("looks", [nc.watch, nc.capture, nc.record])
def test_a_compiled_recomputation_that_is_observed_draws_the_numbers_of_the_forward(under, looks):
    """Gradients and the random numbers that follow are those of the program that nobody looks at."""

    def gradients(looking):
        torch._dynamo.reset()
        model = Recomputed()
        compiled = nc.compile(model, under=under, backend="aot_eager")
        torch.manual_seed(1)
        with looking():
            compiled(torch.linspace(-1, 1, 32).view(4, 8)).sum().backward()
        return [*(p.grad for p in model.parameters()), torch.randn(2)]

    for a, b in zip(gradients(contextlib.nullcontext), gradients(looks), strict=True):
        assert torch.equal(a, b)


class Pyramid(nn.Module):
    """Yields its levels, each made of the one before."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            yield x


def test_a_forward_that_is_a_generator_runs_in_the_region_of_the_compiled_model():
    """Its steps run after the call; what looks at such a model runs them, with a backward of all that they yield."""
    torch.manual_seed(0)
    model, x = Pyramid(), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = [*model(x)]
    found = [*nc.compile(model, under="bf16", backend="aot_eager")(x)]
    assert not torch.is_autocast_enabled("cpu")
    assert all(a.dtype is b.dtype is torch.bfloat16 and torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    explained = nc.explain(model, (x,), under="bf16", front_end="compile", backend="aot_eager")
    assert sum(tally.calls for tally in explained.ledger.calls.values()) == 3 and not explained.differences
    for backward in (True, lambda levels: sum(level.float().square().mean() for level in levels)):
        assert nc.compare(model, (x,), under="bf16", backward=backward).gradients
