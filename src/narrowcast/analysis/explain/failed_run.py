"""A run that raised in a region: which call it was, with which formats, and what of other policies runs the model.

Asked only after the model has raised. It is run again to see the call, in fp32, and under each policy that may help:
what is suggested was tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

from narrowcast.core.policy import Policy
from narrowcast.core.policy.settings import FULL
from narrowcast.frontends.eager import autocast
from narrowcast.observation.trial.isolation import isolated
from narrowcast.observation.trial.raising import Raising, SeeFunctions, SeeOps, first_line
from narrowcast.reports.results.explanation import Attempt, Failure
from narrowcast.runtime.sites.python_stack import find_site, innermost_frame

Run = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def failure_of(run: Run, region: autocast, error: Exception) -> Failure | None:
    """What raised, and what runs instead; None if the model raises in fp32, too.

    run: the model, its args and kwargs. region: the one in which it raised; not open.
    """
    if _raised(run, None):
        return None
    seen = _watched(run, region, first_line(error))
    site = seen.site or find_site(frame=innermost_frame(error))
    attempts = tuple(Attempt(policy.name, _raised(run, around)) for policy, around in _others(region))
    return Failure(seen.op, seen.formats, *site.at, first_line(error), region.policy.name, attempts)


def _watched(run: Run, region: autocast, said: str) -> Raising:
    """The call that raises, seen in another run; nothing if that does not raise the same.

    A model may take another path while functions are seen (fused layers do): then ops alone are looked at.
    """
    for modes in ((SeeFunctions, SeeOps), (SeeOps,)):
        seen = Raising()
        try:
            with ExitStack() as stack:
                again = stack.enter_context(isolated(*run, fake=False))
                stack.enter_context(region)
                for mode in modes:
                    stack.enter_context(mode(seen))
                again()
        except Exception as error:
            if first_line(error) == said:
                return seen
    return Raising()


def _raised(run: Run, region: autocast | None) -> str:
    """What the model raises in the region, or in fp32; empty if it runs."""
    try:
        with isolated(*run, fake=False) as again, nullcontext() if region is None else region:
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
