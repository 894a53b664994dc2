"""The most bytes held at once by a training step, predicted and measured, and what the goal "memory" costs in time.

    python benchmarks/peak_memory.py [--model NAME ...] [--rounds N]

Sides: compiled fp32, torch.compile under torch.autocast in bf16, and ours with goal="memory". Bytes are those that
torch's allocator gives, of one forward and backward, beyond what was there before. One process per model.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import placement
import torch
from alternate import alternate
from machine import facts

import narrowcast as nc
from narrowcast.frontends.graphs.compiled import watch_graphs
from narrowcast.runtime.devices.device import held_at_most

RESULTS = Path(__file__).parent / "results/peak_memory.json"
SIDES = {"fp32": "compile fp32", "native bf16": "compile native bf16", "memory": "ours memory"}
MIB = 2**20
TIMES = 8
"""The batch is this many times the one that placement.py trains with: activations outweigh what is always there."""


def measured(name: str, rounds: int) -> dict[str, object]:
    """MiB held at most by each side, predicted for ours, and the ratio of its step's time to the faster rival's."""
    model, args, kwargs = placement.prepare(name, "train")
    args, kwargs = placement.batch(args, TIMES), {key: placement.batch(value, TIMES) for key, value in kwargs.items()}
    sides = {}
    with watch_graphs() as graphs:
        for side, what in SIDES.items():
            sides[side] = placement.side(what, model, args, kwargs, True)
            sides[side]()
    peaks = {c.name: c.peak for g in graphs for c in g.candidates}
    chosen = [next(c.peak for c in g.candidates if c.name == g.chosen) for g in graphs if g.candidates]
    held = {side: round((held_at_most(run) or 0) / MIB, 1) for side, run in sides.items()}
    times = {side: statistics.median(t) for side, t in alternate(sides, rounds).items()}
    best = min(times["fp32"], times["native bf16"])
    return {
        "held MiB": held,
        "predicted MiB": round(max((p.bytes for p in chosen if p), default=0) / MIB, 1),
        "predicted MiB of each": {n: round(p.bytes / MIB, 1) for n, p in peaks.items() if p and len(graphs) == 1},
        "ms": {side: round(t, 1) for side, t in times.items()},
        "time over the fastest": round(times["memory"] / best, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", choices=sorted(placement.TRAINS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measured(asked.one, asked.rounds)))
        return
    found = {"machine": facts(), "narrowcast": nc.__version__, "torch": torch.__version__, "models": {}}
    for name in asked.model or placement.TRAINS:
        command = [sys.executable, __file__, "--one", name, "--rounds", str(asked.rounds)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found["models"][name] = json.loads(done.stdout.strip().splitlines()[-1])
        print(name, found["models"][name])
    RESULTS.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
