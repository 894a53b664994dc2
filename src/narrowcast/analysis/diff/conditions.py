"""How many times larger errors come out of a call than they went in, from the sizes of what it read and what it gave.

A sum that cancels is small beside its terms, and so is what it gives beside its own error: errors go with the size that
the terms have together, if their signs fall as they will (Higham, section 2.8), not with what is left of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from narrowcast.analysis.diff.pieces import Piece, distance
from narrowcast.core.ops import named, op_kind
from narrowcast.core.ops.bounds import PRODUCT, SCATTER, bound_kind, terms_of
from narrowcast.core.ops.facts import ATTENTION, CONV, COPY, GEMM, MOVEMENT, NORM, REDUCTION, SOFTMAX, VIEW

_STEEPEST = 100.0
"""No exponential whose argument is larger, and no norm that leaves less, says anything of how errors grow."""
_OF_BACKWARD = 8.0
"""Gradients through norms and softmax are what is left of a projection; how much, cannot be told from sizes alone."""
_OF_CONVOLUTION = (("grad_output", "weight"), ("grad_output", "input"), ("grad_output",))
"""What each result of a convolution's backward is a sum of products of."""


def _is_of(op: str, *kinds: str) -> bool:
    """Return whether errors grow in an op as in those kinds of the table of ops."""
    return any(op_kind(op).name in named(f"growth.{kind}") for kind in kinds)


def moves(op: str) -> bool:
    """Whether an op only moves values, all or some."""
    return op_kind(op).family in (MOVEMENT, VIEW, COPY)


def passes_on(op: str) -> bool:
    """Whether relative errors come out of an op as they went in: it scales, selects or moves."""
    return moves(op) or _is_of(op, "scales")


def jump(op: str, came: float, chosen_by: float = 0.0) -> float:
    """How far off the result is of an op that chooses by a sign or a place, where what it chooses by is off: that share
    of elements lies on the other side, each as wrong as it is large. chosen_by: how far off the floats are of which its
    conditions were made.
    """
    is_jump = _is_of(op, "jumps") or op.endswith("_mode")  # a quotient that is rounded
    off = max(chosen_by, came if is_jump else 0.0)
    return math.sqrt(off) if off < 1 else 0.0


def growth(
    op: str,
    position: int,
    came: Mapping[str, Piece],
    gave: Piece,
    out: float,
    is_backward: bool,
    is_equal: bool = False,
) -> float:
    """How many times, at least once. came: what the call read, by name; gave: the result at that position; out: its
    root mean square, the larger of both runs'. is_equal: both runs read the same bits: it is the call's own errors that
    grow.
    """
    seen = {name: piece for name, piece in came.items() if piece.is_seen}
    if not out or not seen:
        return 1.0
    least = _OF_BACKWARD if "backward" in op else _STEEPEST if _is_of(op, "of_matrices") else 1.0
    steepness = 1.0 if is_equal else max(_STEEPEST * _is_steep(op), _steepness(op, seen))
    return max(least, _size(op, position, seen, gave, is_backward) / out, steepness)


def growth_in_rows(op: str, read: Sequence[Piece], gave: Piece) -> float:
    """Return by how much errors of single rows may grow beside the largest element, at least 1: where a call multiplies
    or divides each row by a number, as a norm that is written out does.
    """
    if len(read) < 2 or not _is_of(op, "scales") or gave.columns == 1 or 1 not in (read[0].columns, read[1].columns):
        return 1.0
    factor = read[1].largest if op_kind(op).name == "mul" else 1 / read[1].low if read[1].low > 0 else 0.0
    return max(1.0, read[0].largest * factor / gave.rms) if gave.rms else 1.0


def _is_steep(op: str) -> bool:
    """Whether a function may be as steep as any: tan, atanh, sinc, polygamma, those that nobody lists."""
    kind = op_kind(op)
    is_known = kind.family or "backward" in op or bound_kind(op)
    return _is_of(op, "steep") or not (
        is_known or _is_of(op, "flat", "jumps", "likelihoods", "distances", "of_differences")
    )


def _size(op: str, position: int, came: Mapping[str, Piece], gave: Piece, is_backward: bool) -> float:
    """The size that the terms of a result have together."""
    kind, largest = op_kind(op), max(piece.rms for piece in came.values())
    if is_backward and "backward" in kind.name:
        return _size_of_gradient(op, position, came, gave)
    if position:
        return largest  # a mean beside what it is the mean of
    if kind.family in (GEMM, CONV) or bound_kind(op) == PRODUCT:
        factors = [p.rms for name, p in came.items() if name != "bias" and not (name == "self" and "mat1" in came)]
        added = came["self"].rms if "self" in came and "mat1" in came else 0.0
        return max(added, math.sqrt(_terms(op, came, gave)) * math.prod(factors[:2]))
    if kind.family == REDUCTION or _is_of(op, "means") or bound_kind(op) == SCATTER:
        terms = max(1.0, max(piece.elements for piece in came.values()) / max(1, gave.elements))
        return largest / math.sqrt(terms) if _is_of(op, "means") else largest * math.sqrt(terms)
    if _is_of(op, "sums", "distances"):
        return largest
    if kind.name == "mul" and len(came) > 1:  # by a mask, that leaves what is small
        return math.prod(sorted(piece.rms for piece in came.values())[-2:])
    if _is_of(op, "logarithms"):
        return max(_over_smallest(piece, kind.name == "log1p") for piece in came.values())
    if _is_of(op, "periodic", "likelihoods"):
        return max(piece.largest for piece in came.values())
    if kind.name == "kl_div":  # near the target, what is left of its logarithms
        return max(piece.largest * math.sqrt(piece.count) for piece in came.values())
    if kind.name in ("lgamma", "digamma"):  # zero at one and two, and nearby
        return max((1.0 + p.largest * abs(math.log(p.largest)) for p in came.values() if p.largest), default=1.0)
    return 0.0


def _size_of_gradient(op: str, position: int, came: Mapping[str, Piece], gave: Piece) -> float:
    given = next((piece for name, piece in came.items() if name.startswith("grad")), None)
    if given is None:
        return 0.0
    if "convolution" in op and position < len(_OF_CONVOLUTION):
        names = _OF_CONVOLUTION[position]
        terms = _terms(op, came, gave) if len(names) > 1 else given.elements / max(1, gave.elements)
        return math.sqrt(terms) * math.prod(came[name].rms for name in names if name in came)
    terms = max(1.0, given.elements / max(1, gave.elements))
    others = [piece.largest for piece in came.values() if piece is not given] if "softmax" in op else []
    return given.rms * math.sqrt(terms) * max(others, default=1.0)


def _terms(op: str, came: Mapping[str, Piece], gave: Piece) -> int:
    shapes: list[Sequence[int]] = [piece.facts.shape for piece in came.values() if piece.facts is not None]
    try:
        return terms_of(op, shapes, [gave.facts.shape] if gave.facts is not None else [(gave.elements,)])
    except (IndexError, ValueError):
        return 1


def _over_smallest(piece: Piece, more: float = 0.0) -> float:
    """How large values are beside the smallest of them, to which more is added: a logarithm is off by what that is off
    in parts of itself, and so is a quotient.
    """
    smallest = piece.low + more
    return max(1.0, min(_STEEPEST, (piece.rms + more) / smallest)) if smallest > 0 else _STEEPEST


def _steepness(op: str, came: Mapping[str, Piece]) -> float:
    """How fast a function grows: of exponentials by the largest exponent, of quotients by the smallest divisor, of
    norms by what a mean leaves, of losses by how near to their target they are.
    """
    kind = op_kind(op)
    if _is_of(op, "of_differences") and len(came) > 1:
        given, goal, *_ = came.values()
        apart = distance(given, goal).relative
        return 1 / apart if apart > 0 else 1.0
    read = next(iter(came.values()))
    if kind.family == SOFTMAX or _is_of(op, "exponentials"):
        steepness = max(abs(p.high) if p.is_mask else p.largest for p in came.values())
        if kind.name == "pow" and read.low > 0:  # the exponent may be negative
            steepness = max(steepness, _over_smallest(read))
        return steepness if kind.family == SOFTMAX else min(_STEEPEST, steepness)  # scores may be -1e4 where masked
    if kind.family == ATTENTION and {"query", "key"} <= came.keys():
        return 3 * came["query"].rms * came["key"].rms * math.sqrt(came["query"].columns)
    divisor = came.get("other") if _is_of(op, "quotients") else read if _is_of(op, "reciprocals") else None
    if divisor is not None and divisor.high > 0:  # with zero among them they may be as large as any
        return _over_smallest(divisor) if divisor.low > 0 else math.inf
    if read.low < 0 and _is_of(op, "with_poles"):
        return math.inf
    if kind.family == NORM:
        spread = read.rms**2 - read.mean**2
        return read.rms / math.sqrt(spread) if spread > read.rms**2 / _STEEPEST**2 else _STEEPEST
    return 1.0
