"""What people feel first: importing, entering a region, a call of an op that a policy changes, a compiled call.

    python benchmarks/short_paths.py [--rounds N] [--first-calls] [--instructions]

Bounds: a native region at most 1.5 of torch.autocast, as written and reused, with a policy at most 3; an op that a
policy changes at most 8 us more than native's; a compiled call at most 3 us more than torch.compile's inside
torch.autocast; import and the first region at most 0.15 s each, the first recording 0.4 s. `--first-calls` times the
first call of MiniLM under goal="fast" (minutes): at most 1.3 of torch.compile's with a known profile, 1.05 where the
choice is remembered. `--instructions` counts those of the short paths with valgrind (a minute per figure): what a busy
machine cannot change.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from alternate import alternate, ratio
from machine import facts

import narrowcast as nc

LOW = torch.bfloat16
POLICY = nc.Policy.native().with_rules(nc.Rule("aten.gelu", "full"), nc.Rule("aten.softmax", "lower"))
REGIONS = {
    "torch.autocast": lambda: torch.autocast("cpu", LOW),
    "native": lambda: nc.autocast("cpu", LOW),
    "policy": lambda: nc.autocast("cpu", LOW, policy=POLICY),
    "safe": lambda: nc.autocast("cpu", LOW, policy="safe"),
}
REGION_BOUNDS = {"native": 1.5, "policy": 3.0, "safe": 3.0}

STEPS = """
import gc, sys, time
if {collector}: gc.disable()
import torch
start = time.perf_counter()
import narrowcast as nc
nc.autocast, nc.record
imported = time.perf_counter()
with nc.autocast("cpu", torch.bfloat16): torch.mm(torch.ones(2, 2), torch.ones(2, 2))
entered = time.perf_counter()
with nc.record(), nc.autocast("cpu", torch.bfloat16): torch.mm(torch.ones(2, 2), torch.ones(2, 2))
recorded = time.perf_counter()
print(imported - start, entered - imported, recorded - entered)
"""

FIRST = """
import sys, time, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {examples!r})
import minilm, torch
import narrowcast as nc
subject = minilm.subject(documents=4)
def run(model): return model(*subject.args, **subject.kwargs)
with torch.no_grad():
    run(subject.model)
    start = time.perf_counter()
    {code}
    print(time.perf_counter() - start)
"""
OURS = 'run(nc.compile(subject.model, dtype="bf16", goal="fast"))'
THEIRS = 'compiled = torch.compile(subject.model)\n    with torch.autocast("cpu", torch.bfloat16): run(compiled)'


def entered(make: Callable[[], object]) -> Callable[[], None]:
    """Enter and leave a region made each time, as it is written."""

    def run() -> None:
        with make():
            pass

    return run


def reused(make: Callable[[], object]) -> Callable[[], None]:
    """Enter and leave one region."""
    region = make()

    def run() -> None:
        with region:
            pass

    return run


def regions(rounds: int) -> dict[str, object]:
    """Microseconds and ratios of entering and leaving."""
    found: dict[str, object] = {}
    for form, how in (("as written", entered), ("reused", reused)):
        times = alternate({name: how(make) for name, make in REGIONS.items()}, rounds, calls=2000)
        found[form] = {
            name: {"us": round(min(t) * 1e3, 2), "ratio": ratio(times, name, "torch.autocast")["of_fastest"]}
            for name, t in times.items()
        }
    return found


def changed_ops(rounds: int) -> dict[str, object]:
    """Microseconds of a call on 16 elements: native, by hand, and under the policy."""
    low, high = torch.randn(2, 8, dtype=LOW), torch.randn(2, 8)
    gelu, softmax = torch.nn.functional.gelu, torch.softmax
    cases = {
        "gelu, full": (lambda: gelu(low), lambda: gelu(low.float())),
        "softmax, lower": (lambda: softmax(high, -1), lambda: softmax(high.to(LOW), -1)),
    }
    found = {}
    for name, (plain, by_hand) in cases.items():
        with torch.no_grad():
            with torch.autocast("cpu", LOW):
                native = alternate({"native": plain, "by hand": by_hand}, rounds, calls=500)
            with nc.autocast("cpu", LOW, policy=POLICY):
                ours = alternate({"policy": plain}, rounds, calls=500)
        found[name] = {side: round(min(t) * 1e3, 2) for side, t in {**native, **ours}.items()}
    return found


def compiled_calls(rounds: int) -> dict[str, float]:
    """Microseconds of a call of a compiled nn.Linear(4, 4) in its region."""
    x = torch.randn(2, 4)

    def model() -> torch.nn.Module:
        return torch.nn.Linear(4, 4)

    theirs = torch.compile(model())

    def in_region() -> torch.Tensor:
        with torch.autocast("cpu", LOW):
            return theirs(x)

    ours, policy = nc.compile(model(), under=LOW), nc.compile(model(), under=nc.autocast("cpu", LOW, policy=POLICY))
    with torch.no_grad():
        sides = {"torch.compile in torch.autocast": in_region, "ours": lambda: ours(x), "policy": lambda: policy(x)}
        times = alternate(sides, rounds, calls=1000)
    return {name: round(min(t) * 1e3, 2) for name, t in times.items()}


def printed(code: str, **variables: str) -> list[float]:
    """The numbers that a process prints."""
    environment = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    return [float(word) for word in done.stdout.split()]


def imports(times: int) -> dict[str, dict[str, float]]:
    """Seconds of import, first region and first recording, in processes of their own, over `import torch`.

    Python's collector has much to do after torch's import, and does it in whatever is imported next: with and without.
    """
    found = {}
    for name, collector in (("as it is", False), ("without the collector", True)):
        rows = [printed(STEPS.format(collector=collector)) for _ in range(times)]
        medians = [round(statistics.median(column), 3) for column in zip(*rows, strict=True)]
        found[name] = dict(zip(("import", "first region", "first recording"), medians, strict=True))
    return found


def first_calls() -> dict[str, float]:
    """Seconds of the first call, with caches of Inductor's that are empty each time."""
    examples = str(Path(__file__).parent.parent / "examples")
    with tempfile.TemporaryDirectory() as folder:

        def run(code: str, number: int) -> float:
            inductor = str(Path(folder) / f"inductor{number}")
            own = {"NARROWCAST_CACHE_DIR": folder, "TORCHINDUCTOR_CACHE_DIR": inductor}
            return round(printed(FIRST.format(examples=examples, code=code), **own)[-1], 2)

        found = {"nothing known": run(OURS, 0), "remembered": run(OURS, 1)}
        for file in (Path(folder) / "choices").glob("*.json"):
            file.unlink()
        found["known profile"] = run(OURS, 2)
        found["torch.compile"] = statistics.median(run(THEIRS, 3 + n) for n in range(2))
    return found


COUNTED = """
import sys, warnings
warnings.simplefilter("ignore")
import torch
import narrowcast as nc
LOW, x = torch.bfloat16, torch.randn(2, 8)
policy = nc.Policy.native().with_rules(nc.Rule("aten.gelu", "full"), nc.Rule("aten.softmax", "lower"))
{setup}
def once():
    {code}
for _ in range(int(sys.argv[1])): once()
"""
SHORT = {
    "region, torch.autocast": ("", 'with torch.autocast("cpu", LOW): pass'),
    "region, native": ("", 'with nc.autocast("cpu", LOW): pass'),
    "region, policy": ("", 'with nc.autocast("cpu", LOW, policy=policy): pass'),
    "softmax, native": ('torch.autocast("cpu", LOW).__enter__()', "torch.softmax(x, -1)"),
    "softmax, policy": ('nc.autocast("cpu", LOW, policy=policy).__enter__()', "torch.softmax(x, -1)"),
    "compiled call, torch.compile": (
        'run = torch.compile(torch.nn.Linear(8, 8), backend="eager")',
        'with torch.autocast("cpu", LOW): run(x)',
    ),
    "compiled call, ours": ('run = nc.compile(torch.nn.Linear(8, 8), dtype=LOW, backend="eager")', "run(x)"),
}


def instructions() -> dict[str, int]:
    """Instructions of one call of each short path: the difference of two runs under valgrind, by their calls."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, (setup, code) in SHORT.items():
            script = Path(folder) / "counted.py"
            script.write_text(COUNTED.format(setup=setup, code=code), encoding="utf-8")
            few, many = (_counted(script, calls) for calls in (500, 2500))
            found[name] = round((many - few) / 2000)
    return found


def _counted(script: Path, calls: int) -> int:
    """Instructions of a whole process."""
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", sys.executable, str(script)]
    own = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
    done = subprocess.run([*command, str(calls)], capture_output=True, text=True, env=own, check=True)
    return int(done.stderr.split("Collected :")[1].split()[0])


def main() -> int:
    """Measure, print, write the result file; exit code 1 if a bound is passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--first-calls", action="store_true")
    parser.add_argument("--instructions", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    result: dict[str, Any] = {
        "benchmark": "short_paths", "machine": facts(), "regions": regions(options.rounds),
        "changed_ops_us": changed_ops(options.rounds), "compiled_call_us": compiled_calls(options.rounds),
        "seconds": imports(5),
    }  # fmt: skip
    if options.first_calls:
        result["first_call_s"] = first_calls()
    if options.instructions:
        result["instructions"] = instructions()
    print(json.dumps({k: v for k, v in result.items() if k != "machine"}, indent=1))
    missed = list(over_bounds(result))
    print(*(f"over the bound: {line}" for line in missed), sep="\n")
    units = result["machine"]["units"]
    limited = "" if "avx512_bf16" in units or not units else f"-{units[-1]}"  # a file for machines without bf16 units
    file = Path(__file__).parent / f"results/short_paths{limited}.json"
    if file.exists():  # what was not measured again stays
        result = {**json.loads(file.read_text()), **result}
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if missed else 0


def over_bounds(result: dict) -> object:
    """A line for each bound that is passed."""
    for form, rows in result["regions"].items():
        for name, bound in REGION_BOUNDS.items():
            if rows[name]["ratio"] > bound:
                yield f"{name} region {form}: {rows[name]['ratio']} of torch.autocast's ({bound})"
    for name, row in result["changed_ops_us"].items():
        if row["policy"] - row["native"] > 8:
            yield f"{name}: {row['policy'] - row['native']:.1f} us more than native's (8)"
    calls = result["compiled_call_us"]
    for side in ("ours", "policy"):
        more = calls[side] - calls["torch.compile in torch.autocast"]
        if more > 3:
            yield f"compiled call, {side}: {more:.1f} us more than torch.compile's (3)"
    for name, bound in (("import", 0.15), ("first region", 0.15), ("first recording", 0.4)):
        if result["seconds"]["as it is"][name] > bound:
            yield f"{name}: {result['seconds']['as it is'][name]} s ({bound})"
    first = result.get("first_call_s", {})
    for name, bound in (("known profile", 1.3), ("remembered", 1.05)):
        if first and first[name] > bound * first["torch.compile"]:
            yield f"first call, {name}: {first[name] / first['torch.compile']:.2f} of torch.compile's ({bound})"


if __name__ == "__main__":
    sys.exit(main())
