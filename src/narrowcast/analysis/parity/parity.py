"""`nc.parity`: how far the numbers of two programs of one model are apart, by which cause, and from which module on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from narrowcast.analysis.capture.capture import module_of
from narrowcast.analysis.capture.tokens import after_the_last, logits_of
from narrowcast.analysis.diff.diff import diff
from narrowcast.analysis.parity.causes import Search, other_choices, place_of
from narrowcast.analysis.parity.exchange import ModuleCall, containers
from narrowcast.analysis.parity.outputs import notes_on
from narrowcast.analysis.parity.partners import partners_of
from narrowcast.analysis.parity.programs import Live, OneProgram, distance, live_program, other_inputs, program_of
from narrowcast.analysis.parity.rest import causes_of, of_rounding
from narrowcast.analysis.parity.rounding import beyond_bounds, in_fp32, is_rounding, is_wide, noise_of
from narrowcast.analysis.parity.sampler import sampled_from
from narrowcast.analysis.parity.shares import paired_results, shares_of, within
from narrowcast.analysis.parity.weights import different, pair_weights
from narrowcast.core.ledger.identity import CallId
from narrowcast.errors import RunError, first_line
from narrowcast.frontends.eager.asked import Under
from narrowcast.frontends.eager.registered import leaves_no_kernels
from narrowcast.observation.trial.trial import Trial
from narrowcast.output.words import number_text
from narrowcast.reports.results.mapping import RunMapping
from narrowcast.reports.results.parity import SOUND_CAUSES, Cause, Distance, ModuleShare, Parity, distance_in_nats
from narrowcast.reports.results.run import Run
from narrowcast.reports.results.run_differences import RunDifferences
from narrowcast.reports.results.saved import load
from narrowcast.reports.results.verdicts import (
    ALIKE,
    ATTRIBUTE,
    CACHE,
    CALLS,
    KERNEL,
    ROUND_OFF,
    SAMPLER,
    SHAPE,
    TOKENS,
    WEIGHTS,
)
from narrowcast.runtime.torch_bridge.case import Case
from narrowcast.runtime.torch_bridge.inputs import Inputs

Side = Callable[..., Any] | Case | Run | str | Path
_LIMIT_BYTES, _MOST_RUNS = 1 << 30, 24
"""Results of modules that are kept for b, at most; and how often it runs to find where it differs."""
_NAMED = 3
_CONFIRMS, _REST = 10, 1e-3
"""By how many times a distance falls with its cause; the part of it that needs no cause."""


@leaves_no_kernels()
def parity(
    a: Side,
    b: Side,
    inputs: Inputs = (),
    *,
    under: Under | tuple[Under, Under] = None,
    tokens: torch.Tensor | None = None,
    mapping: RunMapping | str | Path | None = None,
    max_nats: float | None = None,
    names: tuple[str, str] = ("a", "b"),
) -> Parity:
    """Find how far two programs of one model are apart, and why: a trainer and the engine that serves it, a model and
    its port, two formats, two versions.

    a, b:   models, functions or Cases, which run; runs that `nc.capture` made, or their files, which do not run again;
            or one of each.
    inputs: as for `capture`, of whichever run; a Case has its own.
    under:  as for `capture`, for both; or a pair, for a and for b.
    tokens: ids [..., T] of a language model with logits [..., T, V], if they are not one of the inputs. What is
            compared are then log-probabilities of the same tokens, in nats; of other models their outputs, relatively
            (L2). A run has those that `capture(tokens=...)` or `run.keep_tokens` kept.
    mapping: pairs of modules or calls by hand, as for `diff`.
    max_nats: the largest rms that is allowed (of other models, the largest relative error): `result.is_over`.
    names:  of the two, in the output.

    Causes are looked for in this order: tokens, what was done to logits before log-probabilities were taken, weights
    (by value, through fused and transposed ones), attributes and buffers of modules, choices (of experts), formats, and
    single calls. Two modules are asked: b runs on a copy that has a's, and a cause is confirmed if nine tenths of the
    distance go with it; else it is likely. Then b runs with what its first modules return made equal, which shows how
    much each part of it brings; at most 24 times. Of runs alone calls are compared, as `diff` does.

    Models are left as they are. Raises RunError for a model that draws (dropout in training), tokens that none gives
    log-probabilities of, and what `capture` and `diff` refuse.
    """
    programs = _programs((a, b), inputs, under, tokens, names)
    _check_numbers(programs)
    apart = _other_tokens(*programs)
    result = Parity(*names, _distance(*programs, max_nats), limit=max_nats)
    result.causes += apart
    are_models = all(isinstance(one, Live) and one.is_module for one in programs)  # an attribute may scale logits
    waits = are_models or _have_other_weights(*programs)  # and so may other weights
    if not apart and result.distance.rms != 0 and not waits:
        result.causes += _of_sampler(*programs, result.distance)
    whole, is_named = result.distance.rms, bool(result.causes)
    for program in programs:
        if isinstance(program, Live):
            program.run = program.captured()
    found = diff(programs[0].run, programs[1].run, mapping=mapping, names=names)
    result.environment = list(found.environment)
    modules = _as_modules(*programs) if whole > 0 else None
    if whole > 0 and not is_named and is_rounding(whole, programs, found):
        is_named = True
        if modules is None or modules != programs or not _by_values_in_fp32(result, modules):
            result.causes = [of_rounding(found)]
    if not is_named and (changed := _other_versions(programs)):
        result.causes, is_named = changed, True
    if modules is None and not is_named:
        result.causes += causes_of(found, lambda _: None, whole)
    elif modules is not None and not is_named:
        causes = list(result.causes)
        try:
            _by_engine(result, programs, modules, found)
            _by_exchange(result, modules, found if modules == programs else diff(modules[0].run, modules[1].run))
        except Exception as error:  # a model that runs as it is need not run with parts of another
            result.notes.append(f"parts of a could not be put into b: {first_line(error)}")
            result.causes = [*causes, *causes_of(found, lambda _: None, whole)]
        is_found = any(one.is_confirmed and one.kind in (ATTRIBUTE, WEIGHTS) for one in result.causes)
        if waits and not is_found and (sampler := _of_sampler(*programs, result.distance)):
            result.causes = [*sampler, *(one for one in result.causes if not one.is_confirmed)]
    if math.isinf(whole) and result.verdict == CACHE:
        what = "outputs of one are not finite where those of the other are"
        result.causes = [Cause(CALLS, what, "run it under nc.watch(), which names the call that makes it")]
    if isinstance(programs[0], Live) and isinstance(programs[1], Live):
        _of_outputs(result, programs[0], programs[1], found)
    are_runs = not any(isinstance(one, Live) for one in programs)
    if are_runs and math.isnan(whole) and not math.isnan(known := found.output_difference):
        result.distance, result.causes = Distance("relative", known), result.causes if known else []
    result.notes += other_inputs(*programs)
    if whole > 0 and modules is None:
        result.notes.append("no shares: both have to be modules that run, or runs of modules that are still there")
    if modules is None and result.is_over:
        result.notes += found.notes  # which are about pairs of calls
    return result


def _of_outputs(result: Parity, a: Live, b: Live, found: RunDifferences) -> None:
    """Enter what the distance does not say of two outputs: what has no partner, integers, and, of language models, what
    follows the last token.
    """
    if a.tokens is None or b.tokens is None:
        result.notes += notes_on(a.output, b.output)
        result.causes = _of_calls(found) if math.isnan(result.distance.rms) else result.causes
        return
    after = after_the_last(a.output, b.output, a.tokens) if a.ids == b.ids else ([], [])
    far = distance_in_nats(*after).rms
    if result.verdict in SOUND_CAUSES and far > 0 and far > _CONFIRMS * noise_of(a):
        of_a, of_b = [*a.log_probabilities, *after[0]], [*b.log_probabilities, *after[1]]
        result.distance = distance_in_nats(of_a, of_b, result.limit)
        what = f"the tokens agree; what is most likely after the last of each row is {number_text(far)} nats apart"
        result.causes = [Cause(CALLS, what, "compare what both do at the last place"), *_of_calls(found)]


def _of_calls(found: RunDifferences) -> list[Cause]:
    """Return the causes that the calls of two runs show, where no distance says how much they explain."""
    return [cause for cause in causes_of(found, lambda _: None, math.nan) if cause.kind not in SOUND_CAUSES]


def _as_modules(a: OneProgram, b: OneProgram) -> tuple[Live, Live] | None:
    """Return both as modules that are called once on the same inputs: what a function calls, or what a run was captured
    of, in the place of these. None where that cannot be.
    """
    live, other = (a, b) if isinstance(a, Live) and a.is_module else (b, a)
    if not isinstance(live, Live) or not live.is_module:
        return None
    called = other if isinstance(other, Live) and other.is_module else _called_by(other, live)
    if called is None:
        return None
    return (live, called) if live is a else (called, live)


def _called_by(program: OneProgram, live: Live) -> Live | None:
    """Return the module that a program calls, on the inputs of the other; None where that cannot be."""
    is_made = isinstance(program, Live) and program.trial.is_made
    made = program.trial.original().model if isinstance(program, Live) and is_made else None
    module = made if isinstance(made, torch.nn.Module) else module_of(program.run)
    if module is None:
        return None
    under = program.under if isinstance(program, Live) else None
    try:
        trial = Trial.of("parity", module, (live.trial.args, live.trial.kwargs))
        called = live_program(program.name, trial, under, live.tokens)
        called.run = called.captured()
    except Exception:  # it takes other inputs: what it raises is its own
        return None
    is_compared = called.is_module and not math.isnan(distance(called, live, live.output).rms)
    return called if is_compared else None


def _by_engine(
    result: Parity, programs: tuple[OneProgram, OneProgram], modules: tuple[Live, Live], found: RunDifferences
) -> None:
    """Enter what goes away where the module of one is called once, on all tokens, in the place of the program."""
    other, called = next(((p, m) for p, m in zip(programs, modules, strict=True) if p is not m), (None, None))
    if other is None or called is None:
        return
    before, after = result.distance.rms, distance(*modules, modules[1].output).rms
    own = _distance(called, other, None).rms
    noise = noise_of(called)
    result.runs += 2
    agrees = found.verdict in (ALIKE, ROUND_OFF) or not (found.producers or found.alone)
    if isinstance(other, Live) and other.trial.is_made:
        what = f"what was made of {other.name} is {number_text(own)} off its module; rounding makes "
        what += number_text(noise)
        kind, todo = (ROUND_OFF, "") if own <= noise else (KERNEL, f"run {other.name} as eager code")
        result.causes.append(Cause(kind, what, todo, before, after, after * _CONFIRMS <= before))
    elif own <= noise and agrees:
        result.causes.append(of_rounding(found))
    elif own <= noise and own * _CONFIRMS > before:
        what = f"{other.name} computes in other batches and pieces than one call of its module, "
        what += f"{number_text(own)} off; rounding of each call makes up to {number_text(noise)}"
        result.causes.append(Cause(SHAPE, what, "", before, after, after * _CONFIRMS <= before))
    elif own > noise and agrees and not isinstance(other, Live):
        what = f"calls of {other.name} agree, and its log-probabilities are {number_text(own)} off those of its logits"
        todo = "compare what is done to logits before the log-probabilities are taken"
        result.causes.append(Cause(SAMPLER, what, todo, before, after, after * _CONFIRMS <= before))
    elif own > noise:
        what = f"{other.name} is {number_text(own)} off one call of its module on the same tokens, where rounding "
        what += f"makes {number_text(noise)}"
        todo = "compare positions, masks, and what the cache holds there"
        result.causes.append(Cause(CACHE, what, todo, before, after, after * _CONFIRMS <= before))


def _by_values_in_fp32(result: Parity, programs: tuple[Live, Live]) -> bool:
    """Enter the weights and attributes that make a difference where both compute in fp32, and return whether any do:
    in low formats they may do less than rounding.
    """
    wide = None if all(map(is_wide, programs)) else in_fp32(programs)
    if wide is None or distance(*wide, wide[1].output).rms <= noise_of(wide[0]):
        return False
    tried = Parity(result.a, result.b, _distance(*wide, None))
    _by_exchange(tried, wide, diff(wide[0].run, wide[1].run))
    causes = [cause for cause in tried.causes if cause.kind in (WEIGHTS, ATTRIBUTE)]
    if causes:
        result.notes.append("both compute within rounding of each other; causes and shares are of copies in fp32")
        result.causes, result.shares = causes, tried.shares
    result.runs += tried.runs
    return bool(causes)


def _programs(
    sides: tuple[Side, Side], inputs: Inputs, under: Any, tokens: torch.Tensor | None, names: tuple[str, str]
) -> tuple[OneProgram, OneProgram]:
    regions = under if isinstance(under, tuple) else (under, under)
    made = []
    for side, region, name in zip(sides, regions, names, strict=True):
        side = load(side, Run) if isinstance(side, str | Path) else side
        given = () if isinstance(side, Case | Run) else inputs
        made.append(program_of(name, side, given, region, tokens))
    return made[0], made[1]


def _check_numbers(programs: Sequence[OneProgram]) -> None:
    """Raise RunError where one alone has log-probabilities."""
    for one, other in (programs, programs[::-1]):
        if one.log_probabilities and not other.log_probabilities:
            asked, found = f"parity({one.name}, {other.name})", f"{other.name} has no log-probabilities"
            how = "with tokens=ids, or add them: run.keep_tokens(ids, log_probabilities)."
            raise RunError(asked, found, advice=f"Capture {other.name} {how}")


def _other_tokens(a: OneProgram, b: OneProgram) -> list[Cause]:
    """Return the cause that the tokens are not the same ones, if they are not."""
    if a.ids == b.ids:
        return []
    same = _same_tokens(a, b)
    what = f"{len(a.ids)} tokens in a, {len(b.ids)} in b, the same ones up to token {same}"
    what += _shift(a, b) or _shift(b, a)
    return [Cause(TOKENS, what, "give both the same ids: one tokenizer, one template, one BOS")]


def _shift(longer: OneProgram, other: OneProgram) -> str:
    """Return that one has a few tokens more at its beginning, if it has."""
    if longer.tokens is None or other.tokens is None:
        rows = longer.ids, other.ids
        return next((f"; {longer.name} begins with {n} more" for n in (1, 2) if rows[0][n:] == rows[1]), "")
    x, y = longer.tokens, other.tokens
    n = x.shape[-1] - y.shape[-1]
    is_shifted = 0 < n < x.shape[-1] and x[..., n:].shape == y.shape and torch.equal(x[..., n:], y)
    return f"; {longer.name} begins with {n} more, as with a BOS" if is_shifted else ""


def _same_tokens(a: OneProgram, b: OneProgram) -> int:
    """Return how many tokens are the same ones, from the first on."""
    differing = (n for n, (x, y) in enumerate(zip(a.ids, b.ids, strict=False)) if x != y)
    return next(differing, min(len(a.ids), len(b.ids)))


def _distance(a: OneProgram, b: OneProgram, limit: float | None) -> Distance:
    if a.ids or b.ids:
        same = _same_tokens(a, b)
        return distance_in_nats(a.log_probabilities[:same], b.log_probabilities[:same], limit)
    if isinstance(a, Live) and isinstance(b, Live):
        return distance(a, b, b.output)
    return Distance("relative", float("nan"))


def _other_versions(programs: Sequence[OneProgram]) -> list[Cause]:
    """Return that weights were loaded while a run was captured, if they were."""
    found = []
    for one in programs:
        if one.run.weights_changed:
            calls = ", ".join(map(str, one.run.weights_changed[:_NAMED]))
            what = f"{one.name} had other weights from call {calls} of its module on than before"
            todo = f"capture {one.name} between two updates of its weights, and compare it with the weights of then"
            found.append(Cause(WEIGHTS, what, todo))
    return found


def _have_other_weights(a: OneProgram, b: OneProgram) -> bool:
    """Return whether two modules hold other values under the same names."""
    if not (isinstance(a, Live) and a.is_module and isinstance(b, Live) and b.is_module):
        return False
    return bool(different(a.module, b.module, pair_weights(a.module, b.module, {})))


def _of_sampler(a: OneProgram, b: OneProgram, whole: Distance) -> list[Cause]:
    """Return what was done to the logits of one that explains the log-probabilities of the other, if anything does."""
    for live, other in ((a, b), (b, a)):
        if not isinstance(live, Live) or live.tokens is None:
            continue
        rows = logits_of(live.output, live.tokens)[1]
        limit = min(whole.rms, 1.0) / _CONFIRMS  # where a token was cut off, the distance is infinite
        found = sampled_from(rows, live.ids, other.log_probabilities, limit)
        if found is not None:
            what, left = found
            todo = f"take both of the same logits: raw, or divided and cut alike ({what} is {other.name}'s)"
            text = f"log-probabilities of {other.name} are those of {live.name}'s logits with {what}"
            return [Cause(SAMPLER, text, todo, whole.rms, left, True)]
    return []


def _where_most_is(shares: Sequence[ModuleShare], left: float) -> Cause:
    """Return the module with the largest share, where no call explains a distance."""
    if not shares:
        return Cause(CALLS, "no pair of calls explains it", "compare what both do")
    share = max(shares, key=lambda share: share.amount)
    what = f"no pair of calls explains it; {number_text(share.amount)} of it lies in {share.module}"
    todo = f"compare the code and the weights of {share.module} with those of {share.a}"
    return Cause(CALLS, what, todo, left, left - share.amount, module=share.module, place=share.place)


def _by_exchange(result: Parity, programs: tuple[Live, Live], found: RunDifferences) -> None:
    """Enter causes and shares that exchanging parts of a and b shows."""
    a, b = programs
    of_a, of_b = ([name for name, _ in program.module.named_modules()] for program in programs)
    partners = partners_of(of_a, of_b, found.rows)
    kept_a, kept_b = a.exchanged()[1], b.exchanged(numbers_calls=True)[1]
    pairs = within(paired_results(kept_a, kept_b, partners), kept_a, _LIMIT_BYTES)
    results = a.exchanged(wanted=set(pairs.values()))[1].results
    equal = {key: results[partner] for key, partner in pairs.items()}
    wanted, result.routed = other_choices(kept_a, kept_b, partners)
    whole = distance(a, b, b.output).rms
    noise = noise_of(a)
    search = Search(a, b, whole, noise, partners)
    result.notes += search.weights()
    search.attributes()
    search.choices(wanted, result.routed)
    search.formats()
    if search.left > _REST * result.distance.rms:
        calls = diff(a.run, search.rest()) if search.changes else found
        paths = {partner[0]: path for path, partner in partners.items() if len(partner) == 1}

        def without(call: CallId) -> tuple[float, float, str] | None:
            path = call.module_path
            before, after = kept_b.around(call, equal)
            if not after:
                path = next((paths[path] for path in containers(path) if path in paths), "")
                before, after = kept_b.around_module(path, equal)
            return (search.with_results(before), search.with_results(after), path) if after else None

        is_noise = search.left <= noise and not beyond_bounds(calls)
        result.causes += (
            [of_rounding(calls)] if is_noise else causes_of(calls, without, search.left, search.has_weights)
        )
    result.causes = sorted(
        [*search.causes, *result.causes],
        key=lambda cause: (cause.kind == ROUND_OFF, -round(cause.removes / result.distance.rms, 1)),
    )
    choices = wanted if result.routed else {}
    if choices:
        result.notes.append("shares are of what is left when b chooses as a does")

    def measure(calls: Sequence[ModuleCall]) -> float:
        return distance(a, b, b.exchanged(results={key: equal[key] for key in calls}, choices=choices)[0]).rms

    places = {path: place_of(b, path) for path, _ in pairs}
    whole = measure(()) if choices else whole
    result.shares, runs = shares_of(pairs, whole, measure, places, _MOST_RUNS)
    result.runs += search.runs + runs
    if search.left > noise and all(cause.kind == ROUND_OFF for cause in result.causes):
        result.causes = [_where_most_is(result.shares, search.left)]
