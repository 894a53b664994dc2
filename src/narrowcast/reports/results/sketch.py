"""Sketches of tensors: a few sums of some of their rows, by which two runs are compared that kept no tensors.

A row is what lies along the last dimension. Of each inspected row, sums of every sixteenth element are kept,
and the row's length (L2). They are linear: the difference of two sketches is the sketch of the difference, whose length
estimates that of the difference. Those of parts that lie side by side in a wider tensor add up to its own, if the
parts' widths are multiples of 16; and those of one row are the same however rows are spread over calls.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Mapping

ROWS = 16
"""How many rows of a tensor are sketched: evenly, the first and the last among them."""
SUMS = 16
COLUMNS = 32768
"""Of a wider row every second (third, ...) block of `SUMS` elements is sketched."""
NUMBERS = SUMS + 1

Row = tuple[float, ...]
"""The sums, then the length of the row."""


def sketched_rows(rows: int) -> tuple[int, ...]:
    """Return which of this many rows are sketched."""
    return tuple(range(rows)) if rows <= ROWS else tuple(n * (rows - 1) // (ROWS - 1) for n in range(ROWS))


def sketched_step(columns: int) -> int:
    """Return of how many blocks of a row of this width one is sketched."""
    return -(-columns // COLUMNS)


def rows_and_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return how many rows a tensor of that shape has, and how wide they are; a single number is a row of one."""
    return math.prod(shape[:-1]), (shape[-1] if shape else 1)


def sketch_text(raw: bytes) -> str:
    """Return the text that a run keeps, of the numbers of all rows as little-endian fp32."""
    return base64.b64encode(raw).decode()


def sketch_rows(text: str, shape: tuple[int, ...]) -> dict[int, Row]:
    """Return the rows by their numbers; none without a text. ValueError for text that is no sketch of such a tensor."""
    if not text:
        return {}
    raw = base64.b64decode(text, validate=True)
    numbers = sketched_rows(rows_and_columns(shape)[0])
    if len(raw) != len(numbers) * NUMBERS * 4:
        raise ValueError(f"a sketch of {len(raw)} bytes for a tensor of {list(shape)}")
    sums = struct.iter_unpack(f"<{NUMBERS}f", raw)
    return dict(zip(numbers, sums, strict=True))


def side_by_side(parts: list[Row]) -> Row:
    """Return the sketch of the row in which these rows lie side by side."""
    sums = tuple(math.fsum(values) for values in zip(*(part[:SUMS] for part in parts), strict=True))
    return (*sums, math.hypot(*(part[SUMS] for part in parts)))


def sketch_distance(a: Mapping[tuple[int, int], Row], b: Mapping[tuple[int, int], Row]) -> tuple[float, list[float]]:
    """Return the relative distance (L2) of the rows that both have, as estimated, and that of each of them in order of
    size. NaN of none.
    """
    apart, length, each = 0.0, 0.0, list[float]()
    for key, row in a.items():
        other = b.get(key)
        if other is None or not all(map(math.isfinite, (*row, *other))):
            continue
        off, size = math.dist(row[:SUMS], other[:SUMS]), max(row[SUMS], other[SUMS])
        apart, length = apart + off * off, length + size * size
        each.append(off / size if size else 0.0)
    if not each:
        return math.nan, each
    return (math.sqrt(apart / length) if length else 0.0), sorted(each)
