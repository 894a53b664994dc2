"""Graphs beside torch.compile under native autocast: casts, compile time, running time.

    python benchmarks/graphs.py [--part casts|inference|time|linear|run] [--rounds N]

casts:  conversions between floating formats in the forward and the backward graph of each conformance model, as
        AOTAutograd's min-cut partitioner (Inductor's) leaves them. Bound: never more than torch's.
inference: the same of one call without gradients, with bytes. Bound: never more, and fewer on at least 8 models.
time:   reading, passes and writing as a part of compiling MiniLM with Inductor. Bound: 10 %.
linear: the same for a graph ten times as long, up to 20,000 calls. Bound: 12 times the time.
run:    MiniLM compiled by both, alternating.
"""

import argparse
import copy
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/conformance"))

import models
from alternate import alternate, ratio
from machine import facts

import narrowcast as nc
from narrowcast.frontends.graphs.compiled import watch_graphs
from narrowcast.frontends.graphs.levels import Ambient
from narrowcast.frontends.graphs.read import read_graph
from narrowcast.frontends.graphs.write import write_passes
from narrowcast.output.collector import collector_paused
from narrowcast.programs.passes import AFTER_AUTOGRAD


def casts_of(graph: torch.fx.GraphModule) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What conversions from one floating format to another read, and what they give."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in (
            torch.ops.aten._to_copy.default,
            torch.ops.prims.convert_element_type.default,
        ):
            src, dst = node.args[0].meta["val"], node.meta["val"]
            if src.is_floating_point() and dst.is_floating_point() and src.dtype != dst.dtype:
                yield src, dst


def count_casts(graph: torch.fx.GraphModule) -> int:
    """How many there are."""
    return sum(1 for _ in casts_of(graph))


def counting(counts: list[int]) -> Callable:
    """A backend that counts the casts of its forward and backward graphs and runs them as they are."""

    def count(position: int) -> Callable:
        def compiler(graph: torch.fx.GraphModule, inputs: object) -> Callable:
            counts[position] += count_casts(graph)
            return graph.forward

        return compiler

    return aot_autograd(
        fw_compiler=count(0), bw_compiler=count(1), partition_fn=min_cut_rematerialization_partition
    )  # fmt: skip


def cast_bytes(graph: torch.fx.GraphModule) -> int:
    """Bytes that those conversions read and write."""
    return sum(src.numel() * (src.itemsize + dst.itemsize) for src, dst in casts_of(graph))


def inference_casts() -> dict[str, object]:
    """Casts of one call without gradients, and their bytes: torch.compile under autocast, and goal="exact"."""
    rows = {}
    for loaded in (*models.REAL, *models.RANDOM):
        torch.manual_seed(0)
        model, args, kwargs = loaded()
        sides: dict[str, list[int]] = {}
        for name in ("torch", "narrowcast"):
            torch._dynamo.reset()
            counts = [0, 0]

            def count(graph: torch.fx.GraphModule, inputs: object, counts: list[int] = counts) -> Callable:
                counts[0] += count_casts(graph)
                counts[1] += cast_bytes(graph)
                return graph.forward

            backend = aot_autograd(fw_compiler=count, inference_compiler=count)
            mine = copy.deepcopy(model).eval()
            with torch.no_grad():
                if name == "torch":
                    with torch.autocast("cpu", torch.bfloat16):
                        torch.compile(mine, backend=backend)(*args, **kwargs)
                else:
                    nc.compile(mine, under=torch.bfloat16, backend=backend)(*args, **kwargs)
            sides[name] = counts
        theirs, ours = sides["torch"], sides["narrowcast"]
        rows[loaded.__name__] = {
            "casts": {name: counts[0] for name, counts in sides.items()},
            "bytes": {name: counts[1] for name, counts in sides.items()},
        }
        print(
            f"{loaded.__name__:14} casts {theirs[0]:4} {ours[0]:4}   KiB {theirs[1] >> 10:8} {ours[1] >> 10:8}",
            flush=True,
        )
    pairs = [(row["casts"], row["bytes"]) for row in rows.values()]
    never_more = all(c["narrowcast"] <= c["torch"] and b["narrowcast"] <= b["torch"] for c, b in pairs)
    fewer = sum(c["narrowcast"] < c["torch"] or b["narrowcast"] < b["torch"] for c, b in pairs)
    return {"rows": rows, "fewer": fewer, "of": len(rows), "within": never_more and fewer >= 8}


def loss_of(outputs: object) -> torch.Tensor:
    """Something to differentiate."""
    leaves = [t for t in torch.utils._pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor) and t.requires_grad]
    return torch.stack([t.float().square().sum() for t in leaves]).sum()


def casts() -> dict[str, object]:
    """Casts of both sides for every model."""
    rows = {}
    for loaded in (*models.REAL, *models.RANDOM):
        torch.manual_seed(0)
        model, args, kwargs = loaded()
        sides = {}
        for name in ("torch", "narrowcast"):
            torch._dynamo.reset()
            counts = [0, 0]
            mine = copy.deepcopy(model)
            backend = counting(counts)
            if name == "torch":
                with torch.autocast("cpu", torch.bfloat16):
                    out = torch.compile(mine, backend=backend)(*args, **kwargs)
            else:
                out = nc.compile(mine, under=torch.bfloat16, backend=backend)(*args, **kwargs)
            loss_of(out).backward()
            sides[name] = counts
        rows[loaded.__name__] = {
            "forward": {name: counts[0] for name, counts in sides.items()},
            "backward": {name: counts[1] for name, counts in sides.items()},
        }
        theirs, ours = sides["torch"], sides["narrowcast"]
        print(
            f"{loaded.__name__:14} forward {theirs[0]:4} {ours[0]:4}   backward {theirs[1]:4} {ours[1]:4}", flush=True
        )
    within = all(side["narrowcast"] <= side["torch"] for row in rows.values() for side in row.values())
    return {"rows": rows, "within": within}


def compile_time() -> dict[str, object]:
    """MiniLM, forward and backward, Inductor without its caches."""
    model, args, kwargs = models.minilm()
    torch._dynamo.reset()
    with watch_graphs() as graphs, torch._inductor.config.patch(force_disable_caches=True):
        start = time.perf_counter()
        out = nc.compile(model, under=torch.bfloat16)(*args, **kwargs)
        loss_of(out).backward()
        whole = time.perf_counter() - start
    seconds = sum(g.seconds for g in graphs)
    capture = sum(g.capture_seconds for g in graphs)
    found = {
        "whole_s": round(whole, 2),
        "read_passes_write_s": round(seconds - capture, 3),
        "capture_and_check_s": round(capture, 3),
        "share_of_read_passes_write": round((seconds - capture) / whole, 4),
        "share_of_all": round(seconds / whole, 4),
        "within": (seconds - capture) / whole <= 0.10,
    }
    print(found)
    return found


class Chain(nn.Module):
    """`layers` times: a product, a sum, an activation, and the way back to fp32; some 10 calls each."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(4, 4)) for _ in range(8))
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for n in range(self.layers):
            y = torch.mm(x, self.weights[n % 8])
            x = (torch.relu(y) + torch.mm(x, self.weights[n % 8]).float()).tanh().to(torch.bfloat16).float() + x
        return x


def linear() -> dict[str, object]:
    """Reading, passes and writing of joint-like graphs of 2,000 and 20,000 calls."""
    prepared = []
    for calls in (2_000, 20_000):
        with torch.autocast("cpu", torch.bfloat16):
            exported = torch.export.export(Chain(calls // 11), (torch.randn(4, 4),)).graph_module
            prepared.append((exported, Ambient.now(("cpu",))))
    times: dict[int, float] = {}
    for _ in range(5):  # the sizes in turn: a slow phase of the machine meets both
        for exported, ambient in prepared:
            graph = copy.deepcopy(exported)
            start = time.perf_counter()
            with collector_paused():
                reading = read_graph(graph, "chain", ambient)
                write_passes(reading, AFTER_AUTOGRAD)
            calls, elapsed = len(reading.program.steps), round(time.perf_counter() - start, 3)
            times[calls] = min(elapsed, times.get(calls, elapsed))
    small, large = times.values()
    found = {"seconds_by_calls": times, "ratio": round(large / small, 2), "within": large / small <= 12}
    print(found)
    return found


def running(rounds: int) -> dict[str, object]:
    """MiniLM's forward compiled by Inductor: torch under native autocast, and explicit casts of the same policy."""
    model, args, kwargs = models.minilm()
    torch._dynamo.reset()
    plain, ours = torch.compile(model), nc.compile(copy.deepcopy(model), under=torch.bfloat16)

    def native() -> object:
        with torch.autocast("cpu", torch.bfloat16):
            return plain(*args, **kwargs)

    with torch.no_grad():
        times = alternate(
            {"torch.compile": native, "nc.compile": lambda: ours(*args, **kwargs), "noise": native}, rounds
        )
    found = {side: ratio(times, side, "torch.compile") for side in ("nc.compile", "noise")}
    print(found)
    return found


def main() -> int:
    """Measure, print, write the result file; exit code 1 if a bound is passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["casts", "inference", "time", "linear", "run"])
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    parts = {
        "casts": casts,
        "inference": inference_casts,
        "time": compile_time,
        "linear": linear,
        "run": lambda: running(options.rounds),
    }
    file = Path(__file__).parent / "results/graphs.json"
    results = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for name in [options.part] if options.part else list(parts):
        results[name] = parts[name]()
    results["machine"] = facts()
    file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0 if all(part.get("within", True) for part in results.values() if isinstance(part, dict)) else 1


if __name__ == "__main__":
    sys.exit(main())
