"""Is an error round-off, a kernel's, or neither? Kernels are judged by bounds (`kernel_bounds`), propagated errors by
rounding bounds that are measured (TTrace, arXiv 2506.09280).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch

from narrowcast.analysis.compare.bands import Bands
from narrowcast.analysis.compare.kernel_bounds import Judged
from narrowcast.analysis.compare.kernel_slacks import Samples
from narrowcast.analysis.compare.reference import LIMIT, MADE, PASSED, Alone, Keep, KeptCall, sample_like
from narrowcast.analysis.watch.culprit import first_not_finite
from narrowcast.core.ledger.identity import BACKWARD, CallId
from narrowcast.core.ops import is_named
from narrowcast.core.ops.bounds import NAMED
from narrowcast.formats import FORMATS as FORMATS_BY_NAME, fp32
from narrowcast.observation.statistics.arguments import tensors_by_name
from narrowcast.observation.trial.output_errors import (
    MASKED,
    decibels,
    difference,
    error_of,
    flat,
    gradient_error,
    output_errors,
)
from narrowcast.observation.trial.trial import Outcome
from narrowcast.reports.results import verdicts
from narrowcast.reports.results.differences import (
    NO_GRADIENT,
    OUTPUT_FACTOR,
    SKIPPED_STEP,
    CallError,
    Differences,
    GradientError,
    OutputError,
)
from narrowcast.reports.results.findings import FOR_SCALER, Watching
from narrowcast.runtime.torch_bridge import FORMATS, short_type

TINY = 8 * FORMATS[torch.float32].epsilon
"""The difference that two orders of summation in fp32 may make."""
_ROOM, _OF_SIZES = 4096.0, 0.1
_NOT_FINITE = "NaN or infinity where the reference has none"
_OTHER_SHAPES = "its results have other shapes than in the reference"
_OTHER_ARGUMENT = "its argument"
_TIMES = 10.0
"""How many times nearer than the numbers that multiply them results are that other factors make equal."""
_PLACES = ("start", "end", "index")
_AT_LIMIT = "it is at a limit of the op, which fp64 has there, too, and it has no effect"


def name_not_finite(result: Differences, reference: Watching, here: Watching, is_itself: bool) -> None:
    """Name the call that makes what is not finite under the policy alone, and, if is_itself, the reference's own. What
    a scaler skips a step for is intended: then nothing is compared. Nor where the calls that make it are the
    reference's, whichever elements they make so.
    """
    result.not_finite = first_not_finite(reference, here)
    result.reference_not_finite = reference.first if is_itself else None
    are_skipped = FOR_SCALER in {*here.intentional, *reference.intentional}
    if result.verdict in (verdicts.NOT_FINITE, verdicts.NOT_COMPARED) and here.first is None and are_skipped:
        result.verdict = verdicts.NOT_COMPARED
        result.notes.append(SKIPPED_STEP)
        result.rows = [
            replace(r, verdict=verdicts.NOT_JUDGED) if r.verdict in verdicts.AT_FAULT else r for r in result.rows
        ]
    is_same = None not in (here.first, result.reference_not_finite) and result.not_finite is None
    if result.verdict == verdicts.NOT_FINITE and is_same:
        result.verdict = verdicts.NOT_COMPARED


def bound_of(outputs: Sequence[OutputError], band: float, low: torch.dtype) -> float:
    """Return the bound of outputs. One that is zero in the reference stays so when it is perturbed: a unit in the last
    place at one is round-off there.
    """
    return max(band, FORMATS[low].epsilon) if any(o.sqnr_db == -math.inf for o in outputs) else band


def judge_call(
    identity: CallId, kept: KeptCall, expected: KeptCall, alone: Alone | None, band: float | None, is_own: bool
) -> CallError:
    """Return the errors of one call under the policy (`kept`) against the reference, and the verdict.

    band: the rounding bound of the call; None without one. is_own: both are the same program: then other shapes are due
    to other values, as those of a backward are to other formulas, and other numbers as arguments are a fault only if
    the result is beyond the rounding bound.
    """
    r = [s.double() for s in expected.samples]
    call = kept.call
    row = CallError(
        identity, call.site.file, call.site.line, call.computes, expected.call.computes, verdicts.EXACT,
        forward=call.forward, round_off_bound=band or 0.0,
    )  # fmt: skip
    if not has_same_shapes(kept, expected):
        verdict = verdicts.NOT_JUDGED if is_own or call.forward else verdicts.FAULT
        return replace(row, verdict=verdict, why=_OTHER_SHAPES)
    got = [x for x in _at_places_of(kept, expected) if x is not None]
    total = error_of(got, r)
    row = replace(row, total=total, propagated=total, sqnr_db=decibels(1.0, total * total))
    low = alone.low if alone is not None else []
    if low:
        row = replace(row, local=error_of(low, r), propagated=error_of(got, low))
    row = _with_shares(row, low or got, r, kept)
    if (judged := kept.judged) is not None:
        row = replace(
            row, kernel=judged.error, bound=judged.share, largest_ulps=judged.largest_ulps, mean_ulps=judged.mean_ulps,
            bias_ulps=judged.sign,
        )  # fmt: skip
    verdict, why = _verdict(row, kept, expected, alone, band, is_own, _lost(got, r))
    return replace(row, verdict=verdict, why=why)


def came_to_nothing(row: CallError, are_same: bool) -> CallError:
    """Return the row for outputs and gradients within their bounds: another program may compute more rows, or fewer.
    are_same: outputs are the same but for the last bits; then calls on the way that are far apart undo each other. What
    another number leaves as it is, as an eps of these inputs, is undone by none.
    """
    is_far = row.total > OUTPUT_FACTOR * max(row.round_off_bound, TINY)
    is_nothing = row.why == _OTHER_SHAPES or (are_same and is_far and row.why.startswith(_OTHER_ARGUMENT))
    return replace(row, verdict=verdicts.NOT_JUDGED) if is_nothing else row


def came_to_something(row: CallError) -> CallError:
    """Return the row for outputs or gradients that are not finite: a limit of an op is then at fault."""
    return replace(row, verdict=verdicts.NOT_FINITE, why=_NOT_FINITE) if row.why == _AT_LIMIT else row


def _verdict(
    row: CallError,
    kept: KeptCall,
    expected: KeptCall,
    alone: Alone | None,
    band: float | None,
    is_own: bool,
    is_lost: bool,
) -> tuple[str, str]:
    judged = kept.judged
    if judged is not None and judged.is_beyond:
        return verdicts.KERNEL, _about_kernel(judged)
    if alone is not None and not alone.is_same:
        return verdicts.NONDETERMINISTIC, ""
    is_far = band is None or row.total > max(OUTPUT_FACTOR * band, TINY)
    is_formula = kept.call.forward is not None  # of autograd, which sums other axes in other formats and in graphs
    other = other_arguments(kept, expected) if row.total and (is_far or not is_own) and not is_formula else []
    if other and not (is_named(kept.call.id.op, "gradients.scale") and _is_undone(*other[0], row.total)):
        (name, was), (_, now) = other[0]
        return verdicts.FAULT, f"{_OTHER_ARGUMENT} {name} is {now}, {was} in the reference"
    if is_lost and kept.nonfinite == MADE:
        return verdicts.NOT_FINITE, _NOT_FINITE
    if is_lost and kept.nonfinite == LIMIT:
        return verdicts.PASSED_ON, _AT_LIMIT
    if is_lost and kept.nonfinite == PASSED:
        return verdicts.PASSED_ON, "its inputs hold NaN or infinity"
    if not row.total and not row.local:
        return verdicts.EXACT, ""
    if judged is not None or not is_far:
        is_drawn = judged is None and row.is_low and kept.draws_numbers
        return verdicts.UNKNOWN if is_drawn else verdicts.ROUND_OFF, ""
    return verdicts.NOT_JUDGED, ""


def _is_undone(was: tuple[str, str], now: tuple[str, str], total: float) -> bool:
    """Return whether results of a multiplication are far nearer than the numbers: what these multiply differs, too."""
    try:
        a, b = float(was[1]), float(now[1])
    except ValueError:  # a mode of rounding
        return False
    return abs(a - b) > _TIMES * total * max(abs(a), abs(b))


def name_cause(result: Differences, reference: Keep, under: Keep) -> None:
    """Name a cause where outputs of two models differ beyond round-off, and no call is at fault: the casts that one
    alone makes, to formats in which it computes nothing, or else the first call beyond its rounding bound. Not where a
    call has no partner, which is reported as such.
    """
    if result.verdict != verdicts.FAULT or result.faults or result.unmatched or result.reference in ("fp32", "fp64"):
        return
    there, here = ({call.id: (call, short_type(d)) for call, d in keep.strange_casts()} for keep in (reference, under))
    for casts, others, where in ((there, here, "in the reference"), (here, there, "here")):
        for call, format in (casts[identity] for identity in casts if identity not in others):
            formats, why = (format, "-") if casts is here else ("-", format), f"only {where} it rounds to {format}"
            result.rows.append(CallError(call.id, call.site.file, call.site.line, *formats, verdicts.FAULT, why))
    far = (
        n
        for n, row in enumerate(result.rows)
        if row.round_off_bound and row.total > max(OUTPUT_FACTOR * row.round_off_bound, TINY)
    )
    first = next(far, None)
    if not result.faults and first is not None:
        why = "it is the first beyond what round-off may make, and not by its kernel: it reads something else"
        result.rows[first] = replace(result.rows[first], verdict=verdicts.FAULT, why=why)


def _about_kernel(judged: Judged) -> str:
    if judged.sign and judged.share < 2:
        return f"its roundings have a sign: {judged.sign:+.2f} units in the last place on average"
    return (
        f"its kernel is off by {judged.error:.1e} from the same op in fp64 on the same inputs: of one element by "
        f"{judged.share:.1f} times what its formats and sums allow"
    )


def has_same_shapes(kept: KeptCall, expected: KeptCall) -> bool:
    """Return whether two calls have results of the same shapes."""
    y = _at_places_of(kept, expected)
    return all(x is not None for x in y) and len(kept.samples) == len(expected.samples)


def other_arguments(kept: KeptCall, expected: KeptCall) -> list[tuple[tuple[str, str], tuple[str, str]]]:
    """Return arguments that are no tensors, nor dtypes, and differ: those of the reference, and those here.

    Empty of other ops, and where other tensors are passed, too: a mask where the reference has `is_causal`; or what
    they read has another shape or size, as where one limits a norm, the other its square. Numbers that are equal in the
    formats of the call, or that masks are filled with, count as the same.
    """
    ops = {each.call.id.op.rpartition(".")[0] for each in (kept, expected)}
    if len(kept.dtypes) != len(expected.dtypes) or len(ops) > 1 or _read_others(kept, expected):
        return []
    unit = max(
        (FORMATS[d].epsilon for d in [*kept.dtypes, *kept.output, *expected.output] if d in FORMATS), default=0.0
    )
    was, now = dict(expected.given), dict(kept.given)
    both = [dict(tensors_by_name(one.call.facts, one.call.args, one.call.kwargs)) for one in (kept, expected)]
    tensors = both[0] | both[1]
    names = [name for name in {**was, **now} if "dtype" not in name and name not in tensors]
    values = [(name, was.get(name, "None"), now.get(name, "None")) for name in names]
    ranks = {max((t.dim() for t in each.values()), default=0) for each in both}
    rank = max(ranks) + is_named(kept.call.id.op, "operands.adds_a_dimension")
    others = [(n, a, b) for n, a, b in values if a != b and not (n.startswith("dim") and _are_same_dims(a, b, rank))]
    others = [one for one in others if len(ranks) == 1 or not one[0].startswith("dim")]  # of tensors in other shapes
    sizes = [*(kept.read or ((), 0))[0], *map(int, re.findall(r"\d+", was.get("input_sizes", "")))]
    others = [one for one in others if one[0] not in _PLACES or not _is_same_place(*one[1:], sizes)]
    return [((n, a), (n, b)) for n, a, b in others if not _are_alike(a, b, unit)]


def _read_others(kept: KeptCall, expected: KeptCall) -> bool:
    """Return whether two calls read tensors of other shapes, or whose sizes are further apart than by errors."""
    if kept.read is None or expected.read is None:
        return False
    (shape, size), (other_shape, other_size) = kept.read, expected.read
    return shape != other_shape or abs(size - other_size) > _OF_SIZES * max(size, other_size)


def _are_same_dims(a: str, b: str, rank: int) -> bool:
    """Return whether dimensions, -1 and [-1] of 3 for example, are the same: 2 and [2]."""
    first, second = ([int(d) for d in re.findall(r"-?\d+", text)] for text in (a, b))
    return len(first) == len(second) and all((x - y) in (0, rank, -rank) for x, y in zip(first, second, strict=True))


def _is_same_place(a: str, b: str, sizes: Sequence[int]) -> bool:
    """Return whether places in a dimension of one of these sizes, -4 and 10 of 14 for example, are the same."""
    if not all(re.fullmatch(r"-?\d+", text) for text in (a, b)):
        return False
    x, y = int(a), int(b)
    largest = max(sizes, default=0)
    return min(x, y) >= largest or any(min(x, y) < 0 and abs(x - y) == size for size in sizes)


def _are_alike(a: str, b: str, unit: float) -> bool:
    try:
        x, y = (torch.tensor([float(v)], dtype=torch.float64, device="cpu") for v in (a, b))
    except ValueError:
        return False
    if not (x.isfinite() or y.isfinite()):  # NaN in one format, infinite in another: neither is right
        return True
    return bool(torch.maximum(x, y) <= MASKED) or bool((x - y).abs() <= unit * x.abs())


def _at_places_of(kept: KeptCall, expected: KeptCall) -> list[torch.Tensor | None]:
    return [sample_like(s.double(), want) for s, want in zip(kept.samples, expected.samples, strict=False)]


def _with_shares(row: CallError, got: Samples, r: Samples, kept: KeptCall) -> CallError:
    """Return the row with the shares of elements that the format lost."""
    elements = sum(x.numel() for x in r) or 1
    over = under = saturated = 0
    for x, want, dtype in zip(got, r, kept.output, strict=False):
        over += int((torch.isinf(x) & torch.isfinite(want)).sum())
        under += int(((x == 0) & (want != 0)).sum())
        saturated += int(((x.abs() == FORMATS[dtype].max) & (want.abs() != FORMATS[dtype].max)).sum())
    return replace(row, overflow=over / elements, underflow=under / elements, saturated=saturated / elements)


def _lost(got: Samples, r: Samples) -> bool:
    """Return whether a value is not finite where the reference's is; fill values of masks do not count."""
    pairs = [(difference(want, x), want) for x, want in zip(got, r, strict=False)]
    return any(bool((~torch.isfinite(off) & torch.isfinite(want)).any()) for off, want in pairs)


def root_mean_square(gradient: torch.Tensor) -> float:
    """Return the root mean square of a gradient, which may be sparse or empty."""
    values = flat(gradient)
    return float(values.norm()) / math.sqrt(values.numel()) if values.numel() else 0.0


def judge_gradients(
    expected: Outcome, actual: Outcome, bands: Bands, underflow: frozenset[str], wanted: Collection[str] = ()
) -> list[GradientError]:
    """Return a row for each parameter. underflow: those whose error is round-off if the loss is scaled. wanted: those
    of the model that is compared which require a gradient.
    """
    largest = max(map(root_mean_square, expected.gradients.values()), default=0.0)
    rows = []
    for name, gradient in expected.gradients.items():
        if (found := actual.gradients.get(name)) is not None:
            rows.append(judge_gradient(name, gradient, found, bands.of_gradient(name), largest))
        elif name in wanted:
            row = judge_gradient(name, gradient, torch.zeros_like(gradient), bands.of_gradient(name), largest)
            rows.append(replace(row, format=NO_GRADIENT, underflow=0.0))
    lost = [g.verdict == verdicts.FAULT and g.parameter in underflow for g in rows]
    return [replace(g, verdict=verdicts.ROUND_OFF) if is_lost else g for g, is_lost in zip(rows, lost, strict=True)]


def scale_of_loss(expected: Mapping[CallId, KeptCall], calls: Mapping[CallId, KeptCall]) -> float:
    """Return the power of two that scales the largest gradient in fp16 to 4,096: no gradient of weight underflows then,
    and sums do not overflow. 1, where there is none. expected: the reference's calls, in which none underflows.
    """
    backward = [
        (kept, expected.get(identity, kept)) for identity, kept in calls.items() if identity.direction == BACKWARD
    ]
    pairs = [pair for kept, of in backward for pair in zip(of.samples, kept.output, strict=False)]
    sizes = [float(s.abs().max()) for s, dtype in pairs if dtype is torch.float16 and s.numel()]
    largest = max((size for size in sizes if math.isfinite(size)), default=0.0)
    return 2.0 ** math.floor(math.log2(_ROOM / largest)) if largest else 1.0


def judge_gradient(name: str, r: torch.Tensor, x: torch.Tensor, band: float, largest: float) -> GradientError:
    """Return the error of a parameter's gradient x against the reference's r. band: its rounding bound. largest: the
    root mean square of the model's largest gradient.
    """
    got = flat(x)
    ref = torch.where(flat(r).isfinite() | got.isfinite(), flat(r), got)  # neither infinity nor NaN trains
    error = error_of([got], [ref])
    size = float(ref.norm() * got.norm())
    cosine = float(ref @ got) / size if size else float(not ref.any() and not got.any())
    under = float(((got == 0) & (ref != 0)).double().mean()) if ref.numel() else 0.0
    share = root_mean_square(r) / largest if largest else 1.0
    format = short_type(x.dtype)
    verdict = verdicts.ROUND_OFF if error else verdicts.EXACT
    row = GradientError(name, format, error, cosine, under, verdict, band, share)
    if _lost([got], [ref]) or math.isnan(error):
        return replace(row, verdict=verdicts.NOT_FINITE)
    is_there = float(ref.abs().max()) > fp32.smallest_normal / fp32.epsilon if ref.numel() else False
    is_far = band and error > OUTPUT_FACTOR * band and error > TINY and is_there
    return replace(row, verdict=verdicts.FAULT) if is_far and not row.is_round_off_alone else row


def off_by_compiler(seen: Outcome, actual: Outcome, bands: Bands) -> float:
    """Return the difference of a compiled program's outputs from those of its calls run one by one, if it is reported:
    both compute in the same formats, and a compiler may only round less often. Else 0.
    """
    pairs = [(e.relative_error, bands.output) for e in output_errors(seen.output, actual.output)]
    pairs += [(gradient_error(gradient, actual.gradients[name]), bands.of_gradient(name))
              for name, gradient in seen.gradients.items() if name in actual.gradients]  # fmt: skip
    return max((error for error, band in pairs if bands.runs and error > max(NAMED * band, TINY)), default=0.0)


def low_format_of(rows: list[CallError]) -> str | None:
    """Return the low format in which most calls compute that are in another in the reference; None if none is low."""
    computing = Counter(name for row in rows if row.is_low for name in set(row.computes.split(",")))
    low = [name for name, _ in computing.most_common() if FORMATS_BY_NAME.get(name, fp32).bits < fp32.bits]
    return next(iter(low), None)


def is_low_in_both(rows: list[CallError], is_made: bool) -> bool:
    """Return whether no call is lower than in the reference, which is low itself, or unknown (is_made). A backward that
    a program calls has the formats of the region around all of it.
    """
    forward = [row for row in rows if row.id.direction != BACKWARD]
    formats = {name for row in forward for name in row.reference.split(",")}
    low = any(name in FORMATS_BY_NAME and FORMATS_BY_NAME[name].bits < fp32.bits for name in formats)
    return not any(row.is_low for row in forward) and (low or (is_made and not rows))


def without_sums(calls: dict[CallId, KeptCall]) -> dict[CallId, KeptCall]:
    """Return all calls but the sums of a tensor's gradients, whose order in autograd depends on the casts."""
    return {identity: kept for identity, kept in calls.items() if not identity.is_sum_of_gradients}
