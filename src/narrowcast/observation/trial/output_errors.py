"""How far outputs are from a reference's: signal to noise, relative and largest errors, tensor by tensor."""

from __future__ import annotations

import math
import re
from typing import Any

import torch

from narrowcast.formats import bf16, fp16
from narrowcast.reports.results.differences import OutputError
from narrowcast.reports.results.run_records import MASK_NUMBER
from narrowcast.runtime.torch_bridge import part_of, short_type, tensors_in
from narrowcast.runtime.torch_surface.dispatch import keystr, tree_flatten_with_path

MASKED = -0.99 * fp16.max
"""What is lower than any score: with whatever number a program masks in each format, it says the same."""


def sqnr_db(reference: torch.Tensor, found: torch.Tensor) -> float:
    """Return the signal to quantisation noise in dB: 10 log10(sum ref^2 / sum (ref - x)^2), in fp64.

    Any shapes, equal ones; infinity if the tensors are equal, NaN if one holds a NaN or infinity that the other lacks.
    """
    ref, x = reference.detach().double(), found.detach().double()
    return decibels(float(numbers_in(ref).square().sum()), float(difference(ref, x).square().sum()))


def decibels(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise): infinity without noise, NaN where the noise is not finite."""
    if noise == 0.0:
        return math.inf
    if not math.isfinite(noise):
        return math.nan
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def relative_error(reference: torch.Tensor, found: torch.Tensor) -> float:
    """Return ||x - ref|| / ||ref|| in fp64; 0 if equal. Of a reference of zeros, which has no size of its own, the root
    mean square of x: x is taken to be of size one.
    """
    ref, x = reference.detach().double(), found.detach().double()
    error = error_of([x], [ref])
    return error if math.isfinite(error) or bool(ref.any()) else float(x.square().mean().sqrt())


def error_of(found: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    """Return the relative error over several tensors in fp64; NaN if a value is not finite on one side alone."""
    noise = sum(float(difference(r, x).square().sum()) for x, r in zip(found, reference, strict=False))
    if noise == 0.0:
        return 0.0
    signal = sum(float(numbers_in(r).square().sum()) for r in reference)
    return math.sqrt(noise / signal) if signal else math.inf


def difference(ref: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return x - ref, zero where both are the same infinity, both NaN, or both what masks are filled with."""
    off = x - ref
    if _are_plain(ref) and _are_plain(x):
        return off
    same = (ref == x) | (torch.isnan(ref) & torch.isnan(x)) | (is_masked(ref) & is_masked(x))
    beyond = torch.isinf(x) & torch.isfinite(ref)
    if are_mask_numbers(ref[beyond], ref.numel()):
        same |= beyond
    return torch.where(same, torch.zeros_like(ref), off)


def numbers_in(ref: torch.Tensor) -> torch.Tensor:
    """Return the tensor with zeros where it is not finite, and where it is masked."""
    return ref if _are_plain(ref) else torch.where(is_masked(ref), 0.0, ref).nan_to_num(0.0, 0.0, 0.0)


def _are_plain(x: torch.Tensor) -> bool:
    """Return whether all values are finite and none is a mask's, by a quick test: False does not prove the opposite."""
    return not x.numel() or (math.isfinite(float(x.sum())) and float(x.min()) > MASKED)


def are_mask_numbers(values: torch.Tensor, among: int) -> bool:
    """Return whether values that a format does not hold are one number far beyond scores: masks add or fill in -1e9.

    A result that overflows is one number, too: masks are negative, or large, have one digit or are powers of two, and
    are some of the elements. among: how many there are in all.
    """
    sizes = values.abs()
    if not sizes.numel() or not MASK_NUMBER <= float(sizes.min()) <= float(sizes.max()) <= _FARTHEST:
        return False
    largest, is_some = float(sizes.max()), sizes.numel() < among
    if largest - float(sizes.min()) > 1e-3 * largest:
        return False
    if bool((values < 0).all()):
        return _is_written(largest) or (is_some and sizes.numel() > 1)
    return is_some and largest >= _POSITIVE and _is_written(largest)


def _is_written(number: float) -> bool:
    """Return whether it is about 1e9, 3e7, 2**31, give or take the scores that it was added to."""
    first = 10.0 ** math.floor(math.log10(number))
    near = (round(number / first) * first, 2.0 ** round(math.log2(number)))
    return any(abs(number - one) <= _SCORES + 1e-6 * number for one in near)


_FARTHEST = 1e30
"""What is as large as a format itself is no such number."""
_POSITIVE = 1e9
"""Distances are masked with numbers from here on; smaller positive ones are results."""
_SCORES = 100.0


def is_masked(x: torch.Tensor) -> torch.Tensor:
    """Return where a tensor in fp64 has what masks are filled with: -infinity, and about the lowest of a format."""
    return (x <= 0.99 * -bf16.max) | ((x <= MASKED) & (x >= -fp16.max))


def output_errors(reference: Any, found: Any) -> tuple[OutputError, ...]:
    """Return one row per floating tensor in the outputs (nested in tuples, dicts, dataclasses that pytree knows). Of
    complex ones real and imaginary parts are compared.
    """
    rows = []
    pairs = zip(named_tensors(reference), named_tensors(found), strict=False)
    for (name, ref), (_, x) in pairs:
        shape = ref.shape
        is_real = ref.is_floating_point() and x.is_floating_point()
        if not (is_real or (ref.is_complex() and x.is_complex())) or ref.shape != x.shape:
            continue
        names = short_type(ref.dtype), short_type(x.dtype)
        ref, x = as_real(dense(ref)), as_real(dense(x))
        largest = difference(ref.detach().double(), x.detach().double()).abs()
        error = float(largest.max()) if largest.numel() else 0.0
        given = f"{names[0]} {list(shape)}"
        rows.append(OutputError(name, given, names[1], sqnr_db(ref, x), relative_error(ref, x), error))
    return tuple(rows)


def gradient_error(reference: torch.Tensor, found: torch.Tensor) -> float:
    """Return the relative error of a gradient, which may be sparse or complex."""
    return error_of([flat(found)], [flat(reference)])


def flat(gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient's values in fp64."""
    return as_real(dense(gradient.detach())).double().flatten()


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as its real and imaginary parts, [..., 2]; another as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with every element, if it is a sparse one; of a sharded one this rank's."""
    part = part_of(tensor)
    return part if part.layout is torch.strided else part.to_dense()


def named_tensors(tree: Any) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors in a tree that pytree knows, each with where it stands."""
    leaves, _ = tree_flatten_with_path(tree)
    return [(_name_of(path), leaf) for path, leaf in leaves if torch.is_tensor(leaf)]


def _name_of(path: Any) -> str:
    """Return where a tensor stands in an output: `logits`, `hidden[0]`, `output`."""
    return re.sub(r"\['([A-Za-z_]\w*)'\]", r".\1", keystr(path)).lstrip(".") or "output"


def has_nan(tree: Any) -> bool:
    """Return whether a floating tensor among the outputs holds NaN."""
    return any(t.is_floating_point() and bool(torch.isnan(dense(t)).any()) for t in tensors_in(tree))
