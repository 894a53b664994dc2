"""`make conformance` and `make bench` go on where they ended, and say what has not passed."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("long_suite", ROOT / "tools/long_suite.py")
long_suite = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(long_suite)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The command, on three parts of which the second fails until a file is there."""
    count, mended = tmp_path / "count", tmp_path / "mended"
    parts = {
        "one": f"echo one >> {count}",
        "two": f"echo two >> {count}; test -e {mended}",
        "three": f"echo 3 >> {count}",
    }
    monkeypatch.setitem(long_suite.SUITES, "conformance", parts)
    monkeypatch.setattr(long_suite, "commit", lambda: "abc")

    def command(*words):
        monkeypatch.setattr(sys, "argv", ["long_suite.py", "conformance", "--keep", str(tmp_path / "kept"), *words])
        return long_suite.main(), count.read_text().split() if count.exists() else []

    command.mended, command.kept = mended, tmp_path / "kept/conformance"
    return command


def test_a_part_that_failed_runs_again_and_those_that_passed_do_not(run, capsys):
    """The others run although one fails; the summary has all."""
    assert run() == (1, ["one", "two", "3"])
    assert "two                  failed in 0 s" in capsys.readouterr().out
    run.mended.touch()
    assert run() == (0, ["one", "two", "3", "two"])
    assert run("--again", "--only", "one") == (0, ["one", "two", "3", "two", "one"])


def test_what_ran_at_another_commit_or_was_stopped_does_not_count(run, capsys):
    """Nor what has no result yet."""
    assert run("--summary")[0] == 0 and "not run" in capsys.readouterr().out
    run("--only", "one")
    file = run.kept / "one.json"
    row = json.loads(file.read_text())
    assert row["code"] == 0 and row["machine"]["torch"] and row["commit"] == "abc"
    file.write_text(json.dumps({**row, "commit": "other"}))
    assert run("--only", "one")[1] == ["one", "one"]


def test_a_part_that_there_is_not_is_refused(run):
    """With those that there are."""
    with pytest.raises(SystemExit):
        run("--only", "four")


def test_each_part_names_files_that_exist():
    """Scripts and tests of the repository."""
    for suite in ("conformance", "bench"):
        for part, line in long_suite.SUITES[suite].items():
            names = [word for word in line.split() if word.endswith(".py") or word.startswith("tests/")]
            assert part and all((ROOT / name).exists() for name in names), line
