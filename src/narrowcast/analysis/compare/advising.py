"""What helps: rules, or lines in fp32. The model is run with each, and only what lowers the error is advised.

A rounding seldom does harm where it happens: a position that bf16 cannot represent does in a cosine, an epsilon that
fp16 cannot represent in a root. So first lines whose code asks for a low format itself are tried in fp32, since no rule
applies to those; then rules about the call most at fault and the low calls from which its inputs come, the nearest
first: a rule alone, if it does about as much as all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from narrowcast.analysis.capture.capture import observed_region
from narrowcast.analysis.compare.isolating import writes
from narrowcast.analysis.compare.judging import low_format_of
from narrowcast.analysis.compare.low_calls import AsksHigh, LowFlow
from narrowcast.analysis.compare.rules import rule_about, rule_about_result
from narrowcast.core.ledger.identity import CallId
from narrowcast.core.policy import Rule
from narrowcast.frontends.compiled.compiled_model import asked_before
from narrowcast.frontends.eager import autocast
from narrowcast.observation.observer.observer import Observer
from narrowcast.observation.trial.output_errors import dense, gradient_error, output_errors
from narrowcast.observation.trial.trial import Outcome, Trial, has_numbers, tensors_of
from narrowcast.observation.trial.uncast import NOTHING
from narrowcast.output.words import or_infinity
from narrowcast.reports.results import verdicts
from narrowcast.reports.results.differences import AskedFormat, CallError, Differences, Growth, Remedy
from narrowcast.runtime.regions.ruling import never_tell_hidden
from narrowcast.runtime.torch_bridge import FORMATS, PLAIN, tensors_in
from narrowcast.runtime.torch_surface.dispatch import tree_map

SOURCE = "narrowcast compare"
VISIBLE = 4.0
"""An output error of this many units in the last place of the low format is worth runs, even if it is round-off."""
_SMALL = 1.2
"""So is one of this many, if one remedy leaves hardly any of it: many roundings make such an error, too."""
_VISIBLE_IN_GRADIENTS, _COUNTS = 0.08, 0.01
"""So is this error of a gradient that is this part of the largest: where terms cancel, round-off makes more."""
_HELPS, _HELPS_MUCH = 0.5, 0.125
"""A remedy leaves at most this part of the error; and of a small one."""
_AS_GOOD = 2.0
"""One rule is as good as all that were tried together, if it leaves at most this many times their error."""
_TRIES, _BLAMED, _ALONE, _TOGETHER, _LINES = 12, 3, 4, 3, 3
"""The most runs of the model; the most calls whose sources are tried; how many rules of a kind are tried alone, and
how many together; and how many lines alone.
"""
_SHAKES, _NEAR = 3, 0.03
"""A rule is tried against that many inputs that are that much off."""
RunIn = Callable[..., Outcome]
"""Runs the model in a region, under an observer or None; or another trial in its place."""


@dataclass(frozen=True, slots=True)
class Harm:
    """The error to reduce: of the output, or of a parameter's gradient; infinity where that is not finite. is_small:
    it is worth a word only if one remedy leaves hardly any of it.
    """

    parameter: str
    error: float
    is_small: bool = False

    def left(self, expected: Outcome, outcome: Outcome) -> float:
        """Return the same error of another run."""
        if self.parameter:
            gradient = outcome.gradients.get(self.parameter)
            error = math.inf if gradient is None else gradient_error(expected.gradients[self.parameter], gradient)
        else:
            errors = output_errors(expected.output, outcome.output)
            error = max((or_infinity(one.relative_error) for one in errors), default=math.inf)
        return or_infinity(error)

    def is_helped_by(self, error: float) -> bool:
        """Return whether a remedy that leaves this error helps."""
        return error <= (_HELPS_MUCH if self.is_small else _HELPS) * min(self.error, 1.0)


def harm_of(result: Differences, low_epsilon: float, expected: Outcome) -> Harm | None:
    """Return the error that is worth reducing after a comparison, if there is one: of the output first."""
    if not _has_finite(expected):
        return None
    if result.verdict in (verdicts.KERNEL, verdicts.NONDETERMINISTIC, verdicts.NOT_COMPARED):
        return None  # a kernel is at fault by itself
    if result.verdict == verdicts.FAULT and result.unmatched and not result.faults:
        return None  # the two are different programs
    worst = max((or_infinity(o.relative_error) for o in result.outputs), default=0.0)
    if math.isinf(worst) and _has_lost(expected):
        return None  # as in the reference: no rule makes it finite
    if worst > VISIBLE * low_epsilon:
        return Harm("", worst)
    lost = [g for g in result.gradients if g.verdict in verdicts.AT_FAULT] or [
        g for g in result.gradients if g.relative_error > _VISIBLE_IN_GRADIENTS and g.share > _COUNTS
    ]
    if not lost:
        if result.verdict == verdicts.FAULT and worst:
            return Harm("", worst)
        return Harm("", worst, is_small=True) if worst > _SMALL * low_epsilon else None
    errors = {g.parameter: or_infinity(g.relative_error) for g in lost}
    parameter = max(errors, key=errors.__getitem__)
    return Harm(parameter, errors[parameter])


def about_lost(expected: Outcome) -> str:
    """Return the note that the reference has nothing to compare with: no output but NaN, or a gradient that is not
    finite; nothing where it has.
    """
    lost = [name for name, gradient in expected.gradients.items() if not bool(dense(gradient).isfinite().all())]
    outputs = [dense(t) for t in tensors_of(expected.output) if has_numbers(t) and t.numel()]
    if outputs and all(bool(t.isnan().all()) for t in outputs):
        return "The output is nothing but NaN in the reference, too: nothing is compared with it."
    if lost:
        names = f"{lost[0]}, in all {len(lost)}"
        return f"Gradients are not finite in the reference, too ({names}): nothing is said of them."
    return ""


def _has_lost(expected: Outcome) -> bool:
    """Return whether an output of the reference has a value that is not finite."""
    return any(not bool(t.isfinite().all()) for t in _numbers(expected))


def _has_finite(expected: Outcome) -> bool:
    """Return whether the reference, if it has outputs, has a finite value, by which what helps is judged."""
    numbers = _numbers(expected)
    return not numbers or any(bool(t.isfinite().any()) for t in numbers)


def _numbers(expected: Outcome) -> list[torch.Tensor]:
    return [dense(t) for t in tensors_of(expected.output) if t.is_floating_point()]


def region_to_try(trial: Trial, other: Trial, region: autocast, rows: list[CallError]) -> autocast:
    """Return the region in which what helps is looked for: for code that was made, that in which it was, or native in
    its low format, with eager code in it (`other`).
    """
    under = (asked_before(trial.model) or {}).get("under")
    if under is None and region.policy is NOTHING and (trial.is_made or trial.fp32_for_low() is not None):
        under = low_format_of(rows)
    return region if under is None else observed_region("compare", other, under)


class Advising:
    """Looks for what helps. run: runs the model in a region under an observer, with gradients if those are at fault."""

    def __init__(self, run: RunIn, region: autocast, expected: Outcome, result: Differences, harm: Harm) -> None:
        self._run, self._region, self._expected, self._result, self._harm = run, region, expected, result, harm
        self._growth: Growth | None = None

    def run(self, around: autocast, is_low: bool = False) -> None:
        """Note what helps, or how many runs were tried in vain. around: the reference's region. is_low: the code has
        low weights, so that a region may be what helps.
        """
        flow = LowFlow((self._region.policy,))
        error = self._harm.left(self._expected, self._run(self._region, flow))
        if self._harm.is_helped_by(error):  # compiled code alone has this error, or code with low weights
            is_region = is_low and self._result.verdict == verdicts.ROUND_OFF
            self._result.remedy = self._remedy(error) if is_region else None
            return
        self._growth = flow.growth(self._result.rows, self._visible)
        is_told = not (self._harm.parameter or self._harm.is_small)  # that of gradients grows in the backward
        self._result.growth = self._growth if is_told else None
        self._result.remedy = self._high_lines(flow.asked, around) or self._rules(flow)
        if self._harm.is_small and self._result.remedy is None:
            self._result.tried = 0

    def try_elsewhere(self, trial: Trial, around: autocast) -> None:
        """Take back a rule that helps on these inputs alone: where the error is as small without it on inputs that are
        a little off, a value at a near tie was chosen otherwise, and no rule keeps others from that. trial: with these
        inputs. around: the reference's region.
        """
        remedy = self._result.remedy
        if remedy is None or not remedy.rules or self._result.verdict != verdicts.ROUND_OFF:
            return
        errors = []
        for other in _near_inputs(trial):
            try:
                errors.append(self._harm.left(self._run(around, None, other), self._run(self._region, None, other)))
            except Exception:  # not all that is near an input is one
                return
        small = max(_AS_GOOD * remedy.error, self._visible)
        usual = sorted(errors)[len(errors) // 2] if errors else math.inf
        if usual <= small:
            self._result.remedy, self._result.growth, self._result.tried = None, None, 0
            text = f"{remedy.rules[0]} lowers the error from {remedy.before:.1e} to {remedy.error:.1e} on these inputs."
            text += f" On inputs {_NEAR:.0%} off it is {usual:.1e} without it: another value is chosen here at a near "
            self._result.notes.append(f"{text}tie, and no rule keeps other inputs from that.")

    # -- lines that ask for a low format -------------------------------------------------------------------------------

    def _high_lines(self, asked: Sequence[AskedFormat], around: autocast) -> Remedy | None:
        """Try lines in fp32 that ask for a low format here, and not in the reference; return one, if one is enough."""
        if not asked:
            return None
        in_reference = AsksHigh()
        self._run(around, in_reference)
        also = {each.at for each in in_reference.asked}
        lines = sorted((each for each in asked if each.at not in also), key=lambda each: not each.rounds_whole)
        whole = self._try(AsksHigh((self._region.policy,), lines)) if lines else math.inf
        if not self._harm.is_helped_by(whole):
            return None
        for line in lines[:_LINES] if len(lines) > 1 else ():
            error = self._try(AsksHigh((self._region.policy,), [line]))
            if self._is_as_good(error, whole):
                return self._remedy(error, asked=(line,))
        return self._remedy(whole, asked=tuple(lines))

    # -- rules ---------------------------------------------------------------------------------------------------------

    def _rules(self, flow: LowFlow) -> Remedy | None:
        """Try rules about a call that is at fault, and about the calls from which its inputs come."""
        for blamed in self._to_blame():
            calls = {i: passed for i, passed in flow.upstream(blamed).items() if not writes(i.op)}
            rules = list(dict.fromkeys(map(_rule, calls)))
            whole = self._try_rules(rules) if rules else math.inf
            if self._harm.is_helped_by(whole):
                remedy = self._fewest(_choices(calls, flow), rules, whole)
                return remedy and replace(remedy, lines=self._lines_lifted(remedy.rules, calls, flow))
        return None

    def _fewest(self, choices: Iterable[list[Rule]], rules: list[Rule], whole: float) -> Remedy | None:
        """Return the first choice that is as good as all rules together, or else the best."""
        best: tuple[float, list[Rule]] = (math.inf, [])
        for choice in choices:
            error = whole if choice == rules else self._try_rules(choice)
            if self._is_as_good(error, whole):
                return self._remedy(error, choice)
            best = min(best, (error, choice), key=lambda pair: pair[0])
        return self._remedy(*best) if self._harm.is_helped_by(best[0]) else None

    def _to_blame(self) -> list[CallId]:
        """Return the first call at fault, that where the error grows, and the worst; of a backward call its forward."""
        result, growth = self._result, self._growth
        rows = [*result.faults[:1], *(row for row in result.worst if row.verdict not in verdicts.AT_FAULT)]
        blamed = [row.forward or row.id for row in rows]
        blamed[len(result.faults[:1]) : 0] = [growth.id] if growth is not None else []
        if (first := result.not_finite) is not None:  # which may have no partner
            own = CallId(first.id.module_path, first.id.op, 1)
            blamed[:0] = [own] * all((one.module_path, one.op) != (own.module_path, own.op) for one in blamed)
        return list(dict.fromkeys(blamed))[:_BLAMED]

    def _lines_lifted(
        self, rules: Iterable[Rule], calls: Iterable[CallId], flow: LowFlow
    ) -> tuple[tuple[str, int], ...]:
        """Return the lines of the calls that the rules put into fp32: of `calls`, those named, and those that follow
        their inputs; of all others those named, or else of the worst those that follow results that are.
        """
        rules, low = set(rules), flow.low_calls()
        is_followed = any(rule.argument is not None for rule in rules)
        lifted = [i for i in calls if _rule(i) in rules or (is_followed and not flow[i].is_decided)]
        lifted += [i for i in low if _rule(i) in rules]
        following = [row.id for row in self._result.worst if row.id in low and not flow[row.id].is_decided]
        lifted = lifted or [i for i in following if rules & {*map(_result_rule, flow.upstream(i))}]
        return tuple(dict.fromkeys(flow[identity].at for identity in lifted))

    # -- trying --------------------------------------------------------------------------------------------------------

    @property
    def _epsilon(self) -> float:
        return FORMATS[self._region.fast_dtype].epsilon

    @property
    def _visible(self) -> float:
        """The error that would be worth a word: of a small one half of it."""
        floor = VISIBLE * self._epsilon
        return min(floor, self._harm.error / 2) if self._harm.is_small else floor

    def _is_as_good(self, error: float, whole: float) -> bool:
        floor = VISIBLE * self._epsilon
        return self._harm.is_helped_by(error) and error <= max(_AS_GOOD * whole, min(floor, self._harm.error / 8))

    def _try_rules(self, rules: Iterable[Rule]) -> float:
        policy = self._region.policy.with_rules(rules)
        region = autocast(self._region.device, self._region.fast_dtype, policy=policy)
        never_tell_hidden(region)
        return self._try(None, region)

    def _try(self, observer: Observer | None, region: autocast | None = None) -> float:
        """Run, and return the error that is left; infinity if it raises, or no run is left."""
        if self._result.tried >= _TRIES:
            return math.inf
        self._result.tried += 1
        try:
            outcome = self._run(region or self._region, observer)
        except Exception:  # formats may meet that never do in the model
            return math.inf
        return self._harm.left(self._expected, outcome)

    def _remedy(self, error: float, rules: Iterable[Rule] = (), asked: tuple[AskedFormat, ...] = ()) -> Remedy:
        return Remedy(error, self._harm.error, tuple(rules), asked, self._harm.parameter)


def _near_inputs(trial: Trial) -> Iterator[Trial]:
    """Yield the trial with floating-point inputs that are a little off; nothing where it has none."""
    if not any(t.is_floating_point() for t in tensors_in(trial.args, trial.kwargs)):
        return
    for seed in range(_SHAKES):
        generator = torch.Generator("cpu").manual_seed(seed)

        def shaken(value: Any, generator: torch.Generator = generator) -> Any:
            if not (isinstance(value, torch.Tensor) and value.is_floating_point() and type(value) in PLAIN):
                return value
            noise = torch.randn(value.shape, generator=generator, device="cpu").to(value.device)
            near = (value.detach() * (1 + _NEAR * noise)).to(value.dtype)
            return near.requires_grad_(value.requires_grad)

        args, kwargs = tree_map(shaken, (trial.args, trial.kwargs))
        yield replace(trial, args=args, kwargs=kwargs)


def _rule(identity: CallId) -> Rule:
    return rule_about(identity.op, identity.module_path, source=SOURCE)


def _result_rule(identity: CallId) -> Rule:
    return rule_about_result(identity.op, identity.module_path, source=SOURCE)


def _choices(calls: dict[CallId, int], flow: LowFlow) -> Iterator[list[Rule]]:
    """Yield the rules to try, the cheapest first: about calls that only follow their inputs; about results of calls
    that rules lowered, so that followers are in fp32; about the compute of these; and about all followers.
    """
    followers = _unique(_rule(i) for i in calls if not flow[i].is_decided)
    near, far = ([i for i, passed in calls.items() if flow[i].is_decided and passed == n] for n in (0, 1))
    results, computing, behind = (
        _unique(map(_result_rule, near)),
        _unique(map(_rule, near)),
        _unique(map(_result_rule, far)),
    )
    yield from ([rule] for rule in followers[:_ALONE])
    yield from ([rule] for rule in results[:_TOGETHER])
    if 1 < len(results) <= _TOGETHER:
        yield results
    yield from ([rule] for rule in computing[:_ALONE])
    if computing and behind and len(computing) + len(behind) <= _TOGETHER:
        yield [*computing, *behind]
    if 1 < len(followers) <= _TOGETHER:
        yield followers


def _unique(rules: Iterable[Rule]) -> list[Rule]:
    return list(dict.fromkeys(rules))
