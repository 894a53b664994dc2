"""What this device can do: asked without a trace, avoided by `safe` and by goals, said by errors and recordings."""

import io
import os
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from torch import nn

import narrowcast as nc
from narrowcast import formats
from narrowcast.core.policy.capabilities import EMULATED, RAISES, Ability, Capabilities
from narrowcast.errors import NarrowcastError, ProfileError, RegionError
from narrowcast.frontends.target import target_of
from narrowcast.reports.results.profile import Device, Profile, profile_path
from narrowcast.reports.results.saved import parse
from narrowcast.runtime.devices import abilities
from narrowcast.runtime.devices.device import device_now
from narrowcast.runtime.torch_surface.fx import FakeTensorMode

BF16, F16 = torch.bfloat16, torch.float16
LSTM = "aten.mkldnn_rnn_layer.default"
X = torch.linspace(-1, 1, 2 * 5 * 8).reshape(2, 5, 8)


@pytest.fixture
def device(monkeypatch):
    """A cpu that can do what it is given: no test depends on the units of the machine."""

    def given(*found):
        key = (device_now("cpu"), True, False)
        monkeypatch.setitem(abilities._known, key, Capabilities("cpu (toy)", found))
        monkeypatch.setattr(abilities, "missing_kernels", lambda device_type: ())

    # what was worked out for the built-in policies holds for the real device
    policies = [nc.Policy.safe("cpu"), nc.Policy.safe(), nc.Policy.native(), nc.Policy.native().repairing()]
    kept = [(policy.memory, dict(policy.memory)) for policy in (*policies, *(p.resolve("cpu") for p in policies))]
    for memory, _ in kept:
        memory.clear()
    yield given
    for memory, before in kept:
        memory.clear()
        memory.update(before)


def no_products(error="no such product"):
    return [Ability(op, "bf16", "forward", RAISES, 0.0, error) for op in ("aten.linear.default", "aten.mm.default")]


class Mixed(nn.Module):
    """A product that the toy lacks, between what it has."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.linear = nn.Conv1d(5, 5, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x):
        return torch.nn.functional.gelu(self.linear(self.conv(x)))


FRONT_ENDS = {
    "compile": lambda m, x, **k: nc.compile(m, backend="aot_eager", weights="cast", **k)(x),
    "export": lambda m, x, **k: nc.export(m, (x,), **k).module()(x),
    "script": lambda m, x, **k: nc.script(m, **k)(x),
    "trace": lambda m, x, **k: nc.trace(m, (x,), **k)(x),
}


def test_safe_runs_what_the_device_lacks_in_fp32(device):
    """On the inputs as they are, with the promised result; gradients flow, and native is left as it is."""
    device(*no_products())
    model = Mixed()
    with nc.autocast("cpu", BF16):
        native = model(X)
    with nc.record() as ledger, nc.autocast("cpu", BF16, policy="safe"):
        found = model(X)
        inner = model.conv(X)
    expected = torch.nn.functional.gelu(model.linear(inner.float()).to(BF16))
    assert found.dtype is native.dtype is BF16
    assert torch.equal(found, expected) and not torch.equal(found, native)
    found.float().sum().backward()
    assert model.linear.weight.grad.dtype is torch.float32
    reasons = {cast.reason for cast in ledger.casts if cast.op == "aten.linear.default"}
    assert reasons == {"cpu (toy) has no bf16 linear"}


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_every_front_end_repairs_alike(front_end, device):
    """Bit for bit eager's."""
    device(*no_products())
    model = Mixed()
    with torch.no_grad():
        with nc.autocast("cpu", BF16, policy="safe"):
            expected = model(X)
        found = FRONT_ENDS[front_end](model, X, under="safe")
    assert found.dtype is expected.dtype and torch.equal(found, expected)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.out = nn.LSTM(8, 16, 2, batch_first=True, bidirectional=True), nn.Linear(32, 4)

    def forward(self, x):
        return self.out(self.rnn(x)[0])


def has_lstm(format):
    """Whether this machine has a kernel for it in the format."""
    lacks = abilities.capabilities("cpu").lacks
    return (LSTM, format) not in {(lack.op, lack.format) for lack in lacks}


@pytest.mark.parametrize("low", [BF16, F16])
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_an_lstm_runs_under_safe_whatever_the_machine(front_end, low):
    """And in all front ends alike; native raises exactly where torch does."""
    model = Tagger()
    has_it = has_lstm(formats.parse_format(str(low)))
    with torch.no_grad():
        if not has_it:
            with pytest.raises(RuntimeError), nc.autocast("cpu", low):
                model(X)
            with pytest.raises(RuntimeError), torch.autocast("cpu", low):
                model(X)
        with nc.autocast("cpu", low, policy="safe"):
            expected = model(X)
        found = FRONT_ENDS[front_end](model, X, under=nc.autocast("cpu", low, policy="safe"))
    assert found.dtype is expected.dtype is low and torch.equal(found, expected)


def test_ops_without_any_low_kernel_run_under_safe():
    """Native raises; the result has the format that came."""
    x = torch.eye(3, dtype=BF16, requires_grad=True)
    with pytest.raises(RuntimeError), nc.autocast("cpu", BF16):
        torch.linalg.det(x)
    with nc.autocast("cpu", BF16, policy="safe"):
        found = torch.linalg.det(x)
        assert torch.special.ndtri(torch.full((2,), 0.5, dtype=BF16)).dtype is BF16
    found.backward()
    assert found.dtype is BF16 and float(found.detach()) == 1.0 and x.grad.dtype is BF16


def test_a_goal_never_raises_where_fp32_runs(device, monkeypatch):
    """A policy that the device cannot carry out is repaired under `fast`, in eager code and exports, too."""
    model = Tagger().eval()
    with torch.no_grad():
        for low in (BF16, F16):
            assert nc.compile(model, under=low, goal="fast", backend="aot_eager")(X).dtype is low
            assert nc.export(model, (X,), under=low, goal=nc.Goal.fast(verify=False)).module()(X).dtype is low


def test_an_error_for_want_of_a_kernel_says_what_avoids_it(device):
    """Op, module, line, policy and rule; added as the error leaves the region, once, and to no other error."""
    with pytest.raises(RuntimeError) as plain:
        torch.mm(torch.ones(2, 3), torch.ones(2, 3))
    wanted = str(plain.value).partition("\n")[0]
    device(*no_products(wanted))

    class Fails(nn.Module):
        def forward(self, x):
            return torch.mm(x, x)

    model = nn.Sequential(Fails())
    with pytest.raises(RuntimeError) as raised, nc.autocast("cpu", BF16), nc.autocast("cpu", BF16):
        model(torch.ones(2, 3))
    (note,) = raised.value.__notes__
    assert "cpu (toy) has no bf16" in note and "in 0," in note and f"{__file__}:" in note
    assert 'policy="safe"' in note and 'nc.Rule("aten.linear.default", "full")' in note
    for error in (ValueError(wanted), RuntimeError("something else")):
        with pytest.raises(type(error)) as other, nc.autocast("cpu", BF16):
            raise error
        assert not getattr(other.value, "__notes__", [])


def test_errors_of_compiled_code_have_the_note(device):
    """Whatever raised inside."""
    if has_lstm(formats.fp16):
        model, low = Tagger(), BF16
        device(Ability("aten.mm.default", "bf16", "forward", RAISES, 0.0, "\"lu_cpu\" not implemented for 'BFloat16'"))
    else:
        model, low = Tagger(), F16
    if low is BF16:
        model = lambda x: torch.linalg.det(torch.mm(x[0], x[0].t()))
    with pytest.raises(RuntimeError) as raised:
        nc.compile(model, under=low, backend="aot_eager")(X)
    error = raised.value
    notes = [*getattr(error, "__notes__", []), *getattr(error.__cause__, "__notes__", [])]
    assert any("narrowcast: cpu" in note for note in notes)


def asked(monkeypatch):
    """What the device answers now, with nothing remembered."""
    monkeypatch.setattr(abilities, "_known", {})
    return abilities.capabilities("cpu")


def test_asking_leaves_no_trace(monkeypatch, tmp_path):
    """Not in random numbers, recordings, fake tensors, traces, inference mode or regions."""
    monkeypatch.setenv("NARROWCAST_CACHE_DIR", str(tmp_path))
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    expected = asked(monkeypatch)
    assert len(expected.abilities) >= 30 and torch.equal(torch.random.get_rng_state(), before)
    profile_path(device_now("cpu")).unlink()
    with nc.record() as ledger, nc.autocast("cpu", BF16), torch.inference_mode(), FakeTensorMode():
        assert asked(monkeypatch) == expected
    assert not ledger.calls
    profile_path(device_now("cpu")).unlink()
    found = []

    def traced(x):
        found.append(asked(monkeypatch))
        return x + 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = torch.jit.trace(traced, (torch.ones(2),), check_trace=False).graph
    assert found == [expected] and [n.kind() for n in graph.nodes() if n.kind().startswith("aten")] == ["aten::add"]


def test_the_answers_are_kept_in_the_profile(monkeypatch, tmp_path):
    """The next process reads them; what another version wrote without them is asked again."""
    monkeypatch.setenv("NARROWCAST_CACHE_DIR", str(tmp_path))
    expected = asked(monkeypatch)
    path = profile_path(device_now("cpu"))
    assert Profile.read(path).abilities.keys() == {a.key for a in expected.abilities}
    monkeypatch.setattr(abilities, "_answers", lambda device_type, backward: pytest.fail("it was asked again"))
    assert set(asked(monkeypatch).abilities) == set(expected.abilities)


def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(monkeypatch, tmp_path):
    """The answers hold for the process, and nothing is said: they cost nothing to have again."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NARROWCAST_CACHE_DIR", str(tmp_path / "file"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asked(monkeypatch).abilities


def test_many_threads_ask_once(monkeypatch, tmp_path):
    """The others wait for the answer."""
    monkeypatch.setenv("NARROWCAST_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(abilities, "_known", {})
    real, times, found = abilities._answers, [], []
    monkeypatch.setattr(abilities, "_answers", lambda *args: times.append(1) or real(*args))
    threads = [
        threading.Thread(target=lambda: found.append(abilities.capabilities("cpu")), daemon=True) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 4 and len(times) == 1 and len(set(map(id, found))) == 1


def test_a_recording_says_once_that_a_format_has_no_fast_units(monkeypatch):
    """In the ledger, its text and its file, and in explanations; nothing where the format is fast, or not used."""
    monkeypatch.setattr(abilities, "slow_families", lambda device, format: {"gemm": 40.0, "conv": 7.0})
    layer = nn.Linear(8, 4)
    with nc.record() as ledger, nc.autocast("cpu", BF16):
        layer(layer.weight)
        layer(X)
    (note,) = ledger.notes
    assert "matrix multiplications take about 40 times and convolutions take about 7 times fp32's time" in note
    assert 'goal="fast"' in note and f"note: {note}" in " ".join(str(ledger).split())
    assert parse(ledger.to_json()).notes == [note]
    assert note in nc.explain(layer, (X,), under=BF16).note
    assert note not in nc.explain(nn.Softmax(-1), (X,), under=BF16).note
    monkeypatch.setattr(abilities, "slow_families", lambda device, format: {})
    with nc.record() as quiet, nc.autocast("cpu", BF16):
        layer(X)
    assert quiet.notes == []


def test_what_is_slow_is_known_from_the_profile_the_kind_or_a_probe(monkeypatch, tmp_path):
    """In this order; a probe is made only where nothing is known."""
    monkeypatch.setenv("NARROWCAST_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(abilities, "_slow", {})
    monkeypatch.setattr(abilities, "_probed", lambda device, format: {"gemm": 11.0})
    unknown = Capabilities("cpu (unheard of)")
    monkeypatch.setattr(abilities, "shipped_capabilities", lambda device, units: unknown)
    assert abilities.slow_families("cpu", formats.bf16) == {"gemm": 11.0}
    known = Capabilities("cpu", (Ability("conv", "bf16", "forward", EMULATED, 9.0),))
    monkeypatch.setattr(abilities, "shipped_capabilities", lambda device, units: known)
    monkeypatch.setattr(abilities, "_slow", {})
    assert abilities.slow_families("cpu", formats.bf16) == {"conv": 9.0}
    monkeypatch.setattr(abilities, "_slow", {})
    monkeypatch.setattr(Profile, "low_over_high", lambda profile, format: {"gemm": 5.0, "conv": 1.1})
    assert abilities.slow_families("cpu", formats.bf16) == {"gemm": 5.0}


def test_the_probe_answers():
    """Whatever it finds."""
    assert abilities._probed("cpu", formats.bf16)["gemm"] > 0


def test_the_probe_says_nothing_of_calls_that_take_no_time(monkeypatch):
    """On a GPU that others use, a product of ten microseconds took five times longer in bf16, for no reason of its own;
    what is said is the ratio of the first size that takes a millisecond in one of the formats.
    """
    sizes = []

    def elapsed_ns(run):
        size, dtype = run.args[0].shape[0], run.args[0].dtype
        sizes.append(size)
        low = dtype is torch.bfloat16
        return 5e6 if low and is_slow and size >= 128 else 2e6 if size >= 512 and not low else 5e4 if low else 1e4

    monkeypatch.setattr(abilities, "elapsed_ns", elapsed_ns)
    is_slow = False
    assert abilities._probed("cpu", formats.bf16)["gemm"] == pytest.approx(0.025) and max(sizes) == 512
    is_slow = True
    assert abilities._probed("cpu", formats.bf16)["gemm"] == pytest.approx(500.0) and sizes[-1] == 128


@pytest.mark.slow
def test_without_a_cpp_compiler_the_goal_runs_op_by_op():
    """With a warning that says what to install; torch.compile alone raises."""
    code = (
        "import torch, narrowcast as nc, warnings; m = torch.nn.Linear(8, 4); x = torch.ones(2, 8)\n"
        "with warnings.catch_warnings(record=True) as told:\n"
        "    warnings.simplefilter('always'); made = nc.compile(m, under='bf16', goal='fast')(x)\n"
        "assert made.dtype is torch.bfloat16 and any('C++ compiler' in str(w.message) for w in told)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "CXX": "/nowhere"}, timeout=200)


def test_programs_are_made_for_a_device_and_say_which(tmp_path):
    """This one, or one whose profile is given; saved programs say it, too, and compute as they were made to."""
    missing = Ability("aten.linear.default", "bf16", "forward", RAISES)
    old = Profile(Device("cpu", "Old", ("avx2",), 2, "2.13.0"), abilities={missing.key: missing})
    path = str(old.write(tmp_path / "old.json"))
    model, options = Mixed(), {"under": "safe"}
    makers = {
        "export": lambda **more: nc.export(model, (X,), **options, **more),
        "script": lambda **more: nc.script(model, **options, **more),
        "trace": lambda **more: nc.trace(model, (X,), **options, **more),
    }
    for name, make in makers.items():
        here, there = make(), make(made_for=path)
        assert target_of(here).endswith(f"torch {torch.__version__}")
        assert target_of(there) == "cpu (avx2), torch 2.13.0"
        stream = io.BytesIO()
        (torch.export.save if name == "export" else torch.jit.save)(there, stream)
        stream.seek(0)
        loaded = (torch.export.load if name == "export" else torch.jit.load)(stream)
        assert target_of(loaded) == target_of(there)
        inner = model.conv.to(BF16)(X.to(BF16))
        model.conv.float()
        expected = torch.nn.functional.gelu(model.linear(inner.float()).to(BF16))
        found = (loaded.module() if name == "export" else loaded)(X)
        assert torch.equal(found, expected), name
    assert target_of(torch.jit.script(model)) == ""
    with pytest.raises(NarrowcastError):
        target_of(model)
    with pytest.raises(RegionError, match="made_for"):
        nc.export(model, (X,), made_for=path)
    with pytest.raises(ProfileError):
        nc.script(model, **options, made_for=str(tmp_path / "none.json"))
