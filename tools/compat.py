"""Run all tests with every supported torch, and write docs/reference/compatibility.md.

    python tools/compat.py                      each version in a .venv of its own, removed afterwards
    python tools/compat.py --only 2.15          one version; the rows of the others stay
    python tools/compat.py --keep FOLDER        keep the environments there, and use those that are there
    python tools/compat.py --runs               no tests; models are captured and compared (version_runs.py) alone
    python tools/compat.py --again              only the tests that failed in the last run, with this commit

torch comes in its default build, which runs on a CPU and brings some gigabytes. What was found is kept beside the page,
in docs/reference/compatibility.json. Models are compared with the torch of the interpreter that runs this: 2.13.0.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import textwrap
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from version_runs import REFERENCE, capture_with, compare_versions, section

ROOT = Path(__file__).parent.parent
PAGE, DATA = ROOT / "docs/reference/compatibility.md", ROOT / "docs/reference/compatibility.json"
# torch, and the Python to run it with where that is installed; the one that runs this otherwise.
MATRIX = {"2.11.0": "3.11", "2.12.1": "3.12", "2.13.0": "3.11", "2.14.1": "3.11", "2.15.0": "3.13"}
ROOMS = sorted(folder.name for folder in (ROOT / "tests").iterdir() if any(folder.glob("test_*.py")))
ALONE = ("facenet-pytorch", "scikit-image", "Resemblyzer", "auto3d", "torchani", "ase")

INTRODUCTION = """\
# Compatibility

torch 2.11 to 2.15, Python 3.11 to 3.13. `make compat` runs all tests with each and writes this page; `checkers` runs
the tests of the pure half, with torch blocked. Each assumption about torch's private parts is a named check
(`python -m narrowcast.runtime.torch_surface.probes`), which runs among these tests; those that stand before something
that would go wrong in silence run at first use, and say which assumption of which version broke.

The wheel was installed beside each of these torches, into an environment without anything else, and README and
quickstart were followed there with the commands and the code that they print (`tools/try_wheel.py --torch 2.11.0
2.12.1 2.13.0 2.14.1 2.15.0`).
"""
DIFFERENCES = """\
- **autocast's lists** differ by version, as data in `core/policy/builtin/*.toml` (`torch = ">=2.12"`): `rms_norm` came
  with 2.12 (cuda, xpu, mtia, maia), `linalg_matrix_sqrth` with 2.14 (cpu, cuda); `cholesky` and `qr` went with 2.14
  (cpu), the overloads with named dimensions with 2.13 (`softmax.Dimname`, `sum.dim_DimnameList` and others). Eager
  code follows the installed torch.
- **What the cpu has no kernel for** in a low format differs, too (`core/policy/builtin/lacks_cpu.toml`): `trace` before
  2.13, `polar` in fp16 before 2.14.
- **2.11** opens regions in graphs with `torch.autocast` itself, later ones with a class of its own: no difference
  in what is computed.
- **2.11 and 2.12** refuse to capture a `scan` a second time («might be aliasing»): such a graph falls back to eager
  autocast's casts, with a warning. Their own compiled regions leak more after an exception; ours leak nothing.
- **2.15** goes on capturing after a call that Dynamo leaves to Python (an LSTM): what follows in the same
  `forward` is a graph of its own and is placed, where earlier it was eager code and was timed op by op. `explain`
  shows such a call with line and reason in all versions.
  It follows `torch.autograd.grad` in a compiled forward, too, which earlier ones refuse without
  `backward="same_as_forward"`; and linear layers of batches are two calls on fake tensors, which move more bytes.
- **2.14 and later** say by FutureWarning that TorchScript is deprecated, earlier ones by DeprecationWarning.
  `nc.script` and `nc.trace` repeat neither.
- **Since 2.14 torch asks another question** to recognize a registered backend; ours answers both, so weights can be
  swapped after a compiled call in all versions.
"""


def environment(torch: str, folder: Path) -> Path:
    """The interpreter of an environment with this torch and what the tests need; made if it is not there."""
    python = folder / torch / "bin/python"
    if python.exists():
        return python
    subprocess.run([_base(MATRIX[torch]), "-m", "venv", str(folder / torch)], check=True)
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    constraints = folder / f"{torch}.txt"
    constraints.write_text("\n".join(line for line in lines if not line.startswith("torch==")), encoding="utf-8")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    pip += ["--constraint", str(constraints)]
    subprocess.run([*pip, "pip"], check=True)  # older ones know no dependency groups
    subprocess.run([*pip, f"torch=={torch}", "numpy"], check=True)
    groups = [f"--group={ROOT / 'pyproject.toml'}:{name}" for name in ("zoo", "dev")]
    subprocess.run([*pip, str(ROOT), *groups, f"torch=={torch}"], check=True)
    subprocess.run([*pip, "--no-deps", *ALONE], check=True)
    return python


def _base(version: str) -> str:
    """The interpreter of a version of Python, also where pyenv has it and does not show it; else the one that runs."""
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for one in (shutil.which(f"python{version}"), *map(str, installed)):
        if one and subprocess.run([one, "-V"], capture_output=True).returncode == 0:
            return one
    return sys.executable


def test(python: Path, only: Sequence[str] = ()) -> dict[str, object]:
    """What the tests gave with one interpreter, by part, and the names of those that failed. only: of these files."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [str(python), "-m", "pytest", "-q", "-n", "auto", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command += only
        settings = {"PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
        subprocess.run(command, cwd=ROOT, env={**os.environ, **settings}, check=False)
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    parts: dict[str, Counter[str]] = {}
    failed, skipped = [], []
    for case in cases:
        part = case.get("classname", "").split(".")[1]
        outcome = next((tag for tag in ("failure", "error", "skipped") if case.find(tag) is not None), "passed")
        parts.setdefault(part, Counter())[outcome] += 1
        name = f"{case.get('classname')}::{case.get('name')}"
        failed += [name] * (outcome in ("failure", "error"))
        skipped += [name] * (outcome == "skipped")
    head = subprocess.run(["git", "log", "-1", "--format=%h %cs"], cwd=ROOT, capture_output=True, text=True, check=True)
    return {
        "commit": head.stdout.strip(),
        "failed": failed,
        "skipped": skipped,
        "parts": {part: dict(sorted(counts.items())) for part, counts in sorted(parts.items())},
    }


def again(python: Path, row: dict[str, Any]) -> dict[str, object]:
    """What a row becomes where the files of tests that failed are run again, with this commit."""
    names = [name.rpartition("::")[0].split(".") for name in row["failed"]]
    files = {next(f for n in range(len(name), 0, -1) if (f := ROOT / ("/".join(name[:n]) + ".py")).is_file())
             for name in names}  # fmt: skip
    if not files:
        return {}
    found = test(python, sorted(map(str, files)))
    parts = {part: dict(counts) for part, counts in row["parts"].items()}
    for name in row["failed"]:
        counts, is_right = parts[name.split(".")[1]], name not in found["failed"]
        now = "skipped" if name in found["skipped"] else "passed"
        counts["failure" if counts.get("failure") else "error"] -= is_right
        counts[now] = counts.get(now, 0) + is_right
    left = [name for name in row["failed"] if name in found["failed"]]
    return {"failed": left, "parts": parts, "again": found["commit"]}


def versions_of(python: Path) -> dict[str, str]:
    """Of torch and of Python."""
    says = "import platform, torch; print(torch.__version__, platform.python_version())"
    found = subprocess.run([str(python), "-c", says], capture_output=True, text=True, check=True).stdout.split()
    return {"torch": found[0], "python": found[1]}


def page(rows: dict[str, dict]) -> str:
    """The document."""
    tested = [row for row in rows.values() if "parts" in row and set(row["parts"]) <= set(ROOMS)]
    names = sorted({part for row in tested for part in row["parts"]})
    head = "| torch | Python | commit | " + " | ".join(names) + " |"
    lines = [head, "|" + "---|" * (len(names) + 3)]
    for row in tested:
        cells = []
        for part in names:
            counts = row["parts"].get(part, {})
            bad = counts.get("failure", 0) + counts.get("error", 0)
            cells.append(f"{counts.get('passed', 0)} passed" + (f", **{bad} failed**" if bad else ""))
        commit = row["commit"] + (f"; what failed again with {row['again']}" if "again" in row else "")
        lines.append(f"| {row['torch']} | {row['python']} | {commit} | " + " | ".join(cells) + " |")
    earlier = [row for row in rows.values() if "parts" in row and row not in tested]
    if earlier:
        sums = [(row["torch"], sum(counts.get("passed", 0) for counts in row["parts"].values())) for row in earlier]
        said = "; ".join(f"{torch}, {passed:,} passed" for torch, passed in sums)
        text = f"Run with an earlier layout of the tests, and not since: {said}."
        lines += ["", *textwrap.wrap(text, 120, break_long_words=False)]
    failed = [f"- {row['torch']}: `{name}`" for row in tested for name in row["failed"]]
    ran = f"Run on {platform.machine()}, {os.cpu_count()} cores, without a GPU. Expected failures count as skipped."
    shown = [INTRODUCTION, *lines, "", ran, "", "## What differs", "", DIFFERENCES, *section(rows)]
    return "\n".join([*shown, *(["## What fails", "", *failed, ""] if failed else [])])


def main() -> None:
    """Run them, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="one version, 2.15 or 2.15.0")
    parser.add_argument("--keep", type=Path, help="a folder for the environments, which then stay")
    parser.add_argument("--runs", action="store_true", help="capture and compare models, and run no tests")
    parser.add_argument("--again", action="store_true", help="run only what failed in the last run")
    given = parser.parse_args()
    if version("torch").partition("+")[0] != REFERENCE:
        raise SystemExit(f"Models are compared with torch {REFERENCE}; here is {version('torch')}. Run make compat.")
    with tempfile.TemporaryDirectory(prefix="narrowcast-runs-") as runs:
        reference = capture_with(sys.executable, _folder(runs, "reference"))
        for torch in MATRIX:
            if given.only and not torch.startswith(given.only):
                continue
            sys.stdout.write(f"== torch {torch}\n")
            sys.stdout.flush()
            if given.again:
                row = json.loads(DATA.read_text(encoding="utf-8"))[torch]
                _write(torch, again(environment(torch, given.keep or Path(tempfile.mkdtemp())), row))
                continue
            folder = given.keep or Path(tempfile.mkdtemp(prefix="narrowcast-compat-"))
            try:
                python = environment(torch, folder)
                captured = capture_with(python, _folder(runs, torch))
                found = {"runs": {**versions_of(python), **compare_versions(reference, captured)}}
                found.update({} if given.runs else {**versions_of(python), **test(python)})
            finally:
                if given.keep is None:
                    shutil.rmtree(folder, ignore_errors=True)
            _write(torch, found)


def _folder(parent: str, name: str) -> Path:
    made = Path(parent) / name
    made.mkdir()
    return made


def _write(torch: str, found: dict[str, object]) -> None:
    """What was found, beside what was found earlier of this version and of the others."""
    rows = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
    rows[torch] = {**rows.get(torch, {}), **found}
    ordered = {name: rows[name] for name in MATRIX if name in rows}
    DATA.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(ordered), encoding="utf-8")


if __name__ == "__main__":
    main()
