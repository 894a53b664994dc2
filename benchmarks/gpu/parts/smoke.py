"""Models under every policy and front end, bit for bit, forward and gradients; what is recorded and explained."""

from __future__ import annotations

from collections import Counter
from functools import partial

import subjects
import torch
from context import Context, Skip
from same import (
    CUSTOM,
    check_same,
    copies,
    differences,
    mirror,
    off_by,
    or_skip,
    quiet_dynamo,
    raised,
    run_in,
    torchs_graphs_differ,
    values_of,
)
from torch import nn

import narrowcast as nc

LOWS = {"bf16": torch.bfloat16, "fp16": torch.float16}
MODELS = ("mlp", "gpt", "encoder", "resnet50", "decode", "lstm", "lstm_odd")
COMPILED = ("mlp", "gpt", "encoder", "resnet50", "decode")
SCRIPTED = ("mlp", "resnet50", "lstm")
TOLERANCE = 0.05
"""Of the largest output: Inductor fuses casts into loops, and rounds intermediate results less often."""


def run(context: Context) -> None:
    """Every model, under bf16 and fp16."""
    scale = subjects.SMALL if context.small else subjects.MIDDLE
    torch.backends.cuda.matmul.allow_tf32 = False
    for name in MODELS:
        dropout = 0.1 if name in ("gpt", "encoder") else 0.0  # random numbers, too, are to be the same
        model, args = subjects.make(name, scale, context.device, trains=name != "decode", dropout=dropout)
        for label, low in LOWS.items():
            with quiet_dynamo():
                _eager(context, f"{name} {label}", model, args, low)
                if name in COMPILED and not (context.small and label == "fp16"):
                    _graphs(context, f"{name} {label}", model, args, low)
        _recorded(context, name, model, args)
        if name in SCRIPTED:
            _scripts(context, name, model, args)
    with quiet_dynamo():
        _inductor(context, scale)


def _values(model: nn.Module, args: tuple, region: object) -> dict[str, torch.Tensor]:
    own = copies(model)
    return values_of(own, lambda: run_in(region, own, args))


def _native(context: Context, model: nn.Module, args: tuple, low: torch.dtype) -> dict[str, torch.Tensor]:
    return _values(model, args, torch.autocast(context.device, low))


def _ours(context: Context, model: nn.Module, args: tuple, low: torch.dtype, policy: object) -> dict[str, torch.Tensor]:
    return _values(model, args, nc.autocast(context.device, low, policy=policy))


def _eager(context: Context, label: str, model: nn.Module, args: tuple, low: torch.dtype) -> None:
    native = partial(_native, context, model, args, low)
    check_same(context, f"{label}: native, eager", native, partial(_ours, context, model, args, low, None))
    rules = mirror(context.device)
    check_same(
        context, f"{label}: native's rules by our kernels", native, partial(_ours, context, model, args, low, rules)
    )
    with context.attempt(f"{label}: safe runs"):
        wanted = or_skip(native)
        safe = _ours(context, model, args, low, "safe")
        finite = all(t.isfinite().all() for n, t in safe.items() if n.startswith("output"))
        same_types = all(safe[n].dtype is t.dtype for n, t in wanted.items())
        context.check(f"{label}: safe runs", "" if finite and same_types else "not finite, or other dtypes than native")
        context.data.setdefault("safe differs from native in", {})[label] = len(differences(wanted, safe))


def _graphs(context: Context, label: str, model: nn.Module, args: tuple, low: torch.dtype) -> None:
    """Compiled and exported as eager, without code generation: there equal bits are promised."""
    torch_differs = partial(torchs_graphs_differ, model, args)
    for name, policy in (("native", None), ("custom", CUSTOM), ("safe", "safe")):
        eager = partial(_ours, context, model, args, low, policy)

        def compiled(policy: object = policy) -> dict[str, torch.Tensor]:
            own = copies(model)
            made = nc.compile(own, under=nc.autocast(context.device, low, policy=policy), backend="aot_eager")
            return values_of(own, lambda: made(*args))

        def exported(policy: object = policy) -> dict[str, torch.Tensor]:
            own = copies(model)
            made = nc.export(own, args, under=nc.autocast(context.device, low, policy=policy)).module()
            return values_of(made, lambda: made(*args))

        check_same(context, f"{label}: {name}, compiled", eager, compiled, torch_differs)
        if name == "custom":
            check_same(context, f"{label}: {name}, exported", eager, exported, torch_differs)


def _recorded(context: Context, name: str, model: nn.Module, args: tuple) -> None:
    """A recording changes no bit, sees casts on this device, and an explanation foretells them."""
    low = torch.bfloat16
    with context.attempt(f"{name}: recorded"):
        wanted = _ours(context, model, args, low, CUSTOM)
        own = copies(model)

        def recorded() -> object:
            with nc.record() as ledger, nc.autocast(context.device, low, policy=CUSTOM):
                made = own(*args)
            seen.extend(ledger.casts)
            return made

        seen: list[object] = []
        wrong = differences(wanted, values_of(own, recorded))
        unseen = [c for c in seen if c.how == "planned"]
        if not seen:
            wrong.append("no cast was seen")
        context.check(f"{name}: recorded", "; ".join([*wrong[:3], *map(str, unseen[:3])]))
        context.data.setdefault("casts", {})[name] = len(seen)
    with context.attempt(f"{name}: explained"):
        found = nc.explain(copies(model), args, under=nc.autocast(context.device, low, policy=CUSTOM))
        told, real = Counter(map(_kind, found.ledger.casts)), Counter(map(_kind, seen))
        more = [f"{how} {k} {n}" for how, gap in (("only explained", told - real), ("only seen", real - told))
                for k, n in gap.items()]  # fmt: skip
        context.check(f"{name}: explained", "" if str(found) and not more else "; ".join(more[:4]))
        if found.device_type != context.device:
            context.check(f"{name}: explained on its device", f"on {found.device_type}")


def _kind(cast: object) -> tuple[str, str, str, str]:
    return cast.op, cast.argument, str(cast.src), str(cast.dst)


def _scripts(context: Context, name: str, model: nn.Module, args: tuple) -> None:
    """Scripts and traces as eager code; without torch's fuser, which rounds less often."""
    low = torch.bfloat16
    fuser = getattr(torch._C, "_jit_set_texpr_fuser_enabled", None)
    if fuser is not None:
        fuser(False)

    def script() -> dict[str, torch.Tensor]:
        own = copies(model)
        made = nc.script(own, under=nc.autocast(context.device, low, policy=CUSTOM))
        return values_of(own, lambda: made(*args))

    def trace() -> dict[str, torch.Tensor]:
        own = copies(model)
        with torch.no_grad():  # batch norms, which count what they see, see the example
            made = nc.trace(copies(own).eval(), args, under=nc.autocast(context.device, low, policy=None))
        return values_of(own, lambda: made(*args), gradients=False)

    def eager_eval() -> dict[str, torch.Tensor]:
        own = copies(model)
        still = copies(own).eval()
        return values_of(own, lambda: run_in(torch.autocast(context.device, low), still, args), gradients=False)

    eager = partial(_ours, context, model, args, low, CUSTOM)
    check_same(context, f"{name}: scripted", eager, script, lambda: _scripts_differ(model, args))
    check_same(context, f"{name}: traced", eager_eval, trace, lambda: _scripts_differ(model, args))


def _scripts_differ(model: nn.Module, args: tuple) -> str:
    """In fp32, or with low weights and inputs."""
    for dtype in (torch.float32, torch.bfloat16):
        plain, own = copies(model).to(dtype), copies(model).to(dtype)
        inputs = tuple(a.to(dtype) if torch.is_tensor(a) and a.is_floating_point() else a for a in args)
        scripted = torch.jit.script(own)
        wrong = differences(values_of(plain, lambda: plain(*inputs)), values_of(own, lambda: scripted(*inputs)))  # noqa: B023
        if wrong:
            return f"in {dtype} torch's own script differs from eager, too ({wrong[0]})"
    return ""


def _inductor(context: Context, scale: str) -> None:
    """What Inductor makes of our graphs, near eager and near what it makes of torch's."""
    for name in ("mlp", "gpt") if not context.small else ("mlp",):
        label = f"{name}: Inductor"
        with context.attempt(label):
            if raised(lambda: torch.compile(lambda x: x + 1)(torch.ones(2, device=context.device))):
                raise Skip("Inductor cannot generate code here")
            model, args = subjects.make(name, scale, context.device)
            wanted = _native(context, model, args, torch.bfloat16)
            own = copies(model)
            made = nc.compile(own, under=nc.autocast(context.device, torch.bfloat16))
            off = off_by(wanted, values_of(own, lambda made=made, args=args: made(*args)))
            context.check(label, "" if off <= TOLERANCE else f"off by {off:.1e} of the largest output")
