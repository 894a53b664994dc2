"""What a comparison, a repair or an explanation registers with torch goes when it ends: it would slow later regions."""

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.analysis.explain import cost
from narrowcast.frontends.eager import kernels, registered
from narrowcast.testing import assert_close_to

BF16 = torch.bfloat16
ACOS_FULL = nc.Policy("acos in fp32", ((nc.Rule("aten.acos", "full"),),))
ACOS_LOW = nc.Policy("acos in bf16", ((nc.Rule("aten.acos", "lower"),),))


@pytest.fixture(autouse=True)
def few_removals(monkeypatch):
    """What other tests have removed in this minute does not count, and what they could not remove goes."""
    kept = registered.Registration._removed
    monkeypatch.setattr(registered.Registration, "_removed", deque(maxlen=kept.maxlen))
    registered.install_visiting((), "cpu")
    registered.remove_visiting("cpu")
    yield
    kept.extend(registered.Registration._removed)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 4)), torch.randn(3, 8)


VERBS = {
    "compare": lambda m, x: nc.compare(m, (x,), under="bf16"),
    "compare under rules": lambda m, x: nc.compare(m, (x,), under="safe"),
    "explain": lambda m, x: nc.explain(m, (x,), under="bf16", run=True),
    "repair": lambda m, x: nc.repair(m, (x,), under="fp16", budget=1e-4),
    "capture": lambda m, x: nc.capture(m, (x,)),
    "assert_close_to": lambda m, x: assert_close_to(m, (x,), budget=1.0),
}


@pytest.mark.parametrize("verb", VERBS)
def test_regions_of_torch_call_no_kernel_of_ours_afterwards(verb, monkeypatch):
    """Nothing is registered that was not before, and torch.autocast's own kernels run again, at their own speed."""
    net, x = model()
    there = {device: set(ops) for device, ops in registered._staying.items()}
    VERBS[verb](net, x)
    assert {device: set(ops) for device, ops in registered._staying.items() if ops} == {
        device: ops for device, ops in there.items() if ops
    }
    if "aten.linear.default" not in there.get("cpu", ()):
        called = []
        monkeypatch.setattr(kernels.Kernel, "__call__", lambda *args, **kwargs: called.append(args))
        with torch.autocast("cpu", BF16):
            assert nn.functional.linear(x, net[0].weight).dtype == BF16
        assert not called


def test_time_is_that_of_torchs_own_kernels(monkeypatch):
    """While `explain` measures the time of a native region no kernel of ours is asked."""
    net, x = model()
    left = set(registered._staying.get("cpu", ()))  # by earlier tests of this process
    called, runs = [], []
    real, elapsed = kernels.Kernel.__call__, cost.elapsed_ns

    def call(kernel, *args, **kwargs):
        called.extend([kernel] if kernel.facts.id not in left else [])
        return real(kernel, *args, **kwargs)

    monkeypatch.setattr(kernels.Kernel, "__call__", call)

    def timed(run):
        before = len(called)
        found = elapsed(run)
        runs.append(len(called) - before)
        return found

    monkeypatch.setattr(cost, "elapsed_ns", timed)
    nc.explain(net, (x,), under="bf16", run=True)
    assert runs and not any(runs)
    assert called or "aten.linear.default" in left


def test_region_that_a_trial_opened_first_decides_afterwards():
    """A policy whose kernels went with the trial registers them again, for good."""

    class Opens(nn.Module):
        def forward(self, x):
            with nc.autocast("cpu", BF16, policy=ACOS_LOW):
                return torch.acos(x)

    x = torch.full((3,), 0.5)
    for _ in range(2):
        nc.capture(Opens(), (x,))
        assert Opens()(x).dtype == BF16


def test_other_threads_keep_what_they_registered_meanwhile():
    """A region that a thread opens while another compares, for the same op, outlives the comparison."""
    opened, compared, found = threading.Event(), threading.Event(), []
    low = torch.full((3,), 0.5, dtype=BF16)

    def work():
        with nc.autocast("cpu", BF16, policy=ACOS_FULL):
            found.append(torch.acos(low).dtype)
            opened.set()
            compared.wait(60)
            found.append(torch.acos(low).dtype)

    class Starts(nn.Module):
        def forward(self, x):
            if not thread.ident:
                with nc.autocast("cpu", BF16, policy=ACOS_FULL):
                    torch.acos(low)  # registered by the trial first
                thread.start()
                assert opened.wait(60)
            return x + 1

    thread = threading.Thread(target=work, daemon=True)
    nc.capture(Starts(), (torch.ones(3),))
    compared.set()
    thread.join(60)
    assert found == [torch.float32, torch.float32]


def test_a_model_with_threads_of_its_own_is_compared_again_and_again():
    """Its threads open the region that they carry; kernels come and go beside them."""
    net, x, seen = nn.Linear(16, 16), torch.randn(8, 16), []

    def work(rows):
        for _ in range(10):
            rows = torch.tanh(net(rows))
            seen.append(rows.dtype)
        return rows.float()

    def forward(x):
        with ThreadPoolExecutor(4) as pool:
            return torch.cat(list(pool.map(nc.carry(work), x.chunk(4))))

    policy = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full"))
    for under in (policy, "bf16", policy):
        nc.compare(forward, (x,), under=under, isolate=0)
    seen.clear()
    with nc.autocast("cpu", BF16, policy=policy):
        forward(x)
    assert set(seen) == {torch.float32}


def test_trials_of_two_threads_overlap_around_a_region_that_stays_open():
    """Neither takes the kernels of the third thread's region along."""
    begun, ends, low = threading.Event(), threading.Event(), torch.full((3,), 0.5, dtype=BF16)

    def first(x):
        with nc.autocast("cpu", BF16, policy=ACOS_FULL):
            torch.acos(low)
        begun.set()
        ends.wait(60)
        return x + 1

    thread = threading.Thread(target=lambda: nc.capture(first, (torch.ones(3),)), daemon=True)
    thread.start()
    assert begun.wait(60)
    with nc.autocast("cpu", BF16, policy=ACOS_FULL):
        work = lambda: nc.compare(lambda x: x * 2, (torch.ones(3),), under=ACOS_FULL)
        other = threading.Thread(target=work, daemon=True)
        other.start()
        other.join(60)
        assert torch.acos(low).dtype == torch.float32
        ends.set()
        thread.join(60)
        assert torch.acos(low).dtype == torch.float32


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_forward_is_recomputed_after_its_trial(reentrant):
    """In the region's formats, though that has ended."""
    net, kept, seen = nn.Linear(8, 8), [], []

    def block(x):
        y = net(x)
        seen.append(y.dtype)
        return torch.tanh(y)

    def forward(x):
        y = checkpoint(block, x, use_reentrant=reentrant)
        kept.append(y.float().square().sum())
        return y

    policy = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full"))
    nc.capture(forward, (torch.randn(4, 8, requires_grad=True),), under=policy)
    seen.clear()
    kept[0].backward()
    assert seen == [torch.float32]
