"""`nc.compare`: a model under a policy against a reference, call by call: which op adds which error, and is it a fault.

The model runs twice as the reference (what differs there is nondeterminism; in the second run each call also runs alone
in its low formats), under the policy, where kernels are judged by bounds of their errors (`kernel_bounds`), and with
every result perturbed by one unit in the last place of its format under the policy: that measures the rounding bounds
of outputs (TTrace, arXiv 2506.09280). Where an error is larger, more runs show what helps (`advising`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch

from narrowcast.analysis.capture.capture import note_of_changed, observed_region
from narrowcast.analysis.compare import judging, notes
from narrowcast.analysis.compare.advising import Advising, about_lost, harm_of, region_to_try
from narrowcast.analysis.compare.bands import Bands, Moved, by_names_of, cast_formats, moved_formats
from narrowcast.analysis.compare.isolating import low_alone, runs_alone
from narrowcast.analysis.compare.reference import REFERENCES, Alone, Compared, Keep, KeptCall, RunAlone, check_arguments
from narrowcast.analysis.watch.watch import watch
from narrowcast.core.ledger.identity import CallId
from narrowcast.core.ledger.pairing import pairs_of
from narrowcast.errors import NarrowcastError, RunError, first_line
from narrowcast.formats import fp32
from narrowcast.frontends.eager import autocast
from narrowcast.frontends.eager.asked import Under
from narrowcast.frontends.eager.functions import carried_elsewhere
from narrowcast.frontends.eager.registered import leaves_no_kernels
from narrowcast.observation.observer.door import Door, passes
from narrowcast.observation.observer.observer import Observer
from narrowcast.observation.restore.weights import Weights
from narrowcast.observation.trial.environment import environment
from narrowcast.observation.trial.output_errors import dense, has_nan, output_errors
from narrowcast.observation.trial.raising import said_of
from narrowcast.observation.trial.trial import Loss, Outcome, Trial, check_reference, tensors_of
from narrowcast.observation.trial.uncast import NOTHING, Uncast, enabled
from narrowcast.output.progress import Step, long_work
from narrowcast.output.words import counted
from narrowcast.reports.results import verdicts
from narrowcast.reports.results.differences import ANOTHER_MODEL, OUTPUT_FACTOR, Differences
from narrowcast.runtime.regions.pinned import without_low_pins
from narrowcast.runtime.torch_bridge import FORMATS
from narrowcast.runtime.torch_bridge.case import Case
from narrowcast.runtime.torch_bridge.inputs import Inputs
from narrowcast.runtime.torch_surface.dispatch import quietly
from narrowcast.runtime.torch_surface.state import autocast_off

_SEEDS, _MORE_SEEDS = (11, 12), (13, 14, 15, 16, 17, 18)
"""Where two runs leave a doubt, this many more decide: of a scalar, two show little."""


@leaves_no_kernels()
def compare(
    model: Callable[..., Any] | Case,
    inputs: Inputs = (),
    *,
    under: Under = None,
    reference: str | Callable[..., Any] = "fp32",
    by: str = "op",
    backward: bool | Loss = False,
    isolate: int | None = None,
    limit_bytes: int = 1 << 30,
) -> Differences:
    """Compare a model in a region with a reference run, call by call.

    model:  a Module, compiled or not, a script, an exported program, any callable, or a Case.
    inputs: as for `explain`.
    under:  as for `explain`; without it, and no region around the call, the policy native, or no region for a model
            that has its own (compiled, exported) or where the reference is another model.
    reference: `fp32`, the same model in a region that casts nothing: a copy in fp32 of one whose weights are low, the
            original of one that was compiled; `fp64`, a copy of it in fp64; or another model that takes the same
            arguments, run in the same region if it has none of its own: exported code against its source.
    by:     what the first screen lists: `op` or `module`.
    backward: also differentiate, as for `capture`; then gradients are compared, too.
    isolate: the model runs this many times more (16; where there are over 1,000 calls fewer, at least 4), unobserved,
            with single ops of single modules alone in the low format, which shows what they do to the output (`alone`).
            Of more ops, modules are tried as groups first, then the ops of those that moved the output most.
    limit_bytes: how much may be kept of results; beyond half of it 4,096 elements of each are, before 65,536.

    Six runs of the model, `isolate` more; six to nine where two leave a doubt whether an output is beyond round-off,
    two where one is not finite, to find where, and at most 14 where an error is too large, to find what helps
    (`remedy`): rules, or lines in fp32 whose code asks for a low format itself. The model is unchanged afterwards:
    weights that it changes itself are restored. Raises RunError for a model that returns no tensor.
    """
    check_arguments("compare", reference, by)
    trial = Trial.of("compare", model, inputs, backward)
    is_own = isinstance(reference, str)
    default = "native" if is_own and not trial.is_made else None
    opened = enabled(observed_region("compare", trial, under, default))
    other = trial.original() if is_own else Trial.of("compare", reference, (trial.args, trial.kwargs), backward)
    other = trial if other.model is trial.model else other  # what it writes to is restored for both
    result = _empty_result(trial.name, opened, str(reference) if is_own else ANOTHER_MODEL, by)
    around = Uncast(opened.device) if is_own else opened
    dtype = REFERENCES.get(str(reference)) or (other.fp32_for_low() if is_own else None)
    _Comparing(trial, other, opened, around, dtype, limit_bytes, result).run(isolate)
    return result


@leaves_no_kernels()
def compare_with_fp32(
    trial: Trial, region: autocast, limit_bytes: int = 1 << 30
) -> tuple[Differences, Weights, torch.dtype | None]:
    """Compare with fp32 in a prepared region, without ops alone, whatever fp32's output is: NaN, no tensor. Also return
    the weights, which restore what further runs write to, and fp32 if the reference is a copy in it.
    """
    result = _empty_result(trial.name, region, "fp32", "op")
    other, around = trial.original(), Uncast(region.device)
    dtype = other.fp32_for_low()
    comparing = _Comparing(trial, other, region, around, dtype, limit_bytes, result, accepts_any=True)
    comparing.run(isolate=0)
    return result, comparing.weights, comparing.dtype


def _empty_result(name: str, region: autocast, reference: str, by: str) -> Differences:
    low, nothing = str(FORMATS[region.fast_dtype]), region.policy is NOTHING
    return Differences(
        subject=name, device_type=region.device, policy="" if nothing else region.policy.name,
        low="" if nothing else low, reference=reference, by=by,
        environment=environment(region.device, region.policy, low),
    )  # fmt: skip


class _Comparing:
    def __init__(
        self, trial: Trial, other: Trial, region: autocast, around: autocast, dtype: torch.dtype | None,
        limit_bytes: int, result: Differences, accepts_any: bool = False,
    ) -> None:  # fmt: skip
        self._accepts_any = accepts_any
        self._trial, self._other, self._region, self._around = trial, other, region, around
        self._is_own, self._is_same = other.model is trial.model, result.reference in REFERENCES
        self._low = FORMATS[region.fast_dtype]
        self.dtype, self._limit_bytes, self._result = dtype, limit_bytes, result
        self.weights = trial.kept_weights(*() if self._is_own else (other,))
        self._policies = (region.policy,)
        self._casts = region.policy is not NOTHING
        self._step: Step = lambda: None
        self._bands, self._underflow = Bands(), frozenset[str]()
        self._changed, self._door = set[str](), Door(result.notes)
        self._carried = carried_elsewhere()
        self._blind = 0  # calls of attention whose masks hide every key from a query

    def run(self, isolate: int | None) -> None:
        with long_work(f"comparing {self._result.subject}", 6 + runs_alone(isolate) * self._is_own) as self._step:
            self._run_all(isolate)

    def _run_all(self, isolate: int | None) -> None:
        result = self._result
        reference = Keep(self._policies, self._limit_bytes // 2, checksums=True)
        expected = self._run_reference(reference)
        if not self._accepts_any:
            check_reference(expected)
        under = Keep(self._policies, self._limit_bytes // 2, checksums=True, judges=True)
        under.casts_scripts = self._casts
        seen = self._run(self._trial, self._region, self._observed(under))
        self._bands.kernels = under.errors_of_kernels(seen.gradients)
        under.calls = by_names_of(reference.calls, under.calls)
        self._blind = reference.blind + under.blind
        again = RunAlone(self._policies, reference.calls, under.calls)
        repeated = self._run_reference(again)
        actual = self._run(self._trial, self._region if self._casts else autocast_off(), None)
        if self.weights.are_written and self._casts and not self._trial.is_made:
            result.notes += notes.about_old_casts(seen, actual)
            actual = seen  # the casts of weights that it writes to were made again there
        self._move(reference, under, expected, _SEEDS)
        with quietly():
            self._read_calls(reference.calls, under.calls, again.found)
            if result.unmatched:
                result.notes.append(notes.about_unmatched(result.unmatched, under.saw_scripts and self._is_own))
        is_beyond = self._read_outputs(expected, actual)
        if is_beyond:
            is_beyond = self._look_closer(reference, under, expected, actual)
        if self._trial.is_compiled and not any(kept.draws_numbers for kept in under.calls.values()):
            with quietly():
                result.compiled = judging.off_by_compiler(seen, actual, self._bands)
        with quietly():
            unknown = notes.about_draws(expected, actual, result.reference) if self._is_own else ""
            unknown = unknown or notes.about_unseen(under.unseen, carried_elsewhere() > self._carried)
            self._conclude(is_beyond, expected, repeated, unknown)
            judging.name_cause(result, reference, under)
        self._find_not_finite(expected)
        if self._is_own and not under.saw_scripts:  # rules do not decide what is low in these
            self._isolate(runs_alone(isolate, len(result.rows)), expected)
        if not under.saw_scripts if self._is_own else self._trial.is_made and not self._other.is_made:
            self._advise(expected)
        if result.verdict == verdicts.EXACT and self._is_own and not any(row.is_low for row in result.rows):
            self._note(notes.NOTHING_IS_CAST)
        if self._changed:
            self._note(f"{note_of_changed(list(self._changed))}: each run began with the same ones, restored since.")
        result.notes += [notes.ABOUT_BLIND_ROWS] * bool(self._blind)

    def _note(self, note: str) -> None:
        self._result.notes += [note] * (note not in self._result.notes)

    def _observed(self, observer: Observer) -> AbstractContextManager[None]:
        """Return the context that observes a run, and keeps the weights that are written to."""
        observer.weights, observer.door = self.weights, self._door
        return observer.observing()

    def _run(
        self, trial: Trial, region: Any, watching: AbstractContextManager[Any] | None,
        dtype: torch.dtype | None = None,
    ) -> Outcome:  # fmt: skip
        is_reference = isinstance(region, Uncast) and region is self._around
        if watching is None and self._blind:
            watching = self._observed(Compared(self._policies))
        try:
            with self.weights, without_low_pins(trial.model) if is_reference else nullcontext():
                outcome = trial.run(region, watching, dtype)
        finally:
            self._changed.update(self.weights.changed)
        self._result.runs += 1
        self._step()
        return outcome

    def _run_reference(self, observer: Observer) -> Outcome:
        """Run the reference. RunError if it is to be in fp64, and does not run there."""
        observer.casts_scripts = self._casts and not self._is_own
        try:
            return self._run(self._other, self._around, self._observed(observer), self.dtype)
        except RuntimeError as error:
            if self.dtype is None or isinstance(error, NarrowcastError):
                if self._is_own and any(word in str(error) for word in ("dtype", "scalar type")):
                    error.add_note(notes.FORMATS_MEET)
                raise
            if self.dtype is torch.float32:  # its code names the formats of weights: they are kept
                self.dtype = None
                return self._run_reference(observer)
            found = f"the model does not run in fp64: {said_of(error)}"
            raise RunError("compare(reference='fp64')", found, advice=notes.USE_FP32) from error

    def _find_not_finite(self, expected: Outcome) -> None:
        """Find the first call that makes what is not finite here, and is in the reference; and the reference's own."""
        result, floating = self._result, [t for t in tensors_of(expected.output) if t.is_floating_point()]
        floating += [] if expected.loss is None else [expected.loss]
        is_itself = any(not bool(dense(t).isfinite().all()) for t in (*floating, *expected.gradients.values()))
        if is_itself and result.verdict != verdicts.NOT_COMPARED:
            result.notes.append(f"The reference ({result.reference}) itself has values that are not finite.")
        is_here = has_nan(expected.output) or result.verdict == verdicts.NOT_FINITE
        if not (is_itself or is_here):
            return
        reference, here = watch(at="op"), watch(at="op")
        self._run(self._other, self._around, reference, self.dtype)
        if is_here:
            self._run(self._trial, self._region, here)
        judging.name_not_finite(result, reference.found, here.found, is_itself)

    def _move(
        self, reference: Keep, under: Keep, expected: Outcome, seeds: tuple[int, ...], underflows: bool = False
    ) -> None:
        """Run the reference with each call's results perturbed by one unit in the last place. That may raise if shapes
        depend on values; the runs that are compared did not.
        """
        formats = moved_formats(reference, under, self._low, self._is_own, self._is_same)
        casts = cast_formats(reference, under, self._is_own)
        kept = {identity: kept.samples for identity, kept in reference.calls.items()}
        for seed in seeds:
            for shrinks in (False, True):  # what is beyond its limit by a unit may be an index out of bounds
                moved = Moved(self._policies, formats, casts, kept, seed, self._is_own, underflows, shrinks)
                try:
                    outcome = self._run_reference(moved)
                except Exception as error:
                    if passes(error):
                        raise
                    if shrinks:
                        self._note(f"With results moved by one last unit the model raises {first_line(error)}")
                else:
                    self._bands.add(expected, outcome)
                    break
            self._bands.add_calls(moved.errors)

    def _look_closer(self, reference: Keep, under: Keep, expected: Outcome, actual: Outcome) -> bool:
        """Return whether outputs or gradients are beyond round-off after more runs; note if underflow explains them."""
        self._move(reference, under, expected, _MORE_SEEDS)
        is_beyond = self._read_outputs(expected, actual)
        formats = moved_formats(reference, under, self._low, self._is_own, self._is_same).values()
        small = [format for format in formats if format.exponent_bits < fp32.exponent_bits]
        if not is_beyond or not small:
            return is_beyond
        scale = judging.scale_of_loss(reference.calls, under.calls)
        if scale > 1.0 and any(g.verdict == verdicts.FAULT for g in self._result.gradients):
            scaled = self._run(replace(self._trial, scale=scale), self._region if self._casts else autocast_off(), None)
            with quietly():
                rows = judging.judge_gradients(expected, scaled, self._bands, frozenset())
                lost = (verdicts.FAULT, verdicts.NOT_FINITE)
                self._underflow = frozenset(g.parameter for g in rows if g.verdict not in lost)
            is_beyond = self._read_outputs(expected, actual)
        if is_beyond:
            self._move(reference, under, expected, _SEEDS, underflows=True)
            is_beyond = self._read_outputs(expected, actual)
        if not is_beyond:
            self._note(notes.about_underflow(self._result.rows, small[0]))
        return is_beyond

    def _read_calls(
        self, reference: dict[CallId, KeptCall], under: dict[CallId, KeptCall], again: dict[CallId, Alone]
    ) -> None:
        result = self._result
        reference, under = judging.without_sums(reference), judging.without_sums(under)
        pairs = pairs_of(reference, under)
        single = (*pairs.only_a, *pairs.only_b)
        modules, ops = {i.module_path for i in single}, {(i.module_path, i.op) for i in single}
        result.unmatched += [notes.unmatched(call, "only under the policy") for call in pairs.only_b.values()]
        for identity, (expected, kept) in pairs.both.items():
            is_other = not judging.has_same_shapes(kept, expected) and identity.module_path in modules
            in_doubt = (identity.module_path, identity.op) in ops and judging.other_arguments(kept, expected)
            if is_other or in_doubt:
                why = "another call, in a module that makes other calls, too"
                result.unmatched.append(notes.unmatched(kept, why))
                continue
            band = self._bands.calls.get(identity)
            alone = again.get(identity)
            result.rows.append(judging.judge_call(identity, kept, expected, alone, band, self._is_own))
        result.unmatched += [notes.unmatched(call, "only in the reference") for call in pairs.only_a.values()]
        result.notes += notes.about_shaky(result.rows)
        if self._is_same and any(row.is_low for row in result.rows):
            result.notes += notes.about_low_reference(result.rows)

    def _read_outputs(self, expected: Outcome, actual: Outcome) -> bool:
        """Note the errors of outputs and gradients; return whether one is beyond its rounding bound."""
        result, bands = self._result, self._bands
        with quietly():
            result.outputs = output_errors(expected.output, actual.output)
            result.round_off_bound = judging.bound_of(result.outputs, bands.output, self._region.fast_dtype)
            wanted = [name for name, p in self._trial.parameters().items() if p.requires_grad]
            result.gradients = judging.judge_gradients(expected, actual, bands, self._underflow, wanted)
        worst = max((o.relative_error for o in result.outputs if not math.isnan(o.sqnr_db)), default=0.0)
        bound = max(OUTPUT_FACTOR * result.round_off_bound, judging.TINY) if bands.runs else math.inf
        return worst > bound or any(g.verdict == verdicts.FAULT for g in result.gradients)

    def _conclude(self, is_beyond: bool, expected: Outcome, repeated: Outcome, unknown: str) -> None:
        result = self._result
        worst = max((o.relative_error for o in result.outputs), default=0.0)
        is_lost = any(math.isnan(o.sqnr_db) for o in result.outputs)
        if is_lost or any(g.verdict == verdicts.NOT_FINITE for g in result.gradients):
            result.rows = list(map(judging.came_to_something, result.rows))
        elif not is_beyond:
            are_same = not self._is_same and bool(result.outputs) and worst < judging.TINY
            result.rows = [judging.came_to_nothing(row, are_same) for row in result.rows]
        of_calls = {row.verdict for row in result.rows}
        is_not_finite = is_lost or verdicts.NOT_FINITE in of_calls | {g.verdict for g in result.gradients}
        is_beyond = is_beyond or bool(result.compiled) or verdicts.FAULT in of_calls
        is_off = bool(worst or result.differing)
        result.verdict = verdicts.verdict_of(is_beyond, is_not_finite, verdicts.KERNEL in of_calls, is_off)
        lost = about_lost(expected) or notes.about_shapes(expected, result)
        if lost and result.verdict in (verdicts.EXACT, verdicts.ROUND_OFF):
            result.verdict = verdicts.NOT_COMPARED
            self._note(lost)
        shaky = max((e.relative_error for e in output_errors(expected.output, repeated.output)), default=0.0)
        says_nothing = (verdicts.EXACT,) if worst or self._trial.backward else (verdicts.EXACT, verdicts.ROUND_OFF)
        is_low = result.verdict in says_nothing and judging.is_low_in_both(result.rows, self._trial.is_made)
        is_shaky = bool(shaky) and not result.faults and worst <= OUTPUT_FACTOR * shaky
        if is_shaky and result.verdict in (verdicts.ROUND_OFF, verdicts.FAULT):
            result.verdict = verdicts.NONDETERMINISTIC
            result.notes.append(f"Two runs of the reference are {shaky:.1e} apart: nothing can be said of the output.")
        elif result.verdict == verdicts.ROUND_OFF and not self._bands.runs and result.outputs and worst > judging.TINY:
            result.verdict = verdicts.NOT_JUDGED
            self._note("No run says how far round-off carries to the output: only kernels were judged.")
        elif result.verdict == verdicts.FAULT and unknown and verdicts.FAULT not in of_calls and not result.compiled:
            result.verdict = verdicts.NOT_JUDGED
            self._note(unknown)
        elif is_low and result.reference in REFERENCES:
            result.verdict = verdicts.NOT_COMPARED
            self._note(notes.SAME_FORMATS)

    def _advise(self, expected: Outcome) -> None:
        """Find by runs what helps where an error is too large; of code that was made, by runs of its original."""
        trial, region = self._other, region_to_try(self._trial, self._other, self._region, self._result.rows)
        harm = harm_of(self._result, FORMATS[region.fast_dtype].epsilon, expected)
        if harm is None or region.policy is NOTHING:
            return
        trial = trial if harm.parameter else replace(trial, backward=False)

        def run(region: autocast, observer: Observer | None, trial: Trial = trial) -> Outcome:
            dtype = self.dtype if region is self._around else None
            return self._run(trial, region, None if observer is None else self._observed(observer), dtype)

        advising = Advising(run, region, expected, self._result, harm)
        advising.run(self._around, self._trial.fp32_for_low() is not None)
        advising.try_elsewhere(trial, self._around)
        if region is not self._region and self._result.tried:
            policy, low = region.policy.name, FORMATS[region.fast_dtype]
            self._note(f"What helps was looked for in eager code, under {policy} in {low}.")

    def _isolate(self, often: int, expected: Outcome) -> None:
        def run(region: autocast) -> float | None:
            try:
                outcome = self._run(replace(self._trial, backward=False), region, None)
            except Exception:  # formats may meet that never do in the model
                return None
            return max((e.relative_error for e in output_errors(expected.output, outcome.output)), default=None)

        failed = low_alone(self._result.rows, often, self._region, run)
        for path, op in failed[:1]:
            where = f"the first is {op} in {path or 'the root'}"
            self._note(f"{counted(len(failed), 'op')} could not run low alone, {where}")
