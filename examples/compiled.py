"""MiniLM compiled with explicit casts, beside eager code and beside torch.compile under native autocast.

    python examples/compiled.py

Shows that eager, compiled and exported code compute in the same formats and give the same bits, what the passes did
with the casts, and how long the compiled model takes as a ratio of what torch.compile makes of torch.autocast.
"""

import copy
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

import minilm

import narrowcast as nc

DOCUMENTS, ROUNDS, SECONDS = 8, 21, 10


def same_bits(case: nc.Case) -> dict[str, bool]:
    """Whether compiled and exported code give the bits of eager code, in every output."""
    model, inputs = case.model, case.inputs
    with nc.autocast("cpu", torch.bfloat16):
        eager = model(**inputs)
    compiled = nc.compile(copy.deepcopy(model), under=torch.bfloat16, backend="aot_eager")(**inputs)
    exported = nc.export(model, inputs, under=torch.bfloat16).module()(**inputs)
    return {
        "nc.compile": all(torch.equal(eager[name], compiled[name]) for name in eager),
        "nc.export": all(torch.equal(eager[name], exported[name]) for name in eager),
    }


def time_ratio(case: nc.Case) -> tuple[float, float]:
    """nc.compile over torch.compile under torch.autocast, with Inductor: median of alternating rounds, and noise."""
    plain = torch.compile(copy.deepcopy(case.model))
    explicit = nc.compile(copy.deepcopy(case.model), under=torch.bfloat16)

    def native() -> object:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(**case.inputs)

    sides: dict[str, Callable[[], object]] = {
        "torch": native, "narrowcast": lambda: explicit(**case.inputs), "torch again": native,
    }  # fmt: skip
    times: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side()
    began = time.perf_counter()
    for number in range(ROUNDS):
        if number >= 3 and time.perf_counter() - began > SECONDS:
            break  # a processor without bf16 units takes seconds for each
        for name, side in sides.items():
            start = time.perf_counter()
            side()
            times[name].append(time.perf_counter() - start)
    ratios = {
        name: statistics.median(a / b for a, b in zip(times[name], times["torch"], strict=True)) for name in sides
    }
    return ratios["narrowcast"], ratios["torch again"]


def main() -> None:
    """Print all of it."""
    warnings.filterwarnings("ignore")
    case = minilm.case(documents=DOCUMENTS)
    with torch.no_grad():
        found = nc.explain(case, front_end="compile")
        (row,) = found.graph_rows()
        print(f"{case.name}, {DOCUMENTS} documents, policy native, bf16")
        for name, equal in same_bits(case).items():
            print(f"  {name} gives {'the bits of eager code' if equal else 'OTHER BITS than eager code'}")
        print(f"  decisions that differ from eager: {len(found.differences)}")
        done = f"{row.shared} shared, {row.folded} folded, {row.dropped} dropped"
        print(f"  casts: {row.assigned} in eager code; {done}; {row.casts} in the compiled graph")
        print("  compiling with Inductor, twice ...", flush=True)
        ratio, noise = time_ratio(case)
        print(f"  time over torch.compile under torch.autocast: {ratio:.3f} (torch against itself: {noise:.3f})")


if __name__ == "__main__":
    main()
