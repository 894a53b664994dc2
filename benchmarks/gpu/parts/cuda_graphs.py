"""CUDA graphs: regions captured, inputs and weights changed in place between replays, and mode="reduce-overhead"."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import subjects
import torch
from context import Context, Skip
from same import CUSTOM, off_by, quiet_dynamo
from torch import nn

import narrowcast as nc

BF16 = torch.bfloat16
TOLERANCE = 0.05


def run(context: Context) -> None:
    """Captures by hand, then by the compiler."""
    if not context.is_cuda:
        raise Skip("CUDA graphs are a matter of cuda")
    scale = subjects.SMALL if context.small else subjects.MIDDLE
    for name in ("mlp", "encoder", "decode"):
        for policy_name, policy in (("native", None), ("custom", CUSTOM), ("safe", "safe")):
            _captured(context, f"{name}, {policy_name}", name, scale, policy)
    _around(context, scale)
    with quiet_dynamo():
        _compiled_captured(context, scale)
    compiled(context, "exact")


def compiled(context: Context, goal: str) -> None:
    """Inductor's graphs under a goal. A part by itself for `fast`, whose races run in graphs, too."""
    if not context.is_cuda:
        raise Skip("CUDA graphs are a matter of cuda")
    scale = subjects.SMALL if context.small else subjects.MIDDLE
    for name in ("mlp", "encoder", "decode"):
        with quiet_dynamo():
            _reduce_overhead(context, f"{name}, reduce-overhead, {goal}", name, scale, goal)
    with quiet_dynamo():
        _reduce_overhead_trains(context, scale, goal)


def _capture(call: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """The graph of a call, which was made three times before on a stream of its own, and its result's place."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def _change(args: tuple, factor: float) -> None:
    for value in args:
        if value.is_floating_point():
            value.mul_(factor)


def _captured(context: Context, label: str, name: str, scale: str, policy: object) -> None:
    """A region inside a captured call: replays see new inputs, and weights changed in place, as eager code does."""
    with context.attempt(f"{label}: captured"), torch.no_grad():
        model, args = subjects.make(name, scale, "cuda")

        def call() -> torch.Tensor:
            with nc.autocast("cuda", BF16, policy=policy):
                return model(*args)

        graph, result = _capture(call)
        for what, change in (
            ("at first", lambda: None),
            ("other inputs", lambda: _change(args, 1.25)),
            ("weights changed in place", lambda: [p.mul_(1.01) for p in model.parameters()]),
        ):
            change()
            graph.replay()
            found = result.clone()
            context.check(f"{label}: captured, {what}", "" if torch.equal(found, call()) else "other bits than eager")


def _around(context: Context, scale: str) -> None:
    """Captures inside a region that is open all along: no cast made before or in the capture is taken for another."""
    regions = {
        "torch's way, no cache": lambda: nc.autocast("cuda", BF16, cache_enabled=False),
        "checked cache": lambda: nc.autocast("cuda", BF16, cache_enabled="checked"),
        "custom, checked cache": lambda: nc.autocast("cuda", BF16, policy=CUSTOM, cache_enabled="checked"),
    }
    for label, region in regions.items():
        with context.attempt(f"capture inside a region, {label}"), torch.no_grad():
            model, args = subjects.make("mlp", scale, "cuda")
            for p in model.parameters():
                p.requires_grad_()
            with region():
                graph, result = _capture(lambda model=model, args=args: model(*args))
                eager = model(*args).clone()  # after the capture, and before anything was replayed
            with region():
                wanted = model(*args).clone()
            context.check(f"capture inside a region, {label}: eager code after it", _unlike(eager, wanted))
            for p in model.parameters():
                p.mul_(1.01)
            graph.replay()
            with region():
                wanted = model(*args)
            context.check(f"capture inside a region, {label}: replay", _unlike(result, wanted))


def _unlike(found: torch.Tensor, wanted: torch.Tensor) -> str:
    return (
        "" if torch.equal(found, wanted) else f"other bits, off by {(found.float() - wanted.float()).abs().max():.1e}"
    )


def _compiled_captured(context: Context, scale: str) -> None:
    """A compiled model in a graph captured by hand. With weights="cast" replays see changed weights; kept copies are
    outside of the graph. What is cast again during a capture is filled by replays alone: eager calls may not get it.
    """
    for weights in ("cast", "folded"):
        label = f"compiled, captured, {weights}"
        with context.attempt(label), torch.no_grad():
            model, args = subjects.make("mlp", scale, "cuda")
            made = nc.compile(model, under=nc.autocast("cuda", BF16), backend="aot_eager", weights=weights)
            made(*args)

            def eager(model: nn.Module = model, args: tuple = args) -> torch.Tensor:
                with torch.autocast("cuda", BF16):
                    return model(*args)

            graph, result = _capture(lambda made=made, args=args: made(*args))
            _change(args, 1.25)
            graph.replay()
            context.check(f"{label}: other inputs", _unlike(result, eager()))
            for p in model.parameters():
                p.mul_(1.01)
            graph.replay()
            seen = torch.equal(result, eager())
            context.data[f"{label}: replays see changed weights"] = seen
            if weights == "cast":
                context.check(f"{label}: weights changed in place", "" if seen else "other bits than eager")
                continue
            context.check(f"{label}: an eager call after the change", _unlike(made(*args), eager()))
            for p in model.parameters():
                p.mul_(1.01)
            second = torch.cuda.CUDAGraph()
            with torch.cuda.graph(second):
                made(*args)
            context.check(f"{label}: an eager call after a capture that cast", _unlike(made(*args), eager()))


def _reduce_overhead(context: Context, label: str, name: str, scale: str, goal: str) -> None:
    """Inductor's own CUDA graphs: near eager at each call, with new inputs and with changed weights."""
    with context.attempt(label), torch.no_grad():
        model, args = subjects.make(name, scale, "cuda")
        made = nc.compile(model, under=nc.autocast("cuda", BF16), mode="reduce-overhead", goal=goal)
        worst = 0.0
        for step in range(8):
            torch.compiler.cudagraph_mark_step_begin()
            found = {"output": made(*args).clone()}
            with torch.autocast("cuda", BF16):
                wanted = {"output": model(*args)}
            worst = max(worst, off_by(wanted, found))
            _change(args, 0.9)
            if step in (3, 5):
                for p in model.parameters():
                    p.mul_(1.05)
        context.check(label, "" if worst <= TOLERANCE else f"off by {worst:.1e} of the largest output")


def _reduce_overhead_trains(context: Context, scale: str, goal: str) -> None:
    """Training in Inductor's CUDA graphs: losses near those of eager native."""
    label = f"mlp trains, reduce-overhead, {goal}"
    with context.attempt(label):
        losses = []
        for ours in (False, True):
            model, args = subjects.make("mlp", scale, "cuda", trains=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
            made = model
            if ours:
                made = nc.compile(model, under=nc.autocast("cuda", BF16), mode="reduce-overhead", goal=goal)
            found = []
            for _ in range(6):
                torch.compiler.cudagraph_mark_step_begin()
                with torch.autocast("cuda", BF16) if not ours else nullcontext():
                    output = made(*args)
                loss = output.float().square().mean()
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                optimizer.step()
                found.append(loss.item())
            losses.append(found)
        off = max(abs(a - b) / max(abs(a), 1e-9) for a, b in zip(*losses, strict=True))
        context.check(label, "" if off <= TOLERANCE else f"losses {losses}")
