"""The rows of a comparison of two runs: whether paired calls differ, and whether their inputs explain that."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from narrowcast.analysis.diff.aligned_values import GAIN, GAIN_OF_PASSING, Values, module_calls_of
from narrowcast.analysis.diff.alignment import Aligned, formats_of
from narrowcast.analysis.diff.conditions import jump, moves, rooted
from narrowcast.analysis.diff.makers import Makers, Upstream
from narrowcast.analysis.diff.moved import weights_moved
from narrowcast.analysis.diff.outcomes import (
    BAND_OF_LOW,
    OF_OTHERS,
    OF_PARTS,
    OUTPUTS,
    UNEXPLAINED,
    WIDEST,
    EndDifference,
    band_of_all,
    nearest,
)
from narrowcast.analysis.diff.pieces import NINE_DIGITS, RANGES, SKETCHES, STATISTICS, TENSORS, PieceDistance
from narrowcast.analysis.diff.places import Places
from narrowcast.analysis.diff.returned import Returned
from narrowcast.analysis.diff.round_off import BAND
from narrowcast.analysis.diff.sides import Bundle, read_name
from narrowcast.core.ledger.identity import BACKWARD, FORWARD, RECOMPUTATION, CallId
from narrowcast.core.ops import is_named
from narrowcast.core.ops.facts import NORM, SOFTMAX, op_kind
from narrowcast.reports.results.run_differences import DIFFERS, EQUAL, INHERITED, RunRow
from narrowcast.reports.results.verdicts import NOT_COMPARED, ROUND_OFF

_LOSSES = 0.05
"""So near, relatively, are losses of one program in other formats."""
_OF_SAMPLES, _OTHERS, _LIKELY = 4.0, 0.3, 2e-2
"""An error may look this many times larger in the sampled rows of a view than in those of its base; the least
difference of other parts of a rounded tensor; and by values that differ so little that fewer elements than this are
expected to be chosen otherwise, none is.
"""


class Judging:
    """Rows, one after the other: differences of earlier ones serve for inputs that cannot be compared."""

    def __init__(self, values: Values, pairs: Sequence[Aligned]) -> None:
        self.values, self._round_off = values, values.round_off
        self.unpaired: dict[Bundle, float] = {}
        """By call without a partner that makes a difference: the difference of values computed from it."""
        self.read_by: dict[Bundle, list[Aligned]] = {}
        """The pairs whose inputs show that."""
        self.makers = Makers(values.sides[0]), Makers(values.sides[1])
        self.paired = [{bundle: pair for pair in pairs for bundle in (pair.a, pair.b)[n]} for n in range(2)]
        self.as_read: dict[Aligned, PieceDistance] = {}
        """The differences of results of other shapes, as a pair of calls shows them that reads both in one shape."""
        self._of_pairs: dict[Aligned, float] = {}
        self._by: dict[Aligned, str] = {}
        self._read: dict[Aligned, float] = {}
        self._largest, self._of_forward, self._measured, self._jumped = 0.0, 0.0, 0.0, 0.0
        self.has_seen_choices = self.are_alike_as_a_whole = self.have_trained_alike = False
        self.places, self._of_steps = Places(values.sides), weights_moved(values)
        alone = [(n, x) for n, side in enumerate(values.sides) for x in side.bundles if x not in self.paired[n]]
        bands = [*map(values.bound_shown, pairs), *(self._round_off.of_call(n, x) for n, x in alone)]
        self.widest = min(max(bands, default=0.0), WIDEST)
        """The widest rounding bound of a call, at most WIDEST."""
        self.returned = Returned(values, self.makers, self.paired, self._of_pairs, self._by, self.widest)

    def row(self, pair: Aligned) -> RunRow:
        """Return the row of a pair."""
        given, band, places = self.values.given(pair, self._largest), self._round_off.of_pair(pair), self.places
        inputs = {} if pair.a[0].id.is_sum_of_gradients else self.values.inputs(pair)
        format_a, format_b = formats_of(pair.a), formats_of(pair.b)
        is_one = format_a == format_b and pair.a[0].id.op == pair.b[0].id.op
        names = [{name for name, _ in x[0].call.inputs} for x in (pair.a, pair.b)]
        is_equal = names[0] == names[1] and all(one.relative == 0 for one in inputs.values())
        result = self.values.results(pair, is_one and is_equal)
        of_rows = self.values.growth_in_rows(pair)
        is_by_row = pair.a[0].family == NORM or of_rows > 1  # rows of any size become alike there
        known = [max(one.relative * of_rows, one.row * is_by_row) for one in inputs.values() if one.is_known]
        is_of_a_part = any(one.is_part for one in inputs.values()) and not result.is_part  # the result has other parts
        input_difference = max(known) if known and not is_of_a_part else math.nan
        known_of = {n: one for n, one in inputs.items() if one.is_known and (result.is_known or not one.is_part)}
        reasons = [self._reads_other(pair, name, one) for name, one in known_of.items()]
        before = max(self._largest if math.isnan(input_difference) else input_difference, self._jumped)
        is_rough = any(one.by in (STATISTICS, RANGES) for one in inputs.values())
        are_moved = all(moves(bundle.id.op) for bundle in (pair.a[0], pair.b[0]))  # perhaps the part that differs most
        if are_moved or is_rough or pair.a[0].id.direction == BACKWARD:  # it sums rows, not all of which are sampled
            before = max(before, self._largest)
        flattening = self.values.flattening(pair)
        before = max(before, min(self._largest, max(before, NINE_DIGITS) * flattening))
        shown = max(self._measured, self.widest)  # what is further apart are other values, no errors of values
        self._read[pair] = shown if math.isnan(input_difference) or is_rough else min(input_difference, shown)
        chosen_by = max(self._chosen_by(pair), default=0.0)
        unknown = self._largest if inputs and not is_of_a_part else 0.0  # of complex numbers
        seen = unknown if math.isnan(input_difference) else min(input_difference, shown)
        seen = max(seen, min(self._largest, max(seen, NINE_DIGITS) * flattening))  # of elements that are near a step
        self._read[pair] = max(self._read[pair], seen)
        jumped = jump(pair.a[0].id.op, seen, chosen_by)
        if pair.a[0].id.direction == FORWARD:  # in any rows, not all of which are sampled
            self._jumped = max(self._jumped, jumped)
        before = max(rooted(pair.a[0].id.op, before), jumped)
        if is_one and 0.0 in (before, self._largest) and band > BAND_OF_LOW:
            band /= BAND  # inputs are equal, rounded alike: only orders of sums differ
        band *= result.growth
        have_moved = band > BAND_OF_LOW and all(x.moves_weights for x in self.values.sides)  # by rounded gradients
        is_open = have_moved or len(pair.a) + len(pair.b) > 2  # several weights may lie in any order in one
        is_proved = is_equal and any(not (is_open and name in names[0]) for name, *_ in given)
        is_proved &= len(pair.a[0].module_calls) == len(pair.b[0].module_calls)
        is_unknown = len(known) < max(map(len, names)) and (self.widest < BAND_OF_LOW or _reads_vary(pair))
        if math.isnan(input_difference) or is_unknown:  # of calls before it, which may be low
            before = max(before, self.widest if inputs and self._largest else self._band_of_alone(pair))
        is_among_others = is_of_a_part or len({len(bundle.module_calls) for bundle in (*pair.a, *pair.b)}) > 1
        reason = next(filter(None, reasons), "")
        verdict, why = self._verdict(pair, result, band, before, bool(given), is_proved, reason, is_among_others)
        self._of_pairs[pair], self._by[pair] = (result.relative if result.is_known else math.nan), result.by
        self._measured = max(self._measured, result.relative if result.is_known else 0.0)
        self._largest = max(self._largest, self._measured, before)
        if pair.a[0].id.direction == FORWARD or any(side.moves_weights for side in self.values.sides):
            self._of_forward = self._largest  # else differences of a backward come later
        return RunRow(
            _ids(pair.a), _ids(pair.b), places.of(0, pair.a), places.of(1, pair.b), format_a, format_b, pair.by,
            verdict, result.relative, input_difference, band, result.by, result.is_part, given, why,
            places.beside(0, pair.a), places.beside(1, pair.b),
        )  # fmt: skip

    def counts_of_unpaired(self, left_out: Collection[Bundle]) -> list[int]:
        """Return how many calls of each forward have no partner, and are not left out by hand. Cross entropy, which is
        one call in a region and two outside of one, has itself, if it comes to the same.
        """
        alone = [
            [x for x in side.bundles if x.id.direction == FORWARD and x not in paired and x not in left_out]
            for side, paired in zip(self.values.sides, self.paired, strict=True)
        ]
        others = [[x for x in of if not is_named(x.id.op, "computation.cross_entropy")] for of in alone]
        losses = [
            [side.piece(0, x.call.outputs[0][1]).rms for x in of if "_loss" in x.id.op and x not in besides]
            for side, of, besides in zip(self.values.sides, alone, others, strict=True)
        ]
        is_same = len(losses[0]) == len(losses[1]) and all(map(_are_losses_alike, *losses))
        return list(map(len, others if all(losses) and is_same else alone))

    def _verdict(
        self, pair: Aligned, result: PieceDistance, band: float, before: float, is_given: bool, is_proved: bool,
        reason: str, is_among_others: bool,
    ) -> tuple[str, str]:  # fmt: skip
        if not result.is_known:
            return NOT_COMPARED, "what both runs kept of it cannot be compared"
        if result.relative == 0:
            return EQUAL, ""
        if result.relative <= band and not is_proved:
            return ROUND_OFF, ""
        if pair.a[0].id.direction == RECOMPUTATION:
            return INHERITED, "it repeats a call of the forward, which is compared"
        if reason:
            return DIFFERS, reason
        if is_given and result.relative > before:
            return DIFFERS, "its other arguments differ"
        if result.relative <= band + self.values.gain(*pair.a, *pair.b) * result.growth * before:
            return INHERITED, ""
        by = self._chosen_by(pair)
        is_likely = bool(by) and max(by) * max(x.elements for x in (*pair.a, *pair.b)) > _LIKELY
        is_likely &= not (result.is_in_most_rows and result.relative > GAIN_OF_PASSING * math.sqrt(max(by, default=0)))
        chooses = bool(by) and (is_likely or self._is_fed_back(pair, band))
        if chooses or (by and is_among_others):
            self.has_seen_choices |= chooses
            indexes = is_among_others and not self._largest
            return INHERITED, "it indexes other rows" if indexes else "it chooses by values that differ"
        if self._has_moved(pair, result, band):
            return INHERITED, "steps of the loop have moved its weight"
        if is_among_others and all(x.elements == len(x.module_calls) for x in (*pair.a, *pair.b)):
            return NOT_COMPARED, "each is a number of its own part: a loss over one micro-batch, or over all"
        return DIFFERS, UNEXPLAINED

    def _has_moved(self, pair: Aligned, result: PieceDistance, band: float) -> bool:
        """Return whether a call of a loop reads a weight, and differs by what steps in these formats may move it."""
        first, reads = module_calls_of(pair)[0], any(bundle.weight is not None for bundle in (*pair.a, *pair.b))
        if not reads or not all(side.moves_weights for side in self.values.sides):
            return False
        is_alike = first == pair or self.values.results(first).relative <= band
        most = max(band_of_all(self.widest, OUTPUTS), GAIN * self.values.weights_apart(pair))
        return is_alike and result.relative <= most

    def _band_of_alone(self, pair: Aligned) -> float:
        """Return the widest rounding bound of the calls without a partner that made what a pair reads."""
        upstream = self.upstream([m.read(x[0]) for m, x in zip(self.makers, (pair.a, pair.b), strict=True)])
        return max((self._round_off.of_call(n, x) for n, side in enumerate(upstream) for x in side.alone), default=0.0)

    def _chosen_by(self, pair: Aligned) -> list[float]:
        """Return the differences of floats from which conditions and indices that the calls read were computed."""
        choosers = [(n, x) for n, of in enumerate((pair.a[0], pair.b[0])) for x in self.makers[n].choosers(of)]
        return [self._read.get(self.paired[n][x], 0.0) if x in self.paired[n] else self._of_alone(n, x)
                for n, x in choosers]  # fmt: skip

    def _of_alone(self, side: int, bundle: Bundle) -> float:
        """Return how far apart what a call without a partner gives may be, at most as what calls have shown: by its own
        rounding, that of such calls before it, and the differences of pairs before these. Of constants it is nothing.
        """
        before = self.makers[side].upstream(self.makers[side].read(bundle), self.paired[side])
        seen = [self._of_pairs.get(self.paired[side][x], math.inf) for x in before.known]
        own = [self._round_off.of_call(side, x) for x in (bundle, *before.alone)]
        return min(max([*own, *(math.inf if math.isnan(x) else x for x in seen)]), max(self._measured, self.widest))

    def _is_fed_back(self, pair: Aligned, band: float) -> bool:
        """Return whether later module calls select by values computed from the first, which agrees."""
        choosers = [(x, of) for n, of in enumerate((pair.a[0], pair.b[0])) for x in self.makers[n].choosers(of)]
        later = any(x.position > of.position for x, of in choosers)
        return later and self.values.results(module_calls_of(pair)[0]).relative <= band

    def _reads_other(self, pair: Aligned, name: str, inputs: PieceDistance) -> str:
        """Return why an argument differs by more than the calls that made it explain: empty if due to calls without a
        partner, which are noted; else as text, since another call made it, or none. Empty, too, for a part alone (one
        run expands it).
        """
        difference = inputs.relative
        names = self.values.names(pair, name)
        read = [makers.read(bundles[0], same or read_name(bundles[0].call))
                for makers, bundles, same in zip(self.makers, (pair.a, pair.b), names, strict=True)]  # fmt: skip
        a, b = self.upstream(read)
        explained = self._explained(pair, a, b)
        if any(self.values.sides[n].wrote_a_part(x, read[n]) for n, side in enumerate((a, b)) for x in side.known):
            explained = max(explained, self._largest)  # of elements that it left as they were
        self._note_as_read(read, inputs, a, b)
        if difference <= explained or self._is_by_casts(read, difference):
            return ""
        if a.alone or b.alone:
            for bundle in (*a.alone, *b.alone):
                self.unpaired.setdefault(bundle, difference)
                self.read_by.setdefault(bundle, []).append(pair)
            return ""
        if not a.known and not b.known and pair.a[0].id.direction == FORWARD:
            sizes = {sum(bundle.elements for bundle in side) for side in (pair.a, pair.b)}
            if len(sizes) > 1 or len({len(bundle.module_calls) for bundle in (*pair.a, *pair.b)}) > 1:
                return ""  # of other batches
            return "its inputs differ already, and no call of the runs made them"
        made_by = [{self.paired[n][x] for x in side.known} for n, side in enumerate((a, b))]
        is_compared = made_by[0] | made_by[1] <= self._of_pairs.keys()  # not a later call, of an earlier module call
        is_compared &= not any(side.are_whole(numbers) for side, numbers in zip(self.values.sides, read, strict=True))
        if pair.a[0].id.direction == FORWARD and (is_compared or not all(made_by)):
            if made_by[0] != made_by[1]:
                return OF_OTHERS
            if inputs.is_part:
                return ""
            least = _OF_SAMPLES * explained * self._of_whole(read[0], a)
            return OF_PARTS if difference > (least if least < BAND_OF_LOW else max(least, _OTHERS)) else ""
        return "" if made_by[0] & made_by[1] or not all(made_by) else OF_OTHERS

    def _note_as_read(self, read: Sequence[Sequence[int]], inputs: PieceDistance, a: Upstream, b: Upstream) -> None:
        """Note the difference of inputs as that of the one pair of calls that made them, if only statistics of its
        results could be compared.
        """
        made_by = {self.paired[n][x] for n, side in enumerate((a, b)) for x in side.known}
        if a.alone or b.alone or len(made_by) != 1 or not a.known or not b.known or inputs.is_part:
            return
        (pair,) = made_by
        rows = zip(self.values.sides, (pair.a, pair.b), read, strict=True)
        is_whole = all(
            len(bundles) == len(bundles[0].module_calls) == len(numbers) == 1
            and side.piece(0, numbers[0]).elements == bundles[0].elements
            for side, bundles, numbers in rows
        )
        if is_whole and self._by.get(pair) in (STATISTICS, RANGES) and inputs.by in (SKETCHES, TENSORS):
            self.as_read.setdefault(pair, inputs)

    def _of_whole(self, read: Sequence[int], upstream: Upstream) -> float:
        """Return how many times larger a part's relative error may be than that of the whole, in the first run."""
        pieces = [[self.values.sides[0].piece(0, n) for n in numbers]
                  for numbers in (read, [n for x in upstream.known for _, n in x.call.outputs[:1]])]  # fmt: skip
        parts, wholes = ([math.sqrt(p.elements) * p.rms for p in side if p.rms > 0] for side in pieces)
        return max(1.0, max(wholes) / min(parts)) if parts and wholes else 1.0

    def upstream(self, numbers: Sequence[Sequence[int]]) -> tuple[Upstream, Upstream]:
        """Return the calls that made tensors of either run."""
        (a, b), (m, n), (one, other) = numbers, self.makers, self.paired
        return m.upstream(a, one), n.upstream(b, other)

    def _is_by_casts(self, numbers: Sequence[Sequence[int]], difference: float) -> bool:
        """Return whether tensors differ since one run alone rounds them to a format in which it computes nothing; note
        its casts then.
        """
        sides = self.values.sides
        casts = [side.strange_casts(read) for side, read in zip(sides, numbers, strict=True)]
        if len(casts[0]) == len(casts[1]):
            return False
        more = max((0, 1), key=lambda n: len(casts[n]))
        for cast in casts[more]:
            self.unpaired.setdefault(sides[more].by_itself(cast), difference)
        return True

    def _explained(self, pair: Aligned, a: Upstream, b: Upstream) -> float:
        """Return how much tensors made by these calls may differ; those that no call made may be copies of any."""
        is_forward = pair.a[0].id.direction == FORWARD
        largest = self._of_forward if is_forward else self._largest
        if not (a.alone or a.known or b.alone or b.known) and is_forward:
            return self._round_off.of_inputs(pair) + GAIN_OF_PASSING * largest
        earlier = [self._of_pairs.get(self.paired[n][x], 0.0) for n, side in enumerate((a, b)) for x in side.known]
        alone = [(n, x) for n, side in enumerate((a, b)) for x in side.alone]
        before = max((largest if math.isnan(each) else each for each in earlier), default=0.0)
        if any(self.values.sides[n].has_moved(number) for n, x in alone for _, number in x.call.inputs):
            before = max(before, self._of_steps)
        bands = sum(self._round_off.of_call(n, x) for n, x in alone)
        growth = max((self.values.growth_of(n, x.call) for n, x in alone), default=1.0)
        return growth * (self._round_off.of_inputs(pair) + bands + self.values.gain(*(x for _, x in alone)) * before)

    def outputs(self, rows: Sequence[RunRow], are_others: bool, with_losses: bool) -> list[EndDifference]:
        """Compare the outputs of both runs, which models returned or no call reads. Where calls that made one are not
        paired, note them. Of programs that are written differently (are_others) only what the models returned is
        the outcome, where all of that can be compared: what else nothing reads is no result of theirs.
        """
        as_returned = self.returned.one_by_one(with_losses) if are_others else []
        others = self.returned.others()
        last_of = [dict.fromkeys([*m.ends, *m.returned]) for m in self.makers]
        ends = [[x for x in of if (with_losses or not x.is_loss) and x not in others] for of in last_of]
        left = [[x for x in ends[n] if not self._is_end(n, x, ends[1 - n])] for n in range(2)]
        outcomes = []
        for a, b in nearest(self.values, *left):
            pair = Aligned((a,), (b,), "")
            result = self.values.results(pair)
            band = max(self._round_off.of_pair(pair), self.widest)  # of the formats before it, as for a sum in fp32
            known = EndDifference.of(result.relative, band, result.growth, self._is_later(pair))
            goes_on = (a.family == SOFTMAX) != (b.family == SOFTMAX) or self._is_another(pair, ((), ()))
            goes_on &= known.difference > known.band
            if a.elements != b.elements or goes_on or not result.is_known:  # to probabilities, or a loss
                known = EndDifference(math.nan)
            outcomes.append(known)
            made = [[p.call.outputs[0][1] for each in x.module_calls for p in each if p.rank == 0] for x in (a, b)]
            upstream = self.upstream(made)
            if math.isfinite(known.difference) and result.relative > self._explained(pair, *upstream):
                for bundle in (*upstream[0].alone, *upstream[1].alone):
                    self.unpaired.setdefault(bundle, result.relative)
        by_calls = {row.a: row for row in rows}
        for pair in [self.paired[0][x] for x in ends[0] if self._is_end(0, x, ends[1])]:
            least, most = sorted(max(x[0].elements, 1) for x in (pair.a, pair.b))
            if most % least and any(x[0] not in m.ends for x, m in zip((pair.a, pair.b), self.makers, strict=True)):
                continue  # returned of sequences one by one, or padded, it is no part of a batch, and no outcome
            last = [makers.last(bundles[0]) for makers, bundles in zip(self.makers, (pair.a, pair.b), strict=True)]
            read, difference = [[number] for number in last], self.values.between(*last).relative
            row, is_later = by_calls[_ids(pair.a)], self._is_later(pair)
            if difference > self._explained(pair, *self.upstream(read)) and self._is_by_casts(read, difference):
                outcomes.append(EndDifference(math.inf))
            elif row.verdict in (EQUAL, ROUND_OFF):
                band = self._round_off.of_pair(pair)
                is_rough = row.measured_by in (STATISTICS, RANGES)
                apart = self._as_returned(pair, row.difference) if is_rough else row.difference
                outcomes.append(EndDifference.of(apart, band, row.round_off_bound / band, is_later))
            elif not self._is_another(pair, left):  # within the bound of the formats before it, as a loss in fp32
                apart = {INHERITED: row.difference, NOT_COMPARED: math.nan}.get(row.verdict, math.inf)
                outcomes.append(EndDifference(apart, self.widest, is_later=is_later))
        compared = [one for one in outcomes if not math.isnan(one.difference)]
        return as_returned or compared or [EndDifference(math.inf)] * len(outcomes)

    def _is_later(self, pair: Aligned) -> bool:
        """Return whether a pair comes after the last backward, and is no step in place by low gradients."""
        both, is_low = zip(self.makers, (pair.a[0], pair.b[0]), strict=True), self.widest >= BAND_OF_LOW
        return all(m.is_later(x) and not (is_low and op_kind(x.id.op).in_place) for m, x in both)

    def _is_another(self, pair: Aligned, left: Sequence[Sequence[Bundle]]) -> bool:
        """Return whether the result of a call is that of an output of the other run which has no partner, or a loss
        that the other run adds to others. left: those outputs of both runs.
        """
        losses = [[x for x in m.bundles if x.is_loss and pair.a[0].is_loss and x not in (*pair.a, *pair.b)]
                  for m in self.makers]  # fmt: skip
        both = [Aligned(pair.a, (x,), "") for x in (*left[1], *losses[1])]
        both += [Aligned((x,), pair.b, "") for x in (*left[0], *losses[0])]
        apart = (self.values.results(other) for other in both)
        return any(seen.relative <= self.widest and not seen.is_part for seen in apart)

    def _as_returned(self, pair: Aligned, otherwise: float) -> float:
        """Return the difference of a pair's results as models returned them, perhaps in one shape."""
        a, b = self.makers
        seen = self.values.between(a.as_returned(pair.a[0]), b.as_returned(pair.b[0]))
        return seen.relative if seen.by in (SKETCHES, TENSORS) and not seen.is_part else otherwise

    def has_chosen(self, apart: float) -> bool:
        """Return whether outcomes may be this far apart since calls chose by values that differ."""
        return self.has_seen_choices or apart <= GAIN_OF_PASSING * self._jumped

    def of_inputs(self, pairs: Sequence[Aligned]) -> set[object]:
        """Return the calls of a backward, and identities of paired ones, that compute the gradient of an input."""
        calls: set[object] = set(self.makers[0].of_inputs | self.makers[1].of_inputs)
        return calls | {_ids(pair.a) for pair in pairs if any(x in calls for x in (*pair.a, *pair.b))}

    def _is_end(self, side: int, bundle: Bundle, others: Sequence[Bundle]) -> bool:
        """Return whether its partner is an output, too."""
        pair = self.paired[side].get(bundle)
        return pair is not None and any(x in others for x in (pair.b, pair.a)[side])


def _ids(bundles: Sequence[Bundle]) -> tuple[CallId, ...]:
    return tuple(bundle.id for bundle in bundles)


def _reads_vary(pair: Aligned) -> bool:
    """Return whether a call reads other arguments as tensors in one module call than in another."""
    bundles = (*pair.a, *pair.b)
    return any(len({tuple(n for n, _ in calls[0].call.inputs) for calls in x.module_calls}) > 1 for x in bundles)


def _are_losses_alike(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=_LOSSES)
