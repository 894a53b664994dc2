"""What each verb costs for a call of the model, as models grow: time and memory at 250 to 16,000 calls.

    python benchmarks/scaling.py [--verb NAME ...] [--calls N ...] [--limit SECONDS]

The model is a residual network of narrow blocks (layer norm, linear, gelu, linear, sum: five calls each), so that what
is added for each call shows and kernels do not. Every figure is of a process of its own: seconds of the first use
on this model (after one on a model of one block), and the growth of the largest resident set. `plain` and the
rows of torch are what one does without Narrowcast: one forward, torch.export, torch.compile.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from machine import facts
from torch import nn

import narrowcast as nc

RESULTS = Path(__file__).parent / "results/scaling.json"
CALLS = (250, 1000, 4000, 16000)
CALLS_OF_BLOCK = 5
WIDTH = 8
MIB = 2**20


class Block(nn.Module):
    """Five calls."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def model_of(calls: int) -> nn.Module:
    """Return a model of so many calls, its weights from a fixed seed."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(calls // CALLS_OF_BLOCK))).eval()


def captured(model: nn.Module, x: torch.Tensor, low: bool) -> nc.Run:
    """Return the run of one forward, in bf16 or fp32."""
    with nc.capture() as run, torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=low):
        model(x)
    return run


def compiled(
    make: Callable[[nn.Module], Callable[[torch.Tensor], object]],
) -> Callable[[nn.Module, torch.Tensor], None]:
    """Return the first call of what this makes of a model."""

    def run(model: nn.Module, x: torch.Tensor) -> None:
        with torch.no_grad():
            make(model)(x)

    return run


def plain(model: nn.Module, x: torch.Tensor) -> None:
    """Run one forward in torch.autocast."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(x)


def recorded(model: nn.Module, x: torch.Tensor) -> None:
    """Run one forward under record, and print its ledger."""
    with torch.no_grad(), nc.record() as ledger, nc.autocast("cpu", torch.bfloat16):
        model(x)
    str(ledger)


def watched(model: nn.Module, x: torch.Tensor) -> None:
    """Run one forward under watch, and print the run."""
    with torch.no_grad(), nc.watch() as run, nc.autocast("cpu", torch.bfloat16):
        model(x)
    str(run)


def torch_exported(model: nn.Module, x: torch.Tensor) -> None:
    """Export in torch.autocast."""
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.export.export(model, (x,))


def torch_compiled(model: nn.Module) -> Callable[[torch.Tensor], object]:
    """Compile in torch.autocast."""
    ready = torch.compile(model)

    def run(x: torch.Tensor) -> object:
        with torch.autocast("cpu", torch.bfloat16):
            return ready(x)

    return run


VERBS: dict[str, Callable[[nn.Module, torch.Tensor], object]] = {
    "plain": plain,
    "record, print": recorded,
    "explain, print": lambda model, x: str(nc.explain(model, x, under="bf16")),
    "watch, print": watched,
    "capture, print": lambda model, x: str(captured(model, x, low=True)),
    "two captures, diff, print": lambda model, x: str(
        nc.diff(captured(model, x, low=False), captured(model, x, low=True))
    ),
    "compare, print": lambda model, x: str(nc.compare(model, x, under="bf16")),
    "torch.export": torch_exported,
    "export": lambda model, x: nc.export(model, (x,), under="bf16"),
    "torch.compile": compiled(torch_compiled),
    "compile, fast": compiled(lambda model: nc.compile(model, under="bf16", goal="fast")),
}


def measured(verb: str, calls: int) -> dict[str, float]:
    """Return seconds, and MiB that the process grew by at its peak. The first use is of one block."""
    run, x = VERBS[verb], torch.randn(2, WIDTH)
    run(model_of(CALLS_OF_BLOCK), x)
    torch.compiler.reset()
    model = model_of(calls)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    run(model, x)
    seconds = time.perf_counter() - start
    return {
        "s": round(seconds, 3),
        "MiB": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verb", action="append", choices=sorted(VERBS))
    parser.add_argument("--calls", action="append", type=int)
    parser.add_argument("--limit", type=float, default=600, help="seconds for one figure; what takes longer is null")
    parser.add_argument("--one", nargs=2, metavar=("VERB", "CALLS"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measured(asked.one[0], int(asked.one[1]))))
        return
    rows: dict[str, dict[str, dict[str, float] | None]] = {}
    for verb in asked.verb or VERBS:
        rows[verb] = {}
        for calls in asked.calls or CALLS:
            command = [sys.executable, __file__, "--one", verb, str(calls)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=asked.limit)
            except subprocess.TimeoutExpired:
                rows[verb][str(calls)] = None
                break  # what is larger takes longer
            rows[verb][str(calls)] = json.loads(done.stdout.strip().splitlines()[-1])
            print(verb, calls, rows[verb][str(calls)], flush=True)
    found = {"machine": facts(), "narrowcast": nc.__version__, "calls": asked.calls or CALLS, "rows": rows}
    if not asked.verb and not asked.calls:
        RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
