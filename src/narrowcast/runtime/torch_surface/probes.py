"""What Narrowcast takes for granted about torch, assumption by assumption, and whether it holds for the one here.

Every probe runs in the tests of every supported version. Those that stand before something that would otherwise go
wrong in silence run where that begins (`require`), once.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, wraps

import torch

from narrowcast.errors import SurfaceError

SUPPORTED = ("2.11", "2.15")
"""The oldest and the newest torch that the tests run with."""
_BOUNDS = [tuple(int(part) for part in version.split(".")) for version in SUPPORTED]


@dataclass(frozen=True, slots=True)
class Probe:
    """An assumption: what is taken for granted, and a question that answers what was found instead, or None."""

    says: str
    breaks: str
    ask: Callable[[], str | None]


_probes: dict[str, Probe] = {}


def probe(says: str, breaks: str) -> Callable[[Callable[[], str | None]], Callable[[], str | None]]:
    """Enter an assumption into the list. breaks: what would go wrong where it does not hold."""

    def enter(ask: Callable[[], str | None]) -> Callable[[], str | None]:
        @wraps(ask)
        def asked() -> str | None:
            try:
                return ask()
            except Exception as error:
                return f"{type(error).__name__}: {error}"

        _probes[says] = Probe(says, breaks, asked)
        return asked

    return enter


def all_probes() -> tuple[Probe, ...]:
    """Return every assumption, in order."""
    return tuple(_probes.values())


@cache
def require(says: str) -> None:
    """Ask one probe, once. SurfaceError if its assumption does not hold for this torch."""
    failure = _probes[says].ask()
    if failure is not None:
        raise broken(_probes[says], failure)


@cache
def check_version() -> None:
    """Check every assumption about a torch that the tests do not run with: SurfaceError if one does not hold, and a
    warning that the rest is untested. Nothing for the others.
    """
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if _BOUNDS[0] <= release <= _BOUNDS[1]:
        return
    for asked in all_probes():
        failure = asked.ask()
        if failure is not None:
            raise broken(asked, failure)
    warnings.warn(
        f"narrowcast: torch {torch.__version__} is not one that it is tested with ({SUPPORTED[0]} to {SUPPORTED[1]}); "
        "what it takes for granted about torch holds",
        stacklevel=4,
    )


def broken(asked: Probe, found: str) -> SurfaceError:
    """Return the error that names which assumption of which version does not hold."""
    return SurfaceError(
        asked=f"torch {torch.__version__} in which {asked.says}",
        found=f"{found}: {asked.breaks}",
        advice=f"Install a torch from {SUPPORTED[0]} to {SUPPORTED[1]}, or a newer Narrowcast.",
    )


def _missing(owner: object, *names: str) -> str | None:
    gone = [name for name in names if not hasattr(owner, name)]
    return f"{getattr(owner, '__name__', owner)} has no {', '.join(gone)}" if gone else None


# -- what would go wrong in silence ------------------------------------------------------------------------------------


@probe("checkpoints ask for autocast's state", "a forward that a checkpoint recomputes would run under native")
def _checkpoint_state() -> str | None:
    from narrowcast.runtime.torch_surface.modules import CHECKPOINT_FILE, CHECKPOINT_STATE, RECOMPUTING

    function = getattr(torch.utils.checkpoint, CHECKPOINT_STATE, None)
    if function is None:
        return f"torch.utils.checkpoint has no {CHECKPOINT_STATE}"
    state = function()
    if not (isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict)):
        return f"{CHECKPOINT_STATE} gives {type(state).__name__}, not two dicts"
    with open(CHECKPOINT_FILE, encoding="utf-8") as file:  # noqa: PTH123
        text = file.read()
    wanted = [f"def {name}(" for name in RECOMPUTING] + ["cpu_autocast_kwargs"]
    gone = [words for words in wanted if words not in text]
    return f"torch.utils.checkpoint has no {gone[0]!r}" if gone else None


@probe("calls of modules go through _call_impl", "pins and rules about modules would have no effect")
def _module_calls() -> str | None:
    from torch.nn import Module

    seen = []

    class Probed(Module):
        def _call_impl(self, *args: object, **kwargs: object) -> object:
            seen.append(args)
            return super()._call_impl(*args, **kwargs)

        def forward(self, x: object) -> object:
            return x

    Probed()(1)
    return None if seen else "a call of a module does not reach it"


@probe("what changes weights is where it was", "weights that change inside a region would be used as they were")
def _mutators() -> str | None:
    from narrowcast.runtime.torch_surface.modules import mutators

    return next((missing for owner, name in mutators() if (missing := _missing(owner, name))), None) or _missing(
        torch.utils, "swap_tensors"
    )


@probe("Dynamo can skip given code", "compiled code would hold the state of a region for a constant")
def _dynamo_strategies() -> str | None:
    frames = torch._C._dynamo.eval_frame
    return _missing(frames, "set_code_exec_strategy", "_FrameExecStrategy", "_FrameAction")


@probe("optimizers have hooks for all", "weights that an optimizer changes inside a region would be used as they were")
def _optimizer_hooks() -> str | None:
    from torch.optim import optimizer

    return _missing(optimizer, "register_optimizer_step_pre_hook", "register_optimizer_step_post_hook")


@probe("torch's scaler checks gradients and steps through its own methods", "nc.Scaler would skip no step")
def _scaler_methods() -> str | None:
    from torch.nn.utils import clip_grad

    from narrowcast.runtime.torch_surface.grad_scaling import NativeScaler

    theirs = (torch.amp.GradScaler, "_unscale_grads_", "_maybe_opt_step", "_lazy_init_scale_growth_tracker")
    missing = _missing(*theirs) or _missing(clip_grad, "_clip_grads_with_norm_", "clip_grad_value_")
    held = {"_scale", "_growth_tracker", "_init_scale", "_per_optimizer_states"}
    lost = sorted(held - vars(NativeScaler("cpu")).keys())
    return missing or (f"torch.amp.GradScaler holds no {', '.join(lost)}" if lost else None)


# -- the dispatcher ----------------------------------------------------------------------------------------------------


@probe("a Python kernel can be registered at an Autocast key", "policies would have no effect in eager code")
def _python_kernels() -> str | None:
    names = list(inspect.signature(torch.library.Library.impl).parameters)
    if "with_keyset" not in names:
        return "Library.impl takes no with_keyset"
    return _missing(torch.library, "get_kernel")


@probe("the dispatch keys of autocast can be named", "kernels could not be registered")
def _keys() -> str | None:
    from narrowcast.runtime.torch_surface.state import autocast_key

    for device_type in ("cpu", "cuda", "xpu", "mps", "mtia", "maia"):
        autocast_key(device_type)
    return None


@probe("regions count their nesting", "a native region inside ours could not be distinguished from ours")
def _nesting() -> str | None:
    from narrowcast.runtime.torch_surface.state import autocast_nesting

    outside = autocast_nesting()
    with torch.autocast("cpu", torch.bfloat16):
        inside = autocast_nesting()
    return None if inside == outside + 1 else f"inside a region the count is {inside}, outside {outside}"


def _written_and_read(device_type: str, dtype: torch.dtype) -> tuple[bool, torch.dtype]:
    """Return what autocast's state reads after it was switched on with this dtype; then it is as before."""
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    try:
        torch.set_autocast_enabled(device_type, True)
        torch.set_autocast_dtype(device_type, dtype)
        return torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    finally:
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])


@probe("autocast's state can be written and read back", "regions of ours would not be in force, or would stay")
def _state() -> str | None:
    state = _written_and_read("cpu", torch.float16)
    return None if state == (True, torch.float16) else f"it reads {state}"


@probe("the state of absent devices can carry a number", "code compiled under one policy would run under another")
def _carriers() -> str | None:
    lost = [d for d in ("ipu", "maia", "mtia") if _written_and_read(d, torch.int64)[1] is not torch.int64]
    return f"the dtype of {lost[0]} reads back as another" if lost else None


@probe("a cast under autocast is aten._to_copy", "recordings would list no casts")
def _casts() -> str | None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[object] = []
    x = torch.zeros(2, 2, device="cpu")
    with Mode(), torch.autocast("cpu", torch.bfloat16):
        torch.mm(x, x)
    from narrowcast.runtime.torch_surface.dispatch import TO_COPY

    return None if TO_COPY in seen else f"mm of fp32 in a bf16 region runs {seen}"


@probe("the public names of a region tell its state", "scripts and exports could not read a region")
def _region_attributes() -> str | None:
    region = torch.autocast("cpu", torch.bfloat16)
    return _missing(region, "device", "fast_dtype", "_enabled", "_cache_enabled")


# -- graphs and scripts ------------------------------------------------------------------------------------------------


@probe("regions are recorded in graphs that are traced before dispatch", "compiled and exported code would not be cast")
def _regions_in_graphs() -> str | None:
    from torch.fx.experimental.proxy_tensor import make_fx

    from narrowcast.runtime.torch_surface.state import ENTER_AUTOCAST, EXIT_AUTOCAST

    def inside(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return torch.mm(x, x)

    targets = [node.target for node in make_fx(inside, pre_dispatch=True)(torch.zeros(2, 2, device="cpu")).graph.nodes]
    gone = [f.__name__ for f in (ENTER_AUTOCAST, EXIT_AUTOCAST) if f not in targets]
    return f"no {gone[0]} in {targets}" if gone else None


@probe("torch's compilers are where they were", "nc.compile could not hand graphs on")
def _compilers() -> str | None:
    return _missing(torch, "_TorchCompileInductorWrapper", "_TorchCompileWrapper")


@probe("AOTAutograd has the settings that we use", "backwards would run in other formats, and joint graphs unedited")
def _functorch() -> str | None:
    from narrowcast.runtime.torch_surface.dynamo import functorch_config

    return _missing(functorch_config, "backward_pass_autocast", "joint_custom_pass", "enable_autograd_cache")


@probe("scripts can be compiled, changed and inlined", "nc.script and nc.trace could not work")
def _scripts() -> str | None:
    from narrowcast.runtime.torch_surface import jit

    missing = _missing(jit, "BOOL", "TENSOR", "ScriptFunction", "wrap_module")
    return missing or _missing(torch._C.Graph, "create", "insertNode", "insertGraph", "findNode", "block")


def main() -> int:
    """Print every assumption, and whether it holds; the number of those that do not."""
    failed = 0
    for asked in all_probes():
        failure = asked.ask()
        failed += failure is not None
        sys.stdout.write(
            f"{'holds ' if failure is None else 'BROKEN'}  {asked.says}{'' if failure is None else ': ' + failure}\n"
        )
    return failed


if __name__ == "__main__":
    sys.exit(main())
