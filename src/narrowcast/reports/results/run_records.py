"""Calls and tensors of a run: their records, the rows that files have of them, and their texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any

from narrowcast.core.ledger.identity import CallId
from narrowcast.core.ops import named
from narrowcast.formats import FORMATS, Format, fp16


@dataclass(frozen=True, slots=True)
class Histogram:
    """How often each binary exponent occurs among finite values that are not zero.

    first: the smallest exponent e, of values from 2**e to below 2**(e+1). counts: from there on.
    """

    first: int = 0
    counts: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """How many values were counted."""
        return sum(self.counts)

    def share(self, holds: Callable[[int], bool]) -> float:
        """Return the share of the counted values whose exponent passes the test; 0 of none."""
        count = sum(n for e, n in enumerate(self.counts, self.first) if holds(e))
        return count / self.total if self.counts else 0.0

    @property
    def last(self) -> int:
        """The largest exponent that occurs."""
        return self.first + len(self.counts) - 1


Lines = tuple[tuple[str, int], ...]
"""Lines of code: file and number."""
MASK_NUMBER = 1e6
"""The size of numbers that masks are made with, at least: no score comes near."""


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """What is known of one tensor of a run.

    format: its format, or a short name of another element type. low, high: the range of its finite values. mean, rms
    over the finite values; zeros, subnormal, saturated (at the format's largest value), nan, infinite: shares of
    elements. exponents: of the inspected elements; below: of each element's exponent under its row's largest, from 0.
    inspected: how many elements all but the range and the non-finite shares represent; less than `elements` where a
    sample was taken. checksum, file: on request. sketch: of some rows (sketch.py). lies_in: the tensor of the table
    that was entered before in whose memory it lies (a view, a slice, one written to since), or whose copy it is; -1:
    none.
    """

    format: str
    shape: tuple[int, ...]
    device: str
    elements: int
    low: float = 0.0
    high: float = 0.0
    mean: float = 0.0
    rms: float = 0.0
    zeros: float = 0.0
    subnormal: float = 0.0
    saturated: float = 0.0
    nan: float = 0.0
    infinite: float = 0.0
    exponents: Histogram = field(default_factory=Histogram)
    below: Histogram = field(default_factory=Histogram)
    inspected: int = 0
    lies_in: int = -1
    checksum: str = ""
    file: str = ""
    sketch: str = ""

    @property
    def is_finite(self) -> bool:
        """Whether it holds neither NaN nor infinity."""
        return not self.nan and not self.infinite

    @property
    def largest(self) -> float:
        """The largest finite magnitude."""
        return max(abs(self.low), abs(self.high))

    @property
    def is_mask(self) -> bool:
        """Whether it holds the lowest value of its format, which masks are filled with."""
        return (format := self.fits()) is not None and self.low <= -0.99 * format.max

    @property
    def holds_a_mask(self) -> bool:
        """Whether it holds the lowest number of its format; or, beside zeros or scores, one number that fp16 does not
        hold and that is far beyond any score, as far as exponents tell: masks are made with -1e9.
        """
        beyond = [n for e, n in enumerate(self.exponents.counts, self.exponents.first) if e > fp16.max_exponent and n]
        is_lowest = (format := self.fits()) is not None and self.low == -format.max
        is_beside = self.zeros > 0 or sum(beyond) < self.exponents.total or not self.shape
        return is_lowest or (len(beyond) == 1 and self.exponents.last >= math.log2(MASK_NUMBER) and is_beside)

    def fits(self) -> Format | None:
        """Return its format, if it is a floating one."""
        return FORMATS.get(self.format)


@dataclass(frozen=True, slots=True)
class CallRecord:
    """One call of a run. inputs, outputs: names and numbers of tensors in the run's table.

    input_formats, computes: the input formats, and those that the op computes in. rule, reason: what decided, empty
    where nothing did. given: arguments that are no tensors, as text; numbers with all their digits. forward: of a
    backward call, the forward call it belongs to. callers: the user's lines that called the function of this line, in
    its module, innermost first. views: the lines at which what it reads was viewed since calls made it.
    """

    id: CallId
    file: str
    line: int
    input_formats: str
    computes: str
    rule: str = ""
    reason: str = ""
    inputs: tuple[tuple[str, int], ...] = ()
    outputs: tuple[tuple[str, int], ...] = ()
    given: tuple[tuple[str, str], ...] = ()
    forward: CallId | None = None
    is_cast: bool = False
    callers: Lines = ()
    views: Lines = ()

    @property
    def returned(self) -> tuple[tuple[str, int], ...]:
        """Its outputs, without what is for its backward alone."""
        return self.outputs[:1] if self.name in named("finite.keep") else self.outputs

    @property
    def name(self) -> str:
        """The op without its namespace and overload."""
        return self.id.op.split(".")[1]

    def is_given_infinities(self, inputs: Iterable[TensorFacts]) -> bool:
        """Return whether it fills in infinities as it was asked to, or reads a mask, whose numbers become some."""
        return any(value in ("inf", "-inf") for _, value in self.given) or any(t.is_mask for t in inputs)

    def may_be_at_pole(self, inputs: Iterable[TensorFacts]) -> bool:
        """Return whether it may be infinite, or NaN, for an input is zero; what whole numbers hold is not known."""
        return self.name in named("finite.not_at_zero") and any(t.zeros or not t.inspected for t in inputs)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of an optimizer. optimizer: its class. calls: how many calls of the run came before. file, line: of the
    user's code that called it. settings: the numbers and flags of its parameter groups by name; of each, as text, for
    how many elements of parameters it is set.
    """

    optimizer: str
    calls: int
    file: str
    line: int
    settings: dict[str, dict[str, int]]


TENSOR_COLUMNS, CALL_COLUMNS = (tuple(f.name for f in fields(kind)) for kind in (TensorFacts, CallRecord))
_tensor_values, _call_values = (attrgetter(*columns) for columns in (TENSOR_COLUMNS, CALL_COLUMNS))
_ID, _FORWARD = (CALL_COLUMNS.index(name) for name in ("id", "forward"))


def short(value: Any) -> Any:
    """Round a statistic to nine digits, which is all that is known; NaN and infinities are no JSON."""
    if isinstance(value, float):
        return float(f"{value:.9g}") if value == value and abs(value) != float("inf") else str(value)
    return value


def rows_of(tensors: Iterable[TensorFacts], calls: Iterable[CallRecord]) -> dict[str, Any]:
    """Return both as rows under their columns; asdict copies, and takes twenty times as long."""
    of_tensors = [[[v.first, *v.counts] if type(v) is Histogram else v for v in _tensor_values(t)] for t in tensors]
    of_calls = [list(_call_values(call)) for call in calls]
    for row in of_calls:
        row[_ID], row[_FORWARD] = str(row[_ID]), str(row[_FORWARD] or "")
    rows = {"tensor_columns": list(TENSOR_COLUMNS), "tensors": of_tensors}
    return {**rows, "call_columns": list(CALL_COLUMNS), "calls": of_calls}


def site_text(module_path: str, file: str, line: int) -> str:
    """Return a place, ` in encoder, model.py:12`, as far as it is known."""
    return (f" in {module_path}" if module_path else "") + (f", {file}:{line}" if file else "")


def tensor_text(tensor: TensorFacts) -> str:
    """Return a tensor as text: `fp16 [2, 8] -3.1..4.2 rms 0.9, 3% infinite`; no range where nothing is finite."""
    text = f"{tensor.format} {list(tensor.shape)}"
    if tensor.nan + tensor.infinite < 1:
        text += f" {tensor.low:.3g}..{tensor.high:.3g} rms {tensor.rms:.3g}"
    shares = [(name, getattr(tensor, name.lower())) for name in ("NaN", "infinite", "subnormal", "saturated")]
    return ", ".join([text, *(f"{100 * share:.3g}% {name}" for name, share in shares if share)])
