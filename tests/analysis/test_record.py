"""Recording: every cast with its op, place, rule; forward and backward."""

import subprocess
import sys
import threading
from types import FunctionType

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import narrowcast as nc
from narrowcast.errors import RefusedError
from narrowcast.frontends.eager.watch import present_device_types

x = torch.randn(4, 8)


class Block(torch.nn.Module):
    """A linear layer and its activation."""

    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Linear(8, 8)

    def forward(self, x):
        return F.gelu(self.proj(x))


def model():
    return torch.nn.Sequential(Block(), Block())


def test_each_cast_names_op_argument_module_line_and_rule():
    """Also under torch's own region."""
    net = model()
    for region in (torch.autocast("cpu"), nc.autocast("cpu")):
        with nc.record() as ledger, region:
            net(x)
        found = sorted(ledger.casts, key=lambda c: (c.module_path, c.argument))
        assert [(c.argument, c.module_path, c.kind) for c in found] == [
            ("bias", "0.proj", "weight"), ("input", "0.proj", "input"), ("weight", "0.proj", "weight"),
            ("bias", "1.proj", "weight"), ("weight", "1.proj", "weight"),
        ]  # fmt: skip
        first = ledger.casts[0]
        assert first.op == "aten.linear.default"
        assert (first.src, first.dst, first.how, first.direction) == ("fp32", "bf16", "copied", "forward")
        assert first.file == __file__
        assert "self.proj(x)" in open(__file__, encoding="utf-8").read().splitlines()[first.line - 1]  # noqa: PTH123, SIM115
        assert first.rule == "aten.linear.default: lower" and first.reason and first.source
        weight = next(c for c in ledger.casts if c.argument == "weight")
        assert weight.elements == 64 and weight.moved_bytes == 64 * (4 + 2)


def test_backward_casts_are_listed_with_their_forward_place():
    """The gradient of each cast that required one."""
    net = model()
    with nc.record() as ledger, torch.autocast("cpu"):
        net(x).sum().backward()
    backward = sorted((c.module_path, c.argument) for c in ledger.casts if c.direction == "backward")
    assert backward == [("0.proj", "bias"), ("0.proj", "weight"), ("1.proj", "bias"), ("1.proj", "weight")]
    assert {(c.src, c.dst) for c in ledger.casts if c.direction == "backward"} == {("bf16", "fp32")}
    assert all(c.file == __file__ for c in ledger.casts)


def test_what_the_cache_served_is_listed_as_cached():
    """It moves no bytes."""
    net = torch.nn.Linear(8, 8)
    with nc.record() as ledger, torch.autocast("cpu"):
        net(x)
        net(x)
    how = [(c.argument, c.how) for c in ledger.casts if c.argument == "weight"]
    assert how == [("weight", "copied"), ("weight", "cached")]
    assert ledger.totals().cached == 2
    assert all(c.moved_bytes == 0 for c in ledger.casts if c.how == "cached")
    again = [c for c in ledger.casts if c.argument == "input"]
    assert [c.repeated for c in again] == [False, True], "the same input is cast again"


def test_casts_that_the_user_writes_are_not_autocasting_s():
    """x.half() is theirs."""
    with nc.record() as ledger, torch.autocast("cpu"):
        x.half().float().bfloat16()
    assert ledger.casts == []


def test_without_a_region_nothing_is_cast():
    """The calls are counted all the same."""
    with nc.record() as ledger:
        model()(x)
    assert ledger.casts == []
    assert ledger.op_formats()["aten.addmm.default"] == {"fp32": 2}


def test_op_by_format_counts_follow_the_decision():
    """The op that autocasting knows is counted, not its parts."""
    with nc.record() as ledger, torch.autocast("cpu"):
        model()(x)
    table = ledger.op_formats()
    assert table["aten.linear.default"] == {"bf16": 2}
    assert table["aten.gelu.default"] == {"bf16": 2}
    assert "aten.addmm.default" not in table
    unlisted = [k for k in ledger.calls if k.op == "aten.gelu.default"]
    assert {k.action for k in unlisted} == {"no rule"}


def test_set_dtype_shows_as_a_cast_of_the_first_argument():
    """cuda's softmax rule, on the cpu."""
    with nc.record() as ledger, nc.autocast("cpu", policy="native:cuda"):
        torch.softmax(x.bfloat16(), -1)
    assert [(c.op, c.argument, c.src, c.dst, c.action) for c in ledger.casts] == [
        ("aten.softmax.int", "self", "bf16", "fp32", "full_set_dtype")
    ]


def test_the_gradient_of_a_widened_argument_is_a_cast_too():
    """softmax with dtype=float32 converts its input; the backward converts back."""
    leaf = x.clone().requires_grad_()
    with nc.record() as ledger, nc.autocast("cpu", policy="native:cuda"):
        torch.softmax(leaf.bfloat16(), -1).sum().backward()
    found = [(c.op, c.src, c.dst, c.direction) for c in ledger.casts]
    assert ("aten.softmax.int", "fp32", "bf16", "backward") in found


def test_refusals_are_recorded_and_still_raised():
    """By our kernels and by torch's."""
    refusing = nc.Policy.native().with_rules(nc.Rule("aten.gelu", "refuse", reason="no"))
    with nc.record() as ledger:
        with pytest.raises(RefusedError), nc.autocast("cpu", policy=refusing):
            F.gelu(x)
        with pytest.raises(RuntimeError, match="prioritize"), torch.autocast("cpu"):
            torch.cat([x.half(), x.bfloat16()])
    assert [(r.op, r.reason.partition(" ")[0]) for r in ledger.refusals] == [
        ("aten.gelu.default", "no"), ("aten.cat.default", "native")
    ]  # fmt: skip
    assert all(r.file == __file__ and r.line for r in ledger.refusals)


def test_recordings_nest_and_leave_nothing_behind():
    """The kernels that a recording registers go with the last one."""
    before = torch._C._dispatch_dump("aten::mm")
    with nc.record() as outer:
        with nc.record() as inner, torch.autocast("cpu"):
            torch.mm(x, x.t())
        with torch.autocast("cpu"):
            torch.mm(x, x.t())
    assert len(inner.casts) == 2 and len(outer.casts) == 4
    assert torch._C._dispatch_dump("aten::mm") == before


def test_a_recording_that_raises_leaves_nothing_behind():
    """The exception passes, the state is as before."""
    before = torch._C._dispatch_dump("aten::mm")
    with pytest.raises(ZeroDivisionError), nc.record(), torch.autocast("cpu"):
        raise ZeroDivisionError
    assert torch._C._dispatch_dump("aten::mm") == before
    assert not torch.is_autocast_enabled("cpu")


def test_another_thread_is_not_recorded():
    """A recording sees its own thread."""
    found = []

    def work():
        with torch.autocast("cpu"):
            found.append(torch.mm(x, x.t()).dtype)

    with nc.record() as ledger:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(60)
    assert found == [torch.bfloat16] and ledger.casts == []


def test_recording_changes_no_bits():
    """Forward and backward, native and under a policy."""
    policy = nc.Policy.native().with_rules(nc.Rule("aten.gelu", "to(fp16)"))
    for region in (lambda: torch.autocast("cpu"), lambda: nc.autocast("cpu", policy=policy)):
        net = model()
        results = []
        for recorded in (False, True):
            net.zero_grad()
            with region():
                if recorded:
                    with nc.record():
                        out = net(x)
                else:
                    out = net(x)
            out.sum().backward()
            results.append((out.detach(), net[0].proj.weight.grad.clone()))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("make", [torch.autocast, nc.autocast])
def test_recording_keeps_the_faults_of_native_s_weight_cache(make):
    """A weight that is changed inside the region keeps its cast, recorded or not: a recording shows what happens."""

    def twice():
        net = torch.nn.Linear(8, 8)
        with make("cpu"):
            first = net(x)
            with torch.no_grad():
                net.weight.mul_(2)
            return torch.equal(first, net(x))

    plain = twice()
    with nc.record() as ledger:
        recorded = twice()
    assert plain == recorded is True
    assert [c.how for c in ledger.casts if c.argument == "weight"] == ["copied", "cached"]


def test_ops_whose_kernels_call_listed_ops_are_recorded_as_they_run():
    """torch switches autocast off under a dispatch mode; a recording must not change results."""
    for op in (
        lambda: torch.matrix_exp(torch.eye(3)),
        lambda: F.bilinear(torch.ones(2, 3), torch.ones(2, 3), torch.rand(4, 3, 3)),
    ):
        torch.manual_seed(0)
        with torch.autocast("cpu"):
            plain = op()
        torch.manual_seed(0)
        with nc.record(), torch.autocast("cpu"):
            recorded = op()
        assert plain.dtype is recorded.dtype and torch.equal(plain, recorded)


@pytest.mark.parametrize(
    "activation", [torch.relu, torch.exp, torch.tanh, torch.sigmoid, lambda t: torch.softmax(t, -1)]
)
def test_a_training_step_is_recorded_as_it_runs(activation):
    """Ops whose autograd node saves their output; the thread's autocast state is as before."""
    net = torch.nn.ModuleList([torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)])

    def step():
        net.zero_grad()
        with torch.autocast("cpu"):
            out = net[1](activation(net[0](x)))
            assert torch.is_autocast_enabled("cpu")
            out.sum().backward()
        return out.detach(), *[p.grad.clone() for p in net.parameters()]

    plain = step()
    with nc.record() as ledger:
        recorded = step()
    assert all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    assert not torch.is_autocast_enabled("cpu")
    assert ledger.op_formats()["aten.linear.default"] == {"bf16": 2}
    assert sum(c.direction == "backward" for c in ledger.casts) == 4


def test_the_cast_back_of_inside_is_a_cast():
    """No silent cast."""
    policy = nc.Policy.native().with_rules(nc.Rule("aten.gelu", "inside"))
    with nc.record() as ledger, nc.autocast("cpu", policy=policy):
        F.gelu(x.bfloat16())
    assert [(c.argument, c.src, c.dst) for c in ledger.casts] == [("self", "bf16", "fp32"), ("result", "fp32", "bf16")]


def test_without_the_cache_nothing_is_cached():
    """Also where a kernel calls listed ops, which the mode does not see."""
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    with torch.no_grad(), nc.record() as ledger, torch.autocast("cpu", cache_enabled=False):
        layer(torch.randn(2, 5, 32))
    assert ledger.casts and {c.how for c in ledger.casts} == {"copied"}


SCRIPT = """
import sys, threading, torch, narrowcast as nc
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
x = torch.randn(4, 8)
policy = nc.Policy.native().with_rules(nc.Rule("aten.linear", "full", module="nothing"))
with nc.autocast("cpu", policy=policy):
    net(x)
done = threading.Event()
def work():
    for _ in range(600):
        with torch.autocast("cpu"):
            net(x).sum()
threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
for t in threads:
    t.start()
for _ in range(40):
    with nc.record() as ledger, torch.autocast("cpu"):
        net(x)
    assert len(ledger.casts) == 5
for t in threads:
    t.join(60)
sys.exit(any(t.is_alive() for t in threads))
"""


def test_threads_with_native_regions_run_beside_regions_and_recordings():
    """They neither lock each other out nor crash."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], timeout=120, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_code_that_cannot_be_hashed_is_a_place_like_any_other():
    """Dynamo writes code objects that hold dicts: the line of a call in one is found all the same."""

    def product(x):
        return x @ x

    code = product.__code__.replace(co_consts=(*product.__code__.co_consts, {}))
    with pytest.raises(TypeError, match="unhashable"):
        hash(code)
    with nc.record() as ledger, nc.autocast("cpu", torch.bfloat16):
        FunctionType(code, globals())(torch.ones(2, 2))
    assert {(cast.file, cast.line) for cast in ledger.casts} == {(__file__, code.co_firstlineno + 1)}


def test_compiled_code_stays_compiled_after_it_was_recorded():
    """Dynamo gives up for good on code that it meets under a dispatch mode; meanwhile it runs as eager code."""
    ran = []

    def backend(graph, inputs):
        def run(*args):
            ran.append(graph)
            return graph.forward(*args)

        return run

    model, x = torch.nn.Linear(8, 8), torch.randn(2, 8)
    compiled = nc.compile(model, under="bf16", backend=backend)
    compiled(x)
    with nc.record() as ledger:
        compiled(x)
    assert len(ran) == 1 and len(ledger.casts) == 3
    compiled(x)
    assert len(ran) == 2


def test_an_accelerator_that_torch_is_only_built_for_is_not_present(monkeypatch):
    """A build for CUDA names it on machines without one; its lists would give the cpu's calls other names."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *a, **k: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert present_device_types() == ["cpu"]
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert present_device_types() == ["cpu", "cuda"]


class Checkpointed(nn.Module):
    """A module and a function, both computed again in the backward."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Linear(8, 4)

    def forward(self, x, reentrant):
        x = checkpoint(self.first, x, use_reentrant=reentrant)
        return checkpoint(lambda t: self.last(t), x, use_reentrant=reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("region", ["narrowcast", "torch"])
def test_casts_that_a_checkpoint_makes_again_have_the_places_of_the_forward(reentrant, region):
    """Their paths began at the module that was called again, and what torch calls itself had no line."""
    opened = nc.autocast if region == "narrowcast" else torch.autocast
    with nc.record() as ledger:
        with opened("cpu", torch.bfloat16):
            y = Checkpointed()(torch.randn(2, 8, requires_grad=True), reentrant)
        count = len(ledger.casts)
        y.float().sum().backward()
    places = [(c.op, c.argument, c.module_path, c.file, c.line) for c in ledger.casts if c.direction == "forward"]
    forward, again = set(places[:count]), set(places[count:])
    assert again and again <= forward and {place[2] for place in again} == {"first.0", "last"}
    assert all(file == __file__ and line for *_, file, line in places)
