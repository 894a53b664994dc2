"""nc.Scaler beside torch.amp.GradScaler: wherever torch's works, weights, scales and losses are equal bit for bit."""

import pickle
import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import narrowcast as nc

STEPS, PLANTED = 56, 50
SCALERS = (torch.amp.GradScaler, nc.Scaler)


def model_of(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def batches():
    """One input for each step; that of step 50 overflows in the backward."""
    generator = torch.Generator().manual_seed(1)
    for number in range(STEPS):
        x = torch.randn(4, 6, generator=generator)
        yield x * float("inf") if number == PLANTED else x


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd one by one": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
}


def plain(scaler, optimizer="adamw", dtype=None):
    model = model_of()
    steps = OPTIMIZERS[optimizer](model.parameters())
    seen = []
    for x in batches():
        steps.zero_grad()
        with torch.autocast("cpu", dtype or torch.float16, enabled=dtype is not None):
            y = model(x)
        loss = y.float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(steps)
        scaler.update()
        seen += [loss.detach(), torch.tensor(scaler.get_scale())]
    return [*seen, *model.parameters()]


def accumulating(scaler):
    model = model_of()
    steps = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number, x in enumerate(batches()):
        scaler.scale(model(x).square().mean() / 2).backward()
        if number % 2:
            scaler.unscale_(steps)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(steps)
            scaler.update()
            steps.zero_grad(set_to_none=False)
    return [*model.parameters(), torch.tensor(scaler.get_scale())]


def clipping(scaler, fused=False):
    model = model_of()
    steps = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    norms = []
    for x in batches():
        steps.zero_grad()
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(steps)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        scaler.step(steps)
        scaler.update()
    return [*norms, *model.parameters(), torch.tensor(scaler.get_scale())]


def several(scaler):
    """Two models with an optimizer each, one fused; the overflow reaches one of them."""
    models = [model_of(0), model_of(1)]
    optimizers = [
        torch.optim.AdamW(models[0].parameters(), lr=0.01, fused=True),
        torch.optim.SGD(models[1].parameters(), lr=0.1),
    ]
    for x in batches():
        for steps in optimizers:
            steps.zero_grad()
        first, second = models[0](x).square().mean(), models[1](x.nan_to_num(0, 0, 0)).square().mean()
        scaler.scale(first).backward()
        scaler.scale(second).backward()
        scaler.unscale_(optimizers[1])
        for steps in optimizers:
            scaler.step(steps)
        scaler.update()
    return [*models[0].parameters(), *models[1].parameters(), torch.tensor(scaler.get_scale())]


def sparse(scaler):
    torch.manual_seed(0)
    table = torch.nn.Embedding(16, 4, sparse=True)
    steps = torch.optim.SGD(table.parameters(), lr=0.1)
    for number in range(STEPS):
        steps.zero_grad()
        loss = table(torch.tensor([1, 1, number % 16])).square().sum()
        scaler.scale(loss * float("inf") if number == PLANTED else loss).backward()
        scaler.step(steps)
        scaler.update()
    return [table.weight, torch.tensor(scaler.get_scale())]


def setting(scaler):
    """The scale set by hand, factors changed, state loaded in the middle."""
    model = model_of()
    steps = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, x in enumerate(batches()):
        steps.zero_grad()
        scaler.scale((model(x).square().mean(),))[0].backward()
        scaler.step(steps)
        scaler.update({10: 256.0, 20: torch.tensor(64.0)}.get(number))
        if number == 30:
            scaler.set_growth_factor(4.0)
            scaler.set_backoff_factor(0.25)
            scaler.set_growth_interval(7)
        if number == 40:
            scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3).state_dict())
    factors = (
        scaler.get_scale(),
        scaler.get_growth_factor(),
        scaler.get_backoff_factor(),
        scaler.get_growth_interval(),
    )
    return [*model.parameters(), torch.tensor(factors)]


LOOPS = {
    **{name: (lambda scaler, name=name: plain(scaler, name)) for name in OPTIMIZERS},
    "fp16 region": lambda scaler: plain(scaler, "adamw", torch.float16),
    "accumulating": accumulating,
    "clipping": clipping,
    "clipping, fused": lambda scaler: clipping(scaler, fused=True),
    "several optimizers": several,
    "sparse": sparse,
    "set by hand": setting,
}


def same(ours, theirs):
    """Bit for bit; NaN of the step that is skipped included."""
    pairs = zip(ours, theirs, strict=True)
    return all(a.dtype is b.dtype and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in pairs)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_gives_the_same_bits_as_with_torchs_scaler(loop):
    """The overflow at step 50 skips it in both, and the scale grows every 9 steps."""
    theirs, ours = (LOOPS[loop](kind("cpu", growth_interval=9)) for kind in SCALERS)
    assert same(ours, theirs)
    assert all(bool(torch.isfinite(t).all()) for t in ours[-3:])


def test_another_scale_gives_other_bits():
    """The comparison above can fail: with clipping in between, a scale that rounds otherwise shows."""
    theirs, ours = clipping(torch.amp.GradScaler("cpu", init_scale=1e-30)), clipping(nc.Scaler("cpu"))
    assert not same(ours, theirs)


class Reads(TorchDispatchMode):
    """How often a tensor is read by the host."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("loop", ["adamw", "adamw fused", "sgd fused", "several optimizers", "clipping, fused"])
def test_the_host_reads_no_more_tensors_than_with_torchs_scaler(loop):
    """Overflow, warning and history included; a fused optimizer decides without the host."""
    counts = []
    for kind in SCALERS:
        with Reads() as reads:
            scaler = kind("cpu", growth_interval=9)
            scaler.get_scale = lambda: 0.0  # what the loops themselves ask
            LOOPS[loop](scaler)
        counts.append(reads.count)
    assert counts[1] <= counts[0]
    assert counts[0] == 0 or "fused" not in loop or loop == "several optimizers"


def test_a_read_is_counted():
    """The mode above sees item()."""
    with Reads() as reads:
        torch.ones(()).item()
    assert reads.count == 1


def test_it_is_a_grad_scaler_to_those_who_ask():
    """Frameworks do; and state goes both ways."""
    ours = nc.Scaler("cpu", init_scale=1024.0, growth_interval=5)
    assert isinstance(ours, torch.amp.GradScaler)
    plain(ours)
    theirs = torch.amp.GradScaler("cpu")
    theirs.load_state_dict(ours.state_dict())
    again = nc.Scaler("cpu")
    again.load_state_dict(theirs.state_dict())
    copied = pickle.loads(pickle.dumps(ours))
    keys = theirs.state_dict().keys()
    weight = torch.nn.Parameter(torch.ones(1))
    steps = torch.optim.SGD([weight], lr=0.1)
    again.scale(weight.sum()).backward()
    assert again.step(steps, None)  # as Accelerate calls it
    again.load_state_dict(theirs.state_dict())
    again.update(theirs.get_scale())
    for other in (again, copied):
        assert {key: other.state_dict()[key] for key in keys} == theirs.state_dict()
    assert len(copied.history) == len(ours.history) == STEPS
    first, *others = [plain(scaler) for scaler in (theirs, again, copied)]
    assert all(same(other, first) for other in others)


def test_a_disabled_scaler_does_nothing():
    """As torch's: losses as they are, empty state, and the optimizer steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = nc.Scaler("cpu", enabled=False)
        theirs = torch.amp.GradScaler("cpu", enabled=False)
        assert same(plain(ours), plain(theirs))
    assert ours.state_dict() == {} and ours.get_scale() == 1.0 and not ours.is_enabled()
