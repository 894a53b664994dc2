"""What formats of storage do to a training: the small GPT of gpt.py, computed in fp32 from weights as they are stored.

    python benchmarks/storage.py train              all runs, 1,500 steps each, two seeds
    python benchmarks/storage.py train RUN SEED     one; begun again, it goes on from its last checkpoint
    python benchmarks/storage.py table              losses paired by seed, and bytes of a parameter
    python benchmarks/storage.py update [ELEMENTS]  the time of an update beside torch's AdamW, alternating

Checkpoints and results are kept in build/storage. "8bit" needs torchao.
"""

import json
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from gpt import CHECKPOINT, GPT, ROWS, STEPS, loss_of, rate_at, text, windows
from machine import facts
from torch import nn

import narrowcast as nc

BF16: dict[str, Any] = {"weight": "bf16"}
RUNS: dict[str, dict[str, Any] | None] = {
    "fp32": None,
    "nearest": BF16 | {"moments": "bf16"},
    "remainder": BF16 | {"master": "remainder", "gradient": "fp32"},
    "stochastic": BF16 | {"rounding": "stochastic", "moments": "bf16"},
    "kahan": BF16 | {"rounding": "kahan", "moments": "bf16"},
    "moments": {"moments": "bf16"},
    "8bit": {"moments": "8bit"},
    "8 in fp32": BF16 | {"master": "remainder", "gradient": "fp32"},
    "8 in bf16": BF16 | {"master": "remainder"},
}
"""Runs by name; the last two add up the gradients of 8 micro-batches for each of 250 updates."""
KEPT = Path(__file__).parents[1] / "build" / "storage"
IN_FP32 = nc.Policy("in fp32", ((nc.Rule("aten.*", "full"),),), extends=("nothing",))


def train(name: str, seed: int) -> dict[str, Any]:
    """Train one run, or what is left of it; return its losses and bytes."""
    done, begun = KEPT / f"{name}-{seed}.json", KEPT / f"{name}-{seed}.pt"
    if done.exists():
        return dict(json.loads(done.read_text()))
    KEPT.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    model, data, first, losses = GPT(), text(is_held_out=False), 0, []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    declared, micro = RUNS[name], 8 if name.startswith("8 in") else 1
    steps = 250 if micro > 1 else STEPS
    stored = None if declared is None else nc.store(model, optimizer, declared | {"seed": seed})
    if begun.exists():
        kept = torch.load(begun, weights_only=False)  # blocks of 8 bits are a library's
        model.load_state_dict(kept["model"])
        optimizer.load_state_dict(kept["optimizer"])
        first, losses = kept["step"], kept["losses"]
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step * (STEPS // steps))
        optimizer.zero_grad()
        for part in range(micro):
            rows = windows(data, ROWS // micro, (seed + 1) * 10**6 + step * micro + part)
            with nc.autocast("cpu", torch.bfloat16, policy=IN_FP32) if stored else nullcontext():
                loss = loss_of(model, *rows) / micro
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item() * micro)
        if (step + 1) % CHECKPOINT == 0:
            sys.stdout.write(f"{name} {seed}: {step + 1} of {steps} steps, {losses[-1]:.3f} nats a byte\n")
            sys.stdout.flush()
            kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(kept | {"losses": losses}, begun)
    with torch.no_grad(), nc.autocast("cpu", torch.bfloat16, policy=IN_FP32) if stored else nullcontext():
        held = statistics.mean(loss_of(model, *windows(text(is_held_out=True), 64, n)).item() for n in range(8))
    count = sum(p.numel() for p in model.parameters())
    size = 16.0 if stored is None else sum(now for _, now in stored.sizes().values()) / count
    found = {"held out": held, "last 100": statistics.mean(losses[-100:]), "bytes": round(size, 2)}
    found["updates lost"] = 0.0 if stored is None else statistics.mean(stored.lost[-100:])
    done.write_text(json.dumps(found))
    begun.unlink(missing_ok=True)
    return found


def table() -> str:
    """Return the losses of all runs that are done, beside fp32's of the same seed."""
    lines = ["| run | bytes | held out, seeds 0 and 1 | over fp32 | updates lost at the end |", "|---|---|---|---|---|"]
    for name in RUNS:
        rows = [json.loads(path.read_text()) for path in sorted(KEPT.glob(f"{name}-?.json"))]
        if rows:
            base = "8 in fp32" if name.startswith("8 in") else "fp32"
            beside = [json.loads((KEPT / f"{base}-{seed}.json").read_text()) for seed in range(len(rows))]
            over = ", ".join(f"{a['held out'] - b['held out']:+.4f}" for a, b in zip(rows, beside, strict=True))
            held, lost = ", ".join(f"{row['held out']:.4f}" for row in rows), rows[0]["updates lost"]
            lines.append(f"| {name} | {rows[0]['bytes']:g} | {held} | {over} | {lost:.0%} |")
    return "\n".join(lines)


def update(elements: int) -> str:
    """Return the time of an update beside torch's own, in one alternating run."""
    steps, first = {}, {}
    kinds = {"torch, fused": {"fused": True}, "torch, foreach": {"foreach": True}, "torch, loop": {"foreach": False}}
    more = {"master": BF16 | {"master": "fp32"}}
    kept = []
    for name, declared in {**dict.fromkeys(kinds), **RUNS, **more}.items():
        if name in ("fp32", "8bit") or name.startswith("8 in"):
            continue
        model = nn.ParameterList(nn.Parameter(torch.randn(elements // 10)) for _ in range(10))
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, **kinds.get(name, {}))
        kept.append(nc.store(model, optimizer, declared) if declared is not None else model)
        for one in model.parameters():
            one.grad = torch.randn_like(one, dtype=one.grad_dtype)
        start = time.perf_counter()
        optimizer.step()
        first[name], steps[name] = time.perf_counter() - start, optimizer.step
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(15):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(row) for name, row in times.items()}
    lines = [f"{elements:,} parameters, torch {torch.__version__}, {facts()}", ""]
    lines += ["| update | ms | over fused | over foreach | first, s |"]
    lines += ["|---|---|---|---|---|"]
    fused, each = medians["torch, fused"], medians["torch, foreach"]
    for name, t in medians.items():
        lines.append(f"| {name} | {t * 1e3:.1f} | {t / fused:.2f} | {t / each:.2f} | {first[name]:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    what, *more = sys.argv[1:] or ["table"]
    if what == "update":
        sys.stdout.write(update(int(float(more[0])) if more else 10**7) + "\n")
    elif what == "train":
        for run, seed in [(more[0], int(more[1]))] if more else [(n, s) for s in (0, 1) for n in RUNS]:
            sys.stdout.write(f"{run} {seed}: {train(run, seed)}\n")
    sys.stdout.write(table() + "\n")
