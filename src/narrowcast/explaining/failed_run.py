"""A run that raised in a region: which call it was, with which formats, and what of other policies runs the model.

Asked only after the model has raised. It is run again to see the call, in fp32, and under each policy that may help:
what is suggested was tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from narrowcast.eager import autocast
from narrowcast.eager.watch import present_device_types
from narrowcast.eager.words import format_names
from narrowcast.policy import Policy, Site
from narrowcast.policy.lacks import FULL
from narrowcast.report import Attempt, Failure
from narrowcast.runs.isolation import isolated
from narrowcast.sites.python_stack import find_site, innermost_frame
from narrowcast.torch_bridge import find_op, op_id, tensors_in
from narrowcast.torch_surface.dispatch import DispatchMode, OpOverload
from narrowcast.torch_surface.state import autocast_key, autocast_was_on, switched_on

Run = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def failure_of(run: Run, region: autocast, error: Exception, fake: bool) -> Failure | None:
    """What raised, and what runs instead; None if the model raises in fp32, too.

    run: the model, its args and kwargs. region: the one in which it raised; not open. fake: on fake tensors.
    """
    if _raised(run, None, fake):
        return None
    seen = _watched(run, region, first_line(error), fake)
    site = seen.site or find_site(frame=innermost_frame(error))
    attempts = tuple(
        Attempt(policy.name, _raised(run, policy_region, fake)) for policy, policy_region in _others(region)
    )
    return Failure(seen.op, seen.formats, *site.at, first_line(error), region.policy.name, attempts)


def _watched(run: Run, region: autocast, said: str, fake: bool) -> _Seen:
    """The call that raises, seen in another run; nothing if that does not raise the same.

    A model may take another path while functions are seen (fused layers do): then ops alone are looked at.
    """
    for modes in ((_Functions, _Ops), (_Ops,)):
        seen = _Seen()
        try:
            with ExitStack() as stack:
                again = stack.enter_context(isolated(*run, fake=fake))
                stack.enter_context(region)
                for mode in modes:
                    stack.enter_context(mode(seen))
                again()
        except Exception as error:
            if first_line(error) == said:
                return seen
    return _Seen()


def first_line(error: BaseException | None) -> str:
    """`RuntimeError: both inputs should have same dtype`, short."""
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text[:160]}"


def _raised(run: Run, region: autocast | None, fake: bool) -> str:
    """What the model raises in the region, or in fp32; empty if it runs."""
    try:
        with isolated(*run, fake=fake) as again, nullcontext() if region is None else region:
            again()
    except Exception as error:
        return first_line(error)
    return ""


def _others(region: autocast) -> Iterable[tuple[Policy, autocast]]:
    """The policies that may run what raised: the region's own with what it lacks repaired, if it is a user's; safe."""
    own, safe = region.policy, Policy.safe()
    policies = [safe]
    if own.layers and own.unsupported != FULL and own.name != safe.name and own.extends:
        policies.insert(0, replace(own, unsupported=FULL, name=f'{own.name} with unsupported = "{FULL}"'))
    for policy in policies:
        if policy.digest != own.digest and policy.name != own.name:
            yield policy, autocast(region.device, region.fast_dtype, policy=policy)


class _Seen:
    """The innermost call that raised: its op, or function, the formats that it got, and where it was made."""

    def __init__(self) -> None:
        self.op, self.formats = "", ""
        self.site: Site | None = None

    def note(self, op: str, arguments: list[torch.Tensor]) -> None:
        """A call raised; calls around it raise after it."""
        if self.site is None:
            self.op, self.formats, self.site = op, format_names([t.dtype for t in arguments]), find_site()


class _Functions(TorchFunctionMode):
    """Sees calls of torch's functions: those that raise before any op runs are seen by nobody else."""

    def __init__(self, seen: _Seen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except Exception:
            name = getattr(func, "__name__", str(func))
            op = find_op(f"aten.{name}.default")
            self._seen.note(op_id(op) if op is not None else f"torch's {name}", tensors_in(args, kwargs))
            raise


class _Ops(DispatchMode):
    """Sees ops, which run with autocast on if it is: kernels that call other ops must find it so."""

    def __init__(self, seen: _Seen) -> None:
        super().__init__()
        self._seen = seen
        self._keys = tuple(autocast_key(device_type) for device_type in present_device_types())

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        on = autocast_was_on(self._keys)
        try:
            with switched_on(on) if on else nullcontext():
                return func(*args, **kwargs)
        except Exception:
            self._seen.note(op_id(func), tensors_in(args, kwargs))
            raise
