"""The weight cache: never stale, right for every grad mode and format, bounded, and seen."""

import gc
from contextlib import ExitStack, nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.errors import CacheError, RegionError
from narrowcast.frontends.eager import cache_info, invalidate

BF, HF, FP = torch.bfloat16, torch.float16, torch.float32
OURS = ("checked", "checksum")
ALL = (None, *OURS)


@pytest.fixture
def weight():
    """A weight, and what it is multiplied with."""
    torch.manual_seed(0)
    return torch.nn.Parameter(torch.randn(8, 8))


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def product(weight, dtype=BF):
    """What mm gives for the weight as it is now."""
    return torch.mm(X.to(dtype), weight.detach().to(dtype))


@pytest.mark.parametrize("cache", ALL)
def test_a_weight_is_cast_once(cache, weight):
    """So its gradients add up in the low format, as native's do."""

    def gradient(region):
        weight.grad = None
        with region:
            loss = sum(torch.mm(X, weight).float().pow(2).sum() for _ in range(64))
        loss.backward()
        return weight.grad

    native = gradient(torch.autocast("cpu"))
    assert torch.equal(gradient(nc.autocast("cpu", cache_enabled=cache)), native)
    assert not torch.equal(gradient(nc.autocast("cpu", cache_enabled=False)), native)


def by_copy(weight):
    """In place, under no_grad."""
    with torch.no_grad():
        weight.copy_(torch.ones(8, 8))


def by_add(weight):
    """The same, another op."""
    with torch.no_grad():
        weight.add_(1.0)


def by_other_data(weight):
    """The memory is another one; the version counter is not told."""
    weight.data = torch.full((8, 8), 2.0)


def by_foreach(weight):
    """As optimizers do it."""
    with torch.no_grad():
        torch._foreach_mul_([weight], 3.0)


def by_view(weight):
    """A view shares the version counter."""
    with torch.no_grad():
        weight[0].fill_(4.0)


def by_init(weight):
    """torch.nn.init."""
    torch.nn.init.constant_(weight, 0.5)


@pytest.mark.parametrize("change", [by_copy, by_add, by_other_data, by_foreach, by_view, by_init])
@pytest.mark.parametrize("cache", OURS)
def test_checked_caches_see_every_in_place_change(change, cache, weight):
    """Whoever makes it, in the middle of a region."""
    with nc.autocast("cpu", cache_enabled=cache):
        torch.mm(X, weight)
        change(weight)
        assert torch.equal(torch.mm(X, weight), product(weight))


def by_sgd(model):
    """An optimizer's step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(X).float().sum().backward()
    optimizer.step()


def by_fused_adam(model):
    """One op for all weights."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)
    model(X).float().sum().backward()
    optimizer.step()


def by_scaler(model):
    """A gradient scaler's step."""
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.5), torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(X).float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()


def by_state_dict(model):
    """Weights from elsewhere."""
    model.load_state_dict({"weight": torch.ones(8, 8)})


def by_conversion(model):
    """Moved or converted: the parameter keeps its identity, its data is another's."""
    model.weight.data.mul_(2)
    model.float()


def by_vector(model):
    """A flat vector written into the parameters."""
    torch.nn.utils.vector_to_parameters(torch.arange(64.0) / 64, model.parameters())


@pytest.mark.parametrize("change", [by_sgd, by_fused_adam, by_scaler, by_state_dict, by_conversion, by_vector])
def test_the_default_cache_forgets_when_standard_mutators_run(change):
    """In one region around everything; torch.autocast gives the old result."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8, bias=False)
    with nc.autocast("cpu"):
        before = model(X)
        change(model)
        with torch.autocast("cpu", enabled=False):
            expected = torch.nn.functional.linear(X.bfloat16(), model.weight.detach().bfloat16())
        assert not torch.equal(before, expected)
        assert torch.equal(model(X), expected)


def test_averaged_models_are_not_stale():
    """EMA and SWA write into a model that may have been used in the region."""
    model = torch.nn.Linear(8, 8)
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    averaged.update_parameters(model)
    with nc.autocast("cpu"):
        averaged(X)
        with torch.no_grad():
            model.weight.add_(1.0)
        averaged.update_parameters(model)
        found = averaged(X)
    with nc.autocast("cpu"):
        assert torch.equal(averaged(X), found)


@pytest.mark.parametrize("cache", ALL)
def test_nested_regions_of_different_formats_share_nothing(cache, weight):
    """fp16 inside bf16 inside fp16, over one weight."""
    with nc.autocast("cpu", dtype=HF, cache_enabled=cache):
        for _ in range(2):
            assert torch.equal(torch.mm(X, weight), product(weight, HF))
            with nc.autocast("cpu", dtype=BF, cache_enabled=cache):
                assert torch.equal(torch.mm(X, weight), product(weight, BF))
                with nc.autocast("cpu", enabled=False), nc.autocast("cpu", dtype=HF, cache_enabled=cache):
                    assert torch.equal(torch.mm(X, weight), product(weight, HF))
                assert torch.equal(torch.mm(X, weight), product(weight, BF))


def test_a_region_that_is_off_makes_no_cast_anew(weight):
    """Of ours or torch's, whatever its format: it has cast nothing. One in another format that is on has."""
    for between, again in (
        ([nc.autocast("cpu", BF, enabled=False)], False), ([torch.autocast("cpu", BF, enabled=False)], False),
        ([torch.autocast("cpu", BF), torch.autocast("cpu", enabled=False)], True), ([nc.autocast("cpu", BF)], True),
    ):  # fmt: skip
        with nc.autocast("cpu", HF), ExitStack() as opened:
            first = torch.mm(X, weight)
            for region in (*between, nc.autocast("cpu", HF)):
                opened.enter_context(region)
            last = torch.mm(X, weight)
        casts = [y.grad_fn.next_functions[1][0] for y in (first, last)]
        assert (casts[0] is not casts[1]) is again


@pytest.mark.parametrize("cache", ALL)
@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_what_was_cast_without_gradients_is_not_taken_where_they_flow(cache, first, weight):
    """no_grad or inference mode, then a training step, in one region; and back."""
    with nc.autocast("cpu", cache_enabled=cache):
        with first():
            assert torch.equal(torch.mm(X, weight), product(weight))
        torch.mm(X, weight).float().sum().backward()
        assert weight.grad is not None and weight.grad.abs().sum() > 0
        with first():
            assert torch.equal(torch.mm(X, weight), product(weight))


@pytest.mark.parametrize("cache", OURS)
def test_the_cache_says_what_it_holds(cache, weight):
    """Entries, bytes, hits, misses; nothing after the region."""
    other = torch.nn.Parameter(torch.randn(8, 4))
    assert cache_info() == type(cache_info())()
    with nc.autocast("cpu", cache_enabled=cache):
        for _ in range(3):
            with torch.no_grad():
                torch.mm(torch.mm(X, weight), other)
        info = cache_info()
        assert (info.grade, info.entries, info.bytes) == (cache, 2, 2 * (64 + 32))
        assert (info.hits, info.misses, info.limit_bytes) == (4, 2, None)
        del other
        gc.collect()
        assert cache_info().entries == 1 and cache_info().bytes == 128
    assert cache_info().grade == ""
    with nc.autocast("cpu"):
        assert cache_info().grade == "native"
    with nc.autocast("cpu", cache_enabled=False):
        assert cache_info().grade == "off"


def test_a_budget_is_kept(weight):
    """The casts used longest ago go; what is larger than the budget is not kept; results are the same."""
    weights = [torch.nn.Parameter(torch.randn(8, 8)) for _ in range(4)]
    with nc.autocast("cpu", cache_enabled="checked", cache_limit_bytes=2 * 128):
        for _ in range(2):
            for w in weights:
                assert torch.equal(torch.mm(X, w), product(w))
                assert cache_info().bytes <= 256
        torch.mm(X, weights[2])
        torch.mm(X, weights[0])
        assert cache_info().hits == 1 and cache_info().limit_bytes == 256
    with nc.autocast("cpu", cache_enabled="checked", cache_limit_bytes=100):
        torch.mm(X, weight)
        assert cache_info().entries == 0


@pytest.mark.parametrize("cache", ALL)
def test_writes_through_data_are_told_by_invalidate(cache):
    """No counter sees them. Of a module, a weight, a list, or of everything."""
    model = torch.nn.Linear(8, 8, bias=False)
    for tell in (
        lambda: invalidate(model), lambda: invalidate(model.weight), lambda: invalidate(),
        lambda: invalidate(model.weight.data), lambda: invalidate(model.state_dict()),
        lambda: invalidate(dict(model.named_parameters())), lambda: invalidate([model]),
    ):  # fmt: skip
        with nc.autocast("cpu", cache_enabled=cache):
            model(X)
            model.weight.data.mul_(2)
            tell()
            expected = torch.nn.functional.linear(X.bfloat16(), model.weight.detach().bfloat16())
            assert torch.equal(model(X), expected)
    invalidate(model)  # outside of regions there is nothing to forget
    with pytest.raises(CacheError, match="is not a weight"):
        invalidate([3.5])


def test_checksums_find_writes_through_data(weight):
    """With the lines of both uses. Two elements that change places are found, too."""
    with nc.autocast("cpu", cache_enabled="checksum"):
        torch.mm(X, weight)
        torch.mm(X, weight)
        weight.data[0, [0, 1]] = weight.data[0, [1, 0]]
        with pytest.raises(CacheError, match=r"weight\.data") as caught:
            torch.mm(X, weight)
        assert str(caught.value).count("test_weight_cache.py:") == 2
        invalidate(weight)
        assert torch.equal(torch.mm(X, weight), product(weight))


def digits(seed=0):
    """A small classifier, its data, and its optimizer."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4))
    x, y = torch.randn(256, 16), torch.randint(0, 4, (256,))
    return model, x, y, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(steps, whole=None, forward=None):
    """The loop, in a region around all of it, or around forward and loss alone; losses and weights."""
    model, x, y, optimizer = digits()
    losses = []
    with whole or nullcontext():
        for step in range(steps):
            batch = slice(step * 16 % 256, step * 16 % 256 + 16)
            with forward or nullcontext():
                loss = torch.nn.functional.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return torch.stack(losses), [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("cache", ALL)
def test_many_steps_in_one_region_are_those_of_many_small_ones(cache):
    """Losses and weights, bit for bit; native's loop freezes."""
    losses, weights = train(250, whole=nc.autocast("cpu", cache_enabled=cache))
    expected, expected_weights = train(250, forward=torch.autocast("cpu"))
    assert torch.equal(losses, expected)
    assert all(torch.equal(a, b) for a, b in zip(weights, expected_weights, strict=True))
    frozen, _ = train(50, whole=torch.autocast("cpu"))
    assert not torch.equal(frozen, expected[:50])


def test_memory_does_not_grow_in_a_long_region():
    """Weights that come and go are forgotten, though the graph of a cast holds its weight; those in use stay."""
    stays = torch.nn.Parameter(torch.randn(8, 8))
    with nc.autocast("cpu", cache_enabled="checked"):
        for _ in range(500):
            made = torch.randn(8, 8, requires_grad=True)
            torch.mm(torch.mm(X, made), stays).float().sum().backward()
        assert cache_info().entries <= 66
        assert cache_info().hits == 499
        for _ in range(100):
            with torch.no_grad():
                torch.mm(X, torch.randn(8, 8, requires_grad=True))
        assert cache_info().entries <= 66


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("cache", [None, "checked"])
def test_checkpointing_inside_a_region(cache, reentrant, weight):
    """The recomputation has a cache of its own, and one: a weight used twice in it has native's gradient."""

    def step(x):
        return torch.mm(torch.mm(x, weight).float(), weight)

    def gradient(region):
        weight.grad = None
        with region:
            x = X.clone().requires_grad_()
            checkpoint(step, x, use_reentrant=reentrant).float().pow(2).sum().backward()
        return weight.grad

    expected = gradient(torch.autocast("cpu"))
    policy = nc.Policy.native().with_rules(nc.Rule("aten.gelu", "full"))
    assert torch.equal(gradient(nc.autocast("cpu", cache_enabled=cache, policy=policy)), expected)
    assert torch.equal(gradient(nc.autocast("cpu", cache_enabled=cache)), expected)


CHANGED = nc.Policy.native().with_rules(nc.Rule("aten.linear", "lower", module="nowhere"))  # linear passes our kernel
SETTINGS = [{}, {"cache_enabled": "checked"}, {"cache_enabled": "checksum"}, {"policy": CHANGED}]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_fused_optimizers_are_seen(kind, settings):
    """They count no version on the cpu."""

    def losses(whole, forward):
        torch.manual_seed(0)
        model, x, y = torch.nn.Linear(8, 2), torch.randn(16, 8), torch.randn(16, 2)
        optimizer, found = getattr(torch.optim, kind)(model.parameters(), lr=0.1, fused=True), []
        with whole:
            for _ in range(4):
                with forward:
                    loss = (model(x).float() - y).pow(2).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.append(loss.detach())
        return torch.stack(found)

    found = losses(nc.autocast("cpu", **settings), nullcontext())
    assert torch.equal(found, losses(nullcontext(), torch.autocast("cpu")))


@pytest.mark.parametrize("cache", [None, "checked"])
def test_closures_of_one_step_see_the_weights_as_they_are(cache, weight):
    """LBFGS changes them between its calls."""
    optimizer, equal = torch.optim.LBFGS([weight], max_iter=4), []

    def closure():
        optimizer.zero_grad()
        out = torch.mm(X, weight)
        equal.append(torch.equal(out, product(weight)))
        loss = out.float().pow(2).mean()
        loss.backward()
        return loss

    with nc.autocast("cpu", cache_enabled=cache):
        optimizer.step(closure)
    assert len(equal) > 1 and all(equal)


@pytest.mark.parametrize("cache", OURS)
def test_memory_that_is_used_again_is_not_taken_for_the_old_one(cache, weight):
    """Two writes to .data may end where the first began; half() and float() give the parameter other memory twice."""
    module = torch.nn.Module()
    module.weight = weight
    with nc.autocast("cpu", cache_enabled=cache):
        for _ in range(20):
            torch.mm(X, weight)
            for _ in range(2):
                weight.data = torch.randn(8, 8)
            assert torch.equal(torch.mm(X, weight), product(weight))
            with torch.no_grad():
                weight.mul_(1e-7)
            torch.mm(X, weight)
            module.half().float()
            assert torch.equal(torch.mm(X, weight), product(weight))


@pytest.mark.parametrize("inner", [lambda: nc.autocast("cpu"), lambda: torch.autocast("cpu")], ids=["ours", "native"])
def test_regions_inside_a_checked_one_are_checked(inner, weight):
    """torch's own, too: its kernels are not asked there."""
    with nc.autocast("cpu", cache_enabled="checked"):
        for _ in range(3):
            with inner():
                assert torch.equal(torch.mm(X, weight), product(weight))
            with torch.no_grad():
                weight.add_(1)


def test_function_transforms_and_swaps_work_in_checked_regions():
    """What has no memory of its own is not cached; what is to be swapped is let go."""
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    with nc.autocast("cpu", cache_enabled="checked"):
        found = torch.func.grad(lambda w: torch.mm(x, w).float().sum())(w)
        a, b = torch.nn.Parameter(torch.randn(8, 8)), torch.nn.Parameter(torch.randn(8, 8))
        with torch.no_grad():
            torch.mm(x, a), torch.mm(x, b)
            torch.utils.swap_tensors(a, b)
            assert torch.equal(torch.mm(x, a), torch.mm(x.bfloat16(), a.bfloat16()))
    with torch.autocast("cpu"):
        assert torch.equal(torch.func.grad(lambda w: torch.mm(x, w).float().sum())(w), found)


class Named(torch.nn.Parameter):
    """A subclass, as libraries have them."""


def test_parameters_of_subclasses_are_checked_too():
    """By their memory."""
    weight = Named(torch.randn(8, 8))
    with nc.autocast("cpu", cache_enabled="checked"):
        torch.mm(X, weight)
        weight.data = torch.ones(8, 8)
        assert torch.equal(torch.mm(X, weight), product(weight))


def test_checksums_inside_a_checked_region_raise_nothing_that_is_not_so(weight):
    """A cast that was made without one is made again; elements far apart that change places are found."""
    large = torch.nn.Parameter(torch.randn(128, 128))
    x = torch.randn(2, 128)
    with nc.autocast("cpu", cache_enabled="checked"):
        torch.mm(X, weight)
        with nc.autocast("cpu", cache_enabled="checksum"):
            assert torch.equal(torch.mm(X, weight), product(weight))
            torch.mm(x, large)
            flat = large.data.view(-1)
            flat[[0, 8191]] = flat[[8191, 0]]
            with pytest.raises(CacheError):
                torch.mm(x, large)


def test_a_region_inside_keeps_to_the_budget_of_the_one_around():
    """It is one cache."""
    weights = [torch.nn.Parameter(torch.randn(8, 8)) for _ in range(4)]
    around = nc.autocast("cpu", cache_enabled="checked", cache_limit_bytes=256)
    with around, nc.autocast("cpu", cache_enabled="checked"):
        for weight in weights:
            torch.mm(X, weight)
        assert cache_info().bytes <= 256


@pytest.mark.parametrize("cache", OURS)
def test_traces_compiled_and_exported_code_keep_no_casts_of_ours(cache):
    """What they hold would be of another graph."""
    model = torch.nn.Linear(8, 8)
    with nc.autocast("cpu", cache_enabled=cache):
        expected = model(X)
        held = cache_info().entries
        traced = torch.jit.trace(model, X, check_trace=False)
        exported = torch.export.export(model, (X,))
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(X), expected)
    assert held == 2
    assert torch.equal(traced(X), expected) and exported.module()(X).shape == expected.shape
    own = nc.compile(model, under=nc.autocast("cpu", BF, cache_enabled=cache), backend="aot_eager")
    assert torch.equal(own(X), expected)
    assert torch.equal(nc.script(model, under=nc.autocast("cpu", BF, cache_enabled=cache))(X), expected)
    assert torch.equal(nc.trace(model, X, under=nc.autocast("cpu", BF, cache_enabled=cache))(X), expected)


def in_a_script(x):
    """Regions in scripts may name a grade; a script's cache sees what it writes in any case."""
    with nc.autocast("cpu", dtype=torch.float16, cache_enabled="checked", cache_limit_bytes=100):
        return torch.mm(x, x.t())


def test_scripts_take_regions_with_grades():
    """As with statements and as decorators."""
    assert nc.script(in_a_script)(X).dtype is HF
    assert torch.compile(in_a_script, backend="aot_eager", fullgraph=True)(X).dtype is HF


def test_a_checked_region_computes_what_native_does():
    """Over a model with convolutions, norms and attention, gradients included."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Conv1d(8, 8, 3, padding=1),
        torch.nn.BatchNorm1d(8),
        torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True),
    )
    x = torch.randn(2, 8, 16)

    def run(region):
        model.zero_grad()
        with region:
            out = model(x)
        out.float().pow(2).sum().backward()
        return [out, *(p.grad for p in model.parameters())]

    found = run(nc.autocast("cpu", cache_enabled="checked"))
    expected = run(torch.autocast("cpu"))
    assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_regions_that_cannot_be_are_errors():
    """An unknown grade, and a budget for a cache that has none."""
    with pytest.raises(RegionError, match="no such cache"):
        nc.autocast("cpu", cache_enabled="sometimes")
    with pytest.raises(RegionError, match="cannot be limited"):
        nc.autocast("cpu", cache_limit_bytes=100)
    with pytest.raises(RegionError, match="negative"):
        nc.autocast("cpu", cache_enabled="checked", cache_limit_bytes=-1)
