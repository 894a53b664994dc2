"""What looking at every call costs: MiniLM, 8 documents of 64 tokens, watched and captured, beside the plain forward.

    python benchmarks/observing.py [--rounds N]

In fp32 without a region and in a native bf16 region. Bounds: `nc.watch()` at most 1.3 of the forward, `nc.capture()`
at most 3, both at most 2 of compiled code (torch.compile's, which runs step by step meanwhile); the file of a capture
on 50 documents below 3 MB. A whole training step (forward, backward, AdamW) is stated without a bound. A forward of one
token is stated in microseconds per call that was seen: there is nothing but overhead. Blocks are opened each time, as
they are written; what that costs alone is stated, too.
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
    "alone": nullcontext,
    "alone, again": nullcontext,
    "nc.watch()": nc.watch,
    "nc.capture()": nc.capture,
}
BOUNDS = {"nc.watch()": 1.3, "nc.capture()": 3.0}
COMPILED_BOUND = 2.0
FILE_BOUND_MB = 3.0


Program = Callable[[Callable[[], AbstractContextManager[Any]]], object]
"""What runs, with a region around its forward."""


def forward(model: torch.nn.Module, tokens: dict[str, torch.Tensor]) -> Program:
    """One call, without gradients."""

    def run(region: Callable[[], AbstractContextManager[Any]]) -> object:
        with torch.no_grad(), region():
            return model(**tokens)

    return run


def training_step(model: torch.nn.Module, tokens: dict[str, torch.Tensor]) -> Program:
    """Forward, backward and a step of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-7)

    def run(region: Callable[[], AbstractContextManager[Any]]) -> None:
        with region():
            loss = model(**tokens)[0].float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def in_blocks(program: Program, region: Callable[[], AbstractContextManager[Any]]) -> dict[str, Callable[[], object]]:
    """The program in each side's block."""

    def side(block: Callable[[], AbstractContextManager[Any]]) -> Callable[[], object]:
        def run() -> object:
            with block():
                return program(region)

        return run

    return {name: side(block) for name, block in SIDES.items()}


def calls_seen(program: Callable[[], object]) -> int:
    """How many calls a program makes."""
    with nc.capture() as run:
        program()
    return len(run.calls)


def ratios(program: Program, rounds: int) -> dict[str, object]:
    """Milliseconds and ratios to the program by itself, in each region."""
    found: dict[str, object] = {}
    for name, region in REGIONS.items():
        sides = in_blocks(program, region)
        times = alternate(sides, rounds)
        found[name] = {
            "calls": calls_seen(sides["alone"]),
            "milliseconds": {side: round(sorted(t)[len(t) // 2], 3) for side, t in times.items()},
            "ratio": {side: ratio(times, side, "alone") for side in sides if side != "alone"},
        }
    return found


def small_steps(program: Program, rounds: int) -> dict[str, object]:
    """Microseconds that each call of a forward of one token costs more: of medians, and of the fastest rounds."""
    found: dict[str, object] = {}
    for name, region in REGIONS.items():
        sides = in_blocks(program, region)
        calls = calls_seen(sides["alone"])
        blocks = {f"empty {side}": opened(block) for side, block in SIDES.items() if side in BOUNDS}
        times = alternate({**sides, **blocks}, rounds)
        middle = {side: sorted(t)[len(t) // 2] for side, t in times.items()}
        found[name] = {
            "calls": calls,
            "forward_us": round(middle["alone"] * 1e3, 1),
            "block_us": {side: round(middle[f"empty {side}"] * 1e3, 1) for side in BOUNDS},
            "us_per_call": {
                side: {
                    "median": round((middle[side] - middle[f"empty {side}"] - middle["alone"]) * 1e3 / calls, 1),
                    "of_fastest": round(
                        (min(times[side]) - min(times[f"empty {side}"]) - min(times["alone"])) * 1e3 / calls, 1
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
        saved = nc.capture(minilm.case(), under="bf16").save(Path(folder) / "minilm")
        return round(saved.stat().st_size / 1e6, 3)


def main() -> int:
    """Measure, print, write the result file; exit code 1 if a bound is passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    case = minilm.case(documents=8)
    tokens = {name: tensor[:, :64] for name, tensor in case.inputs.items()}
    token = {name: tensor[:1, :1] for name, tensor in case.inputs.items()}
    model = case.model
    compiled = torch.compile(model)
    result: dict[str, Any] = {
        "benchmark": "observing: MiniLM-L6, 8 documents of 64 tokens",
        "machine": facts(),
        "rounds": options.rounds,
        "programs": {
            "forward": ratios(forward(model, tokens), options.rounds),
            "compiled forward": ratios(forward(compiled, tokens), options.rounds),
            "training step": ratios(training_step(model, tokens), options.rounds),
        },
        "one_token": small_steps(forward(model, token), options.rounds),
        "file_mb": file_megabytes(),
        "bounds": {**BOUNDS, "compiled": COMPILED_BOUND, "file_mb": FILE_BOUND_MB},
    }
    for program, regions in result["programs"].items():
        for region, rows in regions.items():
            print(f"{program}, {region}: {rows['calls']} calls, {rows['milliseconds']['alone']:.1f} ms")
            for side, row in rows["ratio"].items():
                quartiles = f"{row['lower_quartile']:.3f} to {row['upper_quartile']:.3f}"
                bound = bound_of(program, side) or ""
                print(f"  {side:20}{row['median']:9.3f}{quartiles:>18}{row['of_fastest']:9.3f}{bound:>8}")
    for region, small in result["one_token"].items():
        print(f"one token, {region}: {small['calls']} calls, forward {small['forward_us']} us; each call costs more:")
        for side, row in small["us_per_call"].items():
            block = small["block_us"][side]
            print(f"  {side:20}{row['median']:7.1f} us; of the fastest {row['of_fastest']} us; block {block} us")
    print(f"file of a capture on 50 documents: {result['file_mb']} MB (bound {FILE_BOUND_MB})")
    missed = list(over_bounds(result))
    print(*(f"over the bound: {line}" for line in missed), sep="\n")
    file = Path(__file__).parent / "results/observing.json"
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if missed else 0


def bound_of(program: str, side: str) -> float | None:
    """What a side may cost, in parts of the program by itself."""
    if program == "training step" or side not in BOUNDS:
        return None
    return COMPILED_BOUND if program == "compiled forward" else BOUNDS[side]


def over_bounds(result: dict[str, Any]) -> Iterator[str]:
    """A line for each bound that is passed."""
    for program, regions in result["programs"].items():
        for region, rows in regions.items():
            for side, row in rows["ratio"].items():
                bound = bound_of(program, side)
                if bound is not None and row["median"] > bound:
                    yield f"{side}, {program}, {region}: {row['median']} of it ({bound})"
    if result["file_mb"] >= FILE_BOUND_MB:
        yield f"file: {result['file_mb']} MB ({FILE_BOUND_MB})"


if __name__ == "__main__":
    sys.exit(main())
