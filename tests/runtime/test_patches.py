"""What of torch stands replaced: held by whatever needs it, and gone with the last of them."""

import functools
import gc
import subprocess
import sys
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

import narrowcast as nc
from narrowcast.runtime.torch_surface.modules import told_of_module_calls
from narrowcast.runtime.torch_surface.patches import held, standing


def doubling(function):
    return lambda x: 2 * function(x)


def adding(function):
    return lambda x: 1 + function(x)


@pytest.fixture
def owner():
    return SimpleNamespace(f=lambda x: x)


def test_holders_come_and_go_in_any_order(owner):
    """What they do is put around the original; with the last of them the attribute is what it was."""
    before = owner.f
    first, second = held(owner, "first", f=doubling), held(owner, "second", f=adding)
    first.__enter__()
    assert owner.f(3) == 6
    second.__enter__()
    assert owner.f(3) == 7
    assert [line.holders for line in standing() if line.holders] == [2]
    first.__exit__(None, None, None)
    assert owner.f(3) == 4
    second.__exit__(None, None, None)
    assert owner.f is before and not any(line.holders for line in standing())


def test_exceptions_leave_nothing_behind(owner):
    """Neither inside nor while the second attribute is looked up."""
    before = owner.f
    with pytest.raises(KeyError), held(owner, "raises", f=doubling):
        raise KeyError
    with pytest.raises(AttributeError), held(owner, "has no g", f=doubling, g=adding):
        pass
    assert owner.f is before


def test_what_a_subclass_inherits_is_not_left_on_it():
    """An attribute that was not the owner's own is taken away again."""

    class Base:
        def f(self):
            return 1

    class Inherits(Base):
        pass

    with held(Inherits, "propagated", f=lambda f: lambda self: f(self) + 1):
        assert Inherits().f() == 2 and Base().f() == 1
    assert "f" not in vars(Inherits)


def test_who_replaces_it_on_top_of_ours_stays_on_top(owner):
    """Theirs calls what they kept of ours, which then only passes on; later holders stand around theirs."""
    mine = held(owner, "ours", f=doubling)
    mine.__enter__()
    below = owner.f
    owner.f = theirs = lambda x: below(x) + 100
    mine.__exit__(None, None, None)
    assert owner.f is theirs and owner.f(3) == 103
    with held(owner, "again", f=doubling):
        assert owner.f(3) == 206
    assert owner.f is theirs


def test_who_puts_back_what_was_before_ours_is_not_undone(owner):
    """We restore nothing that we do not stand on."""
    before = owner.f
    with held(owner, "ours", f=doubling):
        owner.f = before
    assert owner.f is before


def test_threads_hold_at_the_same_time(owner):
    """As many as like, none sees a half-made chain, and nothing is left."""
    before, failures = owner.f, []

    def work():
        try:
            for _ in range(200):
                with held(owner, "thread", f=adding):
                    if owner.f(0) < 1:
                        failures.append("not in force")
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and owner.f is before


X = torch.ones(2, 4)


def test_recording_a_trace():
    """Both replace the entering of regions, in either order, and TorchScript compiles the class meanwhile."""
    code = (
        "import torch, narrowcast as nc; x = torch.ones(2, 4); m = torch.nn.Linear(4, 4)\n"
        "before = torch.autocast.__enter__\n"
        "with nc.record(): a = nc.trace(m, (x,), under='bf16')\n"
        "b = nc.trace(m, (x,), under='bf16')\n"
        "assert a(x).dtype is b(x).dtype is torch.bfloat16\n"
        "assert torch.autocast.__enter__ is before\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_scripting_inside_a_recording():
    """torch's own compiler reads the source of what stands replaced."""
    with nc.record():

        @torch.jit.script
        def product(x):
            with torch.autocast("cpu", torch.bfloat16):
                return torch.mm(x, x.t())

        assert product(X).dtype is torch.bfloat16


@pytest.mark.parametrize("around", [nc.record, functools.partial(nc.autocast, "cpu")], ids=["record", "region"])
def test_an_exception_in_a_trace_leaves_tracing_possible(around):
    """It did not: what stood replaced stayed, and each later trace of the process raised."""

    class Raises(torch.nn.Module):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                raise KeyError("in the middle")

    enter = torch.autocast.__enter__
    for _ in range(2):
        with pytest.raises(KeyError), around():
            nc.trace(Raises(), (X,), under="bf16")
    assert torch.autocast.__enter__ is enter
    assert nc.trace(torch.nn.Linear(4, 4), (X,), under="bf16")(X).dtype is torch.bfloat16


def test_six_threads_make_their_first_trace_at_once():
    """In a fresh process, where TorchScript has compiled nothing yet."""
    code = (
        "import threading, torch, narrowcast as nc, sys; x = torch.ones(2, 4); made = []\n"
        "start = threading.Barrier(6)\n"
        "def work():\n"
        "    start.wait()\n"
        "    made.append(nc.trace(torch.nn.Linear(4, 4), (x,), under='bf16'))\n"
        "threads = [threading.Thread(target=work, daemon=True) for _ in range(6)]\n"
        "for t in threads: t.start()\n"
        "for t in threads: t.join(60)\n"
        "sys.exit(0 if len(made) == 6 else 1)\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_regions_and_policies_that_nobody_holds_are_freed():
    """Whatever was done in them, except what scripts and graphs name."""
    alive = []
    x = torch.randn(4, 4)
    for number in range(40):
        policy = nc.Policy.native().with_rules(nc.Rule("aten.gelu", "full", reason=f"number {number}"))
        region = nc.autocast("cpu", torch.bfloat16, policy=policy)
        with nc.record() if number % 2 else region, region:
            torch.nn.functional.gelu(x @ x)
        alive += [weakref.ref(policy), weakref.ref(region)]
    del policy, region
    gc.collect()
    assert sum(ref() is not None for ref in alive) <= 2


def test_nothing_is_replaced_by_the_import_alone():
    """What stays for the process comes with the first region, pin or recording."""
    code = (
        "import torch, torch.utils.checkpoint, torch.optim.swa_utils, torch._dynamo  # which replaces some itself\n"
        "owners = [torch, torch.nn.Module, torch.utils, torch.utils.checkpoint, torch.autocast, torch.nn.utils]\n"
        "before = [dict(vars(o)) for o in owners]\n"
        "import narrowcast as nc\n"
        "for name in ('autocast', 'compile', 'export', 'explain', 'script', 'record', 'pin'): getattr(nc, name)\n"
        "from narrowcast.runtime.torch_surface.patches import standing\n"
        "assert not standing(), standing()\n"
        "for owner, was in zip(owners, before):\n"
        "    for name, value in was.items():\n"
        "        assert vars(owner)[name] is value or name.startswith('__'), (owner, name)\n"
        "nc.autocast('cpu').__enter__()\n"
        "assert standing() and all(not line.holders for line in standing())\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)


def test_kernels_that_stay_are_lines_of_the_table():
    """With what they are for."""
    policy = nc.Policy.native().with_rules(nc.Rule("aten.softplus.default", "full"))
    with nc.autocast("cpu", torch.bfloat16, policy=policy):
        pass
    (line,) = [line for line in standing() if line.what == "aten.softplus.default at AutocastCPU"]
    assert line.holders == 0 and "policy" in line.why


def test_a_hook_on_all_modules_goes_between_compilations():
    """Another thread compiles while the hook is there: its guards ask for the hook when its graph is compiled."""
    traced, found = threading.Event(), []

    def backend(graph, example_inputs):
        traced.set()
        time.sleep(0.3)
        return graph

    def compiles():
        try:
            found.append(torch.compile(torch.nn.Linear(4, 4), backend=backend)(torch.ones(2, 4)).shape)
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=compiles, daemon=True)
    with told_of_module_calls(lambda module: None):
        thread.start()
        assert traced.wait(60)
    thread.join(60)
    assert found == [(2, 4)]
