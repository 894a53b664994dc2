"""That eager, compiled, exported and scripted code compute in the same formats, call by call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from narrowcast.analysis.capture.capture import observed_region
from narrowcast.core.policy import Policy
from narrowcast.errors import CheckError, CheckWarning, NarrowcastError, first_line
from narrowcast.frontends.compiled.compile import compile
from narrowcast.frontends.eager import autocast
from narrowcast.frontends.eager.asked import Under
from narrowcast.frontends.exported.export import export
from narrowcast.frontends.graphs.compiled import watch_graphs
from narrowcast.frontends.scripts.script import script
from narrowcast.observation.observer.observer import Observer
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.observer.words import format_names
from narrowcast.observation.trial.trial import Trial
from narrowcast.output.words import counted
from narrowcast.runtime.torch_bridge.case import Case
from narrowcast.runtime.torch_bridge.inputs import Inputs
from narrowcast.runtime.torch_surface.dynamo import forget_compiled_code
from narrowcast.testing.agreement import Agreement, BesideEager, RanCall, compare_calls, disagreement_lines

FRONT_ENDS = ("compile", "export", "script")


def assert_front_ends_agree(
    model: Callable[..., Any] | Case,
    inputs: Inputs = (),
    *,
    front_ends: Sequence[str] | None = None,
    under: Under = None,
) -> Agreement:
    """Assert that the model computes in the formats of eager code in the other front ends, too.

    The model runs for real in each: as eager code in the region, through `nc.compile` (graphs run call by call, so that
    nothing is fused and no code is generated), `nc.export` and `nc.script`. Calls are held together by their identity.

    front_ends: which of `compile`, `export`, `script`. One that is named and cannot be taken fails; left out, all are
            tried, and for one that cannot be taken there is a CheckWarning with the reason, which `not_taken` has, too.
    inputs, under: as for `nc.compare`; the policy native if no region is given.

    Returns what was compared. CheckError, an AssertionError, names the calls that differ, with formats, rule and line.
    """
    __tracebackhide__ = True
    asked = tuple(FRONT_ENDS if front_ends is None else front_ends)
    unknown = [name for name in asked if name not in FRONT_ENDS]
    if unknown:
        call, missing = f"assert_front_ends_agree(front_ends={list(asked)!r})", f"there is no front end {unknown[0]!r}"
        advice = f"Give some of: {', '.join(FRONT_ENDS)}; eager code is what they are held against."
        raise NarrowcastError(call, missing, advice=advice)
    trial = Trial.of("assert_front_ends_agree", model, inputs)
    opened = observed_region("assert_front_ends_agree", trial, under, "native")
    eager = _calls(trial, opened, opened.policy)
    by_front_end: dict[str, BesideEager] = {}
    not_taken: dict[str, str] = {}
    for name in asked:
        try:
            by_front_end[name] = compare_calls(name, eager, _calls_through(name, trial, opened))
        except Exception as error:
            not_taken[name] = first_line(error).rstrip(":. ")
    agreement = Agreement(
        {name: each.calls for name, each in by_front_end.items()}, not_taken,
        {name: each.as_a_whole for name, each in by_front_end.items() if each.as_a_whole},
        tuple(d for each in by_front_end.values() for d in each.disagreements),
    )  # fmt: skip
    _tell(agreement, trial, len(eager), front_ends is not None)
    return agreement


def _calls_through(front_end: str, trial: Trial, region: autocast) -> list[RanCall]:
    """Return the calls of the model in another front end. What it raises is the reason why it cannot be taken."""
    if front_end == "compile":
        forget_compiled_code()
        try:
            with watch_graphs() as graphs:
                compiled = Trial(compile(trial.model, under=region, backend="aot_eager"), trial.args, trial.kwargs)
                calls = _calls(compiled, None, region.policy)
        finally:
            forget_compiled_code()
        if not any(graph.after is not None for graph in graphs):
            why = next((graph.fallback for graph in graphs if graph.fallback), "Dynamo captured no graph")
            raise CheckError("compile", f"the model ran as eager code: {why}")
    elif front_end == "export":
        program = export(trial.model, (trial.args, trial.kwargs), under=region)  # type: ignore[arg-type]  # it refuses
        calls = _calls(Trial(program.module(), trial.args, trial.kwargs), None, region.policy)
    else:
        calls = _calls(Trial(script(trial.model, under=region), trial.args, trial.kwargs), None, region.policy)
    if not calls:
        raise CheckError(front_end, "none of its calls was seen")
    return calls


def _calls(trial: Trial, region: AbstractContextManager[Any] | None, policy: Policy) -> list[RanCall]:
    """Return the calls of one run that compute with floating tensors; conversions between formats left out."""
    observer = _Formats((policy,))
    trial.run(region, observer.observing())
    return observer.calls


class _Formats(Observer):
    def __init__(self, policies: tuple[Policy, ...]) -> None:
        super().__init__(policies)
        self.calls: list[RanCall] = []

    def after(self, call: SeenCall) -> None:
        result = format_names([t.dtype for t in call.results])
        if call.plan is not None and call.plan.results:  # conversions of their own in graphs and scripts
            result = str(call.plan.computes_in or call.computes)
        if not call.is_cast and (call.computes or result):
            rule = call.rule.label if call.rule is not None else ""
            self.calls.append(RanCall(call.id, call.computes, result, rule, call.site.file, call.site.line))


def _tell(agreement: Agreement, trial: Trial, count: int, by_name: bool) -> None:
    __tracebackhide__ = True
    missing = "; ".join(f"{front_end}: {why}" for front_end, why in agreement.not_taken.items())
    if agreement.disagreements:
        front_ends = ", ".join(dict.fromkeys(d.front_end for d in agreement.disagreements))
        share = f"{len(agreement.disagreements)} of {counted(count, 'call', 'compute')}"
        text = f"formats of {trial.name}: {share} otherwise in "
        lines = [f"{text}{front_ends} than in eager code", "", *disagreement_lines(agreement.disagreements)]
        raise CheckError("\n".join(lines), advice=f"\nNot taken: {missing}" if missing else "")
    if not agreement.not_taken:
        return
    if by_name or not agreement.calls:
        text = f"front ends of {trial.name}: {', '.join(agreement.not_taken)} cannot be taken"
        raise CheckError(text, missing, advice="Omit it from front_ends, or fix the error.")
    text = f"narrowcast: front ends of {trial.name} that were not compared: {missing}"
    warnings.warn(text, CheckWarning, stacklevel=3)
