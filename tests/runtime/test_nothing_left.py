"""Whatever is interleaved, and whatever raises in it, in however many threads: everything scoped is as found."""

import sys
import threading
import types
import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.optim.swa_utils
import torch.utils.checkpoint
from hypothesis import given, settings, strategies as st
from torch import nn

import narrowcast as nc
from narrowcast.runtime.torch_surface.patches import standing
from narrowcast.runtime.torch_surface.state import autocast_nesting

POLICY = nc.Policy.native().with_rules(nc.Rule("aten.gelu", "full", reason="a rule"))
PINNING = nc.Policy.native().with_rules(nc.Rule("module.call", "to(fp32)", argument="result", reason="a rule"))
X = torch.ones(2, 4)


class Thrown(Exception):
    """What actions throw in the middle."""


class Layer(nn.Module):
    def __init__(self, throws):
        super().__init__()
        self.linear, self.throws = nn.Linear(4, 4), throws

    def forward(self, x):
        y = torch.nn.functional.gelu(self.linear(x))
        if self.throws:
            raise Thrown
        return y


def scripted(x):
    with torch.autocast("cpu", torch.bfloat16):
        return torch.mm(x, x.t())


def refused(x):
    return open(x)  # noqa: PTH123


@contextmanager
def pinned(layer):
    nc.pin(layer, "fp32")
    try:
        yield
    finally:
        nc.unpin(layer)


# What stays open around others, and what is done at once. Each is given a layer that throws, or not.
AROUND = {
    "native": lambda layer: torch.autocast("cpu", torch.bfloat16),
    "region": lambda layer: nc.autocast("cpu", torch.bfloat16),
    "policy": lambda layer: nc.autocast("cpu", torch.bfloat16, policy=POLICY),
    "safe": lambda layer: nc.autocast("cpu", torch.bfloat16, policy="safe"),
    "modules": lambda layer: nc.autocast("cpu", torch.bfloat16, policy=PINNING),
    "checked": lambda layer: nc.autocast("cpu", torch.bfloat16, cache_enabled="checked"),
    "record": lambda layer: nc.record(),
    "pin": pinned,
    "none": lambda layer: nullcontext(),
}
DONE = {
    "call": lambda layer: layer(X),
    "train": lambda layer: layer(X).float().sum().backward(),
    "trace": lambda layer: nc.trace(layer, (X,), under="bf16"),
    "script": lambda layer: nc.script(refused if layer.throws else scripted, under="bf16"),
    "compile": lambda layer: nc.compile(layer, under="bf16", backend="eager", weights="cast")(X),
    "explain": lambda layer: nc.explain(layer, (X,), under=POLICY),
    "state": lambda layer: layer.load_state_dict(layer.state_dict()),
}
plans = st.recursive(
    st.tuples(st.sampled_from(sorted(DONE)), st.booleans()),
    lambda inner: st.tuples(st.sampled_from(sorted(AROUND)), st.booleans(), st.lists(inner, min_size=1, max_size=3)),
    max_leaves=5,
)


one_at_a_time = threading.Lock()  # explain makes Dynamo forget all code, which torch does not lock (docs/limits.md)


def carry_out(plan):
    """Do what a plan says; what is thrown inside a context leaves it, and goes no further."""
    layer = Layer(plan[1])
    if len(plan) == 2:
        try:
            with one_at_a_time if plan[0] in ("compile", "explain") else nullcontext():
                DONE[plan[0]](layer)
        except Exception:
            if not plan[1]:  # nothing was thrown on purpose
                raise
        return
    try:
        with AROUND[plan[0]](layer):
            for inner in plan[2]:
                carry_out(inner)
            if plan[1]:
                raise Thrown
    except Thrown:
        pass


def owners():
    """Every module of torch's that is loaded, and the classes whose attributes anybody may replace."""
    yield from (m for n, m in sorted(sys.modules.items()) if n.partition(".")[0] == "torch" and m is not None)
    yield from (torch.autocast, nn.Module, torch._C.ScriptFunction, torch._C.ScriptMethod, torch.nn.Linear)
    yield from (torch.optim.swa_utils.AveragedModel, torch.optim.Optimizer, torch.Tensor)


def attributes():
    """By owner and name: every function and class."""
    kinds = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
    found = {}
    for owner in owners():
        for name, value in list(vars(owner).items()):
            if isinstance(value, kinds) or callable(value):
                found[getattr(owner, "__name__", str(owner)), name] = value
    return found


def settings_now():
    """What is no attribute: settings of torch's compilers, and what hangs on its global hooks."""
    earlier = torch._C._jit_set_autocast_mode(True)
    torch._C._jit_set_autocast_mode(earlier)
    config = torch._functorch.config
    optimizers = sys.modules["torch.optim.optimizer"]
    return (
        earlier, config.backward_pass_autocast, config.joint_custom_pass, autocast_nesting(),
        len(optimizers._global_optimizer_pre_hooks), len(optimizers._global_optimizer_post_hooks),
        len(torch.nn.modules.module._global_forward_pre_hooks), torch._C._len_torch_dispatch_stack(),
    )  # fmt: skip


@pytest.fixture(scope="module")
def used_before():
    """What stays for the process is there, and torch has imported what it imports at first use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for policy in (None, POLICY, PINNING, "safe"):
            for done in DONE.values():
                with nc.record(), nc.autocast("cpu", torch.bfloat16, policy=policy):
                    done(Layer(False))
        with AROUND["pin"](Layer(False)), AROUND["checked"](None):
            pass


@settings(max_examples=12)
@given(threads=st.lists(st.lists(plans, min_size=1, max_size=3), min_size=1, max_size=3))
def test_everything_scoped_is_as_found(used_before, threads):
    """Attribute by attribute; and everything works."""
    before, was = attributes(), settings_now()
    lasting = [line for line in standing() if not line.holders]
    assert len(lasting) == len(standing())
    failures = []

    def work(own):
        try:
            for plan in own:
                carry_out(plan)
        except BaseException as error:
            failures.append(error)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        running = [threading.Thread(target=work, args=(own,), daemon=True) for own in threads[1:]]
        for thread in running:
            thread.start()
        work(threads[0])
        for thread in running:
            thread.join(120)
    assert not failures and not any(thread.is_alive() for thread in running)
    after = attributes()
    changed = [key for key, value in before.items() if after.get(key) is not value]
    assert not changed and settings_now() == was
    assert standing() == tuple(lasting)
    with nc.autocast("cpu", torch.bfloat16, policy=POLICY):
        assert Layer(False)(X).dtype is torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert nc.trace(nn.Linear(4, 4), (X,), under="bf16")(X).dtype is torch.bfloat16


def test_a_patch_that_stays_is_seen():
    """The comparison above rejects this."""
    before = attributes()
    original = torch.nn.Module.train
    try:
        torch.nn.Module.train = lambda self, mode=True: self
        after = attributes()
        assert [key for key, value in before.items() if after.get(key) is not value] == [("Module", "train")]
    finally:
        torch.nn.Module.train = original
