"""Tensors that runs wrote into folders, read back and compared whole; no pickle is read, and nothing is executed."""

from __future__ import annotations

import math
import re
import struct
import sys
from array import array
from pathlib import Path

from narrowcast.formats import FORMATS
from narrowcast.reports.results.run import Run
from narrowcast.reports.results.run_records import TensorFacts

_NAME = re.compile(r"tensor-\d+\.npy")
_MAGIC = b"\x93NUMPY"
ELEMENTS = 1 << 24
"""Larger tensors are compared by their statistics in the run."""


class KeptTensors:
    """The folders of two runs. notes: folders that cannot be read, or do not belong to the run."""

    def __init__(self, a: Run, b: Run) -> None:
        self._folders = [str(run.environment.get("tensors", "")) for run in (a, b)]
        self._lacks: dict[str, None] = {}

    @property
    def notes(self) -> list[str]:
        """A line for each folder that could not be read."""
        return [f"tensors kept in {what}: compared by what is in the run" for what in self._lacks]

    def distance(self, a: TensorFacts, b: TensorFacts) -> float | None:
        """Return the relative distance (L2) of two tensors; None if one was not kept, is unreadable, or not finite."""
        if not (a.file and b.file and all(self._folders)) or a.elements > ELEMENTS:
            return None
        read = [self._read(folder, facts) for folder, facts in zip(self._folders, (a, b), strict=True)]
        one, other = read
        if one is None or other is None or len(one) != len(other):
            return None
        length = max(math.hypot(*one), math.hypot(*other))
        difference = math.dist(one, other)
        return None if not math.isfinite(difference + length) else difference / length if length else 0.0

    def _read(self, folder: str, facts: TensorFacts) -> array[float] | None:
        format = FORMATS.get(facts.format)
        if format is None or format.bits < 16 or not _NAME.fullmatch(facts.file):
            return None
        try:
            raw = (Path(folder) / facts.file).read_bytes()
        except OSError as error:
            self._lacks[f"{folder} cannot be read ({type(error).__name__})"] = None
            return None
        start = 10 + int.from_bytes(raw[8:10], "little")
        content = raw[start:]
        if raw[:6] != _MAGIC or b"'|u1'" not in raw[10:start] or len(content) != facts.elements * format.bits // 8:
            self._lacks[f"{folder} are not those of the run ({facts.file})"] = None
            return None
        return _numbers(content, facts.format)


def _numbers(content: bytes, format: str) -> array[float]:
    """Decode little-endian numbers; bf16 is the upper half of fp32."""
    if format == "fp16":
        return array("d", struct.unpack(f"<{len(content) // 2}e", content))
    if format == "bf16":
        wide = bytearray(2 * len(content))
        wide[2::4], wide[3::4] = content[::2], content[1::2]
        content = bytes(wide)
    numbers: array[float] = array("d" if format == "fp64" else "f")
    numbers.frombytes(content)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
