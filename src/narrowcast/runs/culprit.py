"""Who made a value that is not finite: the cast of an argument, the format, or the op. Proved by running it again."""

from __future__ import annotations

from dataclasses import replace

import torch

from narrowcast.eager.kernels import gather
from narrowcast.formats import Format
from narrowcast.ops import named
from narrowcast.report import NotFinite
from narrowcast.report.findings import CAST, FORMAT, OP, Finding, Watching
from narrowcast.runs.arguments import Named, results_by_name, tensors_by_name
from narrowcast.runs.finiteness import is_floating, is_lowest
from narrowcast.runs.rerun import can_run_again, run_in
from narrowcast.runs.seen_call import SeenCall
from narrowcast.runs.statistics import Statistics
from narrowcast.torch_bridge import DTYPES, FORMATS


def finding_of(call: SeenCall, inputs: Named, what: str, made_by: str, sentence: str, advice: str = "") -> Finding:
    """A finding about a call, with the facts of its tensors."""
    table = Statistics(whole=True)
    named_inputs = [(name, table.number(t)) for name, t in inputs]
    outputs = [(name, table.number(t)) for name, t in results_by_name(call.results) if is_floating(t)]
    rows = table.table()
    return Finding(
        call.id, call.site.file, call.site.line, what, made_by, call.computes, sentence, advice,
        tuple((name, rows[n]) for name, n in named_inputs), tuple((name, rows[n]) for name, n in outputs),
        forward=call.forward,
    )  # fmt: skip


def overflowing_casts(call: SeenCall, gave_finite: bool = False) -> tuple[Named, Named]:
    """Arguments whose planned cast makes an infinity of a finite value: by overflow, and those that are masks.

    gave_finite: its results were seen to be finite, which says of a product that its arguments were, too.
    """
    overflowed: Named = []
    masks: Named = []
    if call.plan is None or not any(call.plan.formats):
        return overflowed, masks
    if gave_finite and _name(call) in named("finite.sums_all") and all(result.numel() for result in call.results):
        return overflowed, masks
    for (name, tensor), dst in _planned(call):
        if dst is None or not is_floating(tensor) or dst.max >= FORMATS[tensor.dtype].max or not tensor.numel():
            continue
        x = tensor.detach()
        if _surely_fits(x, dst.max):
            continue
        low, high = (float(value) for value in torch.aminmax(x))
        if max(-low, high) <= dst.max or not (low > -torch.inf and high < torch.inf):
            continue
        if high <= dst.max and is_lowest(low, x):
            masks.append((name, x))
        elif bool(torch.isinf(x.to(DTYPES[dst])).any()) or dst.bits < 16:
            overflowed.append((name, x))
    return overflowed, masks


def _planned(call: SeenCall) -> list[tuple[tuple[str, torch.Tensor], Format | None]]:
    """The tensors that came, each with the format that it is cast to."""
    came = tensors_by_name(call.facts, call.args, call.kwargs)
    if call.plan is None or not any(call.plan.formats):
        return [(pair, None) for pair in came]
    given = zip(gather(call.facts, call.args, call.kwargs), call.plan.formats, strict=True)
    return list(zip(came, [dst for tensor, dst in given if isinstance(tensor, torch.Tensor)], strict=True))


def _surely_fits(x: torch.Tensor, largest: float) -> bool:
    """Whether the sum of squares, a third of the range's price, shows that no element is beyond this one."""
    if x.dtype not in (torch.float32, torch.float64) or not x.is_contiguous():
        return False
    flat = x.view(-1)
    return float(torch.dot(flat, flat)) < 0.9 * largest * largest  # what rounding takes off the sum is far less


def cast_finding(call: SeenCall, overflowed: Named) -> Finding:
    """What the cast of an argument did."""
    name, tensor = overflowed[0]
    format = next(dst for (slot, t), dst in _formats(call) if t is tensor or slot == name)
    largest = float(tensor.abs().max())
    sentence = (
        f"the cast of {name} from {FORMATS[tensor.dtype]} to {format} overflows: its largest magnitude is "
        f"{largest:.4g}, {format} ends at {FORMATS_BY_NAME[format].max:.6g}"
    )
    inputs = tensors_by_name(call.facts, call.args, call.kwargs)
    return finding_of(call, [p for p in inputs if is_floating(p[1])], "infinity", CAST, sentence, keep_high(call))


def _formats(call: SeenCall) -> list[tuple[tuple[str, torch.Tensor], str]]:
    return [
        (pair, str(FORMATS.get(pair[1].dtype, pair[1].dtype) if dst is None else dst)) for pair, dst in _planned(call)
    ]


FORMATS_BY_NAME = {str(f): f for f in FORMATS.values()}


def keep_high(call: SeenCall) -> str:
    """The rule that keeps the call in fp32, as a policy file has it."""
    of = call.forward or call.id
    module = f', module = "{of.module_path}"' if of.module_path else ""
    return f'Keep it in fp32: [[rule]] with op = "{of.op}"{module}, action = "full".'


def find_culprit(call: SeenCall, inputs: Named, results: list[torch.Tensor]) -> tuple[Finding, bool]:
    """What a call whose inputs are finite did; and whether its infinity is the exact limit, as of log(0)."""
    has_nan = any(bool(torch.isnan(t).any()) for t in results)
    what = "nan" if has_nan else "infinity"
    overflowed, _ = overflowing_casts(call)
    if overflowed:
        return replace(cast_finding(call, overflowed), what=what), False
    if call.is_cast:
        source = inputs[-1][1] if inputs else results[0]
        dst = FORMATS[results[0].dtype]
        sentence = (
            f"the cast from {FORMATS[source.dtype]} to {dst} overflows: its largest magnitude is "
            f"{float(source.abs().max()):.4g}, {dst} ends at {dst.max:.6g}"
        )
        return finding_of(call, inputs, what, CAST, sentence, "Scale it, or keep what makes it in fp32."), False
    if not can_run_again(call):
        return finding_of(call, inputs, what, "", "it draws random numbers, and cannot be run again to see"), False
    computed = [t.dtype for t in results]
    low = [dtype for dtype in computed if FORMATS[dtype].bits < 32]
    in_fp32 = run_in(call, torch.float32) if low else None
    if low and in_fp32 is not None and all(_is_finite(t) for t in in_fp32):
        largest = max((float(t.abs().max()) for t in in_fp32 if t.numel()), default=0.0)
        format = FORMATS[low[0]]
        over = f"its largest magnitude there is {largest:.4g}, {format} ends at {format.max:.6g}"
        if largest <= format.max:
            over = f"its largest result there, {largest:.4g}, has room in {format}: a value inside the op has not"
        sentence = f"in fp32, on the same inputs, it is finite; {over}"
        return finding_of(call, inputs, what, FORMAT, sentence, keep_high(call)), False
    in_fp64 = run_in(call, torch.float64)
    if in_fp64 is not None and all(_is_finite(t) for t in in_fp64):
        sentence = "in fp64, on the same inputs, it is finite: fp32 overflows"
        return finding_of(call, inputs, what, FORMAT, sentence, "Scale what comes in, or compute it in fp64."), False
    proof = "in fp32" if in_fp64 is None else "in fp32 and fp64"
    sentence = f"the op itself: it gives the same {proof}, on the same inputs{_cause(call, inputs)}"
    advice = "No format mends it: keep its inputs off that value (a clamp, an epsilon, where)."
    return finding_of(call, inputs, what, OP, sentence, advice), not has_nan


def _cause(call: SeenCall, inputs: Named) -> str:
    """What of the inputs is the usual reason."""
    name = _name(call)
    for argument, tensor in inputs:
        if not tensor.numel():
            continue
        zeros, negative = int((tensor == 0).sum()), int((tensor < 0).sum())
        is_asked = name != "div" or tensor is inputs[-1][1]
        if zeros and is_asked and name in named("finite.not_at_zero"):
            return f"; {zeros} of {tensor.numel()} elements of {argument} are zero"
        if negative and name in named("finite.not_below_zero"):
            return f"; {negative} of {tensor.numel()} elements of {argument} are negative"
    return ""


def _name(call: SeenCall) -> str:
    """The op's name without namespace, overload and the underscore of an in-place form."""
    return call.facts.id.split(".")[1].removesuffix("_")


def _is_finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def first_not_finite(reference: Watching, here: Watching, has_nan: bool) -> tuple[NotFinite | None, str]:
    """Of two watched runs: the first call that made what is not finite here and not in the reference; and the first of
    the reference in words, if its output has NaN.
    """
    known = {finding.id for finding in reference.findings}
    own = next((f for f in here.findings if f.id not in known), None)
    first = reference.first
    return None if own is None else _as_row(own), _as_row(first).text if has_nan and first is not None else ""


def _as_row(finding: Finding) -> NotFinite:
    facts = [facts for _, facts in finding.outputs if not facts.is_finite] or [facts for _, facts in finding.outputs]
    format = facts[0].format if facts else finding.formats
    return NotFinite(finding.id.op, finding.id.module_path, finding.file, finding.line, format, finding.what)
