"""What looking at every call costs: MiniLM, 8 documents of 64 tokens, watched and captured, beside the plain forward.

    python benchmarks/observing.py [--rounds N]

In fp32 without a region and in a native bf16 region. Bounds: `nc.watch()` at most 1.3 of the forward, `nc.capture()`
at most 3; the file of a capture on 50 documents below 3 MB. A forward of one token is stated in microseconds per call
that was seen: there is nothing but overhead. Blocks are opened each time, as they are written; what that costs alone is
stated, too.
"""

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import minilm
from alternate import alternate, ratio
from machine import facts

import narrowcast as nc

REGIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "fp32, no region": nullcontext,
    "bf16 region": lambda: nc.autocast("cpu", torch.bfloat16),
}
SIDES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "forward": nullcontext,
    "forward, again": nullcontext,
    "nc.watch()": nc.watch,
    "nc.capture()": nc.capture,
}
BOUNDS = {"nc.watch()": 1.3, "nc.capture()": 3.0}
FILE_BOUND_MB = 3.0


def forwards(model: torch.nn.Module, tokens: dict[str, torch.Tensor], region: Callable) -> dict[str, Callable]:
    """The forward in each side's block."""

    def side(block: Callable[[], AbstractContextManager[Any]]) -> Callable[[], object]:
        def run() -> object:
            with block(), region():
                return model(**tokens)

        return run

    return {name: side(block) for name, block in SIDES.items()}


def calls_seen(forward: Callable[[], object]) -> int:
    """How many calls a forward makes."""
    with nc.capture() as run:
        forward()
    return len(run.calls)


def ratios(model: torch.nn.Module, tokens: dict[str, torch.Tensor], rounds: int) -> dict[str, object]:
    """Milliseconds and ratios to the forward, in each region."""
    found: dict[str, object] = {}
    for name, region in REGIONS.items():
        sides = forwards(model, tokens, region)
        times = alternate(sides, rounds)
        found[name] = {
            "calls": calls_seen(sides["forward"]),
            "milliseconds": {side: round(sorted(t)[len(t) // 2], 3) for side, t in times.items()},
            "ratio_to_forward": {side: ratio(times, side, "forward") for side in sides if side != "forward"},
        }
    return found


def small_steps(model: torch.nn.Module, tokens: dict[str, torch.Tensor], rounds: int) -> dict[str, object]:
    """Microseconds that each call of a forward of one token costs more: of medians, and of the fastest rounds."""
    found: dict[str, object] = {}
    for name, region in REGIONS.items():
        sides = forwards(model, tokens, region)
        calls = calls_seen(sides["forward"])
        blocks = {f"empty {side}": opened(block) for side, block in SIDES.items() if side in BOUNDS}
        times = alternate({**sides, **blocks}, rounds)
        middle = {side: sorted(t)[len(t) // 2] for side, t in times.items()}
        found[name] = {
            "calls": calls,
            "forward_us": round(middle["forward"] * 1e3, 1),
            "block_us": {side: round(middle[f"empty {side}"] * 1e3, 1) for side in BOUNDS},
            "us_per_call": {
                side: {
                    "median": round((middle[side] - middle[f"empty {side}"] - middle["forward"]) * 1e3 / calls, 1),
                    "of_fastest": round(
                        (min(times[side]) - min(times[f"empty {side}"]) - min(times["forward"])) * 1e3 / calls, 1
                    ),
                }
                for side in BOUNDS
            },
        }
    return found


def opened(block: Callable[[], AbstractContextManager[Any]]) -> Callable[[], None]:
    """Open a block and leave it."""

    def run() -> None:
        with block():
            pass

    return run


def file_megabytes() -> float:
    """The size of a capture's file, MiniLM on 50 documents, without tensors."""
    with tempfile.TemporaryDirectory() as folder:
        saved = nc.capture(minilm.subject(), dtype="bf16").save(Path(folder) / "minilm")
        return round(saved.stat().st_size / 1e6, 3)


def main() -> int:
    """Measure, print, write the result file; exit code 1 if a bound is passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    subject = minilm.subject(documents=8)
    tokens = {name: tensor[:, :64] for name, tensor in subject.kwargs.items()}
    token = {name: tensor[:1, :1] for name, tensor in subject.kwargs.items()}
    with torch.no_grad():
        result: dict[str, Any] = {
            "benchmark": "observing: MiniLM-L6, 8 documents of 64 tokens, no_grad",
            "machine": facts(),
            "rounds": options.rounds,
            "forwards": ratios(subject.model, tokens, options.rounds),
            "one_token": small_steps(subject.model, token, options.rounds),
            "file_mb": file_megabytes(),
            "bounds": {**BOUNDS, "file_mb": FILE_BOUND_MB},
        }
    for region, rows in result["forwards"].items():
        print(f"{region}, {rows['calls']} calls, forward {rows['milliseconds']['forward']:.1f} ms")
        for side, row in rows["ratio_to_forward"].items():
            quartiles = f"{row['lower_quartile']:.3f} to {row['upper_quartile']:.3f}"
            print(f"  {side:20}{row['median']:9.3f}{quartiles:>18}{row['of_fastest']:9.3f}{BOUNDS.get(side) or '':>8}")
        small = result["one_token"][region]
        print(f"  one token: {small['calls']} calls, forward {small['forward_us']} us; each call costs more:")
        for side, row in small["us_per_call"].items():
            block = small["block_us"][side]
            print(f"  {side:20}{row['median']:7.1f} us; of the fastest {row['of_fastest']} us; block {block} us")
    print(f"file of a capture on 50 documents: {result['file_mb']} MB (bound {FILE_BOUND_MB})")
    missed = list(over_bounds(result))
    print(*(f"over the bound: {line}" for line in missed), sep="\n")
    file = Path(__file__).parent / "results/observing.json"
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if missed else 0


def over_bounds(result: dict[str, Any]) -> Iterator[str]:
    """A line for each bound that is passed."""
    for region, rows in result["forwards"].items():
        for side, bound in BOUNDS.items():
            if rows["ratio_to_forward"][side]["median"] > bound:
                yield f"{side}, {region}: {rows['ratio_to_forward'][side]['median']} of the forward ({bound})"
    if result["file_mb"] >= FILE_BOUND_MB:
        yield f"file: {result['file_mb']} MB ({FILE_BOUND_MB})"


if __name__ == "__main__":
    sys.exit(main())
