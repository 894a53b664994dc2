"""Statistics of tensors, in one pass each: the range exactly, the rest of a sample, which is read at the end.

A tensor that was not written to since is inspected once, however many calls read it.
"""

from __future__ import annotations

import math
import os
import zlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from narrowcast.errors import Origin, RunError, reason_of
from narrowcast.observation.statistics.by_storage import ByStorage, has_storage
from narrowcast.observation.statistics.sampled import Taken, facts_of
from narrowcast.reports.results.run_records import TensorFacts
from narrowcast.reports.results.sketch import SUMS, sketched_rows, sketched_step
from narrowcast.runtime.torch_bridge import FORMATS, short_type
from narrowcast.runtime.torch_surface.dispatch import PYTHON, version_of
from narrowcast.runtime.torch_surface.state import excluding

SAMPLE = 4096
"""How many elements of a tensor the sampled statistics read."""
_HELD_BYTES = 1 << 24
"""Samples that wait to be read together are read when they take this much."""


class Statistics:
    """A table of tensors' facts. Must be used where nothing watches: its own work is no call of the run.

    whole: read every element, not a sample. checksums: also keep one of each tensor's bytes. folder: write the
    tensors themselves into it, as long as limit_bytes last.
    """

    def __init__(
        self, whole: bool = False, checksums: bool = False, folder: Path | None = None, limit_bytes: int = 1 << 30,
    ) -> None:  # fmt: skip
        self._whole, self._checksums = whole, checksums
        self.folder, self._left = folder, limit_bytes
        self.not_written = 0
        self._written: list[Path] = []
        self._facts: list[TensorFacts] = []
        self._taken: list[Taken] = []
        """What comes after them."""
        self._known: ByStorage[dict[Any, int]] = ByStorage()  # by version and how it lies; None: what was last there
        self._held_bytes = 0

    def number(self, tensor: torch.Tensor) -> int:
        """Return the tensor's number in the table, where it is entered if it is not there as it is now."""
        if not has_storage(tensor):
            return self._enter(_unseen(tensor))
        known = self._known.setdefault(tensor, dict)
        key = (version_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if key not in known:  # halves of one tensor share all but where they lie
            known[key] = known[None] = self._enter(self._look(tensor, known.get(None, -1)))
        return known[key]

    def known_as(self, tensor: torch.Tensor) -> int:
        """Return the number of the latest entry of where a tensor lies; -1 if there is none."""
        known = self._known.get(tensor) if has_storage(tensor) else None
        return -1 if known is None else known.get(None, -1)

    def copied(self, source: torch.Tensor, copy: torch.Tensor) -> None:
        """Note that a tensor in new memory holds the values of another."""
        number = self.known_as(source)
        if number >= 0 and has_storage(copy):
            self._known.put(copy, {None: number})

    def written(self, tensor: torch.Tensor) -> None:
        """Note that the tensor was written to: what is known of its storage holds no longer."""
        known = self._known.get(tensor)
        if known is not None:
            for key in known.keys() - {None}:
                del known[key]

    def table(self) -> list[TensorFacts]:
        """Return all that was entered, read now."""
        self._facts += facts_of(self._taken)
        self._taken, self._held_bytes = [], 0
        return self._facts

    def without_values(self) -> list[TensorFacts]:
        """Return all that was entered, with the sizes alone of what was not read."""
        return [*self._facts, *(each.without_values() for each in self._taken)]

    def _enter(self, taken: Taken) -> int:
        self._taken.append(taken)
        if taken.sample is not None:
            self._held_bytes += taken.sample.nbytes + taken.rows.nbytes
            if taken.everything is not None or self._held_bytes > _HELD_BYTES:
                self.table()
        return len(self._facts) + len(self._taken) - 1

    def _look(self, tensor: torch.Tensor, lies_in: int) -> Taken:
        x = tensor.detach()
        elements = x.numel()
        taken = Taken(short_type(x.dtype), tuple(map(int, x.shape)), x.device.type, elements, lies_in)
        if elements and (self._checksums or self.folder is not None):
            self._keep(x, taken)
        if not elements or x.dtype not in FORMATS:
            return taken
        if FORMATS[x.dtype].bits < 16:
            x = x.float()
        taken.range, taken.rows = torch.aminmax(in_memory_order(x)), rows_of(x)
        taken.sample = sample_of(x, elements if self._whole else SAMPLE)
        if self._whole and x.is_cpu:
            taken.everything = x
        else:
            taken.sample = taken.sample.clone()
        return taken

    def _keep(self, x: torch.Tensor, taken: Taken) -> None:
        """Keep its checksum, and its content in a file."""
        raw = _raw(x)
        if self._checksums:
            taken.checksum = f"{zlib.crc32(raw.data):08x}"
        if self.folder is None:
            return
        if raw.nbytes > self._left:
            self.not_written += 1
            return
        name = f"tensor-{len(self._facts) + len(self._taken)}.npy"
        try:
            with (self.folder / name).open("wb") as stream:
                np.save(stream, raw, allow_pickle=False)
        except OSError as error:
            for file in (*self._written, self.folder / name):
                file.unlink(missing_ok=True)  # without the run that names them they say nothing
            raise RunError(
                f"writing tensors into {self.folder}", reason_of(error),
                (Origin(str(self.folder / name)),),
                "Give a folder with room, or a smaller tensor_limit_bytes; nothing was left.",
            ) from error  # fmt: skip
        self._written.append(self.folder / name)
        self._left -= raw.nbytes
        taken.file = name


def _unseen(tensor: torch.Tensor) -> Taken:
    """Return what is known of a tensor whose values are not read; sizes that differ from row to row are left out."""
    try:
        shape = tuple(int(size) for size in tensor.shape)
        return Taken(short_type(tensor.dtype), shape, tensor.device.type, tensor.numel())
    except (RuntimeError, AttributeError, TypeError):
        return Taken(short_type(tensor.dtype), (), tensor.device.type, 0)


def in_memory_order(x: torch.Tensor) -> torch.Tensor:
    """Return the same elements with the dimensions in the order in which they lie."""
    return x if x.is_contiguous() else x.permute(sorted(range(x.dim()), key=x.stride, reverse=True))


def sample_of(x: torch.Tensor, elements: int = SAMPLE) -> torch.Tensor:
    """Return at most this many elements of a tensor, as rows (last dimension) at even distances; 2-d."""
    if x.dim() == 0:
        return x.reshape(1, 1)
    if x.numel() > elements:
        x = x[_sampled_slices(x.shape, elements)]
    return x.reshape(-1, x.shape[-1]) if x.shape[-1] else x.reshape(0, 0)


@lru_cache(maxsize=4096)
def _sampled_slices(shape: torch.Size, elements: int) -> tuple[slice, ...]:
    """Return what the sample takes of each dimension."""
    step = -(-shape[-1] // elements)
    rows = max(1, elements // -(-shape[-1] // step))
    slices = [slice(None, None, step)]
    for dimension in range(len(shape) - 2, -1, -1):
        wanted = max(1, rows // math.prod(shape[:dimension]))
        step = -(-shape[dimension] // wanted) if math.prod(shape[: dimension + 1]) > rows else 1
        slices.append(slice((step - 1) // 2, None, step))  # images have their margins at the ends
    return tuple(reversed(slices))


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """Return the rows that a sketch is made of, 2-d, for any strides, in memory of their own; of rows that are too wide
    blocks at even distances.
    """
    if x.dim() < 2:
        rows = x.reshape(1, -1).clone()
    else:
        leading = tuple(x.shape[:-1])
        if x.is_contiguous() and x.numel():  # in half the time
            rows = x.view(-1, x.shape[-1]).index_select(0, _row_numbers(math.prod(leading), x.device))
        else:
            rows = x[_row_index(leading, x.device)]
    step = sketched_step(rows.shape[1])
    if step == 1:
        return rows
    whole = rows.shape[1] // SUMS
    return rows[:, : whole * SUMS].reshape(len(rows), whole, SUMS)[:, ::step].reshape(len(rows), -1)


@lru_cache(maxsize=4096)
def _row_numbers(rows: int, device: torch.device) -> torch.Tensor:
    return _row_index((rows,), device)[0]


@lru_cache(maxsize=4096)
def _row_index(leading: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """Return where the inspected rows lie, by dimension."""
    places = np.unravel_index(np.asarray(sketched_rows(math.prod(leading)), dtype=np.int64), leading)
    return tuple(_from_numpy(place, device) for place in places)


def _from_numpy(numbers: Any, device: torch.device) -> torch.Tensor:
    """Return a real tensor, also where a graph is made meanwhile, and inside of vmap, where torch's factories raise."""
    with excluding(PYTHON):
        return torch.from_numpy(numbers).to(device)


def _raw(x: torch.Tensor) -> Any:
    """Return the bytes of a tensor, in memory of their own likewise."""
    content = x.to("cpu", copy=True, memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
    return content.flatten().view(torch.uint8).numpy() if content.numel() else np.empty(0, np.uint8)


def checksum(tensor: torch.Tensor) -> int:
    """Return a number of a tensor's bytes: equal for equal tensors, hardly ever for others."""
    return zlib.crc32(_raw(tensor.detach()).data) if has_storage(tensor) else 0


def folder_for(path: str | Path) -> Path:
    """Return a folder for tensors, made if its parent is there. Raise RunError if it cannot be written to."""
    folder = Path(path)
    try:
        folder.mkdir(exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} cannot be written to")
    except OSError as error:
        raise RunError(
            f"tensors={str(path)!r}", reason_of(error), (Origin(str(path)),),
            "Give a folder whose parent exists and that can be written to.",
        ) from error  # fmt: skip
    return folder
