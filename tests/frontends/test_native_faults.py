"""Faults of torch.autocast about state and cache, in pairs: torch 2.13 shows each, Narrowcast does not.

Where torch is fixed one day, its half of a test fails: then the documents change. The other faults that users report,
which are about single ops, are in test_safe.py; those of TorchScript in test_script_limits.py.
"""

import asyncio
import subprocess
import sys
import threading

import pytest
import torch

import narrowcast as nc
from narrowcast.errors import CacheError
from narrowcast.frontends.eager import invalidate

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("fresh_dynamo")]
BF, HF, FP = torch.bfloat16, torch.float16, torch.float32
BOTH = pytest.mark.parametrize("make", [torch.autocast, nc.autocast], ids=["native", "ours"])


@pytest.fixture
def weight():
    """An fp32 weight."""
    torch.manual_seed(0)
    return torch.nn.Parameter(torch.randn(8, 8))


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def nesting():
    """torch's count of open regions."""
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth - 1


@pytest.fixture(autouse=True)
def restored():
    """Faults of torch's leave autocast on, and its nesting count wrong: that is undone."""
    yield
    while nesting() > 0:
        torch.autocast_decrement_nesting()
    torch.set_autocast_enabled("cpu", False)
    torch.clear_autocast_cache()


@BOTH
def test_an_optimizer_step_in_a_region_is_not_seen(make, weight):
    """1. The weight's old cast stays: training freezes."""
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with make("cpu"):
        before = torch.mm(X, weight)
        before.float().sum().backward()
        optimizer.step()
        after = torch.mm(X, weight)
    assert torch.equal(before, after) == (make is torch.autocast)


@pytest.mark.parametrize("cache", [None, "checked"])
def test_an_in_place_update_in_a_region_is_not_seen(cache, weight):
    """2. Whoever writes. Ours sees it if its cache is checked; by default it has torch's speed, and is as blind."""
    with nc.autocast("cpu", cache_enabled=cache):
        before = torch.mm(X, weight)
        with torch.no_grad():
            weight.mul_(2)
        assert torch.equal(before, torch.mm(X, weight)) == (cache is None)


@BOTH
def test_nested_regions_of_two_low_formats_over_one_weight(make, weight):
    """3. The inner one gets the cast of the outer one."""

    def nested():
        with make("cpu", dtype=BF):
            torch.mm(X, weight)
            with make("cpu", dtype=HF):
                return torch.mm(X, weight)

    if make is torch.autocast:
        with pytest.raises(RuntimeError, match="same dtype"):
            nested()
    else:
        assert nested().dtype is HF


def test_writes_through_data_are_never_seen(weight):
    """4. No version counter tells. Ours finds them with checksums, and forgets when told."""
    with torch.autocast("cpu"):
        before = torch.mm(X, weight)
        weight.data.mul_(2)
        assert torch.equal(before, torch.mm(X, weight))
    with nc.autocast("cpu", cache_enabled="checksum"):
        torch.mm(X, weight)
        weight.data.mul_(2)
        with pytest.raises(CacheError):
            torch.mm(X, weight)
        invalidate(weight)
        assert torch.equal(torch.mm(X, weight), torch.mm(X.bfloat16(), weight.bfloat16()))


def test_an_fp32_region_is_ignored():
    """5. On the cpu, with a warning. Ours casts up, under `safe` or any policy of one's own."""
    x = X.bfloat16()
    with pytest.warns(UserWarning), torch.autocast("cpu", dtype=FP):
        assert torch.mm(x, x.t()).dtype is BF
    with nc.autocast("cpu", dtype=FP, policy="safe"):
        assert torch.mm(x, x.t()).dtype is FP


@BOTH
def test_a_decorated_generator_runs_outside(make):
    """6. Silently."""

    @make("cpu")
    def steps():
        yield torch.mm(X, X.t()).dtype

    assert next(steps()) is (FP if make is torch.autocast else BF)


@BOTH
def test_a_decorated_coroutine_runs_outside(make):
    """7. The same."""

    @make("cpu")
    async def step():
        return torch.mm(X, X.t()).dtype

    assert asyncio.run(step()) is (FP if make is torch.autocast else BF)


@BOTH
def test_a_region_entered_again_leaves_autocast_on(make):
    """8. torch keeps what to restore in the instance."""
    region = make("cpu")
    with region, region:
        pass
    assert torch.is_autocast_enabled("cpu") == (make is torch.autocast)


def test_threads_do_not_inherit_a_region():
    """9. Nor do executors; `nc.carry` takes it along."""
    found = []

    def work():
        found.append(torch.mm(X, X.t()).dtype)

    with torch.autocast("cpu"):
        for target in (work, nc.carry(work)):
            thread = threading.Thread(target=target, daemon=True)
            thread.start()
            thread.join(60)
    assert found == [FP, BF]


@BOTH
def test_an_exception_in_a_compiled_region_leaks(make):
    """10. torch's nesting count (pytorch/pytorch#195488)."""

    def step(x, index):
        with make("cpu"):
            return x.index_select(0, index)

    compiler = torch.compile if make is torch.autocast else nc.compile
    with pytest.raises(IndexError):
        compiler(step, backend="eager", fullgraph=True)(X, torch.tensor([99]))
    leaks = make is torch.autocast
    assert (nesting() > 0) == leaks and (leaks or not torch.is_autocast_enabled("cpu"))
    torch.set_autocast_enabled("cpu", False)  # until torch 2.12 this leaks, too


def test_the_backward_of_compiled_code_is_autocast():
    """11. As the forward was, where eager code's is not (#153044, #179804)."""

    class Gate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return torch.mm(grad, x)

    def gradient(call):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(2), requires_grad=True)
        with torch.autocast("cpu"):
            out = call(x)
        out.sum().backward()
        return x.grad

    eager = gradient(Gate.apply)
    native = gradient(torch.compile(lambda x: Gate.apply(x), backend="aot_eager"))
    ours = gradient(nc.compile(lambda x: Gate.apply(x), backend="aot_eager"))
    assert torch.equal(eager, ours) and not torch.equal(eager, native)


def in_plain_torch(lines):
    """What goes wrong in a process without Narrowcast, whose kernels torch could trace."""
    code = f"import torch\nmodel, x = torch.nn.Linear(8, 8), torch.ones(4, 8)\n{lines}"
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True).stderr


def test_tracing_once_a_cast_is_cached():
    """12. The cached cast is a constant that requires grad."""
    lines = "with torch.autocast('cpu'):\n    model(x)\n    torch.jit.trace(model, x, check_trace=False)"
    assert "requires grad as a constant" in in_plain_torch(lines)
    model = torch.nn.Linear(8, 8)
    with nc.autocast("cpu"):
        expected = model(X)
        assert torch.equal(nc.trace(model, X)(X), expected)


def test_tracing_with_a_check():
    """13. The check traces once more, and meets the cache that the first trace filled."""
    lines = "with torch.autocast('cpu'):\n    torch.jit.trace(model, x)"
    assert "requires grad as a constant" in in_plain_torch(lines)
    with nc.autocast("cpu"):
        assert nc.trace(torch.nn.Linear(8, 8), X, check_trace=True)(X).dtype is BF


def test_a_script_that_is_called_while_tracing():
    """14. It is left uncast."""

    @torch.jit.script
    def callee(a):
        return torch.mm(a, a.t())

    def calls(x):
        with torch.autocast("cpu"):
            return callee(x)

    assert torch.jit.trace(calls, X, check_trace=False)(X).dtype is FP
    assert nc.trace(calls, X)(X).dtype is BF


def test_register_autocast():
    """15, 16. It pins one format whatever the region says, and raises on an op that has an autocast kernel."""
    library = torch.library.Library("narrowcast_faults", "FRAGMENT")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    torch.library.register_autocast("narrowcast_faults::twice", "cpu", BF, lib=library)
    with torch.autocast("cpu", dtype=HF):
        assert torch.ops.narrowcast_faults.twice(X).dtype is BF
    with pytest.raises(KeyError):
        torch.library.register_autocast("aten::mm", "cpu", BF)
    policy = nc.Policy.native().with_rules(nc.Rule("narrowcast_faults.twice", "lower"), nc.Rule("aten.mm", "full"))
    with nc.autocast("cpu", dtype=HF, policy=policy):
        assert torch.ops.narrowcast_faults.twice(X).dtype is HF and torch.mm(X, X.t()).dtype is FP


def test_export_in_a_region_records_no_casts():
    """17. The program computes in fp32."""
    model = torch.nn.Linear(8, 8)
    with torch.autocast("cpu"):
        exported = torch.export.export(model, (X,))
    assert exported.module()(X).dtype is FP
    assert nc.export(model, (X,), under=BF).module()(X).dtype is BF
