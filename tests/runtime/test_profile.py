"""Profiles: what is measured, kept, read back, interpolated; and every way in which a file can be wrong."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from narrowcast.errors import ProfileError
from narrowcast.formats import bf16, fp16, fp32
from narrowcast.frontends.race.choosing import RememberedTimes, choice_key, load_choice, save_choice
from narrowcast.programs.program import Operand as Read, Step, Value
from narrowcast.reports.results.profile import (
    Device,
    Profile,
    Sample,
    cache_folder,
    load_profile,
    profile_path,
    set_aside,
)
from narrowcast.runtime.devices.device import device_now
from narrowcast.runtime.devices.measure import Measurable, MeasuredOperand, measure
from narrowcast.runtime.devices.prices import CostModel
from narrowcast.runtime.devices.signature import Signature, cast_signature, known_shape, signature_of
from narrowcast.runtime.devices.sweep import basics, foreign_profile, keep, known_profile, sweep

H200 = Device("cuda", "NVIDIA H200", ("sm_90",), 1, "2.13.0")


def sample(ns, flops=1000.0, moved=100.0, family="gemm", format="fp32", backward=False):
    return Sample(family, format, backward, flops, moved, 10, ns, ns * 0.9, ns * 1.1, 5)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NARROWCAST_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_a_profile_is_read_back(folder):
    """The file holds device and samples, and its name says whose they are."""
    profile = Profile(H200, {"a": sample(5.0), "b": sample(7.0, format="bf16")})
    path = profile.write()
    assert path.parent == folder / "profiles"
    assert "nvidia-h200" in path.name
    assert "2.13.0" in path.name
    found = Profile.read(path)
    assert (found.device, found.samples) == (H200, profile.samples)
    assert load_profile(H200).samples == profile.samples


def test_two_writers_lose_nothing(folder):
    """Two processes that measured other things both find everything in the file."""
    program = (
        "import sys; from narrowcast.reports.results.profile import Profile, Device, Sample\n"
        "d = Device('cuda', 'NVIDIA H200', ('sm_90',), 1, '2.13.0')\n"
        "for n in range(15):\n"
        "    p = Profile(d, {f'{sys.argv[1]}{n}': Sample('gemm', 'fp32', False, 1, 1, 1, 5, 4, 6, 3)})\n"
        "    p.write()\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", program, name]) for name in "ab"]
    assert [process.wait(120) for process in running] == [0, 0]
    assert len(load_profile(H200).samples) == 30


@pytest.mark.parametrize(
    "text",
    [
        "", "not json", "[]", '{"schema": "narrowcast.profile/99"}', '{"schema": "narrowcast.profile/1"}',
        '{"schema": "narrowcast.profile/1", "device": {"type": 1}, "samples": {}}',
        '{"schema":"narrowcast.profile/1","device":{"type":"cpu","name":"x","units":[],"threads":1,"torch":"2"},'
        '"samples":{"a":{"family":"gemm","format":"fp32","backward":false,"flops":1,"moved_bytes":1,"elements":1,'
        '"ns":-5,"lower_ns":1,"upper_ns":1,"rounds":1}}}',
    ],
)  # fmt: skip
def test_a_file_that_is_no_profile_is_set_aside(folder, text):
    """An error where it was asked for by name; a warning and a new start where it is the device's own."""
    path = profile_path(H200)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ProfileError) as caught:
        Profile.read(path)
    assert str(path) in str(caught.value)
    with pytest.warns(UserWarning, match="measuring starts again"):
        assert load_profile(H200).samples == {}
    (aside,) = path.parent.glob("*.unreadable-*")
    assert aside.read_text() == text
    assert not path.exists()


def test_a_file_that_turns_unreadable_before_writing_is_kept(folder):
    """Writing over a broken file would lose it: it is set aside, and the new one written."""
    profile = Profile(H200, {"a": sample(5.0)})
    path = profile.write()
    path.write_text("broken")
    profile.write()
    assert Profile.read(path).samples == profile.samples
    assert len(list(path.parent.glob("*.unreadable-*"))) == 1
    assert set_aside(folder / "nothing") == "could not be moved (FileNotFoundError)"


def test_another_devices_file_is_not_written_to(folder):
    """The samples of two devices never mix."""
    path = Profile(H200, {"a": sample(5.0)}).write(folder / "p.json")
    other = Profile(replace(H200, threads=2), {"b": sample(6.0)})
    with pytest.raises(ProfileError, match="NVIDIA H200"):
        other.write(path)
    assert set(Profile.read(path).samples) == {"a"}


def test_a_folder_that_cannot_be_written_to_is_said_once(folder, monkeypatch):
    """A read-only home: what was measured holds for the process, with one warning."""
    (folder / "file").write_text("")
    monkeypatch.setenv("NARROWCAST_CACHE_DIR", str(folder / "file" / "below"))
    profile = Profile(H200, {"a": sample(5.0)})
    with pytest.raises(ProfileError, match="NARROWCAST_CACHE_DIR"):
        profile.write()
    profile.path = profile_path(H200)
    with pytest.warns(UserWarning, match="NARROWCAST_CACHE_DIR"):
        keep(profile)
    keep(profile)  # and no second warning, which would be an error here
    assert profile.samples
    assert not save_choice("key", RememberedTimes("placed", {}, {}, 0, 0.0))


def test_a_full_disk_leaves_the_old_file(folder, monkeypatch):
    """The write fails half way; what was there is still there."""
    profile = Profile(H200, {"a": sample(5.0)})
    path = profile.write()
    before = path.read_text()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    profile.samples["b"] = sample(6.0)
    with pytest.raises(ProfileError, match="no space left"):
        profile.write()
    assert path.read_text() == before
    assert [f.name for f in path.parent.iterdir() if f.suffix == ".tmp"] == []


def test_a_foreign_profile_plans_and_is_refused_for_verification(folder):
    """Times of another machine say nothing of what is measured here."""
    path = Profile(H200, {"a": sample(5.0)}).write(folder / "h200.json")
    assert foreign_profile(str(path), "cpu", verify=False).device == H200
    with pytest.raises(ProfileError) as caught:
        foreign_profile(str(path), "cpu", verify=True)
    assert "NVIDIA H200" in caught.value.asked
    assert "verify=False" in caught.value.advice
    with pytest.raises(ProfileError):
        foreign_profile(str(folder / "missing.json"), "cpu", verify=False)


def test_choices_are_kept_and_broken_ones_set_aside(folder):
    """What was chosen is found again by another process; a broken file is no choice."""
    key = choice_key(H200, "program", "inputs")
    assert key == choice_key(H200, "program", "inputs") != choice_key(H200, "program", "other inputs")
    assert load_choice(key, ["placed"]) is None
    made = RememberedTimes("placed", {"placed": 5.0, "high": 6.0}, {"placed": 0.1, "high": 0.1}, 7, 0.5)
    assert save_choice(key, made)
    assert load_choice(key, ["placed", "high"]) == replace(made, from_disk=True)
    assert load_choice(key, ["policy", "high"]) is None
    (cache_folder() / "choices" / f"{key}.json").write_text("{")
    with pytest.warns(UserWarning, match="could not be read"):
        assert load_choice(key, ["placed", "high"]) is None


# -- measuring ---------------------------------------------------------------------------------------------------------


def mm(format, m=16, k=32, n=8, backward=False):
    types = (format.name,) * 2
    operands = tuple(MeasuredOperand(s, (s[1], 1), format.name, "cpu", backward) for s in ((m, k), (k, n)))
    signature = Signature("aten.mm.default", types, ((m, k), (k, n)), (m, n), format, "", backward)
    return Measurable(signature, torch.ops.aten.mm.default, operands, {})


def test_measuring_adds_what_is_missing(monkeypatch):
    """Formats of one call side by side; what the profile has is not measured again; random state is untouched."""
    monkeypatch.setattr(sys.modules[measure.__module__], "UNSURE", float("inf"))  # however busy the machine is
    profile = Profile(device_now())
    state = torch.get_rng_state()
    assert measure(profile, [[mm(fp32), mm(bf16)]]) == 2
    assert torch.equal(state, torch.get_rng_state())
    assert measure(profile, [[mm(fp32), mm(bf16)]]) == 0
    found = profile.samples[mm(bf16).signature.text]
    assert found.family == "gemm"
    assert found.flops == 2 * 16 * 32 * 8
    assert 0 < found.lower_ns <= found.ns <= found.upper_ns
    assert measure(profile, [[mm(fp32, backward=True)]]) == 1
    assert profile.samples[mm(fp32, backward=True).signature.text].ns > 0


def test_what_cannot_run_and_what_is_too_large_is_left_out():
    """A call that raises has no time, and neither has one that does not fit; no time left, nothing measured."""
    profile = Profile(device_now())
    wrong = mm(fp32)
    wrong = replace(wrong, args=(wrong.args[0], wrong.args[0]))
    huge = mm(fp32, 2**16, 2**16, 2**16)
    assert measure(profile, [[wrong], [huge]]) == 0
    assert measure(profile, [[mm(fp32)]], seconds=0) == 0


def test_measuring_is_real_while_something_is_traced_on_fake_tensors():
    """Under a fake mode the call that is timed is that on tensors with memory, not its shadow."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    kinds = set()

    def product(a, b):
        kinds.add(type(a))
        return torch.mm(a, b)

    profile = Profile(device_now())
    with FakeTensorMode():
        measure(profile, [[replace(mm(fp32, 64, 64, 64), op=product)]])
    assert kinds == {torch.Tensor}
    assert profile.samples[mm(fp32, 64, 64, 64).signature.text].ns > 0


def test_the_sweep_has_every_family_and_each_call_once():
    """All families of calls, both directions, each format."""
    groups = sweep("cpu")
    texts = [m.signature.text for group in groups for m in group]
    assert len(texts) == len(set(texts))
    families = {m.signature.family for group in groups for m in group}
    assert families >= {"gemm", "conv", "attention", "norm", "softmax", "reduction", "pointwise", "copy"}
    assert {m.signature.backward for group in groups for m in group} == {True, False}
    assert {m.signature.format for group in groups for m in group} == {fp32, bf16, fp16}
    assert basics("cpu")


# -- the model ---------------------------------------------------------------------------------------------------------


def test_the_model_interpolates_and_says_how_sure_it_is():
    """Measured calls as they are; between them a roofline, near ones surer than far ones; an unknown family assumed."""
    profile = Profile(H200)
    for n in (64, 128, 256, 512, 1024):
        call = mm(fp32, n, n, n).signature
        work = call.work
        profile.samples[call.text] = sample(1000 + 0.01 * work.flops, work.flops, work.moved_bytes)
    model = CostModel(profile)
    exact = model.estimate(mm(fp32, 256, 256, 256).signature)
    assert exact.source == "measured"
    between = model.estimate(mm(fp32, 384, 384, 384).signature)
    expected = 1000 + 0.01 * mm(fp32, 384, 384, 384).signature.work.flops
    assert between.source == "interpolated"
    assert between.ns == pytest.approx(expected, rel=0.1)
    far = model.estimate(mm(fp32, 8192, 8192, 8192).signature)
    assert far.factor > between.factor >= 1.0
    unknown = model.estimate(mm(bf16, 64, 64, 64).signature)
    assert unknown.source == "assumed"
    assert unknown.factor >= 5
    backward = model.estimate(mm(fp32, 384, 384, 384, backward=True).signature)
    assert backward.ns == pytest.approx(3 * between.ns)


def test_new_samples_are_seen_at_once():
    """No stale interpolation after measuring."""
    profile = Profile(H200)
    model = CostModel(profile)
    call = mm(fp32).signature
    assert model.estimate(call).source == "assumed"
    profile.samples[call.text] = sample(5.0)
    assert model.estimate(call).ns == 5.0


def test_signatures_know_their_work():
    """Operations of products, convolutions and attention; bytes by format; symbolic sizes by what they represent."""
    conv = Signature("aten.conv2d.default", ("fp32", "fp32"), ((1, 3, 8, 8), (4, 3, 3, 3)), (1, 4, 8, 8), fp32)
    assert conv.work.flops == 2 * (4 * 64) * 27
    attention = Signature(
        "aten.scaled_dot_product_attention.default", ("bf16",) * 3, ((2, 4, 16, 8),) * 3, (2, 4, 16, 8), bf16
    )
    assert attention.work.flops == 4 * (2 * 4 * 16 * 8) * 16
    assert attention.work.moved_bytes == 4 * 2 * (2 * 4 * 16 * 8)
    assert cast_signature(("s0", 4), fp32, bf16, {"s0": 3}).shapes == ((3, 4),)
    assert known_shape(("s1",), {}) == (64,)
    step = Step(Value(2, "bf16", (4, 2), "cpu"), "aten.mm.default", (Read("self", 0), Read("mat2", 1)), computes=True)
    values = [Value(0, "bf16", (4, 3), "cpu"), Value(1, "bf16", (3, 2), "cpu", True)]
    text = signature_of(step, values, fp32, weights=(1,)).text
    assert text == "aten.mm.default(fp32[4, 3], fp32[3, 2]) streams 1 with backward"


def test_threads_of_one_process_share_a_profile(folder):
    """The device's profile is loaded once, and has what a cost model needs at least."""
    found = []
    running = [threading.Thread(target=lambda: found.append(known_profile("cpu")), daemon=True) for _ in range(3)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(60)
    assert all(profile is found[0] for profile in found)
    assert CostModel(found[0]).estimate(cast_signature((1000,), fp32, bf16)).source != "assumed"


def test_the_file_is_json_that_others_can_read(folder):
    """Schema, device, samples by signature."""
    path = Profile(H200, {"aten.mm.default(...)": sample(5.0)}).write()
    data = json.loads(path.read_text())
    assert data["schema"] == "narrowcast.profile/1"
    assert data["device"]["name"] == "NVIDIA H200"
    assert data["samples"]["aten.mm.default(...)"]["ns"] == 5.0
    assert os.access(path, os.R_OK)


def test_a_limited_instruction_set_is_another_device(monkeypatch):
    """What oneDNN takes without bf16 units says nothing about what it takes with them."""
    from narrowcast.runtime.devices.device import device_now, this_device

    free = device_now()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE" if "AVX512_CORE" not in str(free.units) else "AVX2")
    this_device.cache_clear()
    limited = device_now()
    monkeypatch.undo()
    this_device.cache_clear()
    assert limited != free and device_now() == free
    assert limited.name == free.name


def test_a_folder_that_may_not_be_entered_holds_nothing(folder, monkeypatch):
    """Not an error: what is measured holds for the process, as where nothing was kept."""

    def closed(path, **_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", closed)
    assert not load_profile(H200).samples
    assert load_choice("key", ["placed"]) is None


@pytest.mark.parametrize(("name", "value"), [("ns", float("inf")), ("upper_ns", float("nan")), ("elements", "many")])
def test_a_sample_with_numbers_that_are_none_is_refused(name, value):
    """Infinite times would make every placement's cost infinite."""
    data = json.loads(Profile(H200, {"a": sample(5.0)}).to_json())
    data["samples"]["a"][name] = value
    with pytest.raises(ProfileError, match="a sample with the numbers"):
        Profile.from_json(json.dumps(data))
