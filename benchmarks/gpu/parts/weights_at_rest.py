"""Low copies of weights, kept from call to call: they follow every change that torch counts, and no call waits."""

from __future__ import annotations

from collections.abc import Callable

import subjects
import torch
from context import Context
from same import quiet_dynamo
from torch import nn

import narrowcast as nc
from narrowcast.frontends.eager import invalidate
from narrowcast.runtime.weights.at_rest import at_rest

BF16 = torch.bfloat16


def run(context: Context) -> None:
    """Each change between calls of one compiled model, which then gives the bits of native eager code."""
    scale = subjects.SMALL if context.small else subjects.MIDDLE
    for name in ("mlp", "encoder", "resnet50"):
        for weights in ("folded", "cast"):
            model, args = subjects.make(name, scale, context.device)
            with quiet_dynamo():
                _changes(context, f"{name}, {weights}", model, args, weights)
    with quiet_dynamo():
        _training(context, scale)


def _changes(context: Context, label: str, model: nn.Module, args: tuple, weights: str) -> None:
    device = context.device
    made = nc.compile(model, under=nc.autocast(device, BF16), backend="aot_eager", weights=weights)

    def follows(what: str) -> None:
        with context.attempt(f"{label}: {what}"), torch.no_grad():
            with torch.autocast(device, BF16):
                expected = model(*args)
            context.check(f"{label}: {what}", "" if torch.equal(made(*args), expected) else "other bits than native")

    follows("at first")
    follows("again")
    before = at_rest.made
    follows("a third time")
    context.check(
        f"{label}: nothing is cast again", f"{at_rest.made - before} weights were" if at_rest.made != before else ""
    )
    for what, change in _all_changes(model, device).items():
        with context.attempt(f"{label}: {what}"):
            change()
        follows(what)
    with context.attempt(f"{label}: a write through .data, told"):
        _first(model).data.mul_(1.5)
        invalidate(model)
    follows("a write through .data, told")
    if context.is_cuda:
        with context.attempt(f"{label}: .data untold"):
            with torch.no_grad():
                made(*args)
                _first(model).data.mul_(1.5)
                with torch.autocast(device, BF16):
                    seen = torch.equal(made(*args), model(*args))
            context.data[f"{label}: a write through .data, untold, is seen"] = seen  # a known limit on an accelerator
            invalidate(model)
        _waits(context, label, lambda: made(*args))


def _all_changes(model: nn.Module, device: str) -> dict[str, Callable[[], object]]:
    """What changes weights."""

    def in_place() -> None:
        with torch.no_grad():
            _first(model).add_(0.01)

    def loaded() -> None:
        model.load_state_dict({k: v + 0.01 if v.is_floating_point() else v for k, v in model.state_dict().items()})

    def other_memory() -> None:
        _first(model).data = _first(model).data * 1.01

    def step(**options: object) -> Callable[[], None]:
        def call() -> None:
            for p in model.parameters():
                p.grad = torch.full_like(p, 0.01)
            torch.optim.AdamW(model.parameters(), lr=1e-3, **options).step()
            model.zero_grad(set_to_none=True)

        return call

    def moved() -> None:
        model.to("cpu")
        with torch.no_grad():
            _first(model).add_(0.01)
        model.to(device)

    def swapped() -> None:
        weight = _first(model)
        torch.utils.swap_tensors(weight, nn.Parameter(weight.detach() * 1.01))

    def many() -> None:
        torch._foreach_add_([p.detach() for p in model.parameters()], 0.01)

    return {
        "written in place": in_place, "a loaded state": loaded, "other memory": other_memory, "a step": step(),
        "a fused step": step(fused=True), "a step of foreach": step(foreach=True), "to the cpu and back": moved,
        "swapped": swapped, "foreach in place": many,
    }  # fmt: skip


def _first(model: nn.Module) -> nn.Parameter:
    return next(p for p in model.parameters() if p.dim() > 1)


def _waits(context: Context, label: str, call: Callable[[], object]) -> None:
    """A call that is warm waits for the device nowhere."""
    if not hasattr(torch.cuda, "set_sync_debug_mode"):
        return
    with context.attempt(f"{label}: a warm call does not wait"), torch.no_grad():
        call()
        call()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        context.check(f"{label}: a warm call does not wait")


def _training(context: Context, scale: str) -> None:
    """Working copies: a training run gives the losses of casts at each call."""
    losses = {}
    label = "working copies train as casts do"
    with context.attempt(label):
        for weights in ("cast", "working_copies"):
            model, args = subjects.make("mlp", scale, context.device, trains=True)
            made = nc.compile(model, under=nc.autocast(context.device, BF16), backend="aot_eager", weights=weights)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            found = []
            for _ in range(8):
                loss = made(*args).float().square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                found.append(loss.item())
            losses[weights] = found
        same = losses["cast"] == losses["working_copies"]
        context.check(label, "" if same else str(losses))
