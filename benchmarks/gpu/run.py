"""Conformance and benchmarks on a GPU, in parts that can be resumed. Needs the torch that is there, and no network.

    make gpu PYTHON=python3.12 [ARGS="--budget 1500"]
    python benchmarks/gpu/run.py [--list] [--only PART ...] [--again] [--jobs N] [--budget SECONDS] [--table]

Each part runs in a process of its own and is killed after its time limit (480 s). What is finished is kept in
benchmarks/results/gpu/MACHINE/PART.json and not run again while torch, the device and the sources are the same; so the
same command goes on where the last one ended, however it ended. The most valuable parts come first. With --jobs, parts
that compare bits run side by side, then those that measure time, each alone. Exit status 1 if any check failed, 2 if a
package is missing; where there is no GPU one line says so, and the status is 0.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import results
from part import Part
from parts_list import load_parts
from results import CRASHED, FAILED, FINISHED, KILLED, RESULTS, ROOT, RUNNING, UNFINISHED

HERE = Path(__file__).resolve().parent
GRACE_S = 15
"""A part may take so much longer than its limit: it stops itself before, and starting Python takes time."""
LAST_LINES = 60
_running: list[subprocess.Popen[str]] = []


def main() -> int:
    """Run what is missing."""
    options = _options()
    if options.table:
        import table

        return table.main([])
    parts = load_parts(options.parts)
    unknown = [name for name in options.only if name not in {p.name for p in parts}]
    if unknown:
        print(f"no such part: {', '.join(unknown)}; --list shows them")
        return 2
    if importlib.util.find_spec("torch") is None and options.device == "cuda" and not _has_driver():
        print(f"skipped: no GPU here (no NVIDIA driver is installed, and {sys.executable} has no torch)")
        return 0
    found = missing_packages()
    if found:
        if options.device == "cuda" and importlib.util.find_spec("torch") is not None and not _torch_sees_a_gpu():
            print(f"skipped: no GPU here (the torch of {sys.executable} finds none)")
            return 0
        wanted = " ".join(f"'{name}'" for name in found)
        print(
            f"{sys.executable} lacks what Narrowcast needs. Install it:\n    {sys.executable} -m pip install {wanted}"
        )
        return 2
    facts = ask_facts(options.device)
    if facts.get("missing"):
        print(f"skipped: no GPU here ({facts['missing']})")
        return 0
    signal.signal(signal.SIGTERM, _stop)
    folder = results.machine_folder(options.results, facts, options.small)
    if options.list:
        return _list(parts, folder, facts, options.small)
    chosen = [p for p in parts if not options.only or p.name in options.only]
    print(f"{facts.get('gpu') or facts['cpu']}, torch {facts['torch']}: {len(chosen)} parts, results in {folder}")
    left = run_parts(chosen, folder, facts, options)
    return summary(chosen, folder, facts, options.small, left)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="show the parts and what became of them")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="run these parts, if they are missing")
    parser.add_argument("--again", action="store_true", help="run also what is finished")
    parser.add_argument(
        "--budget", type=float, default=float("inf"), metavar="SECONDS", help="start no part after that"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="parts that run side by side")
    parser.add_argument("--limit", type=float, default=None, metavar="SECONDS", help="time limit of each part")
    parser.add_argument("--table", action="store_true", help="write docs/internals/benchmarks.md, run nothing")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: to test the parts")
    parser.add_argument("--small", action="store_true", help="small models: to test the parts")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--parts", type=Path, help="a Python file with other PARTS: to test the runner")
    return parser.parse_args()


# -- what is here ------------------------------------------------------------------------------------------------------


def missing_packages() -> list[str]:
    """What pyproject.toml asks for and this interpreter lacks, as pip takes it. A newer torch is tried all the same."""
    import tomllib

    asked = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    found = []
    for requirement in asked:
        name = re.match(r"[\w.-]+", requirement)[0]
        if importlib.util.find_spec(name.replace("-", "_")) is None or _is_too_old(name, requirement):
            found.append(requirement)
    return found


def _is_too_old(name: str, requirement: str) -> bool:
    least = re.search(r">=\s*([\d.]+)", requirement)
    try:
        here = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return least is not None and _numbers(here) < _numbers(least[1])


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.match(r"[\d.]*", version)[0].split(".") if n)


def _has_driver() -> bool:
    return shutil.which("nvidia-smi") is not None or any(
        Path(p).exists() for p in ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg", "/dev/kfd")
    )


def _torch_sees_a_gpu() -> bool:
    code = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 1)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def ask_facts(device: str) -> dict[str, Any]:
    """Facts of the machine, from a process of its own."""
    command = [sys.executable, str(HERE / "one_part.py"), "--facts", "--device", device]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment(None, {}), cwd=ROOT)
    for line in done.stdout.splitlines():
        if line.startswith("FACTS "):
            return dict(json.loads(line.removeprefix("FACTS ")))
    raise SystemExit(f"torch and Narrowcast cannot be imported by {sys.executable}:\n{done.stderr[-3000:]}")


def _environment(part: Part | None, facts: dict[str, Any]) -> dict[str, str]:
    """Ours is the source that runs, whatever is installed; nothing is downloaded; caches are of this run."""
    cache = Path(tempfile.gettempdir()) / f"narrowcast-gpu-{os.getuid()}-{results.source_digest()}"
    before = os.environ.get("PYTHONPATH", "")
    made = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT / "src"), str(HERE), before])),
        "NARROWCAST_CACHE_DIR": str(cache / str(facts.get("device_type", ""))),
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1",
    }  # fmt: skip
    if part is not None and part.exact:
        made["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it cuBLAS does not promise the same bits twice
    return made


# -- running -----------------------------------------------------------------------------------------------------------


def run_parts(chosen: list[Part], folder: Path, facts: dict[str, Any], options: argparse.Namespace) -> list[Part]:
    """Run what is not finished; the parts that there was no time for."""
    end = time.monotonic() + options.budget
    groups = [chosen] if options.jobs == 1 else [[p for p in chosen if not p.timed], [p for p in chosen if p.timed]]
    for number, group in enumerate(groups):
        workers = options.jobs if number == 0 else 1
        with ThreadPoolExecutor(workers) as pool:
            for _ in pool.map(lambda part: _run_if_missing(part, folder, facts, options, end), group):
                pass
    return [p for p in chosen if not _is_finished(p, folder, facts, options.small)] if time.monotonic() >= end else []


def _run_if_missing(part: Part, folder: Path, facts: dict[str, Any], options: argparse.Namespace, end: float) -> None:
    """One part, as often as its attempts allow while each keeps more; nothing after the end of the budget."""
    there = known(part, folder, facts, options.small)
    if there is not None and there["outcome"] in FINISHED and not options.again:
        print(f"{part.name}: {there['outcome']} on {there['date']}, kept")
        return
    if time.monotonic() >= end:
        return
    limit = options.limit or part.limit_s
    print(f"{part.name}: {part.about} (at most {limit:.0f} s)", flush=True)
    if options.again or there is None:
        there = {}
    for attempt in range(part.attempts):
        if attempt and time.monotonic() >= end:
            break
        kept = len(there.get("kept", {}))
        there = run_part(part, folder, facts, options, limit, there)
        again = there["outcome"] in (UNFINISHED, KILLED, CRASHED) and len(there.get("kept", {})) > kept
        if not again:
            break
    print(f"{part.name}: {there['outcome']} in {there['seconds']} s: {_counts(there)}{_because(there)}", flush=True)


def known(part: Part, folder: Path, facts: dict[str, Any], small: bool) -> dict[str, Any] | None:
    """What is there of a part, if it is of this torch, device and source."""
    there = results.read(folder / f"{part.name}.json")
    return there if there is not None and there.get("key") == results.key_of(part, facts, small) else None


def _is_finished(part: Part, folder: Path, facts: dict[str, Any], small: bool) -> bool:
    there = known(part, folder, facts, small)
    return there is not None and there["outcome"] in FINISHED


def run_part(
    part: Part, folder: Path, facts: dict[str, Any], options: argparse.Namespace, limit: float, before: dict[str, Any]
) -> dict[str, Any]:
    """Run one part in its process, and write down what became of it. before: what an earlier attempt left."""
    path = folder / f"{part.name}.json"
    goes_on = bool(before.get("kept"))
    result: dict[str, Any] = {
        "schema": results.SCHEMA, "part": part.name, "about": part.about, "outcome": RUNNING, "reason": "",
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "seconds": 0.0,
        "key": results.key_of(part, facts, options.small), "machine": facts,
        "kept": before.get("kept", {}) if goes_on else {}, "checks": before.get("checks", []) if goes_on else [],
        "data": {},
    }  # fmt: skip
    results.write(path, result)
    command = [sys.executable, str(HERE / "one_part.py"), "--part", part.name, "--into", str(path),
               "--device", options.device, "--seconds", str(limit)]  # fmt: skip
    command += ["--small"] if options.small else []
    command += ["--parts", str(options.parts.resolve())] if options.parts else []
    start = time.monotonic()
    status, lines = _watch(command, _environment(part, facts), limit + min(GRACE_S, limit))
    result = results.read(path) or result
    if status is None:
        result.update(outcome=KILLED, reason=f"it did not end within {limit:.0f} s")
    elif result["outcome"] == RUNNING:
        result.update(outcome=CRASHED, reason=f"its process ended with status {status}")
    result["seconds"] = round(time.monotonic() - start + before.get("seconds", 0.0) * goes_on, 1)
    if result["outcome"] in (KILLED, CRASHED, FAILED):
        result["output"] = lines
    results.write(path, result)
    return result


def _watch(command: list[str], environment: dict[str, str], limit: float) -> tuple[int | None, list[str]]:
    """Run a process, show what it prints, and kill it with all its children when time is over: then no status."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, cwd=ROOT,
        env=environment, start_new_session=True, errors="replace",
    )  # fmt: skip
    _running.append(process)
    last: deque[str] = deque(maxlen=LAST_LINES)

    def show() -> None:
        for line in process.stdout:
            last.append(line.rstrip("\n")[:500])
            print(line, end="", flush=True)

    reader = threading.Thread(target=show, daemon=True)
    reader.start()
    try:
        status: int | None = process.wait(limit)
    except subprocess.TimeoutExpired:
        status = None
    except BaseException:
        _kill(process)
        raise
    _kill(process)  # compile workers, too, which would keep its output open
    reader.join(5)
    _running.remove(process)
    return status, list(last)


def _kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.poll() is None:
        process.wait(30)


def _stop(*_: object) -> None:
    for process in list(_running):
        _kill(process)
    sys.exit(143)


# -- telling -----------------------------------------------------------------------------------------------------------


def _counts(result: dict[str, Any]) -> str:
    found = [check["outcome"] for check in result.get("checks", [])]
    return f"{found.count('ok')} checks ok, {found.count('failed')} failed, {found.count('skipped')} skipped"


def _because(result: dict[str, Any]) -> str:
    return f"; {result['reason'][:300]}" if result.get("reason") else ""


def _list(parts: tuple[Part, ...], folder: Path, facts: dict[str, Any], small: bool) -> int:
    for part in parts:
        there = known(part, folder, facts, small)
        state = f"{there['outcome']}, {_counts(there)}" if there else "missing"
        print(f"{part.name:34} {state:52} {part.about}")
    return 0


def summary(chosen: list[Part], folder: Path, facts: dict[str, Any], small: bool, left: list[Part]) -> int:
    """Say what passed, what failed and what is left; 1 if anything failed."""
    print("\n" + "-" * 100)
    bad = 0
    missing = [p.name for p in left]
    for part in chosen:
        there = known(part, folder, facts, small)
        if there is None:
            continue
        print(f"{part.name:34} {there['outcome']:10} {there['seconds']:7.1f} s  {_counts(there)}{_because(there)}")
        wrong = [check for check in there.get("checks", []) if check["outcome"] == "failed"]
        for check in wrong[:10]:
            print(f"    FAILED {check['name']}: {check['detail'][:200]}")
        if len(wrong) > 10:
            print(f"    ... and {len(wrong) - 10} more, in {folder / part.name}.json")
        bad += bool(wrong) or there["outcome"] in (FAILED, KILLED, CRASHED)
        if there["outcome"] in (KILLED, CRASHED, UNFINISHED) and part.name not in missing:
            missing.append(part.name)
    if missing:
        print(f"left: {', '.join(missing)}. The same command goes on with these.")
    print(f"results: {folder}; `python benchmarks/gpu/run.py --table` writes them into docs/internals/benchmarks.md")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
