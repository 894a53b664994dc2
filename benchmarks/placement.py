"""Formats placed by cost, beside everything else that one could do: one process per model, all sides alternating.

    python benchmarks/placement.py [--model NAME ...] [--mode one|many|train ...] [--rounds N]

Sides: eager fp32, eager native bf16, compiled fp32, compiled native bf16 and fp16, model.to(bf16) compiled (whose fp32
input is cast in the call), and ours with goal="exact" and goal="fast". Modes: inference at batch 1, at a large batch,
and a training step (forward, loss, backward) for models that train. Every figure is a ratio of medians taken in one
process; the results file has the spread, the machine's facts, and for `fast` what was predicted and chosen.

ONEDNN_MAX_CPU_ISA=avx512_core in front of the command measures a machine without bf16 units on one that has them, and
writes a results file of its own.
"""

import argparse
import copy
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/conformance"))

import models
from machine import facts

import narrowcast as nc
from narrowcast.frontends.graphs.compiled import watch_graphs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMIT = os.environ.get("ONEDNN_MAX_CPU_ISA", "").lower()
SUFFIX = "-gpu" if DEVICE == "cuda" else f"-{LIMIT}" if LIMIT else ""
RESULTS = Path(__file__).parent / f"results/placement{SUFFIX}.json"
LARGE = 16
"""The large batch is this many times the model's own input; its own input is cut to one row for batch 1."""
SIDES = (
    "eager fp32", "eager native bf16", "compile fp32", "compile native bf16", "compile native fp16", "to(bf16) compile",
    "ours exact", "ours fast",
)  # fmt: skip
OTHERS = ("eager fp32", "eager native bf16", "compile fp32", "compile native bf16")
"""What `fast` is held against: it may be no less precise than the policy, so to(bf16) is no candidate, but is shown."""
SLOW_NS = 1.5e9
"""A side that takes longer than this per call is timed once."""


class SimpleNet(nn.Module):
    """The one convolution of PyTorch's AMP documents."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(64, 128, (3, 3), stride=(2, 2), bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


def simplenet() -> models.Loaded:
    return SimpleNet().eval(), (torch.randn(2, 64, 224, 224),), {}


class DecodeBlock(nn.Module):
    """One Llama block at one token, its keys and values given."""

    def __init__(self, hidden: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        shape = (x.shape[0], 1, self.heads, -1)
        q, k, v = (f(y).view(shape).transpose(1, 2) for f in (self.q, self.k, self.v))
        keys, values = torch.cat([keys.to(k.dtype), k], 2), torch.cat([values.to(v.dtype), v], 2)
        y = nn.functional.scaled_dot_product_attention(q, keys, values)
        x = x + self.o(y.transpose(1, 2).reshape(x.shape))
        y = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Decode(nn.Module):
    """A Llama-style decode step: 4 blocks, hidden 2048, 64 tokens before."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DecodeBlock(2048, 16, 5504) for _ in range(4))

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, keys, values)
        return x


def decode() -> models.Loaded:
    cache = torch.randn(1, 16, 64, 128)
    return Decode().eval(), (torch.randn(1, 1, 2048), cache, cache.clone()), {}


def vit_small() -> models.Loaded:
    return models._transformers(
        "ViTForImageClassification", "ViTConfig", lambda: (torch.randn(2, 3, 224, 224),),
        num_hidden_layers=4, hidden_size=192, intermediate_size=768, num_attention_heads=3, image_size=224,
        patch_size=16,
    )  # fmt: skip


def gpt_small() -> models.Loaded:
    return models._transformers(
        "GPT2LMHeadModel", "GPT2Config", lambda: (torch.randint(0, 1000, (2, 64)),),
        n_layer=4, n_head=4, n_embd=256, vocab_size=1000, n_positions=64, bos_token_id=0, eos_token_id=0,
        use_cache=False,
    )  # fmt: skip


MODELS = {
    f.__name__: f
    for f in (
        models.minilm,
        models.effnet_lite0,
        models.mnist_cnn,
        models.crepe_tiny,
        models.attacut,
        models.resemblyzer,
        models.crnn,
        models.mtcnn_pnet,
        models.mtcnn_onet,
        models.rxnmapper,
        gpt_small,
        models.llama,
        vit_small,
        models.resnet,
        models.unet,
        simplenet,
        decode,
    )
}
TRAINS = ("mnist_cnn", "gpt_small", "resnet", "unet")
ONE_ONLY = ("decode", "attacut")
SIZES = {"simplenet": 2, "vit_small": 2, "rxnmapper": 2, "mtcnn_pnet": 4}
"""Where the large batch is another than LARGE times the model's own."""


def batch(value: object, times: int | None) -> object:
    """One row of an input (None), or the input this many times over."""
    if isinstance(value, torch.Tensor) and value.dim():
        made = value[:1].clone() if times is None else value.repeat(times, *[1] * (value.dim() - 1))
        return made.to(DEVICE)
    if isinstance(value, (tuple, list)):
        return type(value)(batch(v, times) for v in value)
    return value


def prepare(name: str, mode: str) -> tuple[nn.Module, tuple, dict]:
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name]()
    model = model.to(DEVICE).train(mode == "train")
    if name not in ONE_ONLY:
        times = {"one": None, "many": SIZES.get(name, LARGE), "train": 2}[mode]
        args, kwargs = batch(args, times), {k: batch(v, times) for k, v in kwargs.items()}
    return model, args, kwargs


def cast_floats(tree: object) -> object:
    return torch.utils._pytree.tree_map(
        lambda t: t.bfloat16() if isinstance(t, torch.Tensor) and t.is_floating_point() else t, tree
    )


def side(name: str, model: nn.Module, args: tuple, kwargs: dict, trains: bool) -> Callable[[], object]:
    """What one side runs."""
    mine = copy.deepcopy(model)
    region: Callable[[], object] | None = None
    if name == "eager fp32":
        run = mine
    elif name == "compile fp32":
        run = torch.compile(mine)
    elif name == "to(bf16) compile":
        lowered = torch.compile(mine.bfloat16())
        run = lambda *a, **k: lowered(*cast_floats(a), **cast_floats(k))  # noqa: E731
    elif name.startswith("ours"):
        run = nc.compile(mine, under=torch.bfloat16, goal=name.split()[1])
    else:
        dtype = torch.float16 if name.endswith("fp16") else torch.bfloat16
        run = mine if name.startswith("eager") else torch.compile(mine)
        region = lambda: torch.autocast(DEVICE, dtype)  # noqa: E731

    def call() -> object:
        if region is None:
            return run(*args, **kwargs)
        with region():
            return run(*args, **kwargs)

    if not trains:
        return call

    def step() -> None:
        leaves = torch.utils._pytree.tree_leaves(call())
        wanted = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
        torch.stack([t.float().square().mean() for t in wanted]).sum().backward()
        mine.zero_grad(set_to_none=True)

    return step


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def clock(call: Callable[[], object], calls: int) -> float:
    """Milliseconds per call."""
    synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    synchronize()
    return (time.perf_counter() - start) * 1e3 / calls


def measure(name: str, mode: str, rounds: int) -> dict[str, object]:
    """All sides of one model in one mode; every round runs every side, in turn forwards and backwards."""
    model, args, kwargs = prepare(name, mode)
    trains = mode == "train"
    rows: dict[str, dict[str, object]] = {}
    with torch.set_grad_enabled(trains):
        calls, failed = {}, {}
        for kind in SIDES:
            torch._dynamo.reset()
            start = time.perf_counter()
            try:
                call = side(kind, model, args, kwargs, trains)
                with watch_graphs() as graphs:
                    call()
                    call()
                calls[kind] = call
                rows[kind] = {"first_calls_s": round(time.perf_counter() - start, 2)}
                if kind == "ours fast":
                    rows[kind]["graphs"] = [told(g) for g in graphs]
            except Exception as error:
                failed[kind] = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        once = {kind: min(clock(call, 1) for _ in range(2)) for kind, call in calls.items()}
        repeats = {kind: max(1, min(50, int(10 / max(ms, 1e-3)))) for kind, ms in once.items()}
        times: dict[str, list[float]] = {kind: [] for kind in calls}
        began = time.perf_counter()
        shuffled = random.Random(0)
        for number in range(rounds):
            for kind in shuffled.sample(list(calls), len(calls)):
                slow = once[kind] * 1e6 > SLOW_NS
                if not (slow and number):
                    times[kind].append(clock(calls[kind], repeats[kind]))
            if time.perf_counter() - began > 20 and number >= 6:
                break
    for kind, found in times.items():
        ordered = sorted(found)
        rows[kind].update(
            ms=round(statistics.median(found), 4), lower=round(ordered[len(ordered) // 4], 4),
            upper=round(ordered[-1 - len(ordered) // 4], 4), fastest=round(ordered[0], 4), rounds=len(found),
        )  # fmt: skip
    return {"sides": rows, "failed": failed, "ratios": ratios(times)}


def told(graph: object) -> dict[str, object]:
    """What is known of one compiled graph of ours."""
    candidates = {
        c.name: {"casts": c.casts, "predicted_ms": c.predicted_ns / 1e6, "sure": round(c.sure, 3),
                 "measured_ms": c.measured_ns / 1e6 if c.measured_ns else None}
        for c in graph.candidates
    }  # fmt: skip
    return {"place": Path(str(graph.site)).name, "chosen": graph.chosen, "candidates": candidates,
            "fallback": graph.fallback}  # fmt: skip


def ratios(times: dict[str, list[float]]) -> dict[str, float]:
    """Of round by round pairs: `fast` over the best other side, native over `fast`, and `exact` over native."""
    medians = {kind: statistics.median(found) for kind, found in times.items()}
    found: dict[str, float] = {}
    others = {k: medians[k] for k in OTHERS if k in medians}
    if "ours fast" not in times or not others:
        return found
    best = min(others, key=others.get)
    pairs = {"fast over best other": ("ours fast", best)}
    pairs |= {"native compiled over fast": ("compile native bf16", "ours fast"),
              "eager native over fast": ("eager native bf16", "ours fast"),
              "fast over to(bf16)": ("ours fast", "to(bf16) compile"),
              "exact over native compiled": ("ours exact", "compile native bf16")}  # fmt: skip
    fp32 = min((k for k in ("eager fp32", "compile fp32") if k in medians), key=medians.get, default=None)
    if fp32:
        pairs["best fp32 over fast"] = (fp32, "ours fast")
    for label, (a, b) in pairs.items():
        if a in times and b in times:
            each = [x / y for x, y in zip(times[a], times[b], strict=False)]
            found[label] = round(statistics.median(each), 4)
            found[f"{label}, of fastest"] = round(min(times[a]) / min(times[b]), 4)
    found["best other"] = best
    return found


def chain() -> dict[str, object]:
    """layer_norm, softmax, gelu on 16 M elements, with fp32 out and with what the policy gives: in eager code low pays,
    fused it does not.
    """
    policy = str(Path(__file__).parent / "chain.toml")

    def low_out(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(torch.softmax(nn.functional.layer_norm(x, x.shape[-1:]), -1))

    def fp32_out(x: torch.Tensor) -> torch.Tensor:
        return low_out(x).float()

    x = torch.randn(16384, 1024, device=DEVICE)
    found: dict[str, object] = {}
    with torch.no_grad():
        for run in (low_out, fp32_out):
            for backend in ("eager", "inductor"):
                torch._dynamo.reset()
                plain = run if backend == "eager" else torch.compile(run)
                ours = nc.compile(run, under=policy, goal="fast", backend=backend)
                with watch_graphs() as graphs:
                    ours(x)
                sides = {"fp32": lambda f=plain: f(x), "ours fast": lambda f=ours: f(x)}
                times = {kind: [] for kind in sides}
                for _ in range(15):
                    for kind, call in sides.items():
                        times[kind].append(clock(call, 1))
                pairs = zip(times["fp32"], times["ours fast"], strict=True)
                found[f"{backend}, {run.__name__}"] = {
                    "ms": {k: round(statistics.median(v), 2) for k, v in times.items()},
                    "fp32 over fast": round(statistics.median(a / b for a, b in pairs), 3),
                    "graphs": [told(g) for g in graphs],
                }
    return found


def scale() -> dict[str, object]:
    """Seconds to place programs of 20,000 and 40,000 calls, with the certificate."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests/pure"))
    from test_place import RandomPrices, chain as program_of

    from narrowcast.programs.placement.place import place_formats

    found: dict[str, object] = {}
    seconds = []
    for calls in (20_000, 40_000):
        program, ours = program_of(calls)
        times = []
        for _ in range(3):
            start = time.perf_counter()
            _, placement = place_formats(program, RandomPrices(1), ours=ours)
            times.append(time.perf_counter() - start)
        seconds.append(min(times))
        found[str(calls)] = {"seconds": round(min(times), 2), "gap": placement.gap, "raised": placement.raised}
    found["ratio"] = round(seconds[1] / seconds[0], 2)
    found["within"] = seconds[0] < 5 and seconds[1] / seconds[0] <= 2.5
    return found


def summary(rows: dict[str, dict]) -> dict[str, object]:
    """The figures that must hold, over all models and modes."""
    over_best, native, exact, predicted = [], [], [], []
    for row in rows.values():
        r = row.get("ratios", {})
        over_best += [r["fast over best other"]] if "fast over best other" in r else []
        native += [r["native compiled over fast"]] if "native compiled over fast" in r else []
        exact += [r["exact over native compiled"]] if "exact over native compiled" in r else []
        fast = row.get("sides", {}).get("ours fast", {})
        guessed = [g["candidates"][g["chosen"]]["predicted_ms"] for g in fast.get("graphs", []) if g["chosen"]]
        if guessed and "ms" in fast and all(g["chosen"] for g in fast["graphs"]):
            predicted.append(abs(sum(guessed) / fast["ms"] - 1))
    geometric = math.exp(statistics.mean(map(math.log, native))) if native else None
    return {
        "rows": len(rows),
        "worst fast over best other": max(over_best, default=None),
        "rows above 1.03": sum(r > 1.03 for r in over_best),
        "geometric mean of native compiled over fast": round(geometric, 3) if geometric else None,
        "median prediction error": round(statistics.median(predicted), 3) if predicted else None,
        "predicted rows": len(predicted),
        "median of exact over native compiled": round(statistics.median(exact), 3) if exact else None,
    }


PARTS: dict[str, Callable[[], dict[str, object]]] = {"chain": chain, "scale": scale}


def main() -> int:
    """Measure each model in a process of its own, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="*", default=[*PARTS, *MODELS])
    parser.add_argument("--mode", nargs="*", default=["one", "many", "train"])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--into", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.into:
        warnings.simplefilter("ignore")
        name, mode = options.model[0], options.mode[0]
        row = PARTS[name]() if name in PARTS else measure(name, mode, options.rounds)
        Path(options.into).write_text(json.dumps(row), encoding="utf-8")
        return 0
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {"rows": {}}
    for name in options.model:
        for mode in ["one"] if name in PARTS or name in ONE_ONLY else options.mode:
            if mode == "train" and name not in TRAINS:
                continue
            with tempfile.TemporaryDirectory() as folder:
                into = Path(folder) / "row.json"
                command = [sys.executable, __file__, "--model", name, "--mode", mode, "--rounds", str(options.rounds)]
                ran = subprocess.run([*command, "--into", str(into)], check=False)
                row = json.loads(into.read_text()) if into.exists() else {"failed": {"process": ran.returncode}}
            if name in PARTS:
                results[name] = row
            else:
                results["rows"][f"{name}, {mode}"] = row
            print(name, mode, row.get("ratios") or row, flush=True)
            results["summary"], results["machine"] = summary(results["rows"]), facts()
            RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results["summary"], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
