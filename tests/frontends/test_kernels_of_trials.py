"""What a comparison, a repair or an explanation registers with torch goes when it ends: it would slow later regions."""

import threading

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast.frontends.eager import kernels, registered
from narrowcast.testing import assert_close_to

BF16 = torch.bfloat16
ACOS_FULL = nc.Policy("acos in fp32", ((nc.Rule("aten.acos", "full"),),))
ACOS_LOW = nc.Policy("acos in bf16", ((nc.Rule("aten.acos", "lower"),),))


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
    if "aten.linear.default" in registered._staying.get("cpu", ()):
        pytest.skip("an earlier test of this process left a kernel for linear")
    called, runs = [], []
    from narrowcast.analysis.explain import cost

    real, elapsed = kernels.Kernel.__call__, cost.elapsed_ns
    monkeypatch.setattr(kernels.Kernel, "__call__", lambda *a, **k: (called.append(a), real(*a, **k))[1])

    def timed(run):
        before = len(called)
        found = elapsed(run)
        runs.append(len(called) - before)
        return found

    monkeypatch.setattr(cost, "elapsed_ns", timed)
    nc.explain(net, (x,), under="bf16", run=True)
    assert runs and not any(runs) and called


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
