"""goal="fast": a first call measures and chooses, never raises, and its results are near native's; the race's clock is
held against the device's own events.
"""

from __future__ import annotations

import time
import warnings

import subjects
import torch
from clock import Side, alternate, ratio
from context import Context
from same import off_by, quiet_dynamo, values_of

import narrowcast as nc
from narrowcast.frontends.graphs.compiled import watch_graphs

BF16 = torch.bfloat16
TOLERANCE = 0.06
"""Of the largest output: other formats than native's, and Inductor's loops."""


def run(context: Context) -> None:
    """Inference and training of each model."""
    scale = subjects.SMALL if context.small else subjects.MIDDLE
    for name in ("mlp", "lstm") if context.small else ("mlp", "encoder", "decode", "resnet50", "lstm", "gpt"):
        for mode in ("infer",) if name == "decode" else ("infer", "train"):
            label = f"{name}, {mode}"
            if context.left_s < 60:
                context.skip(label, "there was no more time")
                continue
            with quiet_dynamo():
                _race(context, label, name, scale, mode == "train")


def _race(context: Context, label: str, name: str, scale: str, trains: bool) -> None:
    with context.attempt(f"{label}: first call"):
        model, args = subjects.make(name, scale, context.device, trains)
        for module in model.modules():  # not the whole: cuDNN's LSTM has a backward in training only
            if isinstance(module, torch.nn.BatchNorm2d):
                module.eval()  # what is compared has seen as many batches
        made = nc.compile(model, under=nc.autocast(context.device, BF16), goal="fast")
        start = time.perf_counter()
        with warnings.catch_warnings(record=True) as said, watch_graphs() as graphs:
            warnings.simplefilter("always")
            found = values_of(model, lambda: made(*args), trains)
        seconds = time.perf_counter() - start
        ours = [str(w.message).splitlines()[0][:300] for w in said if "narrowcast" in str(w.message)]
        context.check(f"{label}: first call", "; ".join(ours[:3]))

        def eager() -> object:
            with torch.autocast(context.device, BF16):
                return model(*args)

        off = off_by(values_of(model, eager, trains), found)
        context.check(f"{label}: near native", "" if off <= TOLERANCE else f"off by {off:.1e} of the largest output")
        chosen = [g.chosen for g in graphs]
        context.check(f"{label}: a choice for each graph", "" if all(chosen) or not graphs else f"chosen: {chosen}")
        told = [
            {c.name: {"predicted_ms": c.predicted_ns / 1e6, "raced_ms": c.measured_ns and c.measured_ns / 1e6}
             for c in g.candidates} | {"chosen": g.chosen}
            for g in graphs
        ]  # fmt: skip
        context.data[label] = {"first_call_s": round(seconds, 1), "graphs": told}
        if not trains:
            _against_events(context, label, made, eager, args)


def _against_events(context: Context, label: str, made: object, eager: object, args: tuple) -> None:
    """What the chosen side takes by the device's events, beside eager native."""
    sides = [Side("fast", lambda: made(*args)), Side("eager native", eager)]
    with torch.no_grad():
        made(*args)
        alternate(sides, 3 if context.small else 9, context.device, 5)
    context.data[label] |= {"fast_ms_by_events": min(sides[0].times_ms), "fast over eager native": ratio(*sides)}
