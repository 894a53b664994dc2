"""The OpInfo sweep on a real device: every op under native autocast and under ours, bit for bit, with gradients.

An op that ends the process (a device error, a crash, a hang) is known by name to the next attempt, which goes on after
it. Per op at most SAMPLES samples are taken, at even distances, and OP_S seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from context import Context, DeviceLost, Skip, is_lost, told
from same import dense, mirror
from sweeping import conformance_sweep, is_repeatable
from torch.utils import _pytree as pytree

import narrowcast as nc

SAMPLES, OP_S = 12, 20.0
STARTED = "started"
PAIRS = {torch.bfloat16: None, torch.float16: ("fp32", "fp16", "mixed bf16/fp16")}
"""Formats of the inputs by the region's: under fp16 those that can differ from what bf16 has shown."""


def run(context: Context, shard: int, shards: int) -> None:
    """The ops of one shard that earlier attempts have not seen."""
    try:
        sweep = conformance_sweep()
    except ImportError as error:
        raise Skip(f"torch's OpInfo cannot be imported: {error}") from error
    chosen = sweep.op_db[shard::shards][: 3 if context.small else None]
    broken = context.kept.pop(STARTED, None)
    if broken is not None:
        context.keep(broken, {"samples": 0, "broken": True})
        context.check(f"{broken}: runs", "the process ended while it ran")
    rules = mirror(context.device)
    for info in chosen:
        name = info.formatted_name
        if name in context.kept:
            continue
        if context.left_s < OP_S + 10:
            context.is_unfinished = True
            break
        context.keep(STARTED, name)
        found = _one_op(context, sweep, info, rules)
        del context.kept[STARTED]
        context.keep(name, found)
        for line in found.get("differences", [])[:5]:
            context.check(f"{name}: as native", line)
        if len(context.kept) % 20 == 0:
            context.say(f"{len(context.kept)} of {len(chosen)} ops, {context.left_s:.0f} s left")
    done = [value for name, value in context.kept.items() if name != STARTED]
    context.data = {
        "ops": sum(1 for v in done if v.get("samples")),
        "samples": sum(v.get("samples", 0) for v in done),
        "raised": sum(v.get("raised", 0) for v in done),
        "with gradients": sum(v.get("with_gradients", 0) for v in done),
        "not repeatable": sum(v.get("not_repeatable", 0) for v in done),
        "cut short": [n for n, v in context.kept.items() if isinstance(v, dict) and v.get("cut")],
        "without samples": [n for n, v in context.kept.items() if isinstance(v, dict) and v.get("skipped")],
        "differences": sum(len(v.get("differences", [])) for v in done),
    }
    if not context.is_unfinished:
        wrong = context.data["differences"]
        context.check(f"{context.data['ops']} ops, {context.data['samples']} samples as native",
                      f"{wrong} differences" if wrong else "")  # fmt: skip


def _one_op(context: Context, sweep: Any, info: Any, rules: nc.Policy) -> dict[str, Any]:
    """What came of one op. DeviceLost if the device cannot be used after it."""
    device, start = context.device, time.monotonic()
    found: dict[str, Any] = {
        "samples": 0, "raised": 0, "with_gradients": 0, "not_repeatable": 0, "differences": [],
    }  # fmt: skip
    if torch.float32 not in info.supported_dtypes(device):
        return {"samples": 0, "skipped": "no fp32 on this device"}
    try:
        samples = list(info.sample_inputs(device, torch.float32, requires_grad=False))
    except Exception as error:
        _end_if_lost(error)
        return {"samples": 0, "skipped": f"no samples ({type(error).__name__})"}
    bits_too = info.name not in sweep.NOT_REPEATABLE
    for number, sample, low, label in _cases(sweep, samples, 2 if context.small else SAMPLES):
        if time.monotonic() - start > OP_S:
            found["cut"] = True
            break
        inputs = sweep.cast_tree(((sample.input, *sample.args), sample.kwargs), sweep.DTYPES[label])
        native = lambda low=low, inputs=inputs: _run(info, inputs, torch.autocast(device, low))  # noqa: E731
        wanted = native()
        found["samples"] += 1
        found["raised"] += isinstance(wanted, Exception)
        found["with_gradients"] += isinstance(wanted, dict) and bool(wanted["gradients"])
        for way, region in (("ours", nc.autocast(device, low)), ("mirror", nc.autocast(device, low, policy=rules))):
            wrong = sweep.same(wanted, _run(info, inputs, region), bits_too)
            if not wrong:
                continue
            if bits_too and not is_repeatable(native, wanted):
                found["not_repeatable"] += 1
                bits_too = False
                wrong = sweep.same(wanted, _run(info, inputs, region), False)
            if wrong:
                found["differences"].append(f"sample {number}, {label}, region {low}, {way}: {wrong}")
    return found


def _cases(sweep: Any, samples: list[Any], most: int) -> Iterator[tuple[int, Any, torch.dtype, str]]:
    """Samples at even distances, in each format of region and inputs."""
    step = max(1, -(-len(samples) // most))
    for number in range(0, len(samples), step):
        for low, wanted in PAIRS.items():
            for label in sweep.DTYPES:
                if wanted is None or label in wanted:
                    yield number, samples[number], low, label


def _run(info: Any, inputs: Any, region: Any) -> Any:
    """Outputs and gradients of the op on copies of its inputs, or the exception."""
    leaves: list[torch.Tensor] = []

    def own(value: Any) -> Any:
        if not torch.is_tensor(value):
            return value
        made = value.detach().clone()
        if info.supports_autograd and (made.is_floating_point() or made.is_complex()):
            leaves.append(made.requires_grad_())
        return made

    return _attempt(lambda: _outputs(info, pytree.tree_map(own, inputs), leaves, region))


def _outputs(info: Any, inputs: Any, leaves: list[torch.Tensor], region: Any) -> dict[str, Any]:
    args, kwargs = inputs
    torch.manual_seed(0)
    with region:
        outputs = info.op(*args, **kwargs)
    wanted = [t for t in pytree.tree_leaves(outputs) if torch.is_tensor(t) and t.requires_grad and t.numel()]
    gradients: Any = []
    if wanted and leaves:
        given = [dense(t).to(t.dtype) for t in wanted]
        gradients = _attempt(lambda: list(torch.autograd.grad(wanted, leaves, given, allow_unused=True)))
    return {
        "outputs": pytree.tree_map(lambda t: t.detach() if torch.is_tensor(t) else t, outputs),
        "gradients": type(gradients).__name__ if isinstance(gradients, Exception) else gradients,
    }


def _attempt(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        _end_if_lost(error)
        return error


def _end_if_lost(error: Exception) -> None:
    if isinstance(error, DeviceLost) or is_lost(error):
        raise DeviceLost(told(error)) from error
