"""The runner of benchmarks/gpu: what passes, fails, hangs or is not there is written down as what it is."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
RUN = ROOT / "benchmarks/gpu/run.py"
PARTS = Path(__file__).parent / "gpu_parts.py"


def run(*arguments, **environment):
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment}
    return subprocess.run([sys.executable, str(RUN), *arguments], capture_output=True, text=True, check=False, env=env)


def run_parts(folder, *arguments):
    """The parts of the test on the cpu; the output, and the result files by part."""
    done = run("--device", "cpu", "--small", "--parts", str(PARTS), "--results", str(folder), *arguments)
    found = {file.stem: json.loads(file.read_text()) for file in (folder / names(folder)[0]).glob("*.json")}
    return done, found


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_one_line_says_why():
    """And the exit status is 0."""
    done = run()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("skipped: no GPU here") and len(done.stdout.splitlines()) == 1


def test_make_gpu_needs_no_environment_of_its_own():
    """The command is the given interpreter's alone."""
    command = ["make", "--no-print-directory", "-n", "gpu", "PYTHON=/some/python", "ARGS=--list"]
    around = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # make test runs this
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=around)
    assert done.stdout.strip() == "PYTHONPATH=src /some/python benchmarks/gpu/run.py --list"


def test_a_missing_package_is_named(tmp_path):
    """With what to install, and exit status 2."""
    blocker = "import importlib.util as u; f = u.find_spec; "
    blocker += "u.find_spec = lambda name, *a: None if name in ('tomlkit', 'platformdirs') else f(name, *a)"
    (tmp_path / "sitecustomize.py").write_text(blocker)
    done = run("--device", "cpu", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT / 'src'}")
    assert done.returncode == 2
    assert "-m pip install 'platformdirs>=" in done.stdout and "'tomlkit>=" in done.stdout


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """All parts once, each with two seconds."""
    folder = tmp_path_factory.mktemp("results")
    done, found = run_parts(folder, "--limit", "2")
    return folder, done, found


def test_each_outcome_is_written_down(ran):
    """A part that fails, raises, dies or hangs does not keep the next ones from running."""
    _, done, found = ran
    outcomes = {name: result["outcome"] for name, result in found.items()}
    assert outcomes == {"passes": "passed", "fails": "failed", "raises": "failed", "skips": "skipped",
                        "dies": "crashed", "hangs": "killed", "resumes": "passed"}  # fmt: skip
    assert done.returncode == 1
    assert found["passes"]["data"] == {"figure": 7}
    assert [c["outcome"] for c in found["fails"]["checks"]] == ["failed", "failed", "ok"]
    assert "what it said" in found["raises"]["reason"] and found["raises"]["output"]
    assert found["skips"]["reason"] == "the package nothing is not installed"
    assert found["hangs"]["checks"] == [{"name": "before", "outcome": "ok", "detail": ""}]
    assert "left: dies, hangs" in done.stdout


def test_every_result_says_where_it_was_taken(ran):
    """The machine's facts, and what the result holds for."""
    for result in ran[2].values():
        assert result["machine"]["torch"] == torch.__version__ and result["machine"]["cpu"]
        assert result["key"]["source"] and result["date"] and result["machine"]["flags"]


@pytest.mark.slow
def test_what_is_finished_is_not_run_again(ran):
    """Until it is asked for; what was killed or skipped is tried again."""
    folder, _, before = ran
    done, _ = run_parts(folder, "--only", "passes", "fails", "skips")
    assert (
        "passes: passed on" in done.stdout and "fails: failed on" in done.stdout and "a part that skips" in done.stdout
    )
    assert done.returncode == 1
    done, found = run_parts(folder, "--only", "passes", "--again")
    assert done.returncode == 0 and "a part that passes" in done.stdout
    assert found["fails"]["date"] == before["fails"]["date"]


@pytest.mark.slow
def test_other_sources_make_results_stale(ran):
    """A result is good for the source that it came from."""
    folder = ran[0]
    file = next(folder.glob("*/passes.json"))
    result = json.loads(file.read_text())
    result["key"]["source"] = "another"
    file.write_text(json.dumps(result))
    done = run("--device", "cpu", "--small", "--parts", str(PARTS), "--results", str(folder), "--list")
    assert "passes" in done.stdout and "missing" in done.stdout.split("a part that passes")[0].splitlines()[-1]


@pytest.mark.slow
def test_a_budget_leaves_the_rest(tmp_path):
    """And says what is left; that is no failure."""
    done = run("--device", "cpu", "--small", "--parts", str(PARTS), "--results", str(tmp_path), "--budget", "0")
    assert done.returncode == 0
    assert "left: passes, fails" in done.stdout


# -- the table ---------------------------------------------------------------------------------------------------------


def load(name):
    folder = str(ROOT / "benchmarks/gpu")
    if folder not in sys.path:
        sys.path.append(folder)
    spec = importlib.util.spec_from_file_location(name, ROOT / f"benchmarks/gpu/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MACHINE = {"gpu": "NVIDIA H200", "gpu_memory_gib": 139.8, "capability": "9.0", "gpus": 1, "torch": "2.11.0+cu130",
           "python": "3.12.1", "cpu": "a processor", "cores": 16, "cuda": "13.0", "commit": "abc", "is_changed": False,
           "flags": {"cudnn.allow_tf32": "True"}}  # fmt: skip


def result(part, data, checks=()):
    return {"schema": "narrowcast.gpu/1", "part": part, "outcome": "passed", "seconds": 5.0, "date": "2026-01-02T03:04",
            "machine": MACHINE, "key": {}, "checks": list(checks), "data": data}  # fmt: skip


def side(ms):
    return {"ms": ms, "held_mib": 10.0, "peak_mib": 20.0}


def test_the_table_has_what_was_found(tmp_path):
    """Facts, conformance, times, memory, between the page's markers, and nothing else of the page changes."""
    table = load("table")
    folder = tmp_path / "results/nvidia-h200"
    folder.mkdir(parents=True)
    sides = {"eager native": side(2.0), "compiled native": side(1.5), "ours fast": side(1.25)}
    ratios = {"best other": "compiled native", "fast over best other": 0.8333, "compiled native over fast": 1.2}
    data = {"model": "gpt", "mode": "train", "weights_mib": 400.0, "sides": sides, "ratios": ratios}
    failed = {"name": "relu: as native", "outcome": "failed", "detail": "bits | differ"}
    found = [result("placement-gpt-train", data), result("smoke", {}, [failed]),
             result("ops-1-of-6", {"ops": 100, "samples": 2000, "with gradients": 900, "differences": 1})]  # fmt: skip
    for one in found:
        (folder / f"{one['part']}.json").write_text(json.dumps(one))
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGIN}\nwhat was there\n{table.END}\nafter\n")
    assert table.main(["--results", str(tmp_path / "results"), "--into", str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "what was there" not in text
    for expected in ("NVIDIA H200 (139.8 GiB", "| gpt, train |", "0.8333", "10 + 20", "100 ops, 2000 samples",
                     "relu: as native: bits \\| differ"):  # fmt: skip
        assert expected in text, text


def test_a_table_of_nothing_says_so(tmp_path):
    """Also where only a small test run was made, or a file cannot be read; a page without markers is an error."""
    table = load("table")
    small = tmp_path / "cpu-small"
    small.mkdir()
    (small / "smoke.json").write_text(json.dumps(result("smoke", {})))
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu/smoke.json").write_text("{")
    assert table.section(tmp_path) == table.NOTHING
    page = tmp_path / "page.md"
    page.write_text("no markers")
    assert table.main(["--results", str(tmp_path), "--into", str(page)]) == 1


def test_the_page_has_the_markers_and_tells_the_truth():
    """Without results of a GPU it says that there are none."""
    table = load("table")
    text = (ROOT / "docs/internals/benchmarks.md").read_text()
    assert table.BEGIN in text and table.END in text
    inside = text.partition(table.BEGIN)[2].partition(table.END)[0]
    assert (inside.strip() == table.NOTHING) == (table.section(ROOT / "benchmarks/results/gpu") == table.NOTHING)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["lists", "weights-at-rest", "cuda-graphs", "ops-1-of-6"])
def test_real_parts_run_on_the_cpu_in_small(tmp_path, part):
    """What runs on a GPU is no dead code here."""
    done = run("--device", "cpu", "--small", "--results", str(tmp_path), "--only", part)
    assert done.returncode == 0, done.stdout[-3000:]
    outcome = json.loads((tmp_path / names(tmp_path)[0] / f"{part}.json").read_text())["outcome"]
    assert outcome == ("skipped" if part == "cuda-graphs" else "passed")


BROKEN = """
import time
from dataclasses import replace
from context import Context
from parts import ops
from same import differences
import narrowcast as nc, torch

assert differences({"a": torch.ones(2)}, {"a": torch.ones(2) + 1e-6})
assert not differences({"a": torch.ones(2)}, {"a": torch.ones(2)})
assert differences({"a": torch.ones(2)}, {"a": torch.ones(2).double()}) and differences({}, {"a": torch.ones(2)})
sweep = ops.conformance_sweep()
(info,) = [i for i in sweep.op_db if i.formatted_name == "mm"]
context = Context("cpu", True, time.monotonic() + 100)
rules = ops.mirror("cpu")
assert not ops._one_op(context, sweep, info, rules)["differences"]
wrong = rules.with_rules(nc.Rule("aten.mm", "full", override=True))
assert ops._one_op(context, sweep, info, wrong)["differences"]
"""


@pytest.mark.slow
def test_the_comparisons_see_what_differs():
    """Shown values that differ in a bit, in a dtype, or are missing, and a policy with one wrong rule."""
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT / "benchmarks/gpu")))
    done = subprocess.run([sys.executable, "-c", BROKEN], capture_output=True, text=True, check=False,
                          env={**os.environ, "PYTHONPATH": path})  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
