"""That a model under a policy stays finite, and close to a reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from narrowcast.analysis.capture.capture import observed_region
from narrowcast.analysis.compare.compare import compare
from narrowcast.analysis.compare.reference import REFERENCES, check_arguments
from narrowcast.analysis.watch.watch import watch
from narrowcast.errors import CheckError, NarrowcastError
from narrowcast.frontends.eager import autocast
from narrowcast.frontends.eager.asked import Under
from narrowcast.frontends.eager.registered import leaves_no_kernels
from narrowcast.observation.trial.output_errors import output_errors
from narrowcast.observation.trial.trial import Loss, Trial, tensors_of
from narrowcast.observation.trial.uncast import Uncast
from narrowcast.output.words import counted
from narrowcast.reports.results.differences import CallError, OutputError
from narrowcast.runtime.regions.pinned import without_low_pins
from narrowcast.runtime.torch_bridge.case import Case
from narrowcast.runtime.torch_bridge.inputs import Inputs

_NAMED = 3


def assert_finite(
    model: Callable[..., Any] | Case, inputs: Inputs = (), *, under: Under = None, backward: bool | Loss = False
) -> None:
    """Assert that no call of the model makes a NaN or an infinity.

    Intentional ones do not count: masks, fills with -inf, and what the policy allows (`allow_nonfinite = true`).
    inputs, under: as for `nc.compare`; the policy native if no region is given.
    backward: differentiate, too, as for `nc.capture`. The model runs once, for real, and is left as it is.

    CheckError, an AssertionError, names the first such call, its line, and whether the cast, the format or the op made
    it.
    """
    __tracebackhide__ = True
    trial = Trial.of("assert_finite", model, inputs, backward)
    opened = observed_region("assert_finite", trial, under, "native")
    watching = watch(at="op")
    trial.run(opened, watching)
    first = watching.found.first
    if first is not None:
        more = len(watching.found.findings) - 1
        advice = f"{more} more calls make one: nc.watch lists them." if more else ""
        raise CheckError(f"finite values of {trial.name}, policy {opened.policy.name}", str(first), advice=advice)


@leaves_no_kernels()
def assert_close_to(
    model: Callable[..., Any] | Case,
    inputs: Inputs = (),
    *,
    budget: float,
    reference: str | Callable[..., Any] = "fp32",
    under: Under = None,
) -> tuple[OutputError, ...]:
    """Assert that each output of the model is within a budget of a reference's.

    budget: the largest relative error, ||x - reference|| / ||reference||, of any floating output: 0 and more.
    reference: `fp32`, the same model in a region that casts nothing; `fp64`, a copy of it in fp64; or another model
            that takes the same arguments and runs in the same region.
    inputs, under: as for `nc.compare`; the policy native if no region is given.

    Both run once, for real, with the same random state. Only if it fails `nc.compare` runs the model again and names
    the calls to blame. Returns the errors. CheckError, an AssertionError, if an output is too far off, is not finite
    where the reference is, or has another shape.
    """
    __tracebackhide__ = True
    if not budget >= 0 or math.isinf(budget):
        asked, wrong = f"assert_close_to(budget={budget!r})", "that is no relative error"
        raise NarrowcastError(asked, wrong, advice="Give 1e-2, for example.")
    check_arguments("assert_close_to", reference)
    trial = Trial.of("assert_close_to", model, inputs, False)
    opened = observed_region("assert_close_to", trial, under, "native")
    is_own = isinstance(reference, str)
    other = trial if is_own else Trial.of("assert_close_to", reference, (trial.args, trial.kwargs))
    around = Uncast(opened.device) if is_own else opened
    with without_low_pins(other.model) if is_own else nullcontext():
        expected = other.run(around, None, REFERENCES.get(str(reference)))
    errors = output_errors(expected.output, trial.run(opened).output)
    asked = f"outputs of {trial.name} within {budget:g} of {reference if is_own else other.name}"
    wanted = sum(t.is_floating_point() for t in tensors_of(expected.output))
    if not errors or len(errors) < wanted:
        advice = "Give a model that returns tensors, and a reference that returns as many, of the same shapes."
        there = f"{len(errors)} of {wanted} floating outputs have a partner of their shape"
        raise CheckError(asked, there, advice=advice)
    too_far = [error for error in errors if not error.relative_error <= budget]
    if too_far:
        comparison = compare(trial.model, (trial.args, trial.kwargs), under=opened, reference=reference)
        text = _too_far_text(too_far, len(errors), opened) + _blame_text(comparison.worst[:_NAMED])
        advice = "Run nc.compare (narrowcast compare) for all of them; a rule keeps a call in fp32."
        raise CheckError(asked, text, advice=advice)
    return errors


def _too_far_text(errors: list[OutputError], count: int, region: autocast) -> str:
    lines = [f"{len(errors)} of {counted(count, 'output', 'are')} further off under policy {region.policy.name}"]
    for error in errors[:_NAMED]:
        far = f"relative error {error.relative_error:.3g}, largest difference {error.largest_error:.3g}"
        lines.append(f"  {error.name} ({error.found}): {far}")
    return "\n".join(lines)


def _blame_text(worst: list[CallError]) -> str:
    if not worst:
        return ""
    lines = ["\n\nwhat adds most of it:"]
    for call in worst:
        alone = "" if math.isnan(call.alone) else f", the output's with this one alone low {call.alone:.3g}"
        lines += [
            f"  {call.id}  {call.computes}",
            f"    local error {call.local:.3g}{alone}; {call.verdict}",
            f"    at {call.file}:{call.line}",
        ]
    return "\n".join(lines)
