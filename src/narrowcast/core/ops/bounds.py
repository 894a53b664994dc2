"""How far a sound kernel may be from the exact result, from formats and lengths alone.

With u half a unit of a format, eta its smallest subnormal, y the exact result of rounded inputs:

    one rounding             |fl(y) - y| <= u |y| + eta / 2                         Higham, eq. 2.8; IEEE 754-2019
    a sum of K terms         |error| <= gamma(K, u) (the sum of absolute values)    Higham, sections 3.1 and 4.2
      with luck of signs     probable_gamma(K, u) for gamma, where roundings        Higham and Mary, theorem 2.4
                             are independent of mean zero
    a product of matrices    the same, K the inner size, whatever the order         Higham, eq. 3.13
    a product of K factors   gamma(K, u) |y|                                        Higham, lemma 3.1
    attention                weights off by exp(2 d) - 1, d the scores' error       from softmax's derivative
    log of a sum of K        u (2 log K + 4): the mean of what is subtracted is     Blanchard, D. Higham and N. Higham,
      exponentials           an entropy, log K at most                              IMA J. Numer. Anal. 41 (2021)
    erf                      2^-20 more: a polynomial is right to 1.5e-7 of 1       Abramowitz and Stegun, 7.1.26
    of everything else       what the op in fp32 is off on the same inputs; of norms, too, what it changes that these
                             move by units of fp32

N. Higham, Accuracy and Stability of Numerical Algorithms, SIAM 2002. N. Higham and T. Mary, A New Approach to
Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41 (2019) A2815.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from narrowcast.core.ops.facts import ATTENTION, CONV, COPY, FUSED, GEMM, NORM, VIEW, named, op_kind
from narrowcast.formats import Format, fp32

PRODUCT, SUM, SCATTER, WEIGHTS, WIDE, STEPS, WEIGHTS_BACKWARD = (
    "product", "sum", "scatter", "weights", "wide", "steps", "weights backward",
)  # fmt: skip
"""What bounds a kernel: sums of products, or of terms, in fp32; sums in the result's own format; attention's weights;
the same op in fp32, of pointwise ops and whatever else has one rounding at its end; products that are rounded after
each factor; attention's weights and what is multiplied with them on the way back.
"""
NAMED = 2.0
"""A kernel is named from this many times its bound on."""
WIDE_FACTOR = 4.0
"""How many times the error of the op in fp32 its low kernel may be off inside, which adds in another order."""
_SCANNED = 512
"""A running sum is taken in blocks of at most this many terms."""
_SURE_TERMS = 4096
"""Sums of up to this many terms have the bound that always holds; of more, one that nearly always does is smaller."""
_LUCK = 9.0
"""The standard deviations of a sum's rounding errors that the probable bound allows."""
_POLYNOMIAL = 2.0**-20
"""The absolute error of erf where a polynomial approximates it in fp32."""


def unit(format: Format) -> float:
    """Return half the distance from 1.0 to the next value: the largest relative error of one rounding to nearest."""
    return format.epsilon / 2


def gamma(terms: int, u: float) -> float:
    """Return K u / (1 - K u), infinity from K u = 1 on: the bound of K roundings, whatever their signs."""
    share = terms * u
    return share / (1 - share) if share < 1 else math.inf


def probable_gamma(terms: int, u: float, luck: float = _LUCK) -> float:
    """Return exp(luck sqrt(K) u + K u^2 / (1 - u)) - 1. One of exp(luck^2 / 2) / 2 sums fails: 2e17, if luck is 9."""
    exponent = luck * math.sqrt(terms) * u + terms * u * u / (1 - u)
    return math.expm1(exponent) if exponent < 700 else math.inf


def accumulated(terms: int, format: Format = fp32) -> float:
    """Return gamma of sums in a format: the sure one up to 4,096 terms, and the probable one where that is larger."""
    u = unit(format)
    sure = gamma(min(terms, _SURE_TERMS), u)
    return sure if terms <= _SURE_TERMS else max(sure, probable_gamma(terms, u))


def weights_error(scores: float, roundings: float) -> float:
    """Return the relative error bound of attention's weights, from the absolute error of scores and from roundings."""
    return math.expm1(min(2 * scores, 700.0)) + roundings


def rounding(format: Format, flushes: bool) -> tuple[float, float]:
    """Return u and the absolute error of one rounding; flushes: what is below the smallest normal becomes 0.

    Below the smallest normal of fp32 nothing is sure: low kernels compute in it, and some flush, whatever the mode.
    """
    least = format.smallest_normal if flushes else format.smallest / 2
    return unit(format), least if format.exponent_bits > fp32.exponent_bits else max(least, fp32.smallest_normal)


def cancels(op: str) -> bool:
    """Return whether an op subtracts a mean: of values that are alike fp32 may leave nothing but error."""
    kind = op_kind(op)
    return kind.family == NORM or kind.name in named("bound.cancels")


def absolute_error(op: str, given: Sequence[Sequence[int]], u: float) -> float:
    """Return the absolute error that does not depend on the result: of log_softmax, which rounds the logarithm of a sum
    of at most this many exponentials, each up to 1; of logsumexp, which rounds what it subtracts, too; of a polynomial.
    """
    name = op_kind(op).name
    if name in named("bound.polynomials"):
        return _POLYNOMIAL
    if name not in named("bound.rounds_logarithm"):
        return 0.0
    logarithm = math.log(max((max(shape, default=1) for shape in given), default=1))
    return u * (2 * logarithm + 4 if "logsumexp" in name else logarithm)


def scanned(terms: int) -> int:
    """Return how many additions follow each other in a parallel running sum: up and down a tree in blocks of 512 terms,
    and one from block to block.
    """
    return 2 * min(terms, _SCANNED).bit_length() + terms // _SCANNED


def steps_in_between(op: str, given: Sequence[Sequence[int]], transposed: bool, on_cpu: bool) -> int:
    """Return how often a product may round in between to its result's format. A transposed convolution on the CPU, or a
    backward there, does for each place of the kernel, and for each sample; a bilinear form for each column; einsum for
    each product but the last.
    """
    name = op_kind(op).name
    if name == "einsum":
        return max(len(given) - 2, 0)
    if name in ("bilinear", "_trilinear"):
        return max(given[0]) + 4
    if not on_cpu or not (("convolution" in name and ("backward" in name or transposed)) or "transpose" in name):
        return 0
    source, weight = given[1:3] if "backward" in name else given[:2]
    return math.prod(weight[2:]) + source[0]


def bound_kind(op: str, is_pointwise: bool = False) -> str:
    """Return what bounds the kernel of the op with this id; empty if nothing does. is_pointwise: as torch tags it."""
    kind = op_kind(op)
    name = kind.name
    if name in named("bound.none") or not op.startswith("aten."):
        return ""
    for fact, bound in (("scatter", SCATTER), ("steps", STEPS), ("attention_backward", WEIGHTS_BACKWARD)):
        if name in named(f"bound.{fact}"):
            return bound
    if name in named("bound.sums"):
        return SUM
    if kind.family in (GEMM, CONV) or name in named("bound.products"):
        return PRODUCT
    if kind.family == ATTENTION:
        return WEIGHTS
    known = is_pointwise or kind.family in FUSED - {VIEW, COPY} or name in named("bound.wide")
    return WIDE if known else ""


def terms_of(op: str, given: Sequence[Sequence[int]], outs: Sequence[Sequence[int]]) -> int:
    """Return how many terms, at most, are added up for one element of a result of a product, a convolution or a sum.

    given, outs: shapes of the input tensors and of the output tensors, in order, absent ones left out.
    """
    kind = op_kind(op)
    name = kind.name
    if "convolution" in name or kind.family == CONV:
        weight, other = (given[2], given[0]) if "backward" in name else (given[1], outs[0])
        spatial = math.prod(other) // max(1, min(other[1:2] or [1]))
        return max(math.prod(weight[1:]), math.prod(weight) // max(1, weight[1]), spatial) + 1
    if name in ("bilinear", "_trilinear"):
        return math.prod(given[2][1:]) + 1
    if bound_kind(op) == STEPS:
        return math.prod(given[0]) // max(1, math.prod(outs[0])) + 3
    if bound_kind(op) == SUM:
        return max(1, math.prod(given[0]) // max(1, min(map(math.prod, outs)))) if name != "cumsum" else max(given[0])
    return max((max(shape, default=1) for shape in given), default=1) + 1  # no inner size is larger
