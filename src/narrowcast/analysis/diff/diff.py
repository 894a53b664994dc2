"""`nc.diff`: two runs that need not be alike, call by call: formats, values, and where differences begin."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, overload

from narrowcast.analysis.diff.aligned_values import Values
from narrowcast.analysis.diff.alignment import Aligned, align, formats_of, mapping_of
from narrowcast.analysis.diff.ends import (
    about_outputs,
    compare_ends,
    explain_formats,
    leave_open,
    lengths_of,
    look_at_ends,
    may_be_chosen,
    tell_nan,
)
from narrowcast.analysis.diff.front import Front
from narrowcast.analysis.diff.gradients import common_factor
from narrowcast.analysis.diff.kept_tensors import KeptTensors
from narrowcast.analysis.diff.moved import moved_apart, moved_by_one_alone, trained_by_one_alone
from narrowcast.analysis.diff.outcomes import BAND_OF_LOW
from narrowcast.analysis.diff.pieces import PieceDistance
from narrowcast.analysis.diff.rows import Judging
from narrowcast.analysis.diff.settings import other_step
from narrowcast.analysis.diff.sides import Bundle, Side
from narrowcast.analysis.diff.tokens import band_of_tokens, tokens
from narrowcast.analysis.diff.without_partner import leave_out_all, no_pairs
from narrowcast.core.ledger.identity import BACKWARD
from narrowcast.core.policy import BUILTIN, Policy, as_policy
from narrowcast.core.policy.table import RuleChange
from narrowcast.errors import RunError
from narrowcast.output.words import counted
from narrowcast.reports.results.explanation import Explanation
from narrowcast.reports.results.ledger import CastChange, Ledger
from narrowcast.reports.results.mapping import RunMapping, generalised
from narrowcast.reports.results.run import Run
from narrowcast.reports.results.run_differences import OtherStep, RunDifferences, Unaligned
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

_FAR_OF_NEW, _SAME_OUTPUTS, _FAR_OF_SET = 2e-3, 4, 0.1
"""So far apart, in parts of the largest magnitude, are outputs that other weights give after training, or that no pair
of calls made. The second: outputs of one program in fp32 that is written otherwise are as many rounding bounds apart.
The third: weights that steps have moved which are set otherwise, in parts of their way.
"""
_JUDGED = 1 << 15
"""Pairs are judged again, as each that is left out may show others to be none, until this many were judged in all."""


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
        if first.verdict == VALUES_DIFFER and (first.front or not result.front):
            first.notes.insert(0, _FIRST_STEP)
            first.untrained = result.untrained
            return first
    return result


def _compared(runs: Sequence[list[Run]], names: tuple[str, str], asked: RunMapping | None) -> RunDifferences:
    sides = _sides(*runs)
    pairs, left_out = align(sides[0], sides[1], asked)
    kept = KeptTensors(sides[0].runs[0], sides[1].runs[0])
    result = RunDifferences(*names, environment=environments(*(side.runs[0].environment for side in sides)))
    as_read: dict[Aligned, PieceDistance] = {}
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
    front, apart = Front(judging), compare_ends(result, judging, pairs, left_out)
    result.output_difference = apart
    is_same = apart <= _SAME_OUTPUTS * judging.widest < BAND_OF_LOW
    if is_same and (judging.unpaired or result.producers) and front.come_to_the_same():
        leave_out_all(result, judging)
    tell_nan(result, judging, pairs)
    result.untrained = trained_by_one_alone(judging.values, pairs, judging.places)
    result.tokens = tokens(sides[0].runs[0], sides[1].runs[0], band_of_tokens(pairs, result.rows))
    if not explain_formats(result, judging, left_out):
        look_at_ends(result, judging, pairs, apart)
    if result.verdict != VALUES_DIFFER:
        beyond = front.beyond_rounding()
        result.outputs_apart = 0.0 if may_be_chosen(judging, beyond) else beyond
    settings = other_step(sides[0].runs[0], sides[1].runs[0])
    if settings is not None and result.verdict != VALUES_DIFFER and (way := moved_apart(judging.values)) > _FAR_OF_SET:
        result.weights_apart = way
    is_open = judging.have_trained_alike or (math.isnan(apart) and not any(x.has_backward for x in sides))
    if is_open and not result.outputs_apart and len(sides[0].runs) == len(sides[1].runs) == 1:
        new = front.new_outputs_apart()
        result.outputs_apart = new if new > _FAR_OF_NEW else 0.0
    result.unaligned = _unaligned(sides, pairs, left_out, judging)
    leave_open(result, judging, left_out, apart)
    if result.verdict == VALUES_DIFFER and all(len(side.runs) == 1 for side in sides):
        result.front = front.calls()
        result.other_step = settings and _other_step(result, judging, *settings)
    result.notes = [*about_outputs(result, apart, judging), *_notes(sides, result), *kept.notes]
    if settings is not None and result.verdict != VALUES_DIFFER:
        result.notes.append(f"{settings[0].optimizer} is set otherwise, which shows nowhere, {settings[0].text}")
    if result.verdict == VALUES_DIFFER and (left := moved_by_one_alone(judging.values)):
        result.notes.insert(0, left)
    if result.verdict == VALUES_DIFFER and (factor := common_factor(judging.values, result.gradients)):
        result.notes.insert(0, f"every gradient of b is {factor:.3g} times that of a: {_OF_A_FACTOR}")
    comments = tuple(f"only in {one.run}: {one.id}" for one in result.unaligned if not one.why)
    result.mapping = RunMapping(tuple(generalised(mapping_of(pairs))), comments=comments)
    result.by_hand = asked or RunMapping()
    result.compared_runs = tuple(side.runs[0] for side in sides)
    return result


def _other_step(result: RunDifferences, judging: Judging, step: OtherStep, calls: Sequence[int]) -> OtherStep | None:
    """Return a step that is set otherwise, before which as many calls come, unless one of the front is among these: in
    low formats, or where gradients are alike, that need not make the difference.
    """
    runs = [side.runs[0] for side in judging.values.sides]
    are_alike = bool(result.gradients) and not any(row.is_beyond for row in result.gradients)
    if are_alike or judging.widest >= BAND_OF_LOW:
        return step
    for run, name, before in zip(runs, "ab", calls, strict=True):
        first = next((one.id for one in result.front if one.run == name), None)
        if first is not None and first in [call.id for call in run.calls[:before]]:
            return None
    return step


def _sides(*runs: list[Run]) -> tuple[Side, Side]:
    """Return the two sides; where one alone is a loop, in steps only if these divide the work of the other."""
    a, b = map(Side, runs)
    if a.has_steps and not b.has_steps and not a.divides(b):
        a = Side(runs[0], in_steps=False)
    if b.has_steps and not a.has_steps and not b.divides(a):
        b = Side(runs[1], in_steps=False)
    return a, b


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
            place, views = judging.places.of(n, [bundle]), judging.places.beside(n, [bundle])
            rows.append(Unaligned(name, bundle.id, place, before, why, format, apart, read_by, views))
    return rows


def _notes(sides: Sequence[Side], result: RunDifferences) -> list[str]:
    notes, (a, b) = list[str](), sides
    if a.casts or b.casts:
        notes.append(f"casts are not paired: a has {a.casts}, b has {b.casts}")
    kept = [len(side.runs[0].tokens) for side in sides]
    if kept[0] != kept[1]:
        notes.append(f"a kept {kept[0]} log-probabilities, b {kept[1]}: compared as far as both go")
    lengths = lengths_of(sides)
    if lengths[0] != lengths[1]:
        often = [counted(length, "time") for length in lengths]
        notes.append(f"a makes a call up to {often[0]}, b up to {often[1]}: in calls of a module, or steps of a loop")
    steps = [side.runs[0].steps for side in sides]
    names = [[name for name, row in side.runs[0].parameters.items() if "gradient" in row] for side in sides]
    trained = [sum(side.value(name).elements for name in of) for side, of in zip(sides, names, strict=True)]
    if trained[0] != trained[1] and all(trained) and len(a.runs) == len(b.runs):
        notes.append(f"{trained[0]} elements of parameters have a gradient in a, {trained[1]} in b")
    if steps[0] != steps[1] and all(trained):
        notes.append(f"optimizers make {counted(steps[0], 'step')} in a, {counted(steps[1], 'step')} in b")
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
