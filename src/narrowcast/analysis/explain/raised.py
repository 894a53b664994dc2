"""What raised in a run, and which other policies run it: each is tried, and what it writes to is restored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from narrowcast.analysis.record.record import recording
from narrowcast.core.policy import Policy
from narrowcast.core.policy.settings import FULL
from narrowcast.errors import first_line
from narrowcast.frontends.eager import autocast
from narrowcast.frontends.eager.registered import leaves_no_kernels
from narrowcast.observation.trial.raising import Raising, SeeFunctions, SeeOps
from narrowcast.observation.trial.trial import Trial
from narrowcast.reports.results.explanation import Attempt, Failure
from narrowcast.runtime.sites.python_stack import find_site, innermost_frame


@leaves_no_kernels()
def failure_of(trial: Trial, region: autocast, error: Exception) -> Failure | None:
    """Return what raised in a region, and what runs instead; None if the model raises in fp32, too. Suggestions were
    tried: the model is run again to see the call, in fp32, and under each policy that may help.
    """
    if _raised(trial, None):
        return None
    seen = _watched(trial, region, first_line(error))
    site = seen.site or find_site(frame=innermost_frame(error))
    attempts = tuple(Attempt(policy.name, _raised(trial, around)) for policy, around in _others(region))
    return Failure(seen.op, seen.formats, *site.at, first_line(error), region.policy.name, attempts)


def _watched(trial: Trial, region: autocast, message: str) -> Raising:
    """Return the call that raises, seen in another run; nothing if that does not raise the same.

    A model may take another path while functions are seen (fused layers do): then ops alone are inspected.
    """
    for modes in ((SeeFunctions, SeeOps), (SeeOps,)):
        seen = Raising()
        try:
            with ExitStack() as stack:
                again = stack.enter_context(_kept(trial, region))
                stack.enter_context(region)
                for mode in modes:
                    stack.enter_context(mode(seen))
                again()
        except Exception as error:
            if first_line(error) == message:
                return seen
    return Raising()


@contextmanager
def _kept(trial: Trial, region: autocast | None) -> Iterator[Callable[[], Any]]:
    """Give another run of the trial; what it writes to is observed, and restored after it."""
    with trial.kept_weights() as weights, trial.isolated() as again, recording(weights, region):
        yield again


def _raised(trial: Trial, region: autocast | None) -> str:
    """Return what the model raises in the region, or in fp32; empty if it runs."""
    try:
        with _kept(trial, region) as again, nullcontext() if region is None else region:
            again()
    except Exception as error:
        return first_line(error)
    return ""


def _others(region: autocast) -> Iterable[tuple[Policy, autocast]]:
    """Yield the policies that may run what raised: a user's own with what the device lacks in fp32; safe."""
    own, safe = region.policy, Policy.safe()
    policies = [safe]
    if own.layers and own.unsupported != FULL and own.name != safe.name and own.extends:
        policies.insert(0, replace(own, unsupported=FULL, name=f'{own.name} with unsupported = "{FULL}"'))
    for policy in policies:
        if policy.digest != own.digest and policy.name != own.name:
            yield policy, autocast(region.device, region.fast_dtype, policy=policy)
