"""A disk that is full: it is said with the file's name, and nothing half-written is left."""

import resource
import signal
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import narrowcast as nc


@contextmanager
def room_for(size_bytes):
    """No file may grow beyond this; what is written more fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(64, 64)


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))


def watched(x):
    with nc.watch() as w:
        torch.log(x - x - 1)
    return w


MAKE = {
    "run": lambda model, x: nc.capture(model, (x,)),
    "comparison": lambda model, x: nc.compare(model, (x,), under="bf16", isolate=0),
    "fit": lambda model, x: nc.capture(model, (x,)).headroom(),
    "watching": lambda model, x: watched(x),
}


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("kind", MAKE)
def test_a_result_is_saved_whole_or_not_at_all(kind, there, model, x, tmp_path):
    """The error names the file, earlier contents stay, and saving works once there is room."""
    found, path = MAKE[kind](model, x), tmp_path / "saved.json"
    if there:
        path.write_text("what was there")
    with room_for(256), pytest.raises(nc.errors.RunError, match=r"saved\.json: file too large") as error:
        found.save(path)
    assert "has room; nothing was written" in str(error.value)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("saved.json", "what was there")] * there
    found.save(path)
    assert path.stat().st_size > 256


def test_tensors_that_have_no_room_take_those_before_with_them(model, x, tmp_path):
    """A capture that fails halfway removes the files it had written; a later one writes every file it lists."""
    run = lambda: nc.capture(nn.Sequential(nn.Linear(64, 8), nn.Linear(8, 512)), (x,), tensors=tmp_path / "tensors")
    with room_for(1 << 16), pytest.raises(nc.errors.RunError, match="writing tensors into"):
        run()
    assert not list((tmp_path / "tensors").iterdir())
    assert {t.file for t in run().tensors} - {""} == {file.name for file in (tmp_path / "tensors").iterdir()}


def test_a_finding_is_saved_whole_or_not_at_all(x, tmp_path):
    """If the tensors of a reproducer do not fit, not even its folder remains."""
    finding = watched(x).first
    with room_for(1 << 12), pytest.raises(nc.errors.RunError, match="saving a call into"):
        finding.save(tmp_path / "repro")
    assert not list(tmp_path.iterdir())
    assert finding.save(tmp_path / "repro").exists()


def test_a_log_that_is_full_ends_with_a_whole_line_and_the_run_goes_on(x, tmp_path):
    """Later findings are still collected, and a note says at which step the log ended."""
    log, free = tmp_path / "log.jsonl", tmp_path / "free.jsonl"
    with nc.watch(log=free):
        torch.log(x - x - 1)
    line = len(free.read_text())
    with room_for(2 * line), nc.watch(log=log) as w:
        torch.sqrt(-x.abs() - 1)
        torch.acos(x.abs() + 2)
        torch.atanh(x.abs() + 2)
        torch.log(-x.abs())
    assert len(w.findings) >= 3 and w.notes and "log.jsonl ends at step 0" in w.notes[0], w
    text = log.read_text()
    assert text.endswith("}\n") and 1 <= text.count("\n") < len(w.findings), text
