"""One model in one mode, all sides in turn: fp32, tf32, native autocast, model.to(bf16), ours; time by events, memory.

Every side but to(bf16), which has weights of its own, runs the same model. What a side holds (copies of weights that it
keeps) and what one call takes at most besides are counted apart.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import subjects
import torch
from clock import Side, allocated_mib, alternate, measure_peak, ratio, synchronize, told
from context import Context, is_lost, told as told_error
from same import off_by, quiet_dynamo
from torch import nn

import narrowcast as nc
from narrowcast.frontends.graphs.compiled import watch_graphs

BF16 = torch.bfloat16
TOLERANCE = 0.06
ROUNDS = 15
NATIVE, FAST = "compiled native", "ours fast"
OTHERS = ("eager fp32", "eager tf32", "eager native", "compiled fp32", "compiled tf32", NATIVE)
"""What `fast` is held against: it may be no less precise than the policy, so to(bf16) is shown, and is no candidate."""
SIDES = ("eager fp32", "eager native", NATIVE, FAST, "ours compiled", "compiled to(bf16)", "ours eager",
         "compiled fp32", "compiled tf32", "eager tf32")  # fmt: skip
GRAPHS = ("compiled native, CUDA graphs", "ours compiled, CUDA graphs")
"""For what is so short that launching is what takes time."""


def run(context: Context, model: str, mode: str) -> None:
    """Build the sides, as many as there is time for; then time them in turn."""
    scale = subjects.SMALL if context.small else subjects.REAL
    trains = mode == "train"
    module, args = subjects.make(model, scale, context.device, trains)
    names = (*SIDES, *GRAPHS) if (model, mode, context.device) == ("decode", "infer", "cuda") else SIDES
    context.data |= {"model": model, "mode": mode, "failed": {}, "weights_mib": _mib(module)}
    with quiet_dynamo(), torch.set_grad_enabled(trains):
        sides = [side for name in names if (side := _made(context, name, module, args, trains)) is not None]
        if not sides:
            context.check("sides run", str(context.data["failed"]))
            return
        _near(context, sides, trains)
        for side in sides:
            measure_peak(side, context.device)
        alternate(sides, 3 if context.small else ROUNDS, context.device, max(20.0, min(120.0, context.left_s - 30)))
    context.data["sides"] = {side.name: told(side) for side in sides}
    context.data["ratios"] = _ratios({side.name: side for side in sides})
    context.check("all sides were timed")


def _mib(module: nn.Module) -> float:
    return round(sum(t.nbytes for t in (*module.parameters(), *module.buffers())) / 2**20, 1)


def _made(context: Context, name: str, module: nn.Module, args: tuple, trains: bool) -> Side | None:
    """A side that has run; None, with the reason kept, where it cannot or there is no time."""
    if context.left_s < 90 and not context.small:
        context.is_unfinished = True
        context.say(f"{name}: no time")
        return None
    before = allocated_mib(context.device)
    start = time.monotonic()
    try:
        side = _side(context, name, module, args, trains)
        with side.around(), watch_graphs() as graphs:
            for _ in range(3):
                side.call()
            synchronize(context.device)
    except Exception as error:
        context.data["failed"][name] = told_error(error)
        if is_lost(error):
            raise
        if "ours" in name and type(error).__name__ != "OutOfMemoryError":
            context.check(f"{name} runs", told_error(error))
        return None
    side.first_s = time.monotonic() - start
    side.held_mib = allocated_mib(context.device) - before
    if name.startswith(FAST):
        context.data[f"graphs of {name}"] = [_graph(g) for g in graphs]
    context.say(f"{name}: first calls {side.first_s:.1f} s, {context.left_s:.0f} s left")
    context.save()
    return side


def _graph(graph: object) -> dict[str, object]:
    found = {c.name: {"predicted_ms": c.predicted_ns / 1e6, "raced_ms": c.measured_ns and c.measured_ns / 1e6}
             for c in graph.candidates}  # fmt: skip
    return {
        "place": Path(str(graph.site)).name,
        "chosen": graph.chosen,
        "fallback": graph.fallback,
        "candidates": found,
    }


def _side(context: Context, name: str, module: nn.Module, args: tuple, trains: bool) -> Side:
    """What a side runs, and under which switches."""
    device, mode = context.device, "reduce-overhead" if "CUDA graphs" in name else None
    around: Callable[[], AbstractContextManager[object]] = nullcontext
    region: Callable[[], AbstractContextManager[object]] = nullcontext
    own, run = module, module
    if "fp32" in name or "tf32" in name:
        around = partial(fp32_means, "tf32" in name)
        run = torch.compile(module) if "compiled" in name else module
    elif "native" in name:
        region = partial(torch.autocast, device, BF16)
        run = torch.compile(module, mode=mode) if "compiled" in name else module
    elif "to(bf16)" in name:
        own = copy.deepcopy(module).bfloat16()
        args = tuple(a.bfloat16() if a.is_floating_point() else a for a in args)
        run = torch.compile(own)
    elif name == "ours eager":
        region = partial(nc.autocast, device, BF16)
    else:
        goal = "fast" if name.startswith(FAST) else "exact"
        run = nc.compile(module, under=nc.autocast(device, BF16), goal=goal, mode=mode)

    def call() -> object:
        if mode is not None:
            torch.compiler.cudagraph_mark_step_begin()
        with region():
            return run(*args)

    def step() -> None:
        leaves = torch.utils._pytree.tree_leaves(call())
        wanted = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
        sum(t.float().square().mean() if t.dim() else t.float() for t in wanted).backward()
        own.zero_grad(set_to_none=True)

    return Side(name, step if trains else call, around, call)


@contextlib.contextmanager
def fp32_means(tf32: bool) -> Iterator[None]:
    """What products and convolutions in fp32 are computed in. torch's default is tf32 for convolutions alone."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def _near(context: Context, sides: list[Side], trains: bool) -> None:
    """Our sides give what eager native gives, within what other roundings make of it. Batch norms move with each call,
    and dropout is off: so only where nothing is trained.
    """
    found = {side.name: side for side in sides}
    if trains or "eager native" not in found:
        return
    wanted = _output(found["eager native"])
    for name in found:
        if name.startswith("ours"):
            with context.attempt(f"{name}: near native"):
                off = off_by(wanted, _output(found[name]))
                context.check(f"{name}: near native", "" if off <= TOLERANCE else f"off by {off:.1e} of the largest")


def _output(side: Side) -> dict[str, torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(side.forward())
    return {f"output {n}": t.detach().clone() for n, t in enumerate(leaves) if isinstance(t, torch.Tensor)}


def _ratios(sides: dict[str, Side]) -> dict[str, object]:
    """Of round by round pairs."""
    found: dict[str, object] = {}
    others = [name for name in OTHERS if name in sides]
    if FAST in sides and others:
        best = min(others, key=lambda name: sorted(sides[name].times_ms)[len(sides[name].times_ms) // 2])
        found |= {"best other": best, "fast over best other": ratio(sides[FAST], sides[best])}
    for label, a, b in (
        ("compiled native over fast", NATIVE, FAST), ("eager native over fast", "eager native", FAST),
        ("fast over to(bf16)", FAST, "compiled to(bf16)"), ("exact over compiled native", "ours compiled", NATIVE),
        ("ours eager over eager native", "ours eager", "eager native"),
        ("CUDA graphs: ours over native", GRAPHS[1], GRAPHS[0]),
    ):  # fmt: skip
        if a in sides and b in sides:
            found[label] = ratio(sides[a], sides[b])
    return found
