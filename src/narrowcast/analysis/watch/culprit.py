"""What made a value that is not finite: the cast of an argument, the format, or the op; shown by running it again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from narrowcast.analysis.watch.makers import Maker, Rounded
from narrowcast.core.ledger.identity import BACKWARD
from narrowcast.core.ops import named, written_as
from narrowcast.core.policy import Rule, Site
from narrowcast.core.policy.rules import naming
from narrowcast.formats import Format, fp16
from narrowcast.observation.observer.seen_call import SeenCall
from narrowcast.observation.statistics.arguments import Named, draws_numbers, results_by_name, tensors_by_name
from narrowcast.observation.statistics.statistics import Statistics
from narrowcast.observation.trial import rerun
from narrowcast.observation.trial.finiteness import count_not_finite, inputs_of, is_floating, is_lowest, largest_of
from narrowcast.observation.trial.output_errors import are_mask_numbers
from narrowcast.output.words import counted
from narrowcast.reports.results.findings import CAST, FORMAT, GIVEN, OP, Finding, Watching
from narrowcast.reports.results.verdicts import TREND
from narrowcast.runtime.regions.ruling import shadowed_region
from narrowcast.runtime.torch_bridge import FORMATS, LOW, short_type, tensors_in, written_tensors
from narrowcast.runtime.torch_surface.dispatch import base_of
from narrowcast.runtime.torch_surface.grad_scaling import UNSCALE

_NO_REGION = (
    "Rules hold inside nc.autocast, and none is open here: open it in place of torch.autocast, or make a script with "
    "nc.script(model, under=...)"
)
_BLOCK = 'A torch.autocast block is around it, where the rule holds only if the region is opened with inner="policy".'
_CONVERT = "Convert what it reads, x.float(), or keep it in fp32."
_CONVERTED = "What it reads is converted to fp32 after that: compute it in fp32 from there on."
_FP32_ENDS = "in fp64, on the same inputs, it is finite"
_POLES = ("finite.not_at_zero", "finite.not_below_zero", "growth.with_poles", "growth.steep")
_NOTHING = 1e-30
_MAKERS = 4
"""How many calls are named, of those through which rounding came to a call's inputs."""
"""Absolute tolerance: a result for infinity is zero, the one for the largest of fp32 a little more."""


def finding_of(
    call: SeenCall,
    inputs: Named,
    what: str,
    made_by: str,
    sentence: str,
    advice: str = "",
    rules: tuple[Rule, ...] = (),
) -> Finding:
    """Return a finding about a call, with the facts of its tensors."""
    table = Statistics(whole=True)
    named_inputs = [(name, table.number(t)) for name, t in inputs]
    outputs = [(name, table.number(t)) for name, t in results_by_name(call.results) if is_floating(t)]
    rows = table.table()
    return Finding(
        call.id, call.site.file, call.site.line, what, made_by, call.computes, sentence, advice,
        tuple((name, rows[n]) for name, n in named_inputs), tuple((name, rows[n]) for name, n in outputs),
        forward=call.forward, rules=rules,
    )  # fmt: skip


def overflowing_casts(call: SeenCall, gave_finite: bool = False) -> tuple[Named, Named]:
    """Return the arguments whose planned cast makes a finite value infinite: by overflow, and those that are masks.

    gave_finite: its results were seen to be finite, so those of a product show that its arguments were, too.
    """
    overflowed: Named = []
    masks: Named = []
    if call.plan is None or (gave_finite and sums_all(call) and all(result.numel() for result in call.results)):
        return overflowed, masks
    for name, tensor, dtype in _planned(call):
        dst = FORMATS[dtype]
        if not is_floating(tensor) or dst.max >= FORMATS[tensor.dtype].max or not tensor.numel():
            continue
        x = tensor.detach()
        if _surely_fits(x, dst.max):
            continue
        low, high = (float(value) for value in torch.aminmax(x))
        if not (low > -torch.inf and high < torch.inf):  # what was not finite before is not due to the cast
            x = x[x.isfinite()]
            low, high = (float(value) for value in torch.aminmax(x)) if x.numel() else (0.0, 0.0)
        if max(-low, high) <= dst.max:
            continue
        if high <= dst.max and is_lowest(low, x):
            masks.append((name, tensor))
        elif bool(torch.isinf(x.to(dtype)).any()) or dst.bits < 16:
            overflowed.append((name, tensor))
    return overflowed, masks


def _planned(call: SeenCall) -> list[tuple[str, torch.Tensor, torch.dtype]]:
    """Return the tensors that are cast, each with the dtype that it is cast to."""
    dtypes = rerun.planned_dtypes(call)
    inputs = tensors_by_name(call.facts, call.args, call.kwargs) if dtypes else []
    return [(name, t, dtype) for (name, t), dtype in zip(inputs, dtypes, strict=True) if dtype is not None]


def _surely_fits(x: torch.Tensor, largest: float) -> bool:
    """Return whether the sum of squares shows that no magnitude exceeds `largest`: a third of the cost of aminmax."""
    if x.dtype not in (torch.float32, torch.float64) or not x.is_contiguous():
        return False
    flat = x.view(-1)
    return float(torch.dot(flat, flat)) < 0.9 * largest * largest  # rounding reduces the sum by far less


def cast_finding(call: SeenCall, overflowed: Named) -> Finding:
    """Return the finding that the cast of an argument overflows."""
    name, tensor = overflowed[0]
    format = next(FORMATS[dtype] for slot, t, dtype in _planned(call) if t is tensor or slot == name)
    sentence = (
        f"the cast of {name} from {FORMATS[tensor.dtype]} to {format} overflows: its largest magnitude is "
        f"{largest_of([tensor]):.4g}, the maximum of {format} is {format.max:.6g}"
    )
    inputs = tensors_by_name(call.facts, call.args, call.kwargs)
    return finding_of(call, [p for p in inputs if is_floating(p[1])], "infinity", CAST, sentence, *_keep_high(call))


def _keep_high(call: SeenCall) -> tuple[str, tuple[Rule, ...]]:
    """Return the rule that keeps the call in fp32; advice in its place where none can."""
    asked = [v for v in (*call.args, *call.kwargs.values()) if isinstance(v, torch.dtype) and v in FORMATS]
    if any(FORMATS[dtype].bits < 32 for dtype in asked):
        return f"The code asks for {FORMATS[asked[0]]} itself: ask for torch.float32 there.", ()
    target = next((t for t in written_tensors(call.facts, call.args, call.kwargs) if t.dtype in LOW), None)
    if call.facts.writes and target is not None:
        advice = (
            f"It writes to a tensor in {FORMATS[target.dtype]}, which no rule casts: convert it before, x.float(), "
        )
        return f"{advice}or write the form that returns a new tensor, for which a rule holds.", ()
    of = call.forward or call.id
    if of.direction == BACKWARD:
        return "Keep in fp32 what it is the backward of.", ()
    op = of.op if call.policy is not None else _op_around(call)
    is_hidden = any(shadowed_region(t.device.type) is not None for t in call.results[:1])
    return _BLOCK * is_hidden, (Rule(op, "full", naming(of.module_path)),)


def _op_around(call: SeenCall) -> str:
    """Return the op that a region sees in the place of one that is seen where none is open: what programs call (linear,
    matmul, conv2d), of which a kernel made it.
    """
    if call.forward is not None:  # a backward, whose forward has run
        return written_as(call.forward.op)
    name, tensors = _name(call), tensors_in(call.args, call.kwargs)
    if name in ("convolution", "_convolution"):
        is_transposed = next((value for value in call.args if isinstance(value, bool)), False)
        dimensions = tensors[1].dim() - 2
        if is_transposed:
            return f"aten.conv_transpose{dimensions}d.{'default' if dimensions == 1 else 'input'}"
        return f"aten.conv{dimensions}d.default"
    if name == "mm" and not _is_weight(tensors[1]):
        return "aten.matmul.default"
    return written_as(call.id.op)


def _is_weight(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a parameter, turned as `linear` turns it."""
    base = base_of(tensor)
    return isinstance(base, torch.nn.Parameter) and tensor.stride() == base.stride()[::-1]


def is_quotient(call: SeenCall) -> bool:
    """Return whether its last argument divides the others."""
    return _name(call) == "div"


def sums_all(call: SeenCall) -> bool:
    """Return whether each element of its arguments goes into a sum, as in products."""
    return _name(call) in named("finite.sums_all")


def has_poles(call: SeenCall) -> bool:
    """Return whether the op is infinite at a finite argument."""
    return any(_name(call) in named(key) for key in _POLES)


def find_culprit(
    call: SeenCall, inputs: Named, results: list[torch.Tensor], rounded: Rounded | None = None,
    paths: Callable[[Any], str] = str,
) -> Finding:  # fmt: skip
    """Return a finding about a call whose results are not finite where its inputs were. rounded: what made its inputs
    in a low format. paths: returns the path of a module.
    """
    has_nan = any(bool(torch.isnan(t).any()) for t in results)
    what = "nan" if has_nan else "infinity"
    overflowed, _ = overflowing_casts(call)
    if overflowed:
        return replace(cast_finding(call, overflowed), what=what)
    if call.is_cast:
        read = [value for value in call.args if isinstance(value, torch.Tensor)]  # of whole numbers, too
        source = inputs[-1][1] if inputs else (read or results)[-1]
        dst = FORMATS[results[0].dtype]
        sentence = (
            f"the cast from {short_type(source.dtype)} to {dst} overflows: its largest magnitude is "
            f"{largest_of([source.double()]):.4g}, the maximum of {dst} is {dst.max:.6g}"
        )
        return finding_of(
            call, inputs, what, CAST, sentence, "Scale it down, or convert it to a wider format in the code."
        )
    if any(t.is_complex() for t in call.results):
        sentence = f"the op itself, of finite numbers: it computes in {short_type(call.results[0].dtype)}"
        return finding_of(call, inputs, what, OP, sentence, "Keep its inputs off that value, or scale them.")
    if not rerun.can_run_again(call):
        return finding_of(call, inputs, what, "", f"{_why_once(call)}: it cannot be run again to see")
    computed = [t.dtype for t in results]
    low = [dtype for dtype in computed if FORMATS[dtype].bits < 32]
    in_fp32 = rerun.run_in(call, torch.float32) if low else None
    if low and in_fp32 is not None and rerun.mends(in_fp32, call.results):
        left = count_not_finite(in_fp32)
        if left:
            of, both = count_not_finite(results), _beyond_fp32(in_fp32, rerun.run_in(call, torch.float64))
            sentence = f"in fp32, on the same inputs, {of - left} of {counted(of, 'value')} that are not finite here "
            sentence += f"are finite, and {left} are not{both}"
            if rounded is not None and rounded.makers and rounded.proof()[0]:
                return finding_of(call, inputs, what, FORMAT, sentence, *_advice(call, inputs, rounded, paths))
            advice = "fp32 does not hold it either: scale its inputs, or compute in logarithms."
            return finding_of(call, inputs, what, FORMAT, sentence, advice)
        return _finite_in_fp32(call, inputs, what, FORMATS[low[0]], largest_of(in_fp32))
    in_fp64 = rerun.run_in(call, torch.float64)
    if in_fp64 is not None and rerun.mends(in_fp64, call.results):
        sentence = f"{_FP32_ENDS}: fp32 overflows"
        return finding_of(call, inputs, what, FORMAT, sentence, "Scale its inputs, or compute it in fp64.")
    proof = "in fp32" if in_fp64 is None else "in fp32 and fp64"
    sentence = f"the op itself: it gives the same {proof}, on the same inputs{_cause(call, inputs)}"
    return finding_of(call, inputs, what, OP, sentence, *_advice(call, inputs, rounded, paths))


def _finite_in_fp32(call: SeenCall, inputs: Named, what: str, format: Format, largest: float) -> Finding:
    """Return the finding of a call that is finite in fp32. largest: its largest magnitude there."""
    over = f"its largest magnitude there is {largest:.4g}, the maximum of {format} is {format.max:.6g}"
    if largest <= format.max:
        over = f"its largest result there, {largest:.4g}, has room in {format}: a value inside the op has not"
    sentence = f"in fp32, on the same inputs, it is finite; {over}"
    advice, rules = _keep_high(call)
    if _is_of_a_loop(call):
        advice, rules = _CONVERT, ()
    elif rules and call.policy is None:
        advice = f"{_NO_REGION}, or convert its inputs, x.float()."
    elif largest > format.max and rules:
        also = f"Calls that read it in {format} overflow there, too: keep those in fp32 as well; nc.repair finds them."
        advice = f"{advice} {also}".strip()
    return finding_of(call, inputs, what, FORMAT, sentence, advice, rules)


def _why_once(call: SeenCall) -> str:
    is_drawn = draws_numbers(call.facts, call.args, call.kwargs)
    return "it draws random numbers" if is_drawn else "a class of its own says what it does"


def _advice(
    call: SeenCall, inputs: Named, rounded: Rounded | None, paths: Callable[[Any], str]
) -> tuple[str, tuple[Rule, ...]]:
    """Return advice for what no format of the call fixes: its inputs may have been rounded onto that value; and the
    rules about what made them, where a run shows that they help.
    """
    if any(tensor.numel() == 0 for _, tensor in inputs):
        return "It reads an empty tensor: leave the call out where nothing is left.", ()
    off = "No format of this call fixes it: keep its inputs off that value (a clamp, an epsilon, where)."
    low = next((FORMATS[t.dtype] for _, t in inputs if FORMATS[t.dtype].bits < 32), None)
    if rounded is None or not rounded.makers:
        return (off if low is None else f"{off} Its inputs are in {low}, whose rounding may have put them there."), ()

    def named_as(makers: Sequence[Maker]) -> str:
        first = " of ".join(_named(op, of, paths) for op, of in makers[:_MAKERS])
        return first if len(makers) <= _MAKERS else f"{first} and {len(makers) - _MAKERS} more calls before these"

    makers, is_seen = rounded.proof()
    if not makers:
        gone = f" They come from {named_as([*rounded.makers])}, in a low format; what that read is gone, so whether "
        return (off if is_seen else f"{off}{gone}rounding put them there is not known here: nc.repair finds out."), ()
    rules = dict.fromkeys(Rule(op, "full", naming(paths(of))) for op, of in makers if not isinstance(of, Site))
    where = "" if call.policy is not None else f" {_NO_REGION}."
    if len(rules) < len(makers):
        where = " Convert to torch.float32 there."
    left = f"all but {counted(rounded.left, 'value')} are finite"
    some, is_so = ("its inputs", "it is finite") if not rounded.left else ("some", left)
    proved = f"Rounding put {some} there: run again with {named_as(makers)} in fp32, {is_so}."
    if _is_of_a_loop(call):
        return f"{proved} {_CONVERT if low else _CONVERTED}", ()
    if rounded.left and len(makers) > _MAKERS:  # of a long way, and not enough
        return f"{off} {proved} nc.repair finds which of them help.", ()
    return f"{off} " * bool(rounded.left) + proved + where, tuple(rules)


def _named(op: str, of: Any, paths: Callable[[Any], str]) -> str:
    """Return `aten.mm.default in encoder`, or `the conversion at model.py:12`."""
    if isinstance(of, Site):
        return f"the conversion at {Path(of.file).name}:{of.line}"
    path = paths(of)
    return f"{op} in {path}" if path else op


def _is_of_a_loop(call: SeenCall) -> bool:
    """Return whether a call is of no module and in no region: of an optimizer, of clipping, which no rule is about."""
    return call.policy is None and not call.who.is_in_module


def made_besides(call: SeenCall, results: list[torch.Tensor]) -> Finding | None:
    """Return what overflows in a format in a call that has infinite or NaN inputs, too; None if nothing does."""
    finding = find_culprit(call, inputs_of(call), results) if rerun.can_run_again(call) else None
    return finding if finding is not None and is_overflow(finding) else None


def waits(finding: Finding) -> bool:
    """Return whether it is not a fault by itself: fp64 has it, too, or it is given, or beyond the range of fp32."""
    return finding.made_by in (OP, GIVEN) or (finding.made_by == FORMAT and finding.sentence.startswith(_FP32_ENDS))


def overflows_by_mask(call: SeenCall, finding: Finding) -> bool:
    """Return whether all that overflows is one number that masks are made with: whether infinity serves as well, its
    readers show.
    """
    if not is_overflow(finding) or finding.what == "nan":
        return False
    wide = [tensor for _, tensor in overflowing_casts(call)[0]]
    wide = wide or (tensors_in(call.args)[:1] if call.is_cast else rerun.run_in(call, torch.float32) or [])
    wide = [t.detach() for t in wide if is_floating(t)]
    values = [t[t.isfinite() & (t.abs() > fp16.max)].flatten().float() for t in wide]
    return are_mask_numbers(torch.cat(values), sum(t.numel() for t in wide)) if values else False


def is_overflow(finding: Finding) -> bool:
    """Return whether a format alone makes it."""
    return finding.made_by in (CAST, FORMAT)


def is_for_scaler(call: SeenCall, finding: Finding) -> bool:
    """Return whether a smaller scale of the loss would fix it: an overflow of fp16 or fp32 in the backward."""
    formats = {str(FORMATS[t.dtype]) for t in call.results if t.dtype in FORMATS} | set(finding.formats.split(","))
    return is_overflow(finding) and call.id.direction == BACKWARD and ("fp16" in formats or waits(finding))


def unscales(call: SeenCall) -> bool:
    """Return whether a scaler checks and unscales its gradients by this call."""
    return call.facts.id == UNSCALE


def gives_the_same_without(call: SeenCall) -> bool:
    """Return whether a call, all of whose results are finite, returns the same for the largest number in the place of
    infinity: a clamp, a sigmoid, 1/inf; not rsqrt.
    """
    if not rerun.can_run_again(call):
        return False
    args, kwargs = rerun.planned_arguments(call)
    args, kwargs = rerun.changed(args, kwargs, lambda tensor: tensor.detach().nan_to_num(nan=torch.nan))
    args, kwargs = rerun.copies_of_written(call.facts, args, kwargs)
    results = [t for t in tensors_in(call.facts.op(*args, **kwargs)) if is_floating(t)]
    pairs = zip(results, [t for t in call.results if is_floating(t)], strict=True)
    return all(torch.allclose(f, r, rtol=FORMATS[r.dtype].epsilon, atol=_NOTHING) for f, r in pairs)


def _beyond_fp32(in_fp32: list[torch.Tensor], in_fp64: list[torch.Tensor] | None) -> str:
    """Return that fp32 overflows, if fp64 does not."""
    return ": fp32 overflows, too" if in_fp64 is not None and rerun.mends(in_fp64, in_fp32) else ""


def _cause(call: SeenCall, inputs: Named) -> str:
    name = _name(call)
    if is_quotient(call):  # of whole numbers, too
        inputs = [pair for pair in tensors_by_name(call.facts, call.args, call.kwargs) if pair[0] == "other"]
    for argument, tensor in inputs:
        if not tensor.numel():
            continue
        zeros, negative = int((tensor == 0).sum()), int((tensor < 0).sum())
        if zeros and name in named("finite.not_at_zero"):
            are = "is" if zeros == 1 else "are"
            return f"; {zeros} of {counted(tensor.numel(), 'element')} of {argument} {are} zero"
        if negative and name in named("finite.not_below_zero"):
            return f"; {negative} of {counted(tensor.numel(), 'element')} of {argument} are negative"
    return ""


def _name(call: SeenCall) -> str:
    """Return the op's name without namespace, overload and the underscore of an in-place form."""
    return call.facts.id.split(".")[1].removesuffix("_")


def first_not_finite(reference: Watching, here: Watching) -> Finding | None:
    """Return of two watched runs the first finding of a call that has none in the reference."""
    known = set(map(_placed, reference.findings))
    new = (finding for finding in here.findings if finding.made_by != TREND)
    return next((finding for finding in new if _placed(finding) not in known), None)


def _placed(finding: Finding) -> tuple[str, str, str, str, int]:
    """Return where a finding is: a region adds casts, so that those of the code have other numbers in it."""
    return finding.id.op, finding.id.module_path, finding.id.direction, finding.file, finding.line
