"""The parts in the order in which they run: the most valuable first. Needs no torch."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from part import Part

SHARDS = 6
"""The sweep is cut into this many parts, each of which takes every so-many-th op."""
TRUST_SHARDS = 8
ROWS = (
    ("decode", "infer"), ("gpt", "train"), ("resnet50", "train"), ("encoder", "infer"), ("encoder", "train"),
    ("gpt", "infer"), ("resnet50", "infer"), ("mlp", "train"), ("mlp", "infer"), ("lstm", "train"), ("lstm", "infer"),
    ("timm_convnext", "infer"), ("transformers_bert", "train"), ("transformers_llama", "infer"),
)  # fmt: skip

PARTS: tuple[Part, ...] = (
    Part("smoke", "models bit for bit under every policy; record, explain, compile, export, script",
         "parts.smoke:run", exact=True),
    Part("lists", "the kernels that torch registers against the policy native, and torch's own autocast test lists",
         "parts.lists:run", exact=True),
    *(
        Part(f"ops-{n + 1}-of-{SHARDS}", "every op of OpInfo: ours against native, bit for bit, with gradients",
             "parts.ops:run", {"shard": n, "shards": SHARDS}, exact=True, attempts=4)
        for n in range(SHARDS)
    ),
    *(
        Part(f"trust-{n + 1}-of-{TRUST_SHARDS}", "sound programs and planted faults: what is said of them, and no harm",
             "parts.trust:run", {"shard": n, "shards": TRUST_SHARDS}, limit_s=300, attempts=3)
        for n in range(TRUST_SHARDS)
    ),
    Part("products", "products of many shapes: kernels within the bounds by which they are judged",
         "parts.products:run", limit_s=240),
    Part("scaler", "GradScaler: losses, weights and scales as native's, overflows included, no more waiting",
         "parts.scaler:run", exact=True),
    Part("cuda-graphs", "regions and compiled models in CUDA graphs", "parts.cuda_graphs:run", exact=True),
    Part("weights-at-rest", "low copies of weights follow every change", "parts.weights_at_rest:run", exact=True),
    Part("races", "goal='fast': first calls, what was chosen, results", "parts.races:run", timed=True),
    Part("cuda-graphs-fast", "goal='fast' with mode='reduce-overhead': races inside CUDA graphs",
         "parts.cuda_graphs:compiled", {"goal": "fast"}, limit_s=240, timed=True),
    Part("profile", "what ops and casts cost on this device", "parts.profile:run", timed=True),
    *(
        Part(f"placement-{model}-{mode}", f"all sides of {model}, {mode}: time by events, peak memory",
             "parts.placement:run", {"model": model, "mode": mode}, timed=True)
        for model, mode in ROWS
    ),
    Part("overhead", "what a region, an op and a compiled call cost on top of torch's", "parts.overhead:run",
         timed=True),
)  # fmt: skip


def load_parts(file: Path | None) -> tuple[Part, ...]:
    """The parts, or those of another file (tests have theirs)."""
    if file is None:
        return PARTS
    sys.path.insert(0, str(file.resolve().parent))
    found: tuple[Part, ...] = importlib.import_module(file.stem).PARTS
    return found
