"""How many multiplications a call makes, from shapes alone: of products, convolutions, attention, recurrent layers.

What is counted is a multiplication together with the addition that follows it; torch.utils.flop_counter says two. A
causal mask, zeros and biases are ignored. With n(x) for the elements of x:

    product           left[..., M, K] right[..., K, N]             n(result) K
    convolution       weight[O, C / groups, *kernel]               n(result) n(weight) / O
      transposed      weight[I, O / groups, *kernel]               n(input) n(weight) / I
      its backward    as much for each gradient that is made: the input's, the weight's
    attention         q[..., L, E] k[..., S, E] v[..., S, V]       n(q) / E S (E + V): scores, and the sum of values
      its backward    scores again, and four gradients             n(q) / E S (3 E + 2 V)
    recurrent layer   input[T, B, I], weights of two dimensions    T B n(weights)
      its backward    as much for the input, and for the weights

Sources: Dumoulin and Visin, arXiv 1603.07285 (convolutions); Vaswani et al., arXiv 1706.03762, section 3.2 (attention);
Dao et al., arXiv 2205.14135, algorithm 4 (what its backward makes again). tests/analysis holds them against
torch.utils.flop_counter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from narrowcast.core.ops.facts import ATTENTION, CONV, GEMM, named, op_kind

Sizes = Sequence[Sequence[int]]
_BACKWARD = "_backward"


def multiplications(
    op: str, shapes: Sequence[Sequence[int | str]], results: Sequence[Sequence[int | str]], transposed: bool = False
) -> int | None:
    """Return how many multiplications a call makes: 0 of an op that makes none, None where that is not known.

    op: its id, `aten.mm.default`. shapes: of the input tensors, in the order of its arguments; results: of the output
    tensors; what is absent is left out of both. transposed: of a convolution, if an argument says so and not its name.
    Not known: sizes that are symbolic, and ops that multiply in ways that shapes alone do not say.
    """
    name = op_kind(op).name
    if name in named("multiplies.unknown"):
        return None
    count = _count_of(op, name)
    if count is None:
        return 0
    if any(isinstance(size, str) for shape in (*shapes, *results) for size in shape):
        return None
    given = [[int(size) for size in shape] for shape in shapes]
    outputs = [[int(size) for size in shape] for shape in results]
    try:
        return count(name, given, outputs, transposed or "transpose" in name)
    except (IndexError, ValueError, ZeroDivisionError):  # not all of them were seen
        return None


def _count_of(op: str, name: str) -> Callable[[str, Sizes, Sizes, bool], int] | None:
    if name.removesuffix(_BACKWARD) in named("multiplies.recurrent"):
        return _recurrent
    family = op_kind(op.replace(_BACKWARD, "", 1)).family
    if family == GEMM:
        return None if _BACKWARD in name else _product
    return {CONV: _convolution, ATTENTION: _attention}.get(family)


def _product(name: str, given: Sizes, output: Sizes, _: bool) -> int:
    left = given[1 if name in named("multiplies.bias_first") and len(given) > 2 else 0]
    if name == "addbmm":  # the sum over the batch is in no size of the result
        return math.prod(left) * output[0][-1]
    common = 1 if name == "outer" or not left else left[-1]
    return math.prod(output[0]) * common


def _convolution(name: str, given: Sizes, output: Sizes, transposed: bool) -> int:
    is_backward = _BACKWARD in name
    source, weight = given[1:3] if is_backward else given[:2]
    result = given[0] if is_backward else output[0]
    once = math.prod(source if transposed else result) * math.prod(weight[1:])
    return once * sum(len(shape) > 1 for shape in output) if is_backward else once


def _attention(name: str, given: Sizes, output: Sizes, _: bool) -> int:
    is_backward = _BACKWARD in name
    query, key, value = given[1:4] if is_backward else given[:3]
    queries, keys = math.prod(query[:-1]), key[-2]
    width, width_of_values = query[-1], value[-1]
    return queries * keys * (3 * width + 2 * width_of_values if is_backward else width + width_of_values)


def _recurrent(name: str, given: Sizes, output: Sizes, _: bool) -> int:
    others = given[1:5] if name.startswith("mkldnn") else given[1:]  # its states have two dimensions, too
    weights = sum(math.prod(shape) for shape in others if len(shape) == 2)
    return math.prod(given[0][:-1]) * weights * (2 if _BACKWARD in name else 1)
