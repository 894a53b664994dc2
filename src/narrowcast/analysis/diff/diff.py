"""`nc.diff`: two runs that need not be alike, call by call: formats, values, and where differences begin."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, overload

from narrowcast.analysis.diff.aligned_values import Values
from narrowcast.analysis.diff.alignment import Aligned, align, formats_of, mapping_of, place_of
from narrowcast.analysis.diff.gradients import (
    SAME_STEP,
    apart_as_a_whole,
    band_along,
    common_factor,
    gradients,
    gradients_are_alike,
    in_one_alone,
    moved_apart,
    trains_the_same,
)
from narrowcast.analysis.diff.kept_tensors import KeptTensors
from narrowcast.analysis.diff.outcomes import (
    BAND_OF_LOW,
    GRADIENTS,
    OUTPUTS,
    WIDEST,
    EndDifference,
    Outcomes,
    are_written_otherwise,
    band_of_all,
    is_in_another_order,
)
from narrowcast.analysis.diff.pieces import Distance
from narrowcast.analysis.diff.rows import Judging
from narrowcast.analysis.diff.sides import Bundle, Side
from narrowcast.analysis.diff.stretches import unsure_calls
from narrowcast.analysis.diff.tokens import band_of_tokens, tokens
from narrowcast.analysis.diff.without_partner import leave_out_compensated, no_pairs
from narrowcast.core.ledger.identity import BACKWARD, FORWARD
from narrowcast.core.policy import BUILTIN, Policy, as_policy
from narrowcast.core.policy.table import RuleChange
from narrowcast.errors import RunError
from narrowcast.output.words import counted, number_text
from narrowcast.reports.documents.rules import is_low
from narrowcast.reports.results.explanation import Explanation
from narrowcast.reports.results.ledger import CastChange, Ledger
from narrowcast.reports.results.mapping import RunMapping, generalised
from narrowcast.reports.results.run import Run
from narrowcast.reports.results.run_differences import (
    DIFFERS,
    GradientRow,
    RunDifferences,
    Unaligned,
)
from narrowcast.reports.results.saved import load
from narrowcast.reports.results.verdicts import NOT_COMPARED, VALUES_DIFFER

_FIRST_STEP = (
    "only what precedes the first step of an optimizer is compared: the runs differ there already, and later steps "
    "start from other weights"
)
_OF_A_FACTOR = "look at the scale of the loss, clipping, and averages over a batch, micro-batches or ranks"
_FIRST = ("packages.torch", "device", "policy.name", "policy.low", "packages.", "flags.")
Runs = Run | str | Path | Sequence[Run | str | Path]
_KINDS = {Policy: "a policy", Ledger: "a ledger", Run: "a run", list: "runs of several ranks"}

_VISIBLE, _FAR = 0.01, 4.0
"""Outputs that are further apart, and by this many times the widest rounding bound of a call, are not alike, whether or
not a call is named for it: in other formats, only where one of the programs makes calls that the other does not make.
"""
_JUDGED = 1 << 15
"""Pairs are judged again, as each that is left out may show others to be none, until this many were judged in all."""
_FAR_OF_GRADIENTS, _FAR_OF_WEIGHTS = 0.25, 0.1
"""In low formats gradients of sound programs that are written differently are nearer, all together: 0.14 at most in 500
pairs. So far apart, in parts of their way, are in fp32 weights that other steps have made.
"""


@overload
def diff(a: Policy, b: Policy) -> tuple[RuleChange, ...]: ...
@overload
def diff(a: Ledger | Explanation, b: Ledger | Explanation) -> tuple[CastChange, ...]: ...
@overload
def diff(
    a: Runs, b: Runs, *, mapping: RunMapping | str | Path | None = ..., names: tuple[str, str] | None = ...
) -> RunDifferences: ...


def diff(
    a: Any, b: Any, *, mapping: RunMapping | str | Path | None = None, names: tuple[str, str] | None = None
) -> Any:
    """Find where two runs differ, which need not be alike: eager and compiled, two policies, versions or devices, a
    trainer and its inference engine. For two policies, ledgers (or explanations, which have one) or snapshots: the
    changes from a to b.

    a, b: runs that `nc.capture` made, or the files of such; a sequence of them is one run of as many ranks, whose
        batch is divided among them. Or two of another kind: as objects, files or names of policies.
    mapping: pairs of modules or calls by hand (RunMapping, or its file).
    names: of the runs, in the output, if not those of the files.

    Calls are paired by module path, by weights, by order and op, by values; several with one where a projection is
    fused, and one with several where a cache divides a sequence (calls of one module). Each pair is compared by the
    best that both runs kept: whole tensors, sketches, statistics, ranges. Nothing runs again, and torch is not needed.
    Raises RunError for objects of other kinds, or of two; and for a mapping that names a module or call that does not
    exist.
    """
    names = names or (_name_of(a, "a"), _name_of(b, "b"))
    both = [_loaded(value) for value in (a, b)]
    kinds = [next((words for kind, words in _KINDS.items() if isinstance(value, kind)), type(value).__name__)
             for value in both]  # fmt: skip
    runs = [value if isinstance(value, list) else [value] for value in both]
    if hasattr(both[0], "diff") and type(both[0]) is type(both[1]):
        return both[0].diff(both[1])
    if not all(isinstance(run, Run) for side in runs for run in side):
        raise RunError(
            f"diff({', '.join(names)})", f"one is {kinds[0]}, the other {kinds[1]}",
            advice="Give two runs, two policies, two ledgers or two snapshots.",
        )  # fmt: skip
    for run, name in zip(runs, names, strict=True):
        _with_calls(run, name)
    asked = mapping if isinstance(mapping, RunMapping | None) else RunMapping.load(mapping)
    result = _compared(runs, names, asked)
    are_loops = all(run.steps > 1 and run.calls_before_step for side in runs for run in side)
    if asked is None and result.verdict == VALUES_DIFFER and are_loops:
        first = _compared([[run.before_first_step() for run in side] for side in runs], names, None)
        if first.verdict == VALUES_DIFFER:
            first.notes.insert(0, _FIRST_STEP)
            return first
    return result


def _compared(runs: Sequence[list[Run]], names: tuple[str, str], asked: RunMapping | None) -> RunDifferences:
    sides = _sides(*runs)
    pairs, left_out = align(sides[0], sides[1], asked)
    kept = KeptTensors(sides[0].runs[0], sides[1].runs[0])
    result = RunDifferences(*names, environment=environments(*(side.runs[0].environment for side in sides)))
    as_read: dict[Aligned, Distance] = {}
    judged = 0
    while True:
        judging = Judging(Values(sides[0], sides[1], kept, as_read), pairs)
        result.rows = [judging.row(pair) for pair in pairs]
        if judging.as_read:
            as_read |= judging.as_read
            continue
        judged += len(pairs)
        none = no_pairs(judging, pairs, result.rows, left_out, judged < _JUDGED)
        if not none:
            break
        pairs = [pair for pair in pairs if pair not in none]
    apart = _compare_ends(result, judging, pairs, left_out)
    result.tokens = tokens(sides[0].runs[0], sides[1].runs[0], band_of_tokens(pairs, result.rows))
    if not _explain_formats(result, judging, left_out):
        _look_at_ends(result, judging, pairs, apart)
    result.unsure = unsure_calls(judging, pairs, result.rows)
    result.unaligned = _unaligned(sides, pairs, left_out, judging)
    result.notes = [*_about_outputs(result, apart, judging), *_notes(sides, result), *kept.notes]
    if result.verdict == VALUES_DIFFER and (factor := common_factor(judging.values, result.gradients)):
        result.notes.insert(0, f"every gradient of b is {factor:.3g} times that of a: {_OF_A_FACTOR}")
    comments = tuple(f"only in {one.run}: {one.id}" for one in result.unaligned if not one.why)
    result.mapping = RunMapping(tuple(generalised(mapping_of(pairs))), comments=comments)
    result.by_hand = asked or RunMapping()
    result.compared_runs = tuple(side.runs[0] for side in sides)
    return result


def _look_at_ends(result: RunDifferences, judging: Judging, pairs: list[Aligned], apart: float) -> None:
    """Tell outputs, and weights after steps, that are far apart where nothing else shows a difference; note the calls
    without a partner that made them, or gradients beyond their bound. apart: of outputs.
    """
    sides, is_found = judging.values.sides, bool(result.producers or judging.unpaired)
    beyond = [row for row in result.gradients if row.is_beyond]
    is_of_ranks = len(sides[0].runs) != len(sides[1].runs)  # losses are each rank's own
    is_far = apart > max(_VISIBLE, _FAR * judging.widest)
    if is_far and not (judging.has_chosen(apart) or is_of_ranks):
        result.outputs_apart = apart
        if not is_found and not judging.note_first_alone(pairs, result.rows, FORWARD):
            judging.note_alone([side.runs[0].returned for side in sides], apart)
    elif beyond and not result.producers and all(x.id.direction == BACKWARD for x in judging.unpaired):
        used, difference = _gradients_of(sides, beyond), max(row.difference for row in beyond)
        if not (judging.note_alone(used, difference) or is_found):
            judging.note_first_alone(pairs, result.rows, BACKWARD)
    elif not (is_found or beyond) and len(set(_lengths(sides))) == 1:
        way = moved_apart(judging.values)
        if way > (_FAR_OF_WEIGHTS if judging.widest < BAND_OF_LOW else _FAR_OF_GRADIENTS):
            result.weights_apart = way
            moved = [[row["value"] for row in side.runs[0].parameters.values() if "before" in row] for side in sides]
            judging.note_alone(moved, way)


def _lengths(sides: Sequence[Side]) -> list[int]:
    """Return how often either run makes a call, at most."""
    return [max(len(x.module_calls) for x in side.bundles) for side in sides]


def _sides(*runs: list[Run]) -> tuple[Side, Side]:
    """Return the two sides; where one alone is a loop, in steps only if these divide the work of the other."""
    a, b = map(Side, runs)
    if a.has_steps and not b.has_steps and not a.divides(b):
        a = Side(runs[0], in_steps=False)
    if b.has_steps and not a.has_steps and not b.divides(a):
        b = Side(runs[1], in_steps=False)
    return a, b


def _has_low(result: RunDifferences) -> bool:
    """Return whether a call of either run computes in a low format."""
    return any(is_low(f"{row.format_a},{row.format_b}") for row in result.rows)


def _about_outputs(result: RunDifferences, apart: float, judging: Judging) -> list[str]:
    """Return a note about outputs that are not compared, or further apart than any call's bound, and none is named."""
    band = judging.widest
    if math.isnan(apart) and result.verdict != VALUES_DIFFER and result.unaligned:
        return ["the last calls of both runs have no partner: what they come to is not compared"]
    is_alike = apart <= (band if _has_low(result) else band_of_all(judging.widest, OUTPUTS))
    if result.verdict == VALUES_DIFFER or not band or is_alike or not result.unaligned:
        return []
    first = f"the outputs are {number_text(apart)} apart, and the round-off of a single call is at most "
    if not _has_low(result):
        return [f"{first}{number_text(band)}: no call was found that makes that; some have no partner."]
    return [
        f"{first}{number_text(band)}: calls without a partner may make that together, or hide what does. Capture both "
        "runs in fp32 to see whether they compute the same."
    ]


def _compare_ends(
    result: RunDifferences, judging: Judging, pairs: list[Aligned], left_out: Collection[Bundle]
) -> float:
    """Compare outputs and gradients; where these are alike, differences before them are other steps, no faults. Return
    how far apart outputs are, as far as that is known; NaN if it is not.
    """
    sides = judging.values.sides
    leave_out_compensated(judging, result.rows)
    unpaired = judging.counts_of_unpaired(left_out)
    has_low = _has_low(result)
    are_others = are_written_otherwise(pairs, result.rows, unpaired, has_low)
    band = band_of_all(judging.widest, GRADIENTS, are_others)
    result.gradients = gradients(judging.values, pairs, band, judging.widest)
    parameters = [[n for n, row in side.runs[0].parameters.items() if "gradient" in row] for side in sides]
    have_moved_alike = moved_apart(judging.values) <= max(SAME_STEP, band_of_all(judging.widest, OUTPUTS))
    trains_alike = have_moved_alike or trains_the_same(judging.values, result.gradients, parameters)
    is_same = trains_alike and judging.are_returned_alike()
    are_gradients_alike = is_same or gradients_are_alike(judging.values, result.gradients, parameters, band)
    are_others |= are_gradients_alike and not any(row.difference for row in result.gradients)
    ends = judging.outputs(result.rows, are_others, not are_gradients_alike)
    if are_gradients_alike:  # a loss in other parts, or scaled, trains alike
        ends.append(EndDifference(0.0, judging.widest))
        judging.unpaired = {x: d for x, d in judging.unpaired.items() if not (x.is_loss or x.id.is_sum_of_gradients)}
        if are_others and (is_same or is_in_another_order(judging.values, result.rows, judging.widest)):
            ends = [EndDifference(0.0, judging.widest)]
            judging.are_alike_as_a_whole = True
    outcomes = Outcomes(ends, are_others, judging.widest, all(unpaired))
    effects = judging.effects(pairs, result.rows)
    of_rows = [effects.of(pair) if row.verdict == DIFFERS else "" for pair, row in zip(pairs, result.rows, strict=True)]
    result.rows = outcomes.forward(result.rows, has_low, of_rows)
    of_alone = {bundle: effects.of_all(judging.read_by.get(bundle, [])) for bundle in judging.unpaired}
    judging.unpaired = outcomes.alone(judging.unpaired, judging.of_backward(), has_low, of_alone)
    result.rows, judging.unpaired = outcomes.first(result.rows, judging.unpaired, of_rows, of_alone)
    compared = [{name for row in result.gradients for name in (row.a, row.b)[n]} for n in range(2)]
    are_all = all(known.issuperset(names) for known, names in zip(compared, parameters, strict=True))
    if are_gradients_alike and (outcomes.are_alike or are_all):
        result.rows, judging.unpaired = outcomes.backward(
            result.rows,
            judging.unpaired,
            judging.of_inputs(pairs),
            min(judging.widest, max((g.difference for g in result.gradients), default=0.0)),
        )
    elif not _is_unexplained(result, judging, left_out, are_equal=not any(one.difference for one in ends)):
        result.gradients = gradients(judging.values, pairs, band_along(result.rows))
        if all(parameters) and not any(row.differs_in_format for row in result.rows):
            result.gradients += in_one_alone(judging.values, result.gradients)
    apart = [one.difference for one in ends if math.isfinite(one.difference)]
    if not (apart or result.gradients or all(side.runs[0].returned for side in sides)):
        return math.nan
    return max([0.0 if judging.are_alike_as_a_whole else judging.returned_apart(), *apart])


def _gradients_of(sides: Sequence[Side], rows: Sequence[GradientRow]) -> list[list[int]]:
    """Return the numbers of the gradients of these rows in either run."""
    found = []
    for n, side in enumerate(sides):
        known = [side.runs[0].parameters.get(name, {}) for row in rows for name in (row.a, row.b)[n]]
        found.append([row["gradient"] for row in known if "gradient" in row])
    return found


def _explain_formats(result: RunDifferences, judging: Judging, left_out: Collection[Bundle]) -> bool:
    """Return whether other formats explain outputs and gradients, however far apart they are: of one program, or in
    formats so low that anything may be rounding.
    """
    return bool(result.formats) and (not any(judging.counts_of_unpaired(left_out)) or judging.widest >= WIDEST)


def _is_unexplained(result: RunDifferences, judging: Judging, left_out: Collection[Bundle], are_equal: bool) -> bool:
    """Return whether gradients differ visibly in fp32, or by much in a low format, and nothing that was found makes
    that. are_equal: outputs are, so that no condition was decided otherwise.
    """
    largest = max((row.difference for row in result.gradients if row.is_beyond), default=0.0)
    has_chosen = not are_equal and judging.has_chosen(largest)
    if judging.unpaired or has_chosen or any(row.verdict == DIFFERS for row in result.rows):
        return False
    if judging.widest < BAND_OF_LOW:
        return largest > _VISIBLE
    apart = apart_as_a_whole(judging.values, result.gradients)
    return apart > _FAR_OF_GRADIENTS and not _explain_formats(result, judging, left_out)


def _name_of(value: Any, otherwise: str) -> str:
    several = value if isinstance(value, list | tuple) else [value]
    return " + ".join(Path(one).name for one in several if isinstance(one, str | Path)) or otherwise


def _loaded(value: Any) -> Any:
    """Return what a name or a file holds; of an explanation the ledger. RunError for what cannot be read."""
    if isinstance(value, str | Path):
        is_policy = str(value).partition(":")[0] in BUILTIN or str(value).endswith(".toml")
        value = as_policy(value) if is_policy else load(value)
    if isinstance(value, list | tuple):
        return [_loaded(one) for one in value]
    return value.ledger if isinstance(value, Explanation) else value


def _with_calls(runs: list[Run], name: str) -> list[Run]:
    if not any(run.calls for run in runs):
        raise RunError(f"diff: {name}", "a run without calls", advice="Capture the model while it runs.")
    return runs


def _unaligned(
    sides: Sequence[Side], pairs: list[Aligned], left_out: dict[Bundle, str], judging: Judging
) -> list[Unaligned]:
    rows = []
    has_backward = [any(x.id.direction == BACKWARD for x in side.bundles) for side in sides]
    for n, (name, side) in enumerate(zip("ab", sides, strict=True)):
        paired = {bundle for pair in pairs for bundle in (pair.a, pair.b)[n]}
        after = ""
        for bundle in [*side.bundles, *side.casts_alone.values()]:
            if bundle in paired:
                after = str(bundle.id)
                continue
            why = "the other run has no backward" if bundle.id.direction == BACKWARD and not has_backward[1 - n] else ""
            why = f"left out by {left_out[bundle]}" if bundle in left_out else why
            format, before = formats_of([bundle]), "" if bundle.call.is_cast else after
            apart, readers = judging.unpaired.get(bundle, 0.0), judging.read_by.get(bundle, [])
            read_by = readers[0].a[0].id if apart and readers else None
            rows.append(Unaligned(name, bundle.id, place_of([bundle]), before, why, format, apart, read_by))
    return rows


def _notes(sides: Sequence[Side], result: RunDifferences) -> list[str]:
    notes, (a, b) = list[str](), sides
    if a.casts or b.casts:
        notes.append(f"casts are not paired: a has {a.casts}, b has {b.casts}")
    kept = [len(side.runs[0].tokens) for side in sides]
    if kept[0] != kept[1]:
        notes.append(f"a kept {kept[0]} log-probabilities, b {kept[1]}: compared as far as both go")
    lengths = _lengths(sides)
    if lengths[0] != lengths[1]:
        often = [counted(length, "time") for length in lengths]
        notes.append(f"a makes a call up to {often[0]}, b up to {often[1]}: in calls of a module, or steps of a loop")
    if parts := sum(row.is_part for row in result.rows):
        notes.append(
            f"{counted(parts, 'pair', 'are')} compared in part: one run has elements that the other does not have"
        )
    if len(a.runs) != len(b.runs):
        notes.append("ranks in other numbers: sums over a batch, and the backward, are each rank's own")
    if missing := sum(row.verdict == NOT_COMPARED for row in result.rows):
        notes.append(f"results of {counted(missing, 'pair')} cannot be compared (other shapes, or no floats)")
    if not any(tensor.sketch for side in sides for run in side.runs for tensor in run.tensors):
        notes.append("neither run has sketches (older files have none): ranges are compared")
    return notes


def environments(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return the entries in which two environments differ, by name; versions first."""
    flat_a, flat_b = dict(_flat(a)), dict(_flat(b))
    names = sorted({*flat_a, *flat_b} - {"command", "tensors"}, key=lambda n: (_rank(n), n))
    rows = [(n, flat_a.get(n, "-"), flat_b.get(n, "-")) for n in names if flat_a.get(n) != flat_b.get(n)]
    return [row for row in rows if row[0] != "device" or len({_device(text) for text in row[1:]}) > 1]


def _device(text: str) -> str:
    """Return a device's text without the version of torch at its end, which is reported separately."""
    return text.rpartition(", torch ")[0] or text


def _rank(name: str) -> int:
    """Return the rank of an entry: what matters most is reported first."""
    return next((n for n, start in enumerate(_FIRST) if name == start or (start[-1] == "." and name.startswith(start))),
                len(_FIRST))  # fmt: skip


def _flat(facts: dict[str, Any], before: str = "") -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for name, value in facts.items():
        pairs += _flat(value, f"{before}{name}.") if isinstance(value, dict) else [(f"{before}{name}", str(value))]
    return pairs
