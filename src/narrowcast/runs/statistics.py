"""Statistics of tensors, in one pass each: the range exactly, the rest of a sample; on accelerators read at the end.

A tensor that was not written to since is looked at once, however many calls read it.
"""

from __future__ import annotations

import math
import os
import zlib
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from narrowcast.errors import Origin, RunError
from narrowcast.report.run import Histogram, TensorFacts
from narrowcast.report.sketch import SUMS, sketch_text, sketched_rows, sketched_step
from narrowcast.runs.by_storage import ByStorage, has_storage
from narrowcast.torch_bridge import FORMATS, short_type
from narrowcast.torch_surface.dispatch import StorageWeakRef, storage_key, version_of

SAMPLE = 4096
"""How many elements of a tensor the sampled statistics look at."""
_HELD_BYTES = 1 << 28
"""Samples that wait on an accelerator are read when they take this much."""


@dataclass(slots=True)
class _Pending:
    """What was taken of a tensor and not read yet."""

    facts: TensorFacts
    range: tuple[torch.Tensor, torch.Tensor]
    sample: torch.Tensor
    rows: torch.Tensor


class Statistics:
    """A table of tensors' facts. Must be used where nothing watches: its own work is no call of the run.

    whole: look at every element, not at a sample. checksums: also keep one of each tensor's bytes. folder: write the
    tensors themselves into it, as long as limit_bytes last.
    """

    def __init__(
        self, whole: bool = False, checksums: bool = False, folder: Path | None = None, limit_bytes: int = 1 << 30,
    ) -> None:  # fmt: skip
        self._whole, self._checksums = whole, checksums
        self.folder, self._left = folder, limit_bytes
        self.not_written = 0
        self._written: list[Path] = []
        self._rows: list[TensorFacts | _Pending] = []
        self._known: dict[tuple[int, int, Any], tuple[int, Any]] = {}
        self._last_in = ByStorage[int]()
        self._held_bytes = 0

    def number(self, tensor: torch.Tensor) -> int:
        """The tensor's number in the table, where it is entered if it is not there as it is now."""
        key = weak = None
        if has_storage(tensor):
            lies = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
            key = (storage_key(tensor), _version(tensor), lies)  # halves of one tensor share all but where they lie
            found = self._known.get(key)
            if found is not None and not found[1].expired():
                return found[0]
            weak = StorageWeakRef(tensor.untyped_storage())
        self._rows.append(self._look(tensor))
        number = len(self._rows) - 1
        self._last_in.put(tensor, number)
        if key is not None:
            self._known[key] = (number, weak)
            if len(self._known) > 4096:
                self._known = {k: v for k, v in self._known.items() if not v[1].expired()}
        return number

    def written(self, tensor: torch.Tensor) -> None:
        """The tensor was written to: what is known of its storage holds no longer."""
        if has_storage(tensor):
            storage = storage_key(tensor)
            self._known = {key: value for key, value in self._known.items() if key[0] != storage}

    def table(self) -> list[TensorFacts]:
        """All that was entered, read now."""
        self._read()
        return [row for row in self._rows if isinstance(row, TensorFacts)]

    def _look(self, tensor: torch.Tensor) -> TensorFacts | _Pending:
        if not has_storage(tensor):
            return _unseen(tensor)
        x = tensor.detach()
        elements = x.numel()
        before = self._last_in.get(tensor)
        lies_in = -1 if before is None else before
        facts = TensorFacts(short_type(x.dtype), tuple(map(int, x.shape)), x.device.type, elements, lies_in=lies_in)
        if not elements:
            return facts
        if self._checksums or self.folder is not None:
            facts = self._kept(x, facts)
        if x.dtype not in FORMATS:
            return facts
        if FORMATS[x.dtype].bits < 16:
            x = x.float()
        pending = _Pending(facts, torch.aminmax(x), x if self._whole else sample_of(x), rows_of(x))
        if x.device.type == "cpu":
            return _read(pending, x)
        pending.sample, pending.rows = pending.sample.clone(), pending.rows.clone()
        self._held_bytes += pending.sample.nbytes + pending.rows.nbytes
        if self._held_bytes > _HELD_BYTES:
            self._read()
        return pending

    def _read(self) -> None:
        self._rows = [_read(row) if isinstance(row, _Pending) else row for row in self._rows]
        self._held_bytes = 0

    def _kept(self, x: torch.Tensor, facts: TensorFacts) -> TensorFacts:
        content = x.contiguous().cpu()
        raw = content.flatten().view(torch.uint8).numpy() if content.numel() else np.empty(0, np.uint8)
        if self._checksums:
            facts = replace(facts, checksum=f"{zlib.crc32(raw.data):08x}")
        if self.folder is None:
            return facts
        if raw.nbytes > self._left:
            self.not_written += 1
            return facts
        name = f"tensor-{len(self._rows)}.npy"
        try:
            with (self.folder / name).open("wb") as stream:
                np.save(stream, raw, allow_pickle=False)
        except OSError as error:
            for file in (*self._written, self.folder / name):
                file.unlink(missing_ok=True)  # without the run that names them they say nothing
            raise RunError(
                f"writing tensors into {self.folder}", f"{type(error).__name__}: {error}",
                (Origin(str(self.folder / name)),),
                "Give a folder with room, or a smaller tensor_limit_bytes; nothing was left.",
            ) from error  # fmt: skip
        self._written.append(self.folder / name)
        self._left -= raw.nbytes
        return replace(facts, file=name)


def _unseen(tensor: torch.Tensor) -> TensorFacts:
    """What is known of a tensor whose values are not looked at; sizes that differ from row to row are left out."""
    try:
        shape = tuple(int(size) for size in tensor.shape)
        return TensorFacts(short_type(tensor.dtype), shape, tensor.device.type, tensor.numel())
    except (RuntimeError, AttributeError, TypeError):
        return TensorFacts(short_type(tensor.dtype), (), tensor.device.type, 0)


def sample_of(x: torch.Tensor, elements: int = SAMPLE) -> torch.Tensor:
    """At most so many elements of a tensor, as rows (last dimension) that lie evenly; small ones whole. 2-d."""
    if x.dim() == 0:
        return x.reshape(1, 1)
    columns = x.shape[-1]
    if x.numel() <= elements:
        return x.reshape(-1, columns) if columns else x.reshape(0, 0)
    wide = x if columns <= elements else x[..., :: -(-columns // elements)]
    rows = max(1, elements // wide.shape[-1])
    for dimension in range(x.dim() - 2, -1, -1):
        wanted = max(1, rows // _product(wide.shape[:dimension]))
        step = -(-wide.shape[dimension] // wanted) if _product(wide.shape[: dimension + 1]) > rows else 1
        wide = wide[(slice(None),) * dimension + (slice(None, None, step),)]
    return wide.reshape(-1, wide.shape[-1])


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """The rows that a sketch is made of, 2-d, for any strides; of rows that are too wide blocks that lie evenly."""
    if x.dim() < 2:
        rows = x.reshape(1, -1)
    else:
        rows = x[_row_index(tuple(x.shape[:-1]), x.device)]
    step = sketched_step(rows.shape[1])
    if step == 1:
        return rows
    whole = rows.shape[1] // SUMS
    return rows[:, : whole * SUMS].reshape(len(rows), whole, SUMS)[:, ::step].reshape(len(rows), -1)


@lru_cache(maxsize=4096)
def _row_index(leading: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Where the rows lie that are looked at, by dimension."""
    numbers = np.unravel_index(np.array(sketched_rows(_product(leading)), dtype=np.int64), leading)
    return tuple(torch.from_numpy(np.ascontiguousarray(n)).to(device) for n in numbers)


def _sketch(rows: torch.Tensor) -> str:
    """The sums and the length of each row, as a run keeps them."""
    values = _numpy(rows).astype(np.float64)
    with np.errstate(all="ignore"):
        lengths = np.sqrt(np.einsum("ij,ij->i", values, values))
        sums = values @ _sums_of(values.shape[1])
        return sketch_text(np.concatenate([sums, lengths[:, None]], axis=1).astype("<f4").tobytes())


@lru_cache(maxsize=16)
def _sums_of(columns: int) -> Any:
    """A matrix that sums every sixteenth element: a product takes a fifth of the time of numpy's sum."""
    return np.tile(np.eye(SUMS), (-(-columns // SUMS), 1))[:columns]


def _product(sizes: Any) -> int:
    found = 1
    for size in sizes:
        found *= int(size)
    return found


def _read(pending: _Pending, x: torch.Tensor | None = None) -> TensorFacts:
    """The facts, with what was taken read. x: the tensor, where it is at hand."""
    facts = pending.facts
    low, high = pending.range[0].item(), pending.range[1].item()
    format = _FORMATS[facts.format]
    values = np.atleast_2d(_numpy(pending.sample))
    looked_at = values.size
    is_finite = math.isfinite(low) and math.isfinite(high)
    nan = infinite = 0.0
    if not is_finite:
        everything = values if x is None else _numpy(x)
        nan = float(np.isnan(everything).mean())
        infinite = float(np.isinf(everything).mean())
        nan = max(nan, 1 / facts.elements) if math.isnan(low) else nan
        infinite = max(infinite, 1 / facts.elements) if math.isinf(low) or math.isinf(high) else infinite
        finite = everything[np.isfinite(everything)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
        values = np.where(np.isfinite(values), values, 0)
    exponents, is_zero = _exponents(values)
    zeros = int(np.count_nonzero(is_zero))
    top = exponents.max(axis=-1, keepdims=True)
    below = top - exponents
    if zeros:
        exponents, below = exponents[~is_zero], below[~is_zero]
    counts = _histogram(exponents)
    smallest = math.frexp(format.smallest_normal)[1] - 1
    subnormal = sum(counts.counts[: smallest - counts.first]) if counts.counts and counts.first < smallest else 0
    is_saturated = max(-low, high) >= format.max
    flat = values.ravel().astype(np.float64)
    return replace(
        facts, low=low, high=high, nan=nan, infinite=infinite, looked_at=looked_at,
        mean=float(flat.sum() / looked_at), rms=math.sqrt(flat @ flat / looked_at),
        zeros=zeros / looked_at if is_finite else zeros / looked_at - nan - infinite,
        subnormal=subnormal / looked_at,
        saturated=float(np.count_nonzero(np.abs(values) == format.max) / looked_at) if is_saturated else 0.0,
        exponents=counts, below=_histogram(below),
        sketch=_sketch(pending.rows) if pending.rows is not None else "",
    )  # fmt: skip


def _exponents(values: Any) -> tuple[Any, Any]:
    """The binary exponent of each number, far below all others for zeros; and which are zeros. Read off the bits: that
    takes a fifth of the time of frexp, which is asked where there are fp32's or fp64's own subnormal numbers.
    """
    mantissa_bits, integer = (23, np.int32) if values.dtype == np.float32 else (52, np.int64)
    bits = values.view(integer) & np.iinfo(integer).max
    is_zero = bits == 0
    exponents = (bits >> mantissa_bits).astype(np.int32, copy=False)
    exponents -= (1 << (30 if mantissa_bits == 23 else 62) - mantissa_bits) - 1
    lowest = -126 if mantissa_bits == 23 else -1022
    is_low = exponents < lowest
    if is_low.any():
        exponents[is_low] = np.frexp(values[is_low])[1] - 1
        exponents[is_zero] = _UNDER_ALL
    return exponents, is_zero


_UNDER_ALL = -(1 << 20)
_FORMATS = {str(f): f for f in FORMATS.values()}


def _numpy(x: torch.Tensor) -> Any:
    x = x.detach().cpu()
    return (x if x.dtype in (torch.float32, torch.float64) else x.float()).numpy()


def _histogram(exponents: Any) -> Histogram:
    if not exponents.size:
        return Histogram()
    first = int(exponents.min())
    return Histogram(first, tuple(np.bincount(exponents.ravel() - first).tolist()))


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else version_of(tensor)


def checksum(tensor: torch.Tensor) -> int:
    """A number of a tensor's bytes: equal for equal tensors, hardly ever for others."""
    x = tensor.detach()
    if not x.numel() or not has_storage(x):
        return 0
    raw = x.contiguous().cpu().flatten().view(torch.uint8).numpy()
    return zlib.crc32(raw.data)


def folder_for(path: str | Path) -> Path:
    """A folder for tensors, made if its parent is there. RunError if it cannot be written to."""
    folder = Path(path)
    try:
        folder.mkdir(exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} cannot be written to")
    except OSError as error:
        raise RunError(
            f"tensors={str(path)!r}", f"{type(error).__name__}: {error}", (Origin(str(path)),),
            "Give a folder whose parent exists and that can be written to.",
        ) from error  # fmt: skip
    return folder
