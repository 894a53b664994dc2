"""By how much relative errors grow in a call, estimated from the sizes of its inputs and results.

If a sum cancels, its result is small relative to its terms, and to their errors: errors are proportional to the size of
the terms together, with random signs (Higham, section 2.8), not to what is left of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from narrowcast.analysis.diff.pieces import Piece, distance
from narrowcast.core.ops import named, op_kind
from narrowcast.core.ops.bounds import PRODUCT, SCATTER, bound_kind, terms_of
from narrowcast.core.ops.facts import ATTENTION, CONV, COPY, GEMM, MOVEMENT, NORM, REDUCTION, SOFTMAX, VIEW

_STEEPEST = 100.0
"""With a larger argument of an exponential, or less left by a norm, growth of errors cannot be estimated."""
_OF_BACKWARD = 8.0
"""Gradients through norms and softmax are remainders of a projection; how large, sizes alone do not show."""
_OF_CONVOLUTION = (("grad_output", "weight"), ("grad_output", "input"), ("grad_output",))
"""The factors whose products each result of a convolution's backward sums."""


def _is_of(op: str, *kinds: str) -> bool:
    """Return whether errors grow in an op as in those kinds of the table of ops."""
    return any(op_kind(op).name in named(f"growth.{kind}") for kind in kinds)


def moves(op: str) -> bool:
    """Return whether an op only moves values, all or some."""
    return op_kind(op).family in (MOVEMENT, VIEW, COPY)


def passes_on(op: str) -> bool:
    """Return whether an op leaves relative errors as they are: it scales, selects or moves."""
    return moves(op) or _is_of(op, "scales")


def jump(op: str, difference: float, chosen_by: float = 0.0) -> float:
    """Return the error of an op that selects by a sign or an index, where the values by which it selects have one: that
    share of elements is selected otherwise, each with an error of its size. chosen_by: the difference of the floats of
    which its conditions were computed.
    """
    is_jump = _is_of(op, "jumps") or op.endswith("_mode")  # a quotient that is rounded
    off = max(chosen_by, difference if is_jump else 0.0)
    return math.sqrt(off) if off < 1 else 0.0


def rooted(op: str, difference: float) -> float:
    """Return the error of a square root: |sqrt(a) - sqrt(b)| <= sqrt|a - b|, which small elements come near to. Of
    other ops that of their inputs.
    """
    return max(difference, math.sqrt(difference)) if _is_of(op, "roots") and difference < 1 else difference


def growth(
    op: str,
    position: int,
    inputs: Mapping[str, Piece],
    result: Piece,
    out: float,
    is_backward: bool,
    is_equal: bool = False,
) -> float:
    """Return by how much errors grow, at least 1. inputs: by name; result: that at the position; out: its root mean
    square, the larger of both runs'. is_equal: both runs read the same bits: local errors alone grow.
    """
    seen = {name: piece for name, piece in inputs.items() if piece.is_seen}
    if not out or not seen:
        return 1.0
    least = _OF_BACKWARD if "backward" in op else _STEEPEST if _is_of(op, "of_matrices") else 1.0
    steepness = 1.0 if is_equal else max(_STEEPEST * _is_steep(op), _steepness(op, seen))
    return max(least, _size(op, position, seen, result, is_backward) / out, steepness)


def growth_in_rows(op: str, read: Sequence[Piece], result: Piece) -> float:
    """Return by how much errors of single rows may grow relative to the largest element, at least 1: where a call
    multiplies or divides each row by a number, as a norm that is written out does.
    """
    if len(read) < 2 or not _is_of(op, "scales") or result.columns == 1 or 1 not in (read[0].columns, read[1].columns):
        return 1.0
    factor = read[1].largest if op_kind(op).name == "mul" else 1 / read[1].low if read[1].low > 0 else 0.0
    return max(1.0, read[0].largest * factor / result.rms) if result.rms else 1.0


def flattening(op: str, read: Mapping[str, Piece], result: Piece) -> float:
    """Return by how much a relative error may grow, at least 1, where an op drops, bounds or flattens the largest of
    what it reads, as exp, sigmoid, topk and clamp do masks of -1e4 and outliers: absolute errors do not grow in it, or
    by its steepest slope, and what is left is smaller. Of sums, products and norms 1: they have bounds of their own.
    """
    sizes = [piece.rms * math.sqrt(piece.elements) for piece in read.values() if piece.is_seen]
    is_by_column = op_kind(op).family == NORM and any(kind in op for kind in ("batch_norm", "group_norm"))
    if sizes and (is_by_column or not result.is_seen):  # each column has its own size; a condition, its threshold
        return math.inf
    if not sizes or not result.rms or op_kind(op).family in (GEMM, CONV, ATTENTION, NORM, SOFTMAX):
        return 1.0
    slope = 1.0
    if op_kind(op).name == "glu":  # one half is multiplied by the other, the gate
        slope = max(1.0, max(piece.largest for piece in read.values()))
    elif _is_of(op, "exponentials"):
        slope = result.largest
    elif _is_of(op, "reciprocals"):
        slope = result.largest**2
    elif _is_of(op, "logarithms"):
        slope = max(1 / piece.low if piece.low > 0 else math.inf for piece in read.values())
    elif _is_of(op, "quotients"):
        divisor = read.get("other", read.get("tensor2"))
        slope = 1.0 if divisor is None else 1 / divisor.low if divisor.low > 0 else math.inf
    return max(1.0, slope * max(sizes) / (result.rms * math.sqrt(result.elements)))


def _is_steep(op: str) -> bool:
    """Return whether a function may have any slope: tan, atanh, sinc, polygamma, unlisted ones."""
    kind = op_kind(op)
    is_known = kind.family or "backward" in op or bound_kind(op)
    return _is_of(op, "steep") or not (
        is_known or _is_of(op, "flat", "jumps", "likelihoods", "distances", "of_differences")
    )


def _size(op: str, position: int, inputs: Mapping[str, Piece], result: Piece, is_backward: bool) -> float:
    """Return the size that the terms of a result have together."""
    kind, largest = op_kind(op), max(piece.rms for piece in inputs.values())
    if is_backward and "backward" in kind.name:
        return _size_of_gradient(op, position, inputs, result)
    if position:
        return largest  # a mean with the values that it is the mean of
    if kind.family in (GEMM, CONV) or bound_kind(op) == PRODUCT:
        factors = [p.rms for name, p in inputs.items() if name != "bias" and not (name == "self" and "mat1" in inputs)]
        added = inputs["self"].rms if "self" in inputs and "mat1" in inputs else 0.0
        return max(added, math.sqrt(_terms(op, inputs, result)) * math.prod(factors[:2]))
    if kind.family == REDUCTION or _is_of(op, "means") or bound_kind(op) == SCATTER:
        terms = max(1.0, max(piece.elements for piece in inputs.values()) / max(1, result.elements))
        return largest / math.sqrt(terms) if _is_of(op, "means") else largest * math.sqrt(terms)
    if _is_of(op, "sums", "distances"):
        return largest
    if kind.name == "mul" and len(inputs) > 1:  # by a mask that may leave small values alone
        return math.prod(sorted(piece.rms for piece in inputs.values())[-2:])
    if _is_of(op, "logarithms"):
        return max(_over_smallest(piece, kind.name == "log1p") for piece in inputs.values())
    if _is_of(op, "periodic", "likelihoods"):
        return max(piece.largest for piece in inputs.values())
    if kind.name == "kl_div":  # near the target, its logarithms cancel
        return max(piece.largest * math.sqrt(piece.count) for piece in inputs.values())
    if kind.name in ("lgamma", "digamma"):  # zero at one and two, and nearby
        return max((1.0 + p.largest * abs(math.log(p.largest)) for p in inputs.values() if p.largest), default=1.0)
    return 0.0


def _size_of_gradient(op: str, position: int, inputs: Mapping[str, Piece], result: Piece) -> float:
    gradient = next((piece for name, piece in inputs.items() if name.startswith("grad")), None)
    if gradient is None:
        return 0.0
    if "convolution" in op and position < len(_OF_CONVOLUTION):
        names = _OF_CONVOLUTION[position]
        terms = _terms(op, inputs, result) if len(names) > 1 else gradient.elements / max(1, result.elements)
        return math.sqrt(terms) * math.prod(inputs[name].rms for name in names if name in inputs)
    terms = max(1.0, gradient.elements / max(1, result.elements))
    others = [piece.largest for piece in inputs.values() if piece is not gradient] if "softmax" in op else []
    return gradient.rms * math.sqrt(terms) * max(others, default=1.0)


def _terms(op: str, inputs: Mapping[str, Piece], result: Piece) -> int:
    shapes: list[Sequence[int]] = [piece.facts.shape for piece in inputs.values() if piece.facts is not None]
    try:
        return terms_of(op, shapes, [result.facts.shape] if result.facts is not None else [(result.elements,)])
    except (IndexError, ValueError):
        return 1


def _over_smallest(piece: Piece, more: float = 0.0) -> float:
    """Return the ratio of values to the smallest of them, with `more` added to both: the error of a logarithm, and of a
    quotient, is the relative error of its argument there.
    """
    smallest = piece.low + more
    return max(1.0, min(_STEEPEST, (piece.rms + more) / smallest)) if smallest > 0 else _STEEPEST


def _steepness(op: str, inputs: Mapping[str, Piece]) -> float:
    """Return how steep a function is: of exponentials by the largest exponent, of quotients by the smallest divisor, of
    norms by what the mean leaves, of losses by the distance from their target.
    """
    kind = op_kind(op)
    if _is_of(op, "of_differences") and len(inputs) > 1:
        value, target, *_ = inputs.values()
        difference = distance(value, target).relative
        return 1 / difference if difference > 0 else 1.0
    read = next(iter(inputs.values()))
    if kind.family == SOFTMAX or _is_of(op, "exponentials"):
        steepness = max(abs(p.high) if p.is_mask else p.largest for p in inputs.values())
        if kind.name == "pow" and read.low > 0:  # the exponent may be negative
            steepness = max(steepness, _over_smallest(read))
        return steepness if kind.family == SOFTMAX else min(_STEEPEST, steepness)  # scores may be -1e4 where masked
    if kind.family == ATTENTION and {"query", "key"} <= inputs.keys():
        return 3 * inputs["query"].rms * inputs["key"].rms * math.sqrt(inputs["query"].columns)
    divisor = inputs.get("other", inputs.get("tensor2")) if _is_of(op, "quotients") else None
    divisor = read if _is_of(op, "reciprocals") else divisor
    if divisor is not None and divisor.high > 0:  # with zero among them they may be as large as any
        return _over_smallest(divisor) if divisor.low > 0 else math.inf
    if read.low < 0 and _is_of(op, "with_poles"):
        return math.inf
    if kind.family == NORM:
        spread = read.rms**2 - read.mean**2
        return read.rms / math.sqrt(spread) if spread > read.rms**2 / _STEEPEST**2 else _STEEPEST
    return 1.0
