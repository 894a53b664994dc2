"""`nc.repair`: the smallest rules under which a model runs, stays finite, and is as precise as asked.

The model runs under the policy, observed. A call that raises or is not finite is known at once; errors of the output
are attributed to calls by one run in fp32 (see attributing.py). Rules are added, and the model runs again, until
nothing is wrong or no rule is left to try; then rules are dropped that turn out not to be needed. At most two runs for
each rule, and five more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from narrowcast.analysis.repair.checking import HIGHER, LOWER, Checks, Wanted
from narrowcast.analysis.repair.repairing import Repairing
from narrowcast.analysis.repair.rules import with_repairs
from narrowcast.core.policy import Rule
from narrowcast.errors import RunError
from narrowcast.frontends.compiled.compiled_model import asked_before
from narrowcast.frontends.eager import autocast
from narrowcast.frontends.eager.asked import Under, asked_or_around
from narrowcast.frontends.eager.registered import leaves_no_kernels
from narrowcast.observation.trial.environment import environment
from narrowcast.observation.trial.trial import Loss, Trial
from narrowcast.output.progress import long_work
from narrowcast.reports.results.repair import Repair
from narrowcast.runtime.torch_bridge import FORMATS
from narrowcast.runtime.torch_bridge.case import Case, Evaluate, Metric, check_takes_one
from narrowcast.runtime.torch_bridge.inputs import Inputs


@leaves_no_kernels()
def repair(
    model: Callable[..., Any] | Case,
    inputs: Inputs = (),
    *,
    under: Under = None,
    backward: bool | Loss = False,
    budget: float | str | None = None,
    metric: Metric | None = None,
    better: str = HIGHER,
    tolerance: float | None = None,
) -> Repair:
    """Find the rules under which a model runs in a region, is finite where fp32 is, and is right.

    model:  a Module, any callable, or a Case. Compiled code has its policy in it: repair the model, then compile it.
    inputs, under: as for `explain`; without a region, the policy native.
    backward: also differentiate, as for `capture`: gradients are to be finite, too.
    budget: the largest relative error (L2) of an output against fp32, as 0.01; or the least SQNR, as "40 dB".
    metric: `metric(output)`, called outside of the region, returns a number or numbers by name. Without one a Case's
            `evaluate` is asked, which runs the model itself: each time counts as a run.
    better: `higher` or `lower`: which way the metric is better. tolerance: how much worse it may be than in fp32, in
            its own unit; without one, 1 % of fp32's.

    `result.policy` is the policy with one more layer of rules, each with its evidence as the reason; they name ops in
    modules, not lines, and so hold for other inputs. `result.runs` is how often the model ran: at most twice for each
    rule, and five times more. The model, its weights, gradients and random state are unchanged afterwards. Raises
    RunError for what cannot be repaired, and what fp32 raises, too; where fp32 is not finite, the result reports it.
    """
    trial = Trial.of("repair", model, inputs, backward)
    _check_model(trial.model)
    wanted = _wanted(budget, metric, trial.evaluate, better, tolerance)
    asked = asked_or_around("repair", under, trial.device_type)
    device = asked.device_type or trial.device_type
    if device != trial.device_type:
        raise RunError(
            f"repair on {device}", f"the model is on {trial.device_type}, and runs there",
            advice=f"Give a region for that device, or move the model: model.to({device!r}).",
        )  # fmt: skip
    fast = asked.fast_dtype_on(device)

    def region_with(rules: Iterable[Rule]) -> autocast:
        return replace(asked, dtype=fast).on(device, with_repairs(asked.policy, tuple(rules)))

    opened, low = region_with(()), str(FORMATS[fast])
    result = Repair(trial.name, opened.device, low, asked.policy.name, asked.policy, str(wanted))
    result.environment = environment(opened.device, asked.policy, low)
    with long_work(f"repairing {result.subject}", 8) as step:
        Repairing(Checks(trial, wanted, step, opened.device), region_with, result).run()
    return result


def _check_model(model: Any) -> None:
    found = ""
    if isinstance(model, torch.fx.GraphModule):
        found = "no module is called in a graph, so rules about modules would not hold"
    elif isinstance(model, torch.jit.ScriptModule | torch.jit.ScriptFunction) or asked_before(model) is not None:
        found = "its casts are in it: rules of a region do not reach them"
    if found:
        raise RunError(
            f"repair({type(model).__name__})", found,
            advice="Repair the model that it was made of, and compile, export or script that with result.policy.",
        )  # fmt: skip


def _wanted(
    budget: float | str | None, metric: Metric | None, evaluate: Evaluate | None, better: str, tolerance: float | None
) -> Wanted:
    if better not in (HIGHER, LOWER):
        raise RunError(f"repair(better={better!r})", "not a choice", advice=f"Give {HIGHER} or {LOWER}.")
    if metric is not None:
        check_takes_one("repair(metric=...)", metric, "the output")
        evaluate = None
    if tolerance is not None and metric is None and evaluate is None:
        raise RunError("repair(tolerance=...)", "there is no metric that it could apply to",
                       advice="Add evaluate= to the Case, or give metric=, or budget= for outputs.")  # fmt: skip
    if tolerance is not None and not tolerance >= 0:
        raise RunError(f"repair(tolerance={tolerance})", "it is negative", advice="Give 0 or more.")
    return Wanted(_largest_error(budget), metric, evaluate, better, tolerance)


def _largest_error(budget: float | str | None) -> float | None:
    """Return the relative error that a budget allows: 40 dB are one part in a hundred."""
    if budget is None:
        return None
    try:
        if isinstance(budget, str) and budget.strip().lower().endswith("db"):
            return float(10 ** (-float(budget.strip()[:-2]) / 20))
        error = float(budget)
    except (TypeError, ValueError):
        error = math.nan
    if not 0 <= error < math.inf:
        raise RunError(
            f"repair(budget={budget!r})", "not an error that an output can have",
            advice='Give the relative error that is allowed, as 0.01, or the least SQNR, as "40 dB".',
        )  # fmt: skip
    return error
