"""`narrowcast profile` and goals in `narrowcast explain`, as a user runs them."""

import pytest

from narrowcast.cli import main
from narrowcast.reports.results.profile import Device, Profile, Sample

SUBJECT = """
import torch
import narrowcast as nc

def case():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    return nc.Case(model.eval(), (torch.ones(2, 8),), name="tiny")
"""


def call(*arguments):
    """Run the command; its exit code."""
    with pytest.raises(SystemExit) as done:
        main([str(a) for a in arguments])
    return done.value.code


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NARROWCAST_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def test_a_device_is_measured_and_shown(folder, capsys):
    """Measure for two seconds, show tables and a page, say where it is kept."""
    shipped = folder / "mine.json"
    assert call("profile", "--seconds", "2") == 0
    assert "calls measured" in capsys.readouterr().out
    assert call("profile", "--seconds", "2", "--output", shipped) == 0
    capsys.readouterr()
    assert call("profile", "show", "--all") == 0
    out = capsys.readouterr().out
    for words in ("A low format's time over fp32's, by family", "over fp32", "copy"):
        assert words in out, words
    assert call("profile", "show", shipped, "--all", "--html", folder / "page.html") == 0
    assert '"kind":"profile"' in (folder / "page.html").read_text(encoding="utf-8")
    capsys.readouterr()
    assert call("profile", "path") == 0
    assert str(folder / "cache") in capsys.readouterr().out.replace("\n", "")


def test_the_file_of_another_device_is_refused_before_anything_is_measured(folder, capsys, monkeypatch):
    """It stays as it was; a minute of measuring is not lost."""
    other = folder / "other.json"
    Profile(Device("cpu", "another machine", (), 4, "2.13.0")).write(other)
    before = other.read_text()
    monkeypatch.setattr("narrowcast.runtime.devices.measure.measure", lambda *_, **__: pytest.fail("measured"))
    assert call("profile", "--output", other) == 2
    assert "another machine" in capsys.readouterr().err
    assert other.read_text() == before


def test_what_was_measured_before_an_interrupt_is_kept(folder, capsys, monkeypatch):
    """Ctrl-C loses no minute of measuring."""

    def measure(profile, *_, **__):
        profile.samples["a"] = Sample("gemm", "fp32", False, 1.0, 1.0, 1, 5.0, 4.0, 6.0, 3)
        raise KeyboardInterrupt

    monkeypatch.setattr("narrowcast.runtime.devices.measure.measure", measure)
    assert call("profile", "--output", folder / "mine.json") == 130
    assert f"what was measured is in {folder / 'mine.json'}" in capsys.readouterr().err
    assert "a" in Profile.read(folder / "mine.json").samples


def test_what_cannot_be_done_is_said(folder, capsys):
    """No profile yet, no such device, no time, no folder for the plot, files that are none, nothing in common."""
    assert call("profile", "show") == 2
    assert "narrowcast profile" in capsys.readouterr().err
    for wrong in (("--device", "tpu"), ("--seconds", "0")):
        assert call("profile", *wrong) == 2
        assert "ProfileError" in capsys.readouterr().err
    (folder / "broken.json").write_text("{")
    assert call("profile", "show", folder / "broken.json") == 2
    assert "broken.json" in capsys.readouterr().err
    sample = Sample("gemm", "fp32", False, 1.0, 1.0, 1, 5.0, 4.0, 6.0, 3)
    device = Device("cuda", "NVIDIA H200", ("sm_90",), 1, "2.13.0")
    path = Profile(device, {"a": sample}).write(folder / "a.json")
    assert call("profile", "show", path, "--html", folder / "missing" / "x.html") == 2
    assert "folder does not exist" in capsys.readouterr().err
    assert call("profile", "--output", folder / "a.json", "--seconds", "1") == 2
    assert "NVIDIA H200" in capsys.readouterr().err


def test_explain_takes_a_goal(folder, capsys):
    """What each call may be and costs; a profile of another device plans, and is refused for verification."""
    file = folder / "tiny.py"
    file.write_text(SUBJECT)
    arguments = ("explain", file, "--under", "bf16", "--front-end", "export", "--goal", "fast", "--all")
    arguments += ("--backend", "eager")
    assert call(*arguments) == 0
    out = capsys.readouterr().out
    assert "Candidates" in out and "VERDICT: Goal fast: " in out
    sample = Sample("gemm", "fp32", False, 1.0, 1.0, 1, 5.0, 4.0, 6.0, 3)
    path = Profile(Device("cuda", "NVIDIA H200", ("sm_90",), 1, "2.13.0"), {"a": sample}).write(folder / "h200.json")
    assert call(*arguments, "--profile", path) == 2
    assert "verify=False" in capsys.readouterr().err
    assert call(*arguments, "--profile", path, "--no-verify") == 0
    assert "not timed" in capsys.readouterr().out
    assert call("explain", file, "--goal", "fast") == 2
    assert "GoalError" in capsys.readouterr().err
