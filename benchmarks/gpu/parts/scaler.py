"""Training in fp16 with GradScaler: the same losses, weights and scales as under torch.autocast, overflows included.

With nc.Scaler in its place, too: the same again, and the host waits for the device no more often.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import subjects
import torch
from context import Context, Skip
from same import CUSTOM, copies, mirror, quiet_dynamo, torchs_graphs_differ
from torch import nn

import narrowcast as nc

STEPS, BROKEN_STEP = 48, 40
FIRST_SCALE = 2.0**48
"""So large that the first steps overflow; later one input is infinite, and the scale grows every four good steps."""
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
    "adamw fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True),
}


@dataclass(slots=True)
class Run:
    """What a training run gave: losses and scales step by step as bits, weights at the end, warnings of waiting."""

    losses: list[torch.Tensor] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    waits: int = 0


def run(context: Context) -> None:
    """Models by optimizers by ways to open the region."""
    scale = subjects.SMALL if context.small else subjects.MIDDLE
    if context.is_cuda and not hasattr(torch.cuda, "set_sync_debug_mode"):
        context.skip("waiting is counted", "this torch cannot tell")
    for name in ("mlp",) if context.small else ("mlp", "gpt", "resnet50"):
        model, args = subjects.make(name, scale, context.device, trains=True)
        for optimizer in OPTIMIZERS if name == "mlp" else ("adamw",):
            with quiet_dynamo():
                _compare(context, f"{name} {optimizer}", model, args, optimizer)


def _compare(context: Context, label: str, model: nn.Module, args: tuple, optimizer: str) -> None:
    device, low = context.device, torch.float16

    def native(own: nn.Module) -> object:
        with torch.autocast(device, low):
            return own(*args)

    def ours(policy: object) -> Callable[[nn.Module], object]:
        def call(own: nn.Module) -> object:
            with nc.autocast(device, low, policy=policy):
                return own(*args)

        return call

    def compiled(policy: object, **options: object) -> Callable[[nn.Module], object]:
        made: dict[int, object] = {}

        def call(own: nn.Module) -> object:
            if id(own) not in made:
                made[id(own)] = nc.compile(
                    own, under=nc.autocast(device, low, policy=policy), backend="aot_eager", **options
                )
            return made[id(own)](*args)

        return call

    expected = custom = None
    with context.attempt(f"{label}: native trains"):
        expected = _train(model, args, native, optimizer, device)
        fell = sum(b < a for a, b in zip(expected.scales, expected.scales[1:], strict=False))
        grew = sum(b > a for a, b in zip(expected.scales, expected.scales[1:], strict=False))
        problem = "" if fell > 3 and grew else f"scales fell {fell} times and grew {grew} times: {expected.scales}"
        context.check(f"{label}: native trains, with overflows", problem)
        custom = _train(model, args, ours(CUSTOM), optimizer, device)
    if expected is None or custom is None:
        return
    with context.attempt(f"{label}: our scaler"):
        found = _train(model, args, native, optimizer, device, scaler=partial(nc.Scaler, patience=10**6))
        context.check(f"{label}: our scaler", _differences(expected, found))
        if context.is_cuda:
            text = f"{found.waits} waits in {STEPS} steps, torch's {expected.waits}"
            late = text if found.waits > expected.waits else ""
            context.check(f"{label}: our scaler, waits for the device no more often", late)
    whole = nc.autocast(device, low)
    for name, way, against, around in (
        ("native", ours(None), expected, None),
        ("native's rules by our kernels", ours(mirror(device)), expected, None),
        ("one region around all", lambda own: own(*args), expected, whole),
        ("compiled", compiled(None), expected, None),
        ("custom, compiled", compiled(CUSTOM), custom, None),
    ):
        with context.attempt(f"{label}: {name}"):
            found = _train(model, args, way, optimizer, device, around)
            wrong = _differences(against, found)
            if wrong and _differences(expected, _train(model, args, native, optimizer, device)):
                raise Skip("native does not give its own bits twice")
            if wrong and "compiled" in name and (why := torchs_graphs_differ(model, args)):
                raise Skip(why)
            context.check(f"{label}: {name}", wrong)
            if context.is_cuda and against is expected and "compiled" not in name:
                more = found.waits - expected.waits
                text = f"{found.waits} waits in {STEPS} steps, native {expected.waits}"
                context.check(f"{label}: {name}, waits for the device no more often", text if more > 0 else "")


def _train(
    model: nn.Module, args: tuple, call: Callable[[nn.Module], object], optimizer: str, device: str,
    around: object = None, scaler: Callable = torch.amp.GradScaler,
) -> Run:  # fmt: skip
    """A training run on a copy of the model. Step BROKEN_STEP has an infinite loss."""
    torch.manual_seed(0)
    own = copies(model)
    steps = OPTIMIZERS[optimizer](own)
    scaler = scaler(device, init_scale=FIRST_SCALE, growth_interval=4)
    found = Run()
    with around or contextlib.nullcontext():
        for step in range(STEPS):
            if step == 5:  # what is loaded and compiled at first has waited
                found.waits = 0
            with _counted_waits(found, device):
                output = call(own)
                loss = (output.float().square().mean() if output.dim() else output.float()).mean()
                if step == BROKEN_STEP:
                    loss = loss * torch.full((), float("inf"), device=loss.device)
                steps.zero_grad(set_to_none=True)
                scaler.scale(loss).backward()
                scaler.unscale_(steps)
                torch.nn.utils.clip_grad_norm_(own.parameters(), 1.0)
                scaler.step(steps)
                scaler.update()
            found.losses.append(loss.detach().clone())
            found.scales.append(scaler.get_scale())
    found.weights = [p.detach().clone() for p in (*own.parameters(), *own.buffers())]
    return found


@contextlib.contextmanager
def _counted_waits(found: Run, device: str) -> Iterator[None]:
    """Count what torch says about calls that wait for the device."""
    if device != "cuda" or not hasattr(torch.cuda, "set_sync_debug_mode"):
        yield
        return
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found.waits += sum("called a synchroniz" in str(w.message) for w in said)


def _differences(a: Run, b: Run) -> str:
    if a.scales != b.scales:
        step = next(n for n, (x, y) in enumerate(zip(a.scales, b.scales, strict=True)) if x != y)
        return f"scales differ from step {step} on: {a.scales[step]} against {b.scales[step]}"
    for step, (x, y) in enumerate(zip(a.losses, b.losses, strict=True)):
        if not torch.equal(torch.nan_to_num(x), torch.nan_to_num(y)):
            return f"losses differ from step {step} on: {x.item()} against {y.item()}"
    wrong = sum(
        not torch.equal(torch.nan_to_num(x), torch.nan_to_num(y)) for x, y in zip(a.weights, b.weights, strict=True)
    )
    return f"{wrong} of {len(a.weights)} weights differ" if wrong else ""
