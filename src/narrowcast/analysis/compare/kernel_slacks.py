"""The error that a sound kernel may have before it rounds its result, by kind of bound (`core.ops.bounds`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from narrowcast.core.ops import bounds, is_named, op_kind
from narrowcast.formats import Format, fp32
from narrowcast.observation.statistics.arguments import others_as_text
from narrowcast.observation.trial.finiteness import is_floating
from narrowcast.observation.trial.noise import Noise
from narrowcast.observation.trial.rerun import Change, run_wide
from narrowcast.runtime.torch_bridge import FORMATS, OpFacts, is_pointwise, tensors_in
from narrowcast.runtime.torch_surface.dispatch import schema_of

Samples = list[torch.Tensor]


def shapes_of(*trees: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the tensors in nested arguments."""
    return [tuple(t.shape) for t in tensors_in(*trees)]


@dataclass(frozen=True, slots=True)
class Inputs:
    """A call's op with its inputs."""

    facts: OpFacts
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, dtype: torch.dtype = torch.float64, change: Change | None = None) -> list[torch.Tensor] | None:
        """Run the op in a wide format, on tensors changed by `change`; return its floating-point results."""
        results = run_wide(self.facts, self.args, self.kwargs, dtype, change)
        return None if results is None else [t for t in results if is_floating(t)]

    def on_absolute_values(self, more: float = 0.0) -> list[torch.Tensor] | None:
        """Run the op on the absolute values of all that it adds up, each increased by `more`."""
        kwargs = {k: abs(v) if k in ("alpha", "beta") else v for k, v in self.kwargs.items()}
        return Inputs(self.facts, self.args, kwargs).run(change=lambda t: t.abs() + more if more else t.abs())

    def with_rounded_numbers(self, dtype: torch.dtype) -> Inputs | None:
        """Return the same with numbers, and tensors without a dimension, rounded to a low format, as some kernels read
        them; None where that changes none.
        """
        arguments = schema_of(self.facts.op).arguments
        names = {a.name for a in arguments if str(a.type) in _NUMBERS}  # other whole numbers are sizes and dimensions
        given = {**dict(zip((a.name for a in arguments), self.args, strict=False)), **self.kwargs}
        changed = {}
        for name, value in given.items():
            if name in names and _is_number(value):
                low = value.detach().to(dtype) if isinstance(value, torch.Tensor) else _rounded(value, dtype)
                if float(low) != float(value) and math.isfinite(low):
                    changed[name] = low
        args = tuple(changed.get(name, value) for name, value in list(given.items())[: len(self.args)])
        return Inputs(self.facts, args, {k: changed.get(k, v) for k, v in self.kwargs.items()}) if changed else None

    def given(self, name: str) -> Any:
        """Return an argument by its name."""
        position = next((slot.position for slot in self.facts.slots if slot.name == name), len(self.args))
        return self.args[position] if position < len(self.args) else self.kwargs.get(name)


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return is_floating(value) and not value.dim()
    return isinstance(value, int | float) and not isinstance(value, bool)


def _rounded(value: float, dtype: torch.dtype) -> float:
    return float(torch.tensor(float(value), dtype=dtype, device="cpu"))


_NUMBERS = ("Tensor", "number", "Optional[Tensor]", "Optional[number]", "float", "Optional[float]")
"""The types of arguments that are numbers where no tensor is given."""


_MASKED_OUT = 200.0
"""A mask that adds a value of this size or more makes a weight zero, however it is rounded."""
_SPLITS = 32
"""An inner dimension is split into at most this many parts."""
_LEAST_OF_SPLIT, _NOT_SPLIT = 32, 8
"""Parts have at least this many terms, but of two parts: of ten terms, cuBLAS splits some on an H200, of eight none."""
_BLOCK = 32
"""A block has at least this many rows of scores; what each block adds to a gradient is rounded."""
_LOST = 1.0
"""With a larger error of scores, nothing is left of the weights, which their differences determine."""
_ZERO_AT = 104.0
"""The exponential of less than minus that is zero in fp32."""
_OF_FUNCTION = 2.0**-12
"""No library's function of one tensor is that far off in fp32, of its largest value."""
_MOVED = 4 * fp32.epsilon
"""Inputs are perturbed by this much to see what cancels."""


def _slack_of_sums(inputs: Inputs, exact: Samples, results: Samples) -> Samples | None:
    size = inputs.on_absolute_values()
    if size is None:
        return None
    terms = bounds.terms_of(inputs.facts.id, shapes_of(inputs.args, inputs.kwargs), shapes_of(results))
    low = _rounding_in_between(inputs, results)
    factor = bounds.gamma(bounds.scanned(terms), low) if low else bounds.accumulated(terms)
    return [s * factor for s in size[: len(results)]]


def _rounding_in_between(inputs: Inputs, results: Samples) -> float:
    """Return half a unit of the format that a kernel on an accelerator rounds to in between; 0 where it does not."""
    is_so = not results[0].is_cpu and is_named(inputs.facts.id, "bound.on_accelerators")
    return bounds.unit(FORMATS[results[0].dtype]) if is_so else 0.0


def _slack_of_products(inputs: Inputs, exact: Samples, results: Samples) -> Samples | None:
    size = inputs.on_absolute_values()
    if not size:
        return size
    low, shapes = bounds.unit(FORMATS[results[0].dtype]), shapes_of(inputs.args, inputs.kwargs)
    terms = bounds.terms_of(inputs.facts.id, shapes, shapes_of(results))
    # hardware for products has no subnormal numbers
    slack = [s * bounds.accumulated(terms) + terms * fp32.smallest_normal for s in size[: len(results)]]
    splits = min(_SPLITS, max(terms // _LEAST_OF_SPLIT, 2))
    if terms > _NOT_SPLIT and _splits_sums(results[0]):
        slack = [f + s * bounds.gamma(splits, low) for f, s in zip(slack, size, strict=False)]
    is_transposed = ("transposed", "True") in others_as_text(inputs.facts, inputs.args, inputs.kwargs)
    steps = bounds.steps_in_between(inputs.facts.id, shapes, is_transposed, results[0].is_cpu)
    if steps:
        least = FORMATS[results[0].dtype].smallest
        slack = [f + s * bounds.gamma(steps, low) + steps * least / 2 for f, s in zip(slack, size, strict=False)]
    bias, weight = inputs.given("bias"), inputs.given("weight")
    wide = None  # the size of a bias that is added to a rounded product
    if isinstance(bias, torch.Tensor) and isinstance(weight, torch.Tensor):
        wide = bias.detach().double().abs().view(-1, *[1] * (weight.dim() - 2))
    elif is_named(inputs.facts.id, "multiplies.bias_first") and not results[0].is_cpu:
        beta = inputs.given("beta")
        wide = inputs.given("self").detach().double().abs() * abs(1 if beta is None else beta)
    if wide is not None:
        slack[0] = slack[0] + low * (exact[0].abs() + wide)
    return slack


def _slack_of_scattered(inputs: Inputs, exact: Samples, results: Samples) -> Samples | None:
    size, counts = inputs.on_absolute_values(), inputs.run(change=torch.ones_like)
    if size is None or counts is None:
        return None
    terms = int(max((float(t.abs().max()) for t in counts if t.numel()), default=1.0)) + 1
    if "nll_loss" in inputs.facts.id:  # a mean counts as one term
        terms = max(terms, inputs.given("target").numel() + 1)
    return [s.abs() * bounds.gamma(terms, bounds.unit(FORMATS[t.dtype])) for s, t in zip(size, results, strict=False)]


def _slack_of_steps(inputs: Inputs, exact: Samples, results: Samples) -> Samples | None:
    """Return the slack of repeated products, each rounded; None where one may leave the range of the format."""
    format = FORMATS[results[0].dtype]
    if "backward" not in inputs.facts.id:
        small = inputs.run(change=lambda x: torch.where(x == 0, 1.0, x.abs().clamp(max=1.0)))
        large = inputs.run(change=lambda x: x.abs().clamp(min=1.0))
        if small is None or large is None or not results[0].numel():
            return None
        if float(small[0].abs().min()) < format.smallest_normal or float(large[0].abs().max()) > format.max:
            return None
    steps = bounds.terms_of(inputs.facts.id, shapes_of(inputs.args, inputs.kwargs), shapes_of(results))
    return [exact[0].abs() * bounds.gamma(steps, bounds.unit(format)) + format.smallest]


def _largest_of_function(inputs: Inputs, exact: torch.Tensor) -> float:
    """Return how far off a function of one tensor may be in fp32, element by element; infinity of other ops. What it is
    off on these inputs is no bound where its kernel in fp32 is wrong, too.
    """
    if not is_pointwise(inputs.facts.op) or len(tensors_in(inputs.args, inputs.kwargs)) != 1 or not exact.numel():
        return math.inf
    return _OF_FUNCTION * float(exact.abs().max())


def _largest_of_softmax(inputs: Inputs) -> float:
    """Return how far softmax in fp32 is off at most, whose results are at most 1: an exponential magnifies the rounding
    of its argument by that, down to where it is zero, and the sum adds one rounding a term. Infinity for other ops.
    """
    x = inputs.args[0] if inputs.args else None
    if not is_named(inputs.facts.id, "bound.shares") or not isinstance(x, torch.Tensor) or not x.numel():
        return math.inf
    spread = min(2 * float(x.detach().double().nan_to_num(0.0, 0.0, 0.0).abs().max()), _ZERO_AT)
    return 4 * bounds.unit(fp32) * (spread + max(x.shape, default=1) + 8)


def _slack_in_fp32(inputs: Inputs, exact: Samples, results: Samples) -> Samples | None:
    """Return the largest error of the op in fp32 over all elements, with the effects of rounded numbers."""
    others = [inputs.run(torch.float32)]
    if bounds.cancels(inputs.facts.id):
        others.append(inputs.run(change=lambda t: _noise().moved(t, _MOVED)))
    if any(run is None for run in others):
        return None
    low = bounds.unit(FORMATS[results[0].dtype])
    more = bounds.absolute_error(inputs.facts.id, shapes_of(inputs.args, inputs.kwargs), low)
    between = low if is_named(inputs.facts.id, "bound.twice") else 0.0  # of a product that it rounds on its way
    slack = []
    for n, y64 in enumerate(exact):
        off = [_distance(run[n], y64) for run in others if run is not None]
        largest = max((float(each.max()) for each in off if each.numel()), default=0.0)
        largest = min(largest, _largest_of_softmax(inputs), _largest_of_function(inputs, y64))
        slack.append(y64.abs().mul_(2 * bounds.unit(fp32) + between).add_(bounds.WIDE_FACTOR * largest + more))
    if in_between := _rounding_in_between(inputs, results):
        slack[0] += in_between * _SIZE_IN_BETWEEN[op_kind(inputs.facts.id).name](inputs)
    if op_kind(inputs.facts.id).name == "native_layer_norm":  # of rows of one value the error of the mean is all
        _, mean, scale = (inputs.run() or [])[:3]
        weight = inputs.given("weight")
        subtracted = (mean * scale).abs() * (1.0 if weight is None else weight.detach().double().abs())
        slack[0] += 4 * bounds.unit(fp32) * subtracted
    if "layer_norm_backward" in inputs.facts.id:
        _add_sums_of_rows(inputs, results, slack)
    if "batch_norm_backward" in inputs.facts.id and results[0].shape == inputs.given("input").shape:
        held = _held_by_batch_norm(inputs, lambda t, others: t.mean(others, keepdim=True))
        slack[0] = slack[0] + low * held
    if is_pointwise(inputs.facts.op):
        rounded = inputs.with_rounded_numbers(results[0].dtype)
        numbers = rounded.run() if rounded is not None else None
        if numbers is not None:
            slack[0] += _distance(numbers[0], exact[0])
        if inputs.kwargs.get("alpha", 1) != 1 and isinstance(inputs.args[0], torch.Tensor):  # that product is rounded
            slack[0] += low * _distance(inputs.args[0], exact[0])
    return slack


def _add_sums_of_rows(inputs: Inputs, results: Samples, slack: Samples) -> None:
    """Add the slack of the gradients of a norm's weight and bias: sums over all rows, in their format or the input's.
    Of tiny gradients each term has an error of half the smallest number; that of the input, too.
    """
    names = ("grad_out", "input", "mean", "rstd")
    grad, x, mean, rstd = (inputs.given(name).detach().double() for name in names)
    leading = tuple(range(x.dim() - len(inputs.args[2])))
    size = (grad.abs() * (1 + ((x - mean) * rstd).abs())).sum(leading)
    incoming, rows = FORMATS[inputs.given("grad_out").dtype], mean.numel()
    for n, result in enumerate(results):
        if result.shape == x.shape:
            slack[n] = slack[n] + incoming.smallest * (1 + rstd)
        elif leading and result.shape == size.shape:
            factor = bounds.gamma(rows, max(bounds.unit(FORMATS[result.dtype]), bounds.unit(incoming)))
            slack[n] = slack[n] + factor * size + rows * incoming.smallest


def _held_by_batch_norm(inputs: Inputs, mean_of: Callable[[torch.Tensor, list[int]], torch.Tensor]) -> torch.Tensor:
    """Return what a batch norm's backward subtracts from an input's gradient, which the cpu holds in its low format."""
    tensors = [inputs.given(name) for name in ("grad_out", "input", "save_mean", "save_invstd")]
    if any(t is None or not t.numel() for t in tensors):
        return torch.zeros((), dtype=torch.float64, device=inputs.args[0].device)
    grad, x, mean, scale = (t.detach().double() for t in tensors)
    weight = inputs.given("weight")
    size = (1, -1, *[1] * (x.dim() - 2))
    others = [axis for axis in range(x.dim()) if axis != 1]
    normal = (x - mean.view(size)) * scale.view(size)
    subtracted = normal.abs() * mean_of(grad * normal, others).abs() + mean_of(grad, others).abs()
    factor = scale if weight is None else scale * weight.detach().double().abs()
    if not all(inputs.given(name).is_contiguous() for name in ("grad_out", "input")):  # then each step is rounded
        subtracted = 2 * subtracted + grad.abs()
    held: torch.Tensor = subtracted * factor.view(size)
    return held


def _size_of_product(inputs: Inputs) -> torch.Tensor:
    """Return, of softmax, the gradient times the output, and the sum of these products."""
    grad, output = (inputs.given(name).detach().double() for name in ("grad_output", "output"))
    size: torch.Tensor = (grad * output).abs()
    size += output * size.sum(inputs.args[2], keepdim=True)
    return size


def _size_of_square(inputs: Inputs) -> torch.Tensor:
    """Return, of tanh, the square of the output, its difference from one, and the gradient times that."""
    grad, output = (inputs.given(name).detach().double() for name in ("grad_output", "output"))
    size: torch.Tensor = grad.abs() * (output.square() + 2 * (1 - output.square()).abs())
    return size


def _size_of_means(inputs: Inputs) -> torch.Tensor:
    """Return, of a batch norm's backward, the sums of the gradient, and of the gradient times the normalised input."""
    return _held_by_batch_norm(inputs, lambda t, others: t.abs().mean(others, keepdim=True))


def _size_by_group(inputs: Inputs) -> torch.Tensor:
    """Return, of a group norm, its means, and what it computes of them."""
    y64, *_ = inputs.run() or []
    numbers = dict(others_as_text(inputs.facts, inputs.args, inputs.kwargs))
    count = int(numbers.get("num_groups") or numbers["group"])
    groups = inputs.given("input").detach().double().reshape(y64.shape[0], count, -1)
    scale = (groups.var(-1, correction=0) + float(numbers["eps"])).rsqrt()
    weight, bias = (inputs.given(name) for name in ("weight", "bias"))
    each = (y64.shape[0], y64.shape[1], *[1] * (y64.dim() - 2))
    subtracted = (groups.mean(-1) * scale).abs().repeat_interleave(y64.shape[1] // count, 1).view(each)
    subtracted = subtracted if weight is None else subtracted * weight.detach().double().abs().view(each[1:])
    added = 0.0 if bias is None else bias.detach().double().abs().view(each[1:])
    size: torch.Tensor = 2 * subtracted + 2 * (y64.abs() + added)
    return size


_SIZE_IN_BETWEEN: dict[str, Callable[[Inputs], torch.Tensor]] = {
    "_softmax_backward_data": _size_of_product, "tanh_backward": _size_of_square,
    "group_norm": _size_by_group, "native_group_norm": _size_by_group, "native_batch_norm_backward": _size_of_means,
}  # fmt: skip
"""The sizes of what kernels on an accelerator round in between, to the format of their result."""


def slack_of_low_means(inputs: Inputs, exact: Samples) -> torch.Tensor:
    """Return the error of a batch norm that holds means, deviations, or what it computes of them, in its low format."""
    y64, mean, scale = exact[:3]
    if not mean.numel():
        mean = inputs.given("running_mean").detach().double()
        scale = (inputs.given("running_var").detach().double() + inputs.args[-1]).rsqrt()
    weight, bias = (inputs.given(name) for name in ("weight", "bias"))
    scale = scale if weight is None else scale * weight.detach().double()
    size = 4 * (mean * scale).abs() + (0.0 if bias is None else 2 * bias.detach().double().abs())
    return size.view(-1, *[1] * (y64.dim() - 2)) + 3 * y64.abs()


def _distance(x: torch.Tensor, y64: torch.Tensor) -> torch.Tensor:
    """Return |x - y64|, 0 where that is not finite."""
    return (x.double() - y64).abs_().nan_to_num_(0.0, 0.0, 0.0)


@cache
def _noise() -> Noise:
    return Noise(1)


def _slack_of_weights(inputs: Inputs, exact: Samples, results: Samples) -> Samples | None:
    """Return the slack of attention: weights are rounded to the low format, scores have errors as products do."""
    query, key, mask, bias = (inputs.given(name) for name in ("query", "key", "attn_mask", "attn_bias"))
    mask = bias if mask is None else mask
    position = next(slot.position for slot in inputs.facts.slots if slot.name == "value")
    if position >= len(inputs.args) or not query.numel() or not key.numel():
        return None
    args = tuple(v.abs() if n == position else v for n, v in enumerate(inputs.args))
    size = Inputs(inputs.facts, args, inputs.kwargs).run()
    if size is None:
        return None
    low, scale = bounds.unit(FORMATS[query.dtype]), inputs.kwargs.get("scale") or 1 / math.sqrt(query.shape[-1])
    scores = abs(scale) * float(query.double().norm(dim=-1).max() * key.double().norm(dim=-1).max())
    if isinstance(mask, torch.Tensor) and mask.dtype in FORMATS and mask.numel():
        sizes = mask.detach().double().abs()
        scores += float(torch.where(sizes < _MASKED_OUT, sizes, 0.0).max())
    reduces_low = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    off = scores * (bounds.accumulated(query.shape[-1]) + 4 * (low if reduces_low else bounds.unit(fp32)))
    factor = bounds.weights_error(off, 2 * low + bounds.accumulated(key.shape[-2]))
    return [size[0] * factor]


def _slack_of_weights_backward(inputs: Inputs, exact: Samples, results: Samples) -> Samples | None:
    """Return the slack of attention's backward: weights and their gradients are rounded before they are multiplied."""
    names = ("grad_out", "query", "key", "value", "out", "logsumexp")
    grad, query, key, value, out, logsumexp = (inputs.given(name).detach().double() for name in names)
    mask, scale = inputs.kwargs.get("attn_mask"), inputs.kwargs.get("scale") or 1 / math.sqrt(query.shape[-1])
    scores = scale * query @ key.transpose(-1, -2)
    if isinstance(mask, torch.Tensor):
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask.double()
    if inputs.args[7]:  # is_causal
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    weights = (scores - logsumexp[..., None]).exp().nan_to_num(0.0)
    format, length = FORMATS[results[0].dtype], max(query.shape[-2], key.shape[-2])
    least = max(format.smallest, fp32.smallest_normal)  # the error of weights and their gradients near zero
    lengths = float(query.norm(dim=-1).max() * key.norm(dim=-1).max()) * abs(scale)
    off = (lengths + float(logsumexp[logsumexp.isfinite()].abs().max())) * bounds.accumulated(query.shape[-1] + 4)
    if off > _LOST:
        return None
    rounded = bounds.gamma(4 + length // _BLOCK, bounds.unit(format)) + 2 * bounds.accumulated(length)
    factor = bounds.weights_error(off, rounded)
    inner = grad.abs() @ value.abs().transpose(-1, -2) + (grad * out).abs().sum(-1, keepdim=True)
    off_weights = factor * weights + least
    inner = abs(scale) * (off_weights * inner + least)
    sizes = inner @ key.abs(), inner.transpose(-1, -2) @ query.abs(), off_weights.transpose(-1, -2) @ grad.abs()
    return [size + (1 + length // _BLOCK) * least for size in sizes]


SLACK: dict[str, Callable[[Inputs, Samples, Samples], Samples | None]] = {
    bounds.SUM: _slack_of_sums, bounds.PRODUCT: _slack_of_products, bounds.SCATTER: _slack_of_scattered,
    bounds.WIDE: _slack_in_fp32, bounds.WEIGHTS: _slack_of_weights, bounds.STEPS: _slack_of_steps,
    bounds.WEIGHTS_BACKWARD: _slack_of_weights_backward,
}  # fmt: skip


def with_flushed_inputs(inputs: Inputs, slack: Samples, format: Format) -> Samples | None:
    """Return the slack of a product whose subnormal inputs count as zero."""
    tensors = [t for t in tensors_in(inputs.args, inputs.kwargs) if is_floating(t)]
    if not any(bool(((t != 0) & (t.abs() < format.smallest_normal)).any()) for t in tensors):
        return slack
    size, more = inputs.on_absolute_values(), inputs.on_absolute_values(format.smallest_normal)
    if size is None or more is None:
        return None
    return [s + (b - a) for s, a, b in zip(slack, size, more, strict=False)]


def _splits_sums(result: torch.Tensor) -> bool:
    """Return whether a product on cuda may add partial sums in its low format: a setting, on by default."""
    name = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(result.dtype)
    if not result.is_cuda or name is None:
        return False
    return bool(getattr(torch.backends.cuda.matmul, f"allow_{name}_reduced_precision_reduction"))
