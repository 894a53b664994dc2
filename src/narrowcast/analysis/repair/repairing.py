"""The loop of a repair: run, judge, add rules that may help, until nothing is wrong; then drop rules not needed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from narrowcast.analysis.repair.attributing import Attribution, Worth, gradients_recorded, worth_of
from narrowcast.analysis.repair.checking import FAR_OFF, Checks, Problem, Ran
from narrowcast.analysis.repair.ideas import RegionWith, rules_about_low, rules_for_not_finite, rules_for_raised
from narrowcast.analysis.repair.looking import ForwardCall, RepairObserver
from narrowcast.analysis.repair.rules import folded, with_repairs
from narrowcast.analysis.repair.search import Dropping, choose, may_run
from narrowcast.core.ledger.identity import CallId
from narrowcast.core.ops import ATTENTION, CONV, GEMM, named, op_kind
from narrowcast.core.policy import Rule
from narrowcast.errors import NarrowcastError, RunError, first_line
from narrowcast.formats import Format, fp32
from narrowcast.output.words import counted, number_text
from narrowcast.reports.results.profile import load_profile
from narrowcast.reports.results.repair import (
    ERROR,
    METRIC,
    NOT_FINITE,
    RAISED,
    Matmuls,
    Repair,
    RepairRule,
    RepairStep,
    share_text,
)
from narrowcast.reports.results.verdicts import BEYOND, CLEAN, OUT_OF_IDEAS, REPAIRED
from narrowcast.runtime.devices.device import device_now
from narrowcast.runtime.devices.prices import CostModel
from narrowcast.runtime.devices.signature import Signature
from narrowcast.runtime.torch_bridge import FORMATS, to_dtype


class Repairing:
    """One repair in progress.

    causes: of each rule in force what it fixes, and its worth. ranked: rules whose worth is known. wrong: sets of rules
    that did not suffice, and what was wrong then. clean: by set of rules, a run in which nothing was wrong.
    """

    def __init__(self, checks: Checks, region_with: RegionWith, result: Repair) -> None:
        self._checks, self._region_with, self._result = checks, region_with, result
        self._rules: tuple[Rule, ...] = ()
        self._causes: dict[Rule, tuple[str, float]] = {}
        self._tried: set[Rule] = set()
        self._ranked: set[Rule] = set()
        self._wrong: list[tuple[frozenset[Rule], str]] = []
        self._clean: dict[frozenset[Rule], Ran] = {}
        self._worth: Worth | None = None
        self._needed: dict[Rule, str] = {}
        self._compiled: set[str] = set()

    def run(self) -> None:
        """Repair until a run is clean or no rule is left to try; then drop rules that are not needed."""
        result = self._result
        ran = self._look((), f"under {result.base}")
        problem = self._judge(ran, ())
        if problem is not None or self._checks.wanted.compares:
            self._run_reference(ran)
            problem = self._judge(ran, ())
            outcome = problem.said if problem is not None else "clean"  # judged again, now against fp32
            result.steps[0] = replace(result.steps[0], found=outcome, error=ran.relative)
        result.before = result.steps[0]
        result.matmuls_before = _products(ran.calls)
        if self._fails_itself(ran, problem):
            result.verdict, result.after = BEYOND, result.before
        else:
            ran, problem = self._fix(ran, problem)
            result.verdict = OUT_OF_IDEAS if problem is not None else REPAIRED if self._rules else CLEAN
            if result.verdict == REPAIRED:
                ran = self._drop() or ran
            self._report(ran)
        result.runs = self._checks.count

    # -- runs ----------------------------------------------------------------------------------------------------------

    def _look(self, rules: tuple[Rule, ...], what: str, functions: bool = False, **facts: Any) -> Ran:
        region = self._region_with(rules)
        ran = self._checks.run(region, RepairObserver((region.policy,)), functions)
        problem = self._checks.judge(ran)
        self._compiled |= ran.look.compiled
        outcome = problem.said if problem is not None else "clean"
        step = RepairStep(what, outcome, error=ran.relative, metric=ran.metric, products=_products(ran.calls))
        self._result.steps.append(replace(step, **facts))
        return ran

    def _judge(self, ran: Ran, rules: tuple[Rule, ...]) -> Problem | None:
        problem = self._checks.judge(ran)
        if problem is not None:
            self._wrong.append((frozenset(rules), problem.said))
        else:
            self._clean[frozenset(rules)] = ran
        return problem

    def _run_reference(self, first: Ran) -> None:
        """Run the model in fp32; if the first run finished, find what each of its low calls does to the output."""
        checks, result = self._checks, self._result
        attributes = checks.wanted.compares and first.error is None
        if attributes and checks.wanted.evaluate is None and not checks.trial.backward:
            expected = self._attribute(first.look)
        else:
            expected = checks.run_in_fp32(partial(RepairObserver, ranges=True))
            if attributes:
                self._attribute_besides(first.look)
        self._check_runs(expected)
        self._check_reference(expected)
        checks.expected = expected
        result.reference = dict(expected.metric)
        if expected.outcome is not None and first.outcome is not None:
            first.relative = checks.relative(expected, first)
        outcome = "clean"
        if expected.findings:
            outcome = f"{expected.findings[0].what} made by {expected.findings[0].id}"
        result.steps.append(RepairStep("in fp32", outcome, metric=expected.metric))

    def _check_reference(self, expected: Ran) -> None:
        """Raise RunError where fp32's output or metric cannot serve as the reference."""
        wanted = self._checks.wanted
        if wanted.error is not None and math.isnan(self._checks.relative(expected, expected)):
            raise RunError(
                "repair(budget=...)", "the model returned no floating-point tensor to compare",
                advice="Give a model that returns one, or metric=, a function of what it returns.",
            )  # fmt: skip
        if wanted.error is None and expected.metric and all(map(math.isnan, expected.metric.values())):
            raise RunError(
                f"repair with the metric {next(iter(expected.metric))}", "it is NaN in fp32: none is worse",
                advice="Give a metric that is a number in fp32, or budget= for outputs.",
            )  # fmt: skip
        zero = next((name for name, value in expected.metric.items() if value == 0), None)
        if zero is not None and wanted.tolerance is None:
            raise RunError(
                f"repair with the metric {zero}", "it is 0 in fp32, and 1 % of that allows nothing",
                advice="Give tolerance=: how much worse it may be, in the metric's own unit.",
            )  # fmt: skip

    def _check_runs(self, expected: Ran) -> None:
        """Raise what fp32 raises, too: no policy is to blame for that. RunError for a metric, or an evaluation."""
        error = expected.error
        if error is None:
            return
        if isinstance(error, NarrowcastError):
            raise error
        if not expected.in_metric:
            error.add_note("Raised in fp32, too: no policy is to blame.")
            raise error
        raise RunError(
            "repair(metric=...)" if self._checks.wanted.metric is not None else "Case(evaluate=...)",
            f"of the model in fp32 it raised {first_line(error)}",
            advice="metric(output) is called with what the model returned; evaluate(model), of a Case, with the model, "
            "which it runs itself. Both return a number, or numbers by name.",
        ) from error

    def _attribute(self, look: RepairObserver) -> Ran:
        """Run in fp32, and find the effects of low calls: local errors alone if the code raises with gradients."""
        observers: list[Attribution] = []

        def attributing() -> Attribution:
            observers.append(Attribution(look.low))
            return observers[-1]

        with gradients_recorded(self._checks.trial.parameters()):
            ran = self._checks.run_in_fp32(attributing, lambda _: observers[-1].probe)
        if ran.error is not None:  # .numpy() of what requires grad, for one
            self._result.steps.append(RepairStep("in fp32, with gradients", f"raises {first_line(ran.error)}"))
            ran = self._checks.run_in_fp32(attributing)
        self._worth = worth_of(observers[-1].effects, look)
        return ran

    def _attribute_besides(self, look: RepairObserver) -> None:
        """Find the effects of low calls in a further run, where the run of the reference cannot do so."""
        ran = self._attribute(look)
        outcome = "clean" if ran.error is None else f"raises {first_line(ran.error)}"
        self._result.steps.append(RepairStep("in fp32, to see what each call does", outcome))

    def _fails_itself(self, ran: Ran, problem: Problem | None) -> bool:
        """Return whether fp32 makes all the NaN and infinities that the policy's run has."""
        expected = self._checks.expected
        if expected is None or not expected.findings or problem is not None or not ran.findings:
            return False
        first = expected.findings[0]
        failure = f"fp32 itself is not finite: {first.what} made by {first.id} ({first.file}:{first.line})"
        self._result.before = replace(self._result.before, found=failure)
        return True

    # -- search --------------------------------------------------------------------------------------------------------

    def _fix(self, ran: Ran, problem: Problem | None) -> tuple[Ran, Problem | None]:
        while problem is not None:
            rules = self._reaching(self._propose(ran, problem))
            if not rules:
                break
            if not may_run(self._checks.count, len(self._rules) + len(rules)):
                self._result.notes.append("The limit of runs was reached, and something is left.")
                break
            about = {rule.conditions for rule in rules}  # a later rule about the same calls replaces the earlier
            self._rules = (*(rule for rule in self._rules if rule.conditions not in about), *rules)
            self._tried.update(rules)
            ran = self._look(self._rules, f"with {counted(len(self._rules), 'rule')}", added=tuple(map(str, rules)))
            problem = self._judge(ran, self._rules)
        return ran, problem

    def _reaching(self, rules: list[Rule]) -> list[Rule]:
        """Return the rules, those about ops of compiled code without their modules: it reports none."""
        adapted: dict[Rule, None] = {}
        for rule in rules:
            reaches = rule
            if not rule.is_module_call and any(map(rule.matches_op, self._compiled)):
                reaches = replace(rule, module=None, call=None)
            cause, part = self._causes[rule]
            if reaches is not rule:
                self._tried.add(rule)
                part += self._causes[reaches][1] if reaches in adapted else 0.0
                self._causes[reaches] = (cause, part)
                self._ranked |= {reaches} if rule in self._ranked else set()
            adapted[reaches] = None
        return [rule for rule in adapted if rule not in self._rules]

    def _propose(self, ran: Ran, problem: Problem) -> list[Rule]:
        cause, rules = problem.cause, list[Rule]()
        if cause in (ERROR, METRIC):
            return self._propose_for_error(ran, problem)
        if cause == NOT_FINITE:
            expected = self._checks.expected
            in_fp32 = expected.look if expected is not None else None
            rules = rules_for_not_finite(problem.findings, ran.look, in_fp32, self._tried)
        if not rules and ran.error is not None:
            cause, rules = RAISED, self._propose_for_raised(ran)
        if not rules and cause == NOT_FINITE:  # the code may follow the format of what another call gives
            return self._propose_the_rest(ran, problem)
        for rule in rules:
            self._causes[rule] = (cause, 1.0)
        return rules

    def _propose_for_raised(self, ran: Ran) -> list[Rule]:
        if ran.look.raising.called is None and not ran.in_metric and may_run(self._checks.count, len(self._rules) + 1):
            again = self._look(self._rules, "again, to see torch's functions", functions=True)
            ran = again if again.error is not None else ran
        return rules_for_raised(ran, self._region_with, self._tried)

    def _propose_for_error(self, ran: Ran, problem: Problem) -> list[Rule]:
        if self._worth is None and may_run(self._checks.count, len(self._rules) + 1):
            self._attribute_besides(ran.look)
        worth = self._worth or Worth({})
        left = {rule: part for rule, part in worth.parts.items() if rule not in self._tried}
        chosen = choose(left, 1 / problem.excess)
        self._tried.update(chosen)  # also those that one about a module around them represents
        rules = []
        for rule, covered in folded(chosen, worth.parts).items():
            part = sum(worth.parts[each] for each in covered)
            self._causes[rule] = (problem.cause, part)
            self._ranked.add(rule)
            rules.append(replace(rule, reason=_reason(worth, part, len(covered), self._result.steps[0].error)))
        return rules or self._propose_the_rest(ran, problem)

    def _propose_the_rest(self, ran: Ran, problem: Problem) -> list[Rule]:
        """Return rules about all other low calls, of unknown effect: fp32 with gradients may take another path."""
        rest = [rule for rule in rules_about_low(ran.look) if rule not in self._tried]
        self._tried.update(rest)
        part = ran.relative**2 / len(rest) if rest and math.isfinite(ran.relative) else 1.0
        rules = [
            replace(rule, reason="low, and what it does to the output is not known") for rule in folded(rest, rest)
        ]
        for rule in rules:
            self._causes[rule] = (problem.cause, part)
        return rules

    # -- what is not needed --------------------------------------------------------------------------------------------

    def _drop(self) -> Ran | None:
        """Drop rules that are not needed; return the run with those left, if there was one."""

        def clean(rules: tuple[Rule, ...]) -> tuple[bool, str]:
            left_out = tuple(str(rule) for rule in self._rules if rule not in rules)
            ran = self._look(rules, f"with {len(rules)} of {counted(len(self._rules), 'rule')}", left_out=left_out)
            return self._judge(ran, rules) is None, self._result.steps[-1].found + _figures(ran)

        worth, error = self._worth, self._result.steps[0].error
        ranked = self._ranked if worth is not None and worth.foretells(error) else set()
        dropping = Dropping(clean, lambda: self._checks.count, list(self._wrong), frozenset(ranked))
        is_off = (ERROR, METRIC)
        parts = {rule: part if cause in is_off else math.inf for rule, (cause, part) in self._causes.items()}
        self._rules = dropping.run(self._rules, parts)
        self._result.dropped = [str(rule) for rule in dropping.dropped]
        self._result.untried = [str(rule) for rule in dropping.untried]
        self._needed = dropping.needed
        return self._clean.get(frozenset(self._rules))

    # -- the result ----------------------------------------------------------------------------------------------------

    def _report(self, ran: Ran) -> None:
        result = self._result
        result.policy = with_repairs(result.policy, self._rules)
        problem = self._checks.judge(ran)
        outcome = problem.said if problem is not None else "clean"
        result.after = RepairStep(f"under {result.policy.name}", outcome, error=ran.relative, metric=ran.metric)
        result.matmuls_after = _products(ran.calls)
        known = load_profile(device_now(result.device_type))  # as far as this device was measured
        prices = CostModel(known) if known.samples else None
        low = FORMATS[to_dtype(result.low)]
        calls: defaultdict[Rule | None, list[tuple[CallId, ForwardCall]]] = defaultdict(list)
        for identity, call in ran.calls:
            calls[call.rule].append((identity, call))
        sums: defaultdict[str, float] = defaultdict(float)
        for rule in self._rules:
            cause, part = self._causes[rule]
            sums[cause] += part
        for rule in self._rules:
            cause, part = self._causes[rule]
            lifted = calls[rule]
            share = part / sums[cause] if sums[cause] else 0.0
            cost = _cost_of(lifted, low, prices) if lifted else math.nan
            result.rules.append(RepairRule(rule, cause, share, len(lifted), cost, self._needed.get(rule, "")))
        result.rules.sort(key=lambda rule: -rule.share)
        self._note(ran, prices is None)

    def _note(self, ran: Ran, is_unpriced: bool) -> None:
        result, expected = self._result, self._checks.expected
        if expected is not None and expected.findings:
            first = expected.findings[0]
            result.notes.append(
                f"fp32 itself is not finite: {first.what} made by {first.id} ({first.file}:{first.line}). No policy "
                "is to blame, and none fixes it."
            )
        if ran.relative > FAR_OFF and not self._checks.wanted.compares and math.isfinite(ran.relative):
            result.notes.append(
                f"It is finite, but the output is {number_text(ran.relative)} from fp32's: budget=0.01, for "
                "one, also finds rules about that."
            )
        lost, count = self._checks.lost_gradients(ran)
        if lost:
            result.notes.append(
                f"The gradients of {counted(len(lost), 'parameter')} of {count} are zero (first {lost[0]}), and not in "
                f"fp32: they underflow in {result.low}. No rule about an op is sought for that: scale the loss "
                "(nc.Scaler), or use bf16."
            )
        if self._worth is not None and not self._worth.by_gradient and self._rules:
            result.notes.append("The model's output has no gradients: rules are ranked by the local errors of calls.")
        if is_unpriced and self._rules:
            result.notes.append("No profile of this device prices the rules; `narrowcast profile` makes one.")


def _cost_of(calls: Iterable[tuple[CallId, ForwardCall]], low: Format, prices: CostModel | None) -> float:
    """Return how many nanoseconds longer calls take in fp32 than in the low format, without casts, as predicted by the
    profile of the device; NaN where it predicts none.
    """
    if prices is None:
        return math.nan
    total = 0.0
    for identity, call in calls:
        signatures = [
            Signature(identity.op, (format.name,) * len(call.shapes), call.shapes, call.result, format)
            for format in (fp32, low)
        ]
        in_fp32, in_low = map(prices.estimate, signatures)
        if "assumed" in (in_fp32.source, in_low.source):
            return math.nan
        total += in_fp32.ns - in_low.ns
    return total


def _reason(worth: Worth, part: float, modules: int, error: float) -> str:
    """Return what is known of a rule's worth, as a sentence. error: that of the run without rules, which it reduces."""
    if not worth.by_gradient:
        return f"the local error in the low format is {number_text(math.sqrt(part))}"
    whole = sum(worth.parts.values())
    where = f" ({modules} modules)" if modules > 1 else ""
    share = part / whole if whole else 1.0
    moves = math.sqrt(share) * error if math.isfinite(error) else math.sqrt(part)
    return f"{share_text(share)} of the squared error: low alone moves the output by {number_text(moves)}{where}"


def _figures(ran: Ran) -> str:
    error = "" if math.isnan(ran.relative) else f", output error {number_text(ran.relative)}"
    return error + "".join(f", {name} {value:.6g}" for name, value in ran.metric.items())


def _products(calls: Iterable[tuple[CallId, ForwardCall]]) -> Matmuls:
    """Return how many of these calls are products, and how many of them read a low format."""
    recurrent = named("computation.recurrent") | named("inside.of_recurrent")
    products = [
        call for identity, call in calls
        if op_kind(identity.op).family in (GEMM, CONV, ATTENTION) or identity.op.split(".")[1] in recurrent
    ]  # fmt: skip
    return Matmuls(sum(bool(call.low) for call in products), len(products))
