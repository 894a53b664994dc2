"""Scripts beside torch's own JIT autocast: casts that run, time of the pass, running time.

    python benchmarks/scripts.py [--part casts|time|run] [--rounds N]

casts: tensors that change their format while a script or a trace runs (`aten::_to_copy` in torch's profiler), of ours
       and of torch's with the same region, without gradients. Bound: never more than torch's, where torch's gives what
       eager autocast gives, bit for bit. torch's traces are made without the weight cache: it cannot trace with it.
time:  regions, formats, decisions, passes and writing for one graph. Bounds: 2 s for 5,000 nodes, and no more than
       1.5 times the time per node for 20 times the nodes.
run:   MiniLM traced by both, alternating.
"""

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/conformance"))

import models
from alternate import alternate, ratio
from machine import facts

import narrowcast as nc
from narrowcast.frontends.scripts.convert import inline_calls, make_graph_explicit
from narrowcast.frontends.scripts.scopes import Scope

BF16 = torch.bfloat16


def perceptron(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.relu(torch.mm(F.relu(torch.mm(x, w)), w))


def loop(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(8):
            x = torch.mm(x, w)
    return x


def promoted(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.mm(x, w)
        return torch.cat([x, y]) + torch.stack([y, y]).sum(), torch.cat([y, y])


def halves(x, w):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.mm(x, w)
        with torch.autocast("cpu", enabled=False):
            z = torch.mm(y.float(), w)
    return y, z


class Inside(nn.Module):
    """A model in a region."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.model(x)


def casts_of(function: Callable, inputs: tuple) -> int:
    """The casts of one run, the fourth: by then TorchScript has made its final form."""
    with torch.no_grad():
        for _ in range(3):
            function(*inputs)
        with profile(activities=[ProfilerActivity.CPU]) as found:
            function(*inputs)
    return sum(event.count for event in found.key_averages() if event.key == "aten::_to_copy")


def tensors(found: object) -> list[torch.Tensor]:
    """The tensors of an output."""
    return [y for y in torch.utils._pytree.tree_leaves(found) if isinstance(y, torch.Tensor)]


def same(a: object, b: object) -> bool:
    """Dtypes and bits."""
    return all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


def compared(name: str, eager: Callable, ours: Callable, theirs: Callable, inputs: tuple) -> dict:
    """Casts of both, and whether each gives what eager code gives."""
    found: dict[str, object] = {"name": name}
    with torch.no_grad():
        expected = eager(*inputs)
    for who, make in (("narrowcast", ours), ("torch", theirs)):
        try:
            made = make()
            with torch.no_grad():
                found[f"{who} is eager's"] = all(same(expected, made(*inputs)) for _ in range(3))
            found[who] = casts_of(made, inputs)
        except Exception as error:
            found[who] = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:160]}"
    print(f"{name:24} {found}")
    return found


def part_casts() -> dict:
    """The table."""
    rows = []
    torch.manual_seed(0)
    x, w = torch.randn(8, 8), torch.randn(8, 8)
    for function in (perceptron, loop, promoted, halves):
        make_ours, make_theirs = (lambda f=function: nc.script(f)), (lambda f=function: torch.jit.script(f))
        rows.append(compared(f"script {function.__name__}", function, make_ours, make_theirs, (x, w)))
    for name in ("mnist_cnn", "unet"):
        model, inputs, _ = getattr(models, name)()
        inside = Inside(model.eval())
        rows.append(
            compared(
                f"script {name}", inside, lambda m=inside: nc.script(m), lambda m=inside: torch.jit.script(m), inputs
            )
        )
    for name in ("mnist_cnn", "crepe_tiny", "unet", "effnet_lite0", "minilm"):
        model, inputs, kwargs = getattr(models, name)()
        model.eval()
        if name == "minilm":
            inputs = (kwargs["input_ids"], kwargs["attention_mask"])
            model.config.return_dict = False

        def eager(*inputs, model=model):
            with torch.autocast("cpu", dtype=BF16):
                return model(*inputs)

        def theirs(model=model, inputs=inputs):
            with torch.autocast("cpu", dtype=BF16, cache_enabled=False):
                return torch.jit.trace(model, inputs, check_trace=False)

        def ours(model=model, inputs=inputs):
            return nc.trace(model, inputs, under="bf16", check_trace=False)

        rows.append(compared(f"trace {name}", eager, ours, theirs, inputs))
    worse = [
        row["name"] for row in rows if row.get("torch is eager's") and row["narrowcast"] > row["torch"]
    ]  # fmt: skip
    wrong = [row["name"] for row in rows if not row.get("narrowcast is eager's")]
    assert not worse and not wrong, (worse, wrong)
    return {"rows": rows, "more than torch": worse}


class Chain(nn.Module):
    """As many linear layers, each with a relu and an addition, as make about this many nodes."""

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(nodes // 9)])

    def forward(self, x):
        for layer in self.layers:
            x = F.relu(layer(x)) + x
        return x


def part_time(rounds: int) -> dict:
    """Seconds by nodes."""
    rows = []
    for nodes in (500, 2500, 5000, 10000):
        script = torch.jit.script(Chain(nodes))
        graph = script.graph.copy()
        inline_calls(graph)
        count = sum(1 for _ in graph.nodes())
        best = float("inf")
        for _ in range(rounds):
            copied = graph.copy()
            start = time.perf_counter()
            make_graph_explicit(copied, {"cpu": Scope("cpu", True, BF16)}, script)
            best = min(best, time.perf_counter() - start)
        rows.append({"nodes": count, "seconds": best})
        print(f"{count:6} nodes: {best:.2f} s")
    factor = rows[-1]["seconds"] / rows[0]["seconds"] / (rows[-1]["nodes"] / rows[0]["nodes"])
    assert next(r["seconds"] for r in rows if r["nodes"] >= 4500) < 2 and factor < 1.5, (rows, factor)
    return {"rows": rows, "seconds per node, longest over shortest": factor}


def part_run(rounds: int) -> dict:
    """MiniLM."""
    model, _, kwargs = models.minilm()
    model.config.return_dict = False
    inputs = (kwargs["input_ids"], kwargs["attention_mask"])
    ours = nc.trace(model, inputs, under="bf16", check_trace=False)
    with torch.autocast("cpu", dtype=BF16, cache_enabled=False):
        theirs = torch.jit.trace(model, inputs, check_trace=False)
    with torch.no_grad():
        for _ in range(3):
            ours(*inputs)
            theirs(*inputs)
        times = alternate({"narrowcast": lambda: ours(*inputs), "torch": lambda: theirs(*inputs)}, rounds=rounds)
    found = {"MiniLM, traced, over torch.jit.trace without cache": ratio(times, "narrowcast", "torch")}
    print(found)
    return found


def main() -> None:
    """Run the parts that are asked for; write benchmarks/results/scripts.json."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--part", choices=["casts", "time", "run"])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    path = Path(__file__).parent / "results/scripts.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    parts = {
        "casts": part_casts,
        "time": lambda: part_time(options.rounds),
        "run": lambda: part_run(4 * options.rounds),
    }
    for name, part in parts.items():
        if options.part in (None, name):
            found[name] = {"machine": facts(), **part()}
    path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
