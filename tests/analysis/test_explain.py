"""explain: fake where possible, real where not, nothing left behind."""

import json
import pickle
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import narrowcast as nc
from narrowcast.errors import NarrowcastError, RegionError
from narrowcast.reports.documents.explanations import spent
from narrowcast.testing import take_snapshot

x = torch.randn(4, 8)


class Net(torch.nn.Module):
    """Convolution-free, with batch norm and tied weights."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(8, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.b = torch.nn.Linear(8, 8)
        self.b.weight = self.a.weight

    def forward(self, x, scale=1.0):
        return torch.softmax(self.b(F.gelu(self.norm(self.a(x)))) * scale, -1)


class LooksAtValues(Net):
    """Control flow that depends on data."""

    def forward(self, x, scale=1.0):
        return super().forward(x if x.sum().item() > -1e9 else -x, scale)


def state(module):
    return {k: v.clone() for k, v in module.state_dict().items()}


def unchanged(module, before):
    return all(torch.equal(v, before[k]) for k, v in module.state_dict().items())


@pytest.mark.parametrize("kind", [Net, LooksAtValues])
def test_a_model_is_explained_and_left_as_it_was(kind):
    """Batch norm statistics, random state and parameters, fake or real."""
    net = kind()
    before, random = state(net), torch.random.get_rng_state()
    found = nc.explain(net, ((x,), {"scale": 2.0}))
    assert found.ran_on.startswith("fake" if kind is Net else "the model itself")
    assert ("_local_scalar_dense" in found.note) == (kind is LooksAtValues)
    assert unchanged(net, before) and torch.equal(torch.random.get_rng_state(), random)
    assert found.ledger.op_formats()["aten.linear.default"] == {"bf16": 2}
    assert {c.module_path for c in found.ledger.casts} == {"a", "b"}
    assert not torch.is_autocast_enabled("cpu")


def test_fake_and_real_runs_agree():
    """The same casts and calls."""
    net = Net()
    fake, real = nc.explain(net, (x,)), nc.explain(net, (x,), real=True)
    assert real.ran_on == "the model itself"
    assert fake.ledger.diff(real.ledger) == ()
    assert [(r.op, r.calls, r.computes) for r in fake.op_rows()] == [
        (r.op, r.calls, r.computes) for r in real.op_rows()
    ]
    a, b = fake.ledger.totals(), real.ledger.totals()
    assert replace(a, op_bytes=0) == replace(b, op_bytes=0)
    assert a.op_bytes == pytest.approx(b.op_bytes, rel=0.05)  # a fake kernel may return statistics of another size


def test_a_tied_weight_is_cast_once():
    """It is one tensor in the fake model too."""
    found = nc.explain(Net(), (x,))
    weights = [(c.module_path, c.how) for c in found.ledger.casts if c.argument == "weight"]
    assert weights == [("a", "copied"), ("b", "cached")]


def test_a_model_on_meta_needs_no_memory():
    """64 GiB of weights."""
    with torch.device("meta"):
        net = torch.nn.Sequential(torch.nn.Linear(1 << 17, 1 << 17, bias=False))
    found = nc.explain(net, (torch.empty(2, 1 << 17, device="meta"),))
    assert found.ledger.totals().cast_bytes > (1 << 34) * 6


@pytest.mark.parametrize("device", ["cuda", "xpu", "mps", "mtia", "maia"])
def test_devices_that_are_not_here_are_stood_in_for(device):
    """Their lists, their default format."""
    found = nc.explain(Net(), (x,), device=device)
    assert found.device_type == device and "standing in" in found.ran_on
    assert found.low == ("bf16" if device == "maia" else "fp16")
    rows = {r.op: r for r in found.op_rows()}
    assert rows["aten.linear.default"].computes == found.low
    assert rows["aten.softmax.int"].computes == "fp32"
    assert found.policy == "native"


def test_under_a_policy_the_reasons_are_its_rules():
    """Reason and action of the user's own rule."""
    rule = nc.Rule("aten.gelu", "full", module="", reason="overflows in layer 3")
    found = nc.explain(Net(), (x,), under=nc.Policy.native().with_rules(rule, name="mine"))
    row = next(r for r in found.op_rows() if r.op == "aten.gelu.default")
    assert (row.action, row.reason, row.computes) == ("full", "overflows in layer 3", "fp32")
    assert found.policy == "mine"


def test_a_function_can_be_explained():
    """A model is any callable."""
    net = Net()
    found = nc.explain(lambda t: net(t).sum(), (x,))
    assert found.ran_on.startswith("fake") and len(found.ledger.casts) == 5


def test_a_model_that_raises_raises():
    """Its own error, in a real run."""
    with pytest.raises(ZeroDivisionError):
        nc.explain(lambda t: 1 / 0, (x,))


def test_a_refused_call_is_shown_with_what_ran_before():
    """A policy that refuses does not lose the report."""
    policy = nc.Policy.native().with_rules(nc.Rule("aten.softmax.int", "refuse", reason="not here"))
    found = nc.explain(Net(), (x,), under=policy)
    assert [r.reason for r in found.ledger.refusals] == ["not here"]
    assert "RAISED" in found.note and "not here" in str(found)


def test_run_compares_with_fp32():
    """Outputs, metric, time, memory."""
    net = Net().eval()
    subject = nc.Case(net, (x,), evaluate=lambda m: {"sum": float(m(x).sum())}, name="net")
    found = nc.explain(subject, run=True)
    comparison = found.comparison
    assert comparison is not None
    (output,) = comparison.outputs
    assert output.found == "bf16" and 20 < output.sqnr_db < 100 and 0 < output.relative_error < 0.1
    assert comparison.metric_reference["sum"] == pytest.approx(4)
    long = replace(comparison, region_ms=1e3, reference_ms=1e3)  # a busy machine may take longer op by op
    assert comparison.casts_ms > 0 < comparison.kernels_ms and spent(long).startswith("casts ")
    assert comparison.weight_bytes == sum(t.nbytes for t in (*net.parameters(), *net.buffers()))  # tied ones once
    assert comparison.time_ratio > 0 and comparison.reference_peak_bytes > 0 and comparison.memory_ratio > 0
    text = found.to_text(every=True)
    assert "measured on cpu" in found.ran_on and "no compute" not in text
    for word in ("SQNR", "sum", "peak memory", "alternating pairs", " + weights "):
        assert word in text
    assert ("The time in bf16: casts" in text) is bool(spent(comparison))


def test_an_evaluation_takes_the_model_and_gives_a_number():
    """Also one that has no name of its own; one that takes nothing is refused where it is given."""
    net = Net().eval()
    found = nc.explain(nc.Case(net, x, evaluate=lambda model: model(x).sum()), run=True)
    assert list(found.comparison.metric_found.values()) == [pytest.approx(4, rel=1e-2)]
    with pytest.raises(nc.errors.RunError, match="cannot be called with the model alone"):
        nc.Case(net, x, evaluate=lambda: 1.0)
    with pytest.raises(nc.errors.RunError, match="it returned list"):
        nc.explain(nc.Case(net, x, evaluate=lambda model: [1.0]), run=True)


class Caches(torch.nn.Module):
    """Keeps what it computed, as rotary embeddings and KV caches do."""

    def __init__(self):
        super().__init__()
        self.lin = torch.nn.Linear(8, 8)
        self.table = None
        self.seen = []
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x, past=None):
        if self.table is None:
            self.table = torch.ones(8)
        self.steps = self.steps + 1
        out = self.lin(x) * self.table
        self.seen.append(out)
        if past is not None:
            past["k"] = out
            x.add_(1)
        return out


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("as_function", [False, True])
def test_what_a_model_keeps_while_it_runs_is_not_kept(real, as_function):
    """No fake tensor stays in the model or its arguments, and nothing is written to them."""
    net, past, inputs = Caches(), {}, x.clone()
    model = (lambda *a, **k: net(*a, **k)) if as_function else net
    found = nc.explain(model, ((inputs,), {"past": past}), real=real)
    assert found.ledger.op_formats()["aten.linear.default"] == {"bf16": 1}
    assert net.table is None and past == {} and net.steps == 0 and type(net.steps) is torch.Tensor
    assert torch.equal(inputs, x)
    assert net.seen == [] or as_function  # a list that a function's module appends to cannot be told from the user's
    net.seen.clear()
    assert net(inputs).dtype is torch.float32


def test_json_has_everything():
    """With schema names."""
    data = json.loads(nc.explain(Net(), (x,)).to_json())
    assert data["schema"] == "narrowcast.explanation/4"
    assert data["ledger"]["calls"] and data["ledger"]["casts"]


@pytest.mark.parametrize("real", [False, True])
def test_statistics_of_modules_that_a_function_calls_are_restored(real):
    """A closure cannot be copied."""
    norm = torch.nn.BatchNorm1d(8)
    before = state(norm)
    nc.explain(lambda t: norm(t), (x,), real=real)
    assert unchanged(norm, before)
    norm(x)
    assert norm.num_batches_tracked == 1


def test_what_a_forward_writes_to_attributes_is_put_back():
    """Also where the model itself is timed: new attributes, counts, and what is in lists."""

    class Writes(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.calls, self.seen = torch.nn.Linear(8, 8), 0, [torch.ones(2)]

        def forward(self, x):
            self.calls += 1
            self.seen.append(x)
            self.input_dtype = x.dtype
            return self.layer(x)

    model = Writes()
    seen = model.seen
    nc.explain(model, (x,), under="bf16", run=True)
    assert model.calls == 0 and not hasattr(model, "input_dtype")
    assert model.seen is seen and len(seen) == 1


def test_scripted_code_is_said_to_be_out_of_reach():
    """torch casts it by its own pass."""
    net = torch.nn.Sequential(torch.jit.trace(torch.nn.Linear(8, 8), x), torch.nn.Linear(8, 8))
    found = nc.explain(net, (x,))
    assert "TorchScript" in found.note and "aten._to_copy" in str(found)


def test_kernels_that_call_listed_ops_are_run_for_real():
    """Fake ones do not call them; a wrong picture would follow."""
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).eval()
    with torch.no_grad():
        found = nc.explain(layer, (torch.randn(2, 5, 32),))
        real = nc.explain(layer, (torch.randn(2, 5, 32),), real=True)
    assert found.ran_on == "the model itself" and "_transformer_encoder_layer_fwd" in found.note
    assert len(found.ledger.casts) == len(real.ledger.casts) > 0


def test_sparse_buffers_and_outputs_are_survived():
    """In real runs and comparisons."""

    class Sparse(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("adjacency", torch.eye(4).to_sparse())
            self.lin = torch.nn.Linear(8, 8)

        def forward(self, x):
            return self.lin(x), self.adjacency * 2

    found = nc.explain(nc.Case(Sparse(), (x,)), run=True, real=True)
    assert [o.sqnr_db > 20 for o in found.comparison.outputs] == [True, True]


def test_bad_questions():
    """A device type that is none; running on one that is not here; a subject with arguments."""
    with pytest.raises(RegionError, match="tpu"):
        nc.explain(Net(), (x,), device="tpu")
    with pytest.raises(RegionError, match="Omit run"):
        nc.explain(Net(), (x,), device="mps", run=True)
    with pytest.raises(NarrowcastError, match="a Case has its inputs"):
        nc.explain(nc.Case(Net(), (x,)), (x,))


def test_a_fake_run_moves_no_data():
    """The input may be poisoned: nothing is read."""
    net = Net()
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(float("nan"))
    assert nc.explain(net, (x,)).ran_on.startswith("fake")


def test_a_region_is_read_as_a_whole():
    """Around the call or given: policy, format and whether it is on, also on a device that is not here."""
    net, rule = Net(), nc.Rule("aten.linear", "full", module="b")
    policy = nc.Policy.native().with_rules(rule)
    with nc.autocast("cpu", torch.float16, policy=policy):
        around, differences = nc.explain(net, (x,)), nc.compare(net, (x,), isolate=0)
        formats = take_snapshot(net, (x,)).calls
    given = nc.explain(net, (x,), under=nc.autocast("cpu", torch.float16, policy=policy))
    assert around.low == differences.low == "fp16" and differences.policy == around.policy == policy.name
    assert around.ledger.diff(given.ledger) == () and around.rules[0].calls == 1
    assert {c.computes for c in formats if "linear" in str(c.id)} == {"fp16", "fp32"}
    with nc.autocast("cpu", enabled=False):
        assert not nc.explain(net, (x,)).ledger.casts
    with torch.autocast("cpu", torch.float16):
        native = nc.explain(net, (x,))
    assert (native.low, native.policy) == ("fp16", "native")
    with nullcontext() if torch.cuda.is_available() else pytest.warns(UserWarning, match="CUDA is not available"):
        elsewhere = nc.autocast("cuda", "fp16", cache_enabled=False)
    for region in (elsewhere, pickle.loads(pickle.dumps(elsewhere))):
        found = nc.explain(net, (x,), under=region)
        assert found.ledger.diff(nc.explain(net, (x,), under="fp16", device="cuda").ledger) == ()
        assert "cuda" not in found.note and found.ledger.casts


def test_what_fakes_do_not_carry_runs_on_the_cpu_with_the_lists_of_the_device():
    """It says that, and not how slow the device is: this machine has none."""
    net = LooksAtValues()
    found = nc.explain(net, (x,), under="fp16", device="cuda")
    assert found.ran_on == "the model itself, on the cpu with cuda's lists"
    assert found.note.startswith("Fake tensors do not carry it") and "fast units" not in found.note


def test_what_costs_time_is_advised_before_what_nothing_helps():
    """Of a model within round-off that is slower; and on a device that is not here, no run is advised."""
    model, x = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 8)), torch.randn(4, 64)
    found = nc.explain(model, (x,), under="fp16", run=True)
    assert found.verdict == "round-off"
    slower = replace(found, comparison=replace(found.comparison, time_ratio=2.0))
    whats = [todo.what for todo in slower.todos]
    at = next(n for n, what in enumerate(whats) if what.startswith("Choose formats by measured time"))
    assert not any(what.startswith("Look at") for what in whats[:at])
    assert not any(
        "Run it for real" in todo.what for todo in nc.explain(model, (x,), under="fp16", device="cuda").todos
    )
    assert any("Run it for real" in todo.what for todo in nc.explain(model, (x,), under="fp16").todos)
