"""The same bits: what a model gives in a run, and how it differs from another's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from context import Context, Skip, is_lost, told
from torch import nn

import narrowcast as nc

Values = dict[str, torch.Tensor]


def values_of(model: nn.Module, call: Callable[[], object], gradients: bool = True) -> Values:
    """Outputs, gradients by parameter, buffers by name, of one call. The model's own gradients are gone afterwards."""
    torch.manual_seed(0)
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(gradients):
        leaves = [t for t in torch.utils._pytree.tree_leaves(call()) if isinstance(t, torch.Tensor)]
    found = {f"output {n}": t.detach().clone() for n, t in enumerate(leaves)}
    if gradients:
        loss = [(t.float() * dense(t)).sum() for t in leaves if t.requires_grad]
        torch.stack(loss).sum().backward()
        found |= {f"d {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
    return found | {f"buffer {name}": b.clone() for name, b in model.named_buffers()}


def dense(like: torch.Tensor) -> torch.Tensor:
    """Numbers from 1/8 to 1 in fp32: a gradient that is not expanded, for which kernels take other paths."""
    flat = torch.arange(like.numel(), device=like.device) % 8
    return ((flat + 1) / 8).reshape(like.shape).float()


def differences(a: Values, b: Values) -> list[str]:
    """Names of values that differ in dtype or in a bit."""
    found = [f"{name} is missing in one" for name in sorted(a.keys() ^ b.keys())]
    for name in a.keys() & b.keys():
        x, y = a[name], b[name]
        if x.dtype is not y.dtype or x.shape != y.shape:
            found.append(f"{name}: {x.dtype} {tuple(x.shape)} against {y.dtype} {tuple(y.shape)}")
        elif not torch.equal(torch.nan_to_num(x), torch.nan_to_num(y)):
            off = (x.double() - y.double()).abs().max().item()
            found.append(f"{name}: {x.dtype}, off by {off:.1e} of {x.double().abs().max().item():.1e}")
    return found


def torchs_graphs_differ(model: nn.Module, args: tuple) -> str:
    """Why a graph need not give eager code's bits: torch's own does not, either, in fp32."""
    torch._dynamo.reset()
    plain, own = copies(model), copies(model)
    compiled = torch.compile(own, backend="aot_eager")
    wrong = differences(values_of(plain, lambda: plain(*args)), values_of(own, lambda: compiled(*args)))
    return "in fp32 torch's own aot_eager differs from eager, too" if wrong else ""


def off_by(a: Values, b: Values) -> float:
    """The largest difference of an output, in parts of the largest element."""
    worst = 0.0
    for name, x in a.items():
        if name.startswith("output") and x.is_floating_point():
            scale = x.double().abs().max().clamp(min=1e-6)
            worst = max(worst, ((x.double() - b[name].double()).abs().max() / scale).item())
    return worst


def check_same(
    context: Context, name: str, expected: Callable[[], Values], found: Callable[[], Values],
    control: Callable[[], str] = lambda: "",
) -> None:  # fmt: skip
    """A check that two ways give the same bits. expected: is run again where they differ: what differs from itself
    says nothing. control: gives a reason why they may differ that is not ours; asked only where they do.
    """
    with context.attempt(name):
        wanted = or_skip(expected)
        wrong = differences(wanted, found())
        if wrong:
            if any(differences(wanted, expected()) for _ in range(4)):
                raise Skip(f"native does not give its own bits twice ({wrong[0]})")
            reason = control()
            if reason:
                raise Skip(f"{reason} ({wrong[0]})")
        context.check(name, "; ".join(wrong[:5]))


def or_skip(expected: Callable[[], Values]) -> Values:
    """What native gives; Skip where it cannot: then nothing is promised."""
    try:
        return expected()
    except Exception as error:
        if is_lost(error):
            raise
        raise Skip(f"what it is compared with raises {told(error)}") from error


def copies(model: nn.Module) -> nn.Module:
    """The model with weights and buffers of its own."""
    return copy.deepcopy(model)


def run_in(region: object, model: nn.Module, args: tuple) -> object:
    """A call inside a region."""
    with region:
        return model(*args)


@contextmanager
def quiet_dynamo() -> Iterator[None]:
    """Dynamo forgets, and may compile one code often: sides and formats share their models' code."""
    config = torch._dynamo.config
    for name in ("recompile_limit", "cache_size_limit"):
        if hasattr(config, name):
            setattr(config, name, 256)
            break
    torch._dynamo.reset()
    try:
        yield
    finally:
        torch._dynamo.reset()


def raised(call: Callable[[], object]) -> str:
    """What a call raises; empty if nothing."""
    try:
        call()
    except Exception as error:
        return told(error)
    return ""


def mirror(device: str) -> nc.Policy:
    """Native's rules, marked so that they are not taken for native's own: our kernels carry them out."""
    from dataclasses import replace

    native = nc.Policy.native(device)
    return nc.Policy("mirror", (tuple(replace(rule, override=True) for rule in native.rules),), extends=("nothing",))


CUSTOM = nc.Policy.native().with_rules(
    nc.Rule("aten.gelu", "full", reason="activations in fp32"),
    nc.Rule("aten.softmax", "lower", reason="a listed op lowered"),
    nc.Rule("aten.layer_norm", "inside", reason="fp32 inside"),
    nc.Rule("aten.relu", "full", reason="an unlisted op in fp32"),
    nc.Rule("aten.max_pool2d", "full", reason="a composite op in fp32"),
    nc.Rule("aten.silu", "to(fp16)", reason="a third format"),
    nc.Rule("aten.linear", "full", module="*.1", reason="by place: what the second of a list holds"),
    name="custom",
)
