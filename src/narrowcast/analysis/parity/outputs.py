"""Outputs of two programs, number by number: which are compared, and how far apart they are."""

from __future__ import annotations

import math
from typing import Any

import torch

from narrowcast.observation.trial.output_errors import as_real, dense, difference, error_of, named_tensors, numbers_in
from narrowcast.observation.trial.trial import has_numbers, opened
from narrowcast.output.words import counted
from narrowcast.runtime.torch_bridge import short_type
from narrowcast.runtime.torch_surface.dispatch import tree_map_only

_LEAST = 1e-6
"""A tensor whose values are smaller than those of all outputs by more than this is measured as if they were not."""
Pair = tuple[torch.Tensor, torch.Tensor]


def pairs_of(a: Any, b: Any) -> tuple[list[Pair], list[Pair]]:
    """Return the tensors of a's output, and Python's numbers as tensors, each with its partner in b's: floating and
    complex ones, and integers. By name, or, if names are others, in order. ValueError, with what to say, for other
    shapes and other counts.
    """
    of_a, of_b = _numbers_in(a), _numbers_in(b)
    if len(of_a) != len(of_b) or not of_a:
        named = [", ".join(side) or "none" for side in (of_a, of_b)]
        raise ValueError(f"a returns {counted(len(of_a), 'tensor')} ({named[0]}), b {len(of_b)} ({named[1]})")
    names = zip(of_a, of_a if of_a.keys() == of_b.keys() else of_b, strict=True)
    pairs = {name: (of_a[name], of_b[partner]) for name, partner in names}
    for name, (x, y) in pairs.items():
        if x.shape != y.shape or has_numbers(x) != has_numbers(y):
            text = " in a, ".join(f"{short_type(one.dtype)} {list(one.shape)}" for one in (x, y))
            raise ValueError(f"{name} is {text} in b")
    floating, others = (
        [pair for pair in pairs.values() if has_numbers(pair[0]) is is_floating] for is_floating in (True, False)
    )
    return floating, others


def error_of_outputs(a: Any, b: Any) -> float:
    """Return the largest relative error (L2), in fp64, of a tensor of b's output, or of all together: infinity where
    one alone is not finite. Where these are equal, the root of the share of integers that differ; NaN where `pairs_of`
    has none.
    """
    try:
        floating, others = pairs_of(a, b)
    except ValueError:
        return math.nan
    return _error(floating) or math.sqrt(_share_apart(others))


def notes_on(a: Any, b: Any) -> list[str]:
    """Return why outputs are not compared, or how many integers differ where a distance is of floating numbers."""
    try:
        floating, others = pairs_of(a, b)
    except ValueError as error:
        return [f"outputs are not compared: {error}. Give functions that return what is to be compared."]
    share = _share_apart(others)
    if not share or not _error(floating):
        return []
    return [f"the distance is of floating numbers; {share:.2g} of the outputs' integers differ, too"]


def _error(pairs: list[Pair]) -> float:
    wide = [(as_real(dense(x)).double(), as_real(dense(y)).double().to(x.device)) for x, y in pairs]
    together = error_of([y for _, y in wide], [x for x, _ in wide])
    if not math.isfinite(together):
        return math.inf
    squares = [float(numbers_in(x).square().sum()) for x, _ in wide]
    least = _LEAST**2 * sum(squares) / max(1, sum(x.numel() for x, _ in wide))
    each = [(float(difference(x, y).square().sum()), max(square, least * x.numel()))
            for (x, y), square in zip(wide, squares, strict=True)]  # fmt: skip
    return max([together, *(math.sqrt(noise / size) for noise, size in each if size)])


def _share_apart(pairs: list[Pair]) -> float:
    count = sum(x.numel() for x, _ in pairs)
    return sum(int((x != y).sum()) for x, y in pairs) / count if count else 0.0


def _numbers_in(output: Any) -> dict[str, torch.Tensor]:
    """Return tensors and Python's numbers by where they stand in an output."""
    return dict(named_tensors(tree_map_only((float, complex, int), _tensor, opened(output))))


def _tensor(number: complex) -> torch.Tensor:
    wide = torch.complex128 if isinstance(number, complex) else torch.float64
    return torch.tensor(number, dtype=torch.int64 if isinstance(number, int) else wide, device="cpu")
