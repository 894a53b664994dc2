"""What two runs come to: outputs, gradients and weights, which judge the differences before them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from narrowcast.analysis.diff.aligned_values import GAIN_OF_PASSING
from narrowcast.analysis.diff.alignment import Aligned
from narrowcast.analysis.diff.effects import ABSORBED, UNDONE, Effects
from narrowcast.analysis.diff.gradients import (
    SAME_STEP,
    apart_as_a_whole,
    band_along,
    divides_by_sizes,
    gradients,
    gradients_are_alike,
    in_one_alone,
    named_in,
    shares,
    trains_the_same,
)
from narrowcast.analysis.diff.moved import have_trained_alike, moved_apart
from narrowcast.analysis.diff.outcomes import (
    BAND_OF_LOW,
    GRADIENTS,
    OUTPUTS,
    WIDEST,
    EndDifference,
    Outcomes,
    are_rearranged,
    are_written_otherwise,
    band_of_all,
    is_in_another_order,
)
from narrowcast.analysis.diff.returned import returned
from narrowcast.analysis.diff.rows import Judging
from narrowcast.analysis.diff.sides import Bundle, Side
from narrowcast.analysis.diff.without_partner import (
    leave_out_before_steps,
    leave_out_compensated,
    leave_out_of_gradients,
    note_alone,
    note_first_alone,
)
from narrowcast.core.ledger.identity import BACKWARD, FORWARD
from narrowcast.output.words import number_text
from narrowcast.reports.documents.rules import is_low
from narrowcast.reports.results.run_differences import DIFFERS, GradientRow, RunDifferences, RunRow
from narrowcast.reports.results.verdicts import ROUND_OFF, VALUES_DIFFER

_VISIBLE, _VISIBLE_OF_FP32, _FAR, _FAR_OF_PAIRS = 0.01, 1e-3, 4.0, 2.5
"""Outputs that are further apart, in fp32 without steps by the second (those of 350 sound pairs were 3e-7), and by the
third times the widest bound of a call, are not alike, named for a call or none: in other formats, only where one
program makes calls that the other does not make. The fourth is enough where pairs of calls are as many times nearer.
"""
_FAR_OF_GRADIENTS, _FAR_OF_ONE, _SMALL, _FAR_OF_CALLS, _FAR_OF_WEIGHTS = 0.25, 0.4, 0.1, 6.0, 0.1
"""In low formats gradients of sound programs that are written differently are nearer, all together: 0.17 at most in 700
pairs, and one of less than a tenth of their size, where they are (0.3 was seen); and 5 times the widest rounding bound
of a call in 330. So far apart, in parts of their way, are in fp32 weights that other steps have made.
"""


def compare_ends(result: RunDifferences, judging: Judging, pairs: list[Aligned], left_out: Collection[Bundle]) -> float:
    """Compare outputs and gradients; where these are alike, differences before them are other steps, no faults. Return
    how far apart outputs are, as far as that is known; NaN if it is not.
    """
    sides = judging.values.sides
    leave_out_compensated(judging, result.rows)
    unpaired, steps = judging.counts_of_unpaired(left_out), _steps(result, sides)
    has_low = _has_low(result) and judging.widest >= BAND_OF_LOW
    are_others = are_written_otherwise(pairs, result.rows, unpaired, has_low)
    band = min(_FAR_OF_GRADIENTS, steps * band_of_all(judging.widest, GRADIENTS, are_others))
    most = min(_FAR_OF_GRADIENTS, steps * WIDEST)
    result.gradients = gradients(judging.values, pairs, band, judging.widest)
    parameters = [[n for n, row in side.runs[0].parameters.items() if "gradient" in row] for side in sides]
    judging.returned.are_gradients_alike = gradients_are_alike(judging.values, result.gradients, parameters, band)
    is_same = judging.returned.are_alike() and _trains_alike(result, judging, parameters)
    are_gradients_alike = is_same or judging.returned.are_gradients_alike
    are_others |= are_gradients_alike and not any(row.difference for row in result.gradients)
    ends = judging.outputs(result.rows, are_others, not are_gradients_alike)
    ends = [replace(one, band=max(one.band, min(most, steps * one.band))) for one in ends]
    if are_gradients_alike:
        judging.are_alike_as_a_whole = _are_alike_as_a_whole(result, judging, is_same, are_others)
        ends = _of_alike_programs(result, judging, pairs, ends)
    outcomes = Outcomes(ends, are_others, judging.widest, all(unpaired), most)
    if not are_gradients_alike and outcomes.are_alike:
        are_gradients_alike = _leave_out_other_weights(result, judging)
    by_pair, alike = dict(zip(pairs, result.rows, strict=True)), _of_alike_gradients(result, judging)
    effects = Effects(sides, judging.makers, judging.paired, by_pair, judging.widest, alike)
    of_rows = [effects.of(pair) if row.verdict == DIFFERS else "" for pair, row in zip(pairs, result.rows, strict=True)]
    rearranged = are_rearranged(result.rows, of_rows)
    are_undone = [one or effect == ABSORBED for one, effect in zip(rearranged, of_rows, strict=True) if effect]
    are_undone += [effect in UNDONE for effect in _of_each_alone(judging, effects).values()]
    if are_undone and all(are_undone) and not outcomes.are_alike:
        _note_what_is_not_undone(judging, effects, by_pair)
    result.rows = outcomes.forward(result.rows, has_low, of_rows)
    of_alone = _of_each_alone(judging, effects)
    compared = named_in(result.gradients)
    of_row = _least_of_row(result, judging) if has_low else 0.0
    shows_no_backward = outcomes.are_alike and _shows_no_backward(result, sides, compared, of_row)
    if shows_no_backward:
        leave_out_of_gradients(result, judging, pairs)
    of_backward = set() if shows_no_backward else _of_backward(judging)
    judging.unpaired = outcomes.alone(judging.unpaired, of_backward, has_low, of_alone)
    result.rows, judging.unpaired = outcomes.first(result.rows, judging.unpaired, of_rows, rearranged, of_alone)
    are_all = all(known.issuperset(names) for known, names in zip(compared, parameters, strict=True))
    if are_gradients_alike and (outcomes.are_alike or are_all):
        least, inputs = max((row.difference for row in result.gradients), default=0.0), judging.of_inputs(pairs)
        least = min(judging.widest, least)
        result.rows, judging.unpaired = outcomes.backward(result.rows, judging.unpaired, inputs, least)
    elif not _is_unexplained(result, judging, are_equal=not any(one.difference for one in ends)):
        result.gradients = gradients(judging.values, pairs, band_along(result.rows))
        if all(parameters) and not any(row.differs_in_format for row in result.rows):
            result.gradients += in_one_alone(judging.values, result.gradients)
    if shows_no_backward:
        result.rows, judging.unpaired = outcomes.backward(result.rows, judging.unpaired, (), 0.0)
        if of_row:
            result.gradients = gradients(judging.values, pairs, of_row, judging.widest)
    if judging.have_trained_alike:  # what is left in `grad` may be of another loss, for which one run asks none
        result.gradients = [row for row in result.gradients if not row.is_beyond]
    apart = [one.difference for one in ends if math.isfinite(one.difference)]
    if not (apart or result.gradients or returned(judging.values)):
        return math.nan
    return max([0.0 if judging.are_alike_as_a_whole else judging.returned.apart(), *apart])


def _of_alike_programs(
    result: RunDifferences, judging: Judging, pairs: Sequence[Aligned], ends: Sequence[EndDifference]
) -> list[EndDifference]:
    """Return the outputs that say whether programs differ whose gradients are alike, or that have trained alike: a loss
    in other parts, or scaled, trains alike, and what is not known is no difference. Leave out what is none either.
    """
    judging.unpaired = {x: d for x, d in judging.unpaired.items() if not (x.is_loss or x.id.is_sum_of_gradients)}
    if judging.have_trained_alike:
        leave_out_before_steps(result, judging, pairs)
    known = [one for one in ends if math.isfinite(one.difference)]
    if judging.are_alike_as_a_whole:
        return [EndDifference(0.0, judging.widest), *(one for one in known if one.is_later)]
    return [*known, EndDifference(0.0, judging.widest)]


def _are_alike_as_a_whole(result: RunDifferences, judging: Judging, is_same: bool, are_others: bool) -> bool:
    """Return whether programs do the same, whatever they compute on the way. is_same: weights have moved alike."""
    is_known = judging.have_trained_alike or (is_same and judging.returned.are_gradients_alike)
    is_ordered = are_others and (is_same or is_in_another_order(judging.values, result.rows, judging.widest))
    return is_known or is_ordered


def _trains_alike(result: RunDifferences, judging: Judging, parameters: Sequence[Sequence[str]]) -> bool:
    """Return whether weights have moved alike, or gradients move them alike; note whether that is all of training."""
    judging.have_trained_alike = have_trained_alike(judging.values, result.gradients, judging.widest)
    if judging.have_trained_alike:
        return True
    most = max(SAME_STEP, band_of_all(judging.widest, OUTPUTS))
    return moved_apart(judging.values) <= most or trains_the_same(judging.values, result.gradients, parameters)


def _shows_no_backward(
    result: RunDifferences, sides: Sequence[Side], compared: Sequence[Collection[str]], least: float
) -> bool:
    """Return whether nothing in a backward is a fault where outputs are alike: gradients are what it comes to. They
    are within their bounds, which are wide in a low format, and those of most weights are compared; or cannot be, and
    later steps have led to the same. compared: the parameters of either run whose gradients are. least: how far apart
    one is that shows something, in a low format.
    """
    if not result.gradients:
        return least > 0 or any(run.steps > 1 for side in sides for run in side.runs)
    if any(row.is_beyond and row.difference > least for row in result.gradients):
        return False
    return all(map(_are_most, sides, compared))


def _least_of_row(result: RunDifferences, judging: Judging) -> float:
    """Return how far apart the gradient of one parameter is that shows something in a low format: where all together
    are near, a small one may be further, whose rows are few (another element was the largest).
    """
    known = shares(judging.values, result.gradients)
    are_small = all(share <= _SMALL for row, share in known if row.is_beyond and row.difference > _FAR_OF_GRADIENTS)
    is_near = apart_as_a_whole(judging.values, result.gradients) <= _FAR_OF_GRADIENTS
    return _FAR_OF_ONE if is_near and are_small else _FAR_OF_GRADIENTS


def _of_backward(judging: Judging) -> set[Bundle]:
    """Return the calls of a backward without a partner, but for those that only calls of a forward read: what these
    compute shows in outputs, as that of a forward does, and so does all where no parameter has a gradient.
    """
    if not any("gradient" in row for side in judging.values.sides for row in side.runs[0].parameters.values()):
        return set()
    backward = {bundle for bundle in judging.unpaired if bundle.id.direction == BACKWARD}
    read_by = {bundle: {pair.a[0].id.direction for pair in judging.read_by.get(bundle, ())} for bundle in backward}
    return {bundle for bundle in backward if read_by[bundle] != {FORWARD}}


def _are_most(side: Side, names: Collection[str]) -> bool:
    """Return whether these parameters have more than half of the elements of all with a gradient."""
    elements = {n: side.value(n).elements for n, row in side.runs[0].parameters.items() if "gradient" in row}
    return 2 * sum(elements[name] for name in names if name in elements) > sum(elements.values())


def _of_each_alone(judging: Judging, effects: Effects) -> dict[Bundle, str]:
    """Return what comes of each call without a partner that makes a difference."""
    return {bundle: effects.of_alone(bundle, judging.read_by.get(bundle, [])) for bundle in judging.unpaired}


def _note_what_is_not_undone(judging: Judging, effects: Effects, rows: Mapping[Aligned, RunRow]) -> None:
    """Note the calls without a partner before the first pair whose difference no later call undoes; if there are none,
    those that made the outputs, which are in another order then, too; or before the first that none is known to undo.
    """

    def note_first(undone: Collection[str]) -> bool:
        own = {pair: row for pair, row in rows.items() if row.verdict != DIFFERS and effects.of(pair) not in undone}
        return note_first_alone(judging, [*own], [*own.values()], FORWARD, 0.0)

    numbers = [side.runs[0].returned for side in judging.values.sides]
    if not (note_first(UNDONE) or note_alone(judging, numbers, judging.returned.apart())):
        note_first((ABSORBED,))


def _of_alike_gradients(result: RunDifferences, judging: Judging) -> set[Aligned]:
    """Return the pairs that make gradients of parameters which are alike, perhaps in other parts than the pairs."""
    found: set[Aligned] = set()
    for n, (side, makers) in enumerate(zip(judging.values.sides, judging.makers, strict=True)):
        names = [name for row in result.gradients if not row.is_beyond for name in (row.a, row.b)[n]]
        made = (makers.of(side.runs[0].parameters[name]["gradient"]) for name in names)
        found |= {judging.paired[n][x] for x in made if x is not None and x in judging.paired[n]}
    return found


def _leave_out_other_weights(result: RunDifferences, judging: Judging) -> bool:
    """Leave out gradients of parameters that have other values in either run, of which the outputs are alike: of a norm
    that is folded into a weight, or a scale. They are gradients of other things. Return whether there are any, and the
    others are alike.
    """
    own = [row for row in result.gradients if judging.values.are_of_one_value(row.a, row.b)]
    if not own or len(own) == len(result.gradients) or any(row.is_beyond for row in own):
        return False
    result.gradients = own
    return True


def look_at_ends(result: RunDifferences, judging: Judging, pairs: list[Aligned], apart: float) -> None:
    """Tell outputs, and weights after steps, that are far apart where nothing else shows a difference; note the calls
    without a partner that made them, or gradients beyond their bound. apart: of outputs.
    """
    sides, is_found = judging.values.sides, bool(result.producers or judging.unpaired)
    beyond = [row for row in result.gradients if row.is_beyond]
    is_of_ranks = len(sides[0].runs) != len(sides[1].runs)  # losses are each rank's own
    nearer = _FAR_OF_PAIRS * max(judging.widest, result.largest)
    is_still = judging.widest < BAND_OF_LOW and not any(run.steps for side in sides for run in side.runs)
    visible = _VISIBLE_OF_FP32 if is_still else _VISIBLE
    far = _steps(result, sides) * max(visible, min(_FAR * judging.widest, nearer))
    is_far = apart > min(_FAR_OF_GRADIENTS, far)
    if is_far and not (may_be_chosen(judging, apart) or is_of_ranks):
        result.outputs_apart = apart
        found = (x.id for x in judging.unpaired), (row.a[0] for row in result.producers)
        if all(one.direction == BACKWARD for one in chain(*found)):
            before = judging.unpaired
            judging.unpaired = {}
            noted = note_first_alone(judging, pairs, result.rows, FORWARD, apart)
            if not (noted or note_alone(judging, [side.runs[0].returned for side in sides], apart)):
                judging.unpaired = before
    elif beyond and not result.producers and all(x.id.direction == BACKWARD for x in judging.unpaired):
        used, difference = _gradients_of(sides, beyond), max(row.difference for row in beyond)
        if not (note_alone(judging, used, difference) or is_found):
            note_first_alone(judging, pairs, result.rows, BACKWARD, difference)
    elif not (is_found or beyond) and _are_as_long(sides, judging.widest < BAND_OF_LOW):
        way = moved_apart(judging.values)
        of_low = _FAR_OF_ONE if divides_by_sizes(judging.values) else _FAR_OF_GRADIENTS
        if way > (_FAR_OF_WEIGHTS if judging.widest < BAND_OF_LOW else of_low):
            result.weights_apart = way
            moved = [[row["value"] for row in side.runs[0].parameters.values() if "before" in row] for side in sides]
            note_alone(judging, moved, way)


def _are_as_long(sides: Sequence[Side], is_high: bool) -> bool:
    """Return whether both runs make as many steps: of loops, or of optimizers where nothing is low."""
    steps = {side.runs[0].steps for side in sides}
    return len(set(lengths_of(sides))) == 1 or (is_high and len(steps) == 1 and 0 not in steps)


def may_be_chosen(judging: Judging, apart: float) -> bool:
    """Return whether outputs may be this far apart since calls chose by values that differ: where no such choice was
    seen, few are others, and not most of an output's rows are as far apart.
    """
    if not judging.has_chosen(apart) or judging.has_seen_choices:
        return judging.has_seen_choices
    pairs = [judging.paired[0][x] for x in judging.makers[0].ends if x in judging.paired[0]]
    made = [[bundles[0].call.outputs[:1] for bundles in (pair.a, pair.b)] for pair in pairs]
    ends = [(a[0][1], b[0][1]) for a, b in made if a and b]
    compared = [judging.values.between(*numbers) for numbers in returned(judging.values) or ends]
    return not any(one.is_in_most_rows and 2 * one.relative >= apart for one in compared)


def leave_open(result: RunDifferences, judging: Judging, left_out: Collection[Bundle], apart: float) -> None:
    """Leave open why outputs are far apart that nothing was found to make, but wide bounds, or choices that nobody saw,
    excuse: calls that one run alone makes may hide what does. apart: of outputs.
    """
    is_of_ranks = len(judging.values.sides[0].runs) != len(judging.values.sides[1].runs)
    is_known = result.verdict == VALUES_DIFFER or is_of_ranks or judging.has_seen_choices
    is_known |= not any(judging.counts_of_unpaired(left_out))
    if apart > _FAR_OF_GRADIENTS and not is_known:
        result.outputs_unexplained = apart


def tell_nan(result: RunDifferences, judging: Judging, pairs: list[Aligned]) -> None:
    """Tell the first call that returns NaN, if outputs of one run alone have any: no rounding makes that."""
    both = list(zip(judging.values.sides, judging.makers, strict=True))
    has_nan = [any(_has_nan(side, x) for x in (*makers.ends, *makers.returned)) for side, makers in both]
    if has_nan[0] is has_nan[1] or result.producers or judging.unpaired:
        return
    n = has_nan.index(True)
    first = next(x for x in both[n][0].bundles if _has_nan(both[n][0], x))
    pair = judging.paired[n].get(first)
    if pair is None:
        judging.unpaired[first] = math.inf
    else:
        at = pairs.index(pair)
        result.rows[at] = replace(
            result.rows[at], verdict=DIFFERS, why=f"it is the first that returns NaN in {'ab'[n]}"
        )


def _has_nan(side: Side, bundle: Bundle) -> bool:
    return any(side.runs[0].tensors[number].nan > 0 for _, number in bundle.call.outputs)


def about_outputs(result: RunDifferences, apart: float, judging: Judging) -> list[str]:
    """Return a note about outputs that are not compared, or further apart than any call's bound, and none is named."""
    band = judging.widest
    if math.isnan(apart) and result.verdict != VALUES_DIFFER and result.unaligned:
        return ["what the runs come to is not compared: their last calls have no partner, or another number"]
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


def explain_formats(result: RunDifferences, judging: Judging, left_out: Collection[Bundle]) -> bool:
    """Return whether other formats explain outputs and gradients, however far apart they are: of one program, or in
    formats so low that anything may be rounding.
    """
    return bool(result.formats) and (not any(judging.counts_of_unpaired(left_out)) or judging.widest >= WIDEST)


def _is_one_program(result: RunDifferences, judging: Judging) -> bool:
    """Return whether all calls of either run have a partner, some in another format: these explain what they make."""
    both = zip(judging.values.sides, judging.paired, strict=True)
    return bool(result.formats) and all(bundle in paired for side, paired in both for bundle in side.bundles)


def _is_unexplained(result: RunDifferences, judging: Judging, are_equal: bool) -> bool:
    """Return whether gradients differ visibly in fp32, or by much in a low format, and nothing that was found makes
    that. are_equal: outputs are, so that no condition was decided otherwise.
    """
    if _is_one_program(result, judging):
        return False
    largest = max((row.difference for row in result.gradients if row.is_beyond), default=0.0)
    has_chosen = not are_equal and judging.has_chosen(largest)
    if judging.unpaired or has_chosen or any(row.verdict == DIFFERS for row in result.rows):
        return False
    if judging.widest < BAND_OF_LOW:
        return largest > _VISIBLE
    apart = apart_as_a_whole(judging.values, result.gradients)
    steps = _steps(result, judging.values.sides)
    rounded = (row.difference for row in result.rows if row.verdict == ROUND_OFF and row.a[0].direction == BACKWARD)
    least = GAIN_OF_PASSING * max(rounded, default=0.0)  # of gradients that cancel to nothing, as of a norm's input
    return apart > max(least, min(_FAR_OF_GRADIENTS, steps * _FAR_OF_CALLS * judging.widest))


def _steps(result: RunDifferences, sides: Sequence[Side]) -> int:
    """Return how many times further apart what they come to may be: in low formats weights move apart in each step."""
    return max(1, *(run.steps for side in sides for run in side.runs)) if _has_low(result) else 1


def _gradients_of(sides: Sequence[Side], rows: Sequence[GradientRow]) -> list[list[int]]:
    """Return the numbers of the gradients of these rows in either run."""
    found = []
    for n, side in enumerate(sides):
        known = [side.runs[0].parameters.get(name, {}) for row in rows for name in (row.a, row.b)[n]]
        found.append([row["gradient"] for row in known if "gradient" in row])
    return found


def _has_low(result: RunDifferences) -> bool:
    """Return whether a call of either run computes in a low format."""
    return any(is_low(f"{row.format_a},{row.format_b}") for row in result.rows)


def lengths_of(sides: Sequence[Side]) -> list[int]:
    """Return how often either run makes a call, at most."""
    return [max(len(x.module_calls) for x in side.bundles) for side in sides]
