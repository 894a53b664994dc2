"""Differences of a model under a policy from a reference: by call, by module, in outputs and gradients."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from narrowcast.ledger.identity import BACKWARD, CallId
from narrowcast.output.files import replace_text
from narrowcast.page.shown import Shown

SCHEMA = "narrowcast.compare/1"

EXACT, ROUND_OFF, FAULT, NONDETERMINISTIC, NOT_FINITE, UNKNOWN = (
    "exact", "round-off", "fault", "nondeterministic", "not finite", "not run alone",
)  # fmt: skip
"""Verdicts: no difference; within what one unit in the last place of its formats explains; beyond that; differs between
two runs of the reference itself; NaN or infinity where the reference has none; random, so that it cannot be run alone.
"""


@dataclass(frozen=True, slots=True)
class OutputError:
    """How far one output tensor is from the fp32 reference.

    sqnr_db: 10 log10(sum ref^2 / sum (ref - x)^2), infinity if equal. relative_error: ||x - ref|| / ||ref||.
    """

    name: str
    reference: str
    found: str
    sqnr_db: float
    relative_error: float
    largest_error: float


@dataclass(frozen=True, slots=True)
class NotFinite:
    """A call whose result holds `infinity` or `nan`; format: of the result."""

    op: str
    module_path: str
    file: str
    line: int
    format: str
    value: str

    @property
    def text(self) -> str:
        """`infinity in the fp16 result of aten.mul.Tensor in encoder, model.py:12`."""
        where = site_text(self.module_path, self.file, self.line)
        return f"{self.value} in the {self.format} result of {self.op.removesuffix('.default')}{where}"


def site_text(module_path: str, file: str, line: int) -> str:
    """` in encoder, model.py:12`, as far as it is known."""
    return (f" in {module_path}" if module_path else "") + (f", {file}:{line}" if file else "")


@dataclass(frozen=True, slots=True)
class CallError:
    """The error of one call, from samples of its results.

    computes, reference: the formats it reads under the policy and in the reference. own: relative error (L2) of the
    call alone in its low formats, on the reference's inputs. inherited: of the same call in low formats, on the inputs
    that it really had, against that. total: of what it really gave, against the reference. kernel: of the call alone
    against itself in fp64 on the same rounded inputs: what its kernel adds. band: the largest own error when inputs and
    results move by one unit in the last place. sqnr_db: of the total. largest_ulps, mean_ulps: of kernel errors, in
    units in the last place of the result's format; bias_ulps: the mean of roundings against rounding to nearest,
    towards +infinity or away from zero. overflow, underflow,
    saturated: shares of elements that became infinite, zero, or the largest value. alone: relative error of the model's
    output when only this call's op in its module is low; NaN where it was not tried. why: of the verdict.
    """

    id: CallId
    file: str
    line: int
    computes: str
    reference: str
    verdict: str
    why: str = ""
    own: float = 0.0
    inherited: float = 0.0
    total: float = 0.0
    kernel: float = 0.0
    band: float = 0.0
    sqnr_db: float = math.inf
    largest_ulps: float = 0.0
    mean_ulps: float = 0.0
    bias_ulps: float = 0.0
    overflow: float = 0.0
    underflow: float = 0.0
    saturated: float = 0.0
    alone: float = math.nan
    forward: CallId | None = None

    @property
    def is_low(self) -> bool:
        """Whether it computes in other formats than in the reference."""
        return self.computes != self.reference

    def data(self) -> dict[str, Any]:
        """As rows of the JSON text: identities as text, and what is not finite."""
        row: dict[str, Any] = without_specials(asdict(self))
        return {**row, "id": str(self.id), "forward": str(self.forward or "")}


@dataclass(frozen=True, slots=True)
class ModuleError:
    """The errors of a module's calls: the largest own error, and the total of its last call."""

    module_path: str
    calls: int
    own: float
    total: float
    faults: int
    worst: CallId


@dataclass(frozen=True, slots=True)
class GradientError:
    """The error of a parameter's gradient. cosine: of the angle between the two; 1 is the same direction."""

    parameter: str
    format: str
    relative_error: float
    cosine: float
    underflow: float
    verdict: str
    band: float = 0.0


@dataclass(slots=True)
class Differences(Shown):
    """What `nc.compare` found.

    subject, device_type, policy, low, reference: what was compared; policy and low are empty where no region was asked
    for around a model that brings its own casts, or none. rows: by call, in order. outputs, gradients: of the
    model; band: how far its output moves by one unit in the last place of each call's formats. unmatched: calls that
    only one side made. runs: how often the model ran. by: what the first screen lists, `op` or `module`.
    not_finite: where an output is not finite and the reference's is, the first call that is to blame;
    reference_not_finite: the first NaN of the reference itself, if its output has any.
    """

    subject: str
    device_type: str
    policy: str
    low: str
    reference: str
    rows: list[CallError] = field(default_factory=list)
    outputs: tuple[OutputError, ...] = ()
    gradients: list[GradientError] = field(default_factory=list)
    band: float = 0.0
    verdict: str = EXACT
    unmatched: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    environment: dict[str, Any] = field(default_factory=dict)
    runs: int = 0
    by: str = "op"
    not_finite: NotFinite | None = None
    reference_not_finite: str = ""

    @property
    def worst(self) -> list[CallError]:
        """The calls most to blame, worst first: faults, then those that alone move the output most, then own error."""
        order = {NOT_FINITE: 0, FAULT: 1}
        found = [row for row in self.rows if row.own or row.verdict in order]

        def key(row: CallError) -> tuple[float, ...]:
            alone = -1.0 if math.isnan(row.alone) else row.alone
            return order.get(row.verdict, 2), -alone, -(row.own if not math.isnan(row.own) else math.inf)

        return sorted(found, key=key)

    @property
    def faults(self) -> list[CallError]:
        """The calls that are off by more than round-off."""
        return [row for row in self.rows if row.verdict in (FAULT, NOT_FINITE)]

    @property
    def differing(self) -> list[CallError]:
        """The calls that gave something else than the reference, but for nondeterminism."""
        return [row for row in self.rows if row.total and row.verdict != NONDETERMINISTIC]

    def modules(self) -> list[ModuleError]:
        """By module, those with the largest own errors first."""
        grouped: dict[str, list[CallError]] = {}
        for row in self.rows:
            if row.id.direction != BACKWARD:
                grouped.setdefault(row.id.module_path, []).append(row)
        found = []
        for path, rows in grouped.items():
            worst = max(rows, key=lambda row: row.own)
            faults = sum(row.verdict in (FAULT, NOT_FINITE) for row in rows)
            found.append(ModuleError(path, len(rows), worst.own, rows[-1].total, faults, worst.id))
        return sorted(found, key=lambda module: -module.own)

    def __repr__(self) -> str:
        return f"<Differences of {self.subject}: {self.verdict}, {len(self.faults)} faults; print shows them>"

    def __str__(self) -> str:
        return differences_text(self)

    def data(self) -> dict[str, Any]:
        """What is written as JSON."""
        data = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "rows"}
        for key in ("outputs", "gradients"):
            data[key] = [asdict(row) for row in data[key]]
        data["not_finite"] = None if self.not_finite is None else asdict(self.not_finite)
        data["modules"] = [{**asdict(m), "worst": str(m.worst)} for m in self.modules()]
        return {"schema": SCHEMA, **without_specials(data), "rows": [row.data() for row in self.rows]}

    def to_json(self, indent: int | None = None) -> str:
        """JSON text under the schema `narrowcast.compare/1` (docs/reference/run.md)."""
        return json.dumps(self.data(), indent=indent)

    def save(self, path: str | Path) -> None:
        """Write the JSON text, replacing the file at once."""
        replace_text(Path(path), self.to_json(indent=1) + "\n")


def without_specials(value: Any) -> Any:
    """NaN and infinities are no JSON: they become text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(k): without_specials(v) for k, v in value.items()}
    return [without_specials(v) for v in value] if isinstance(value, Sequence) and not isinstance(value, str) else value


# -- as text ----------------------------------------------------------------------------------------------------------

SHOWN, SHOWN_WITH_GRADIENTS = 5, 3
WIDTH = 80


def differences_text(found: Differences, every_row: bool = False) -> str:
    """The first screen, at most 25 lines; or every row."""
    shown = found.rows if every_row else found.worst[: SHOWN_WITH_GRADIENTS if found.gradients else SHOWN]
    lines = [
        *_wrapped(
            f"{found.subject}: {_under(found)} against {found.reference} on {found.device_type}, {found.runs} runs"
        ),
        *(line for said in [*_verdict(found), *_begins(found)] for line in _wrapped(said)),
    ]
    if found.by == "module" and not every_row:
        lines += ["", f"{'module':40} {'calls':>5} {'own':>8} {'total':>8}"]
        lines += [
            f"{_cut(m.module_path or '(root)', 40):40} {m.calls:5} {_number(m.own):>8} {_number(m.total):>8}"
            for m in found.modules()[: 2 * SHOWN]
        ]
    elif shown:
        lines += ["", f"{'own':>8} {'inherited':>9} {'total':>8} {'band':>8} {'alone':>8}  of the call below"]
        for row in shown:
            lines += _row(row)
    if found.gradients and not every_row:
        worst = sorted(found.gradients, key=lambda g: -_finite(g.relative_error))[:3]
        lines += ["", "gradients furthest off:", *(line for g in worst for line in _wrapped(_gradient(g), f"{'':10}"))]
    lines += [line for note in found.notes for line in _wrapped(f"note: {note}")]
    advice = _advice(found)
    return "\n".join([*lines, *(["", *advice] if advice else [])])


def _under(found: Differences) -> str:
    return f"{found.policy} in {found.low}" if found.policy else "with its own casts"


def _wrapped(line: str, indent: str = "  ") -> list[str]:
    return textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _verdict(found: Differences) -> list[str]:
    faults = len(found.faults)
    differing = len(found.differing)
    outputs = [_finite(o.relative_error) for o in found.outputs]
    largest = max((o.largest_error for o in found.outputs), default=0.0)
    error = f"output error {_number(max(outputs))}" if outputs else "no floating output"
    error += f" (largest {_number(largest)})" if largest else ""
    band = f"; round-off may make {_number(found.band)}" if found.band else ""
    said = {0: "no fault"}.get(faults, f"{faults} faults")
    return [
        f"{found.verdict.upper()}: {error}{band}",
        f"{len(found.rows)} calls, {differing} differ, {said}"
        + (f", {len(found.unmatched)} without a partner" if found.unmatched else ""),
    ]


def _begins(found: Differences) -> list[str]:
    """Where values stop being finite."""
    own = f"not finite first: {found.not_finite.text}" if found.not_finite is not None else ""
    theirs = f"{found.reference} itself: {found.reference_not_finite}" if found.reference_not_finite else ""
    return [said for said in (own, theirs) if said]


def _row(row: CallError) -> list[str]:
    alone = "" if math.isnan(row.alone) else _number(row.alone)
    figures = (row.own, row.inherited, row.total, row.band)
    numbers = f"{_number(figures[0]):>8} {_number(figures[1]):>9} {_number(figures[2]):>8} {_number(figures[3]):>8}"
    why = f"    {row.verdict.upper()}: {row.why}" if row.verdict in (FAULT, NOT_FINITE) else ""
    file = "/".join(row.file.split("/")[-2:])
    figures_first = f"{numbers} {alone:>8}  {row.computes or '-'}  "
    place = _cut(f"{file}:{row.line}", WIDTH - len(figures_first))
    lines = [figures_first + place, *_wrapped(f"    {row.id}", f"{'':6}")]
    return [*lines, *_wrapped(why, "    ")] if why else lines


def _gradient(row: GradientError) -> str:
    under = f", {row.underflow:.0%} underflow" if row.underflow else ""
    return f"{_number(row.relative_error):>8}  {row.parameter} ({row.format}), cosine {row.cosine:.4f}{under}"


def _advice(found: Differences) -> list[str]:
    """The rule that keeps the worst call in fp32."""
    low = [row for row in found.worst if row.is_low]
    if not low:
        return []
    row = low[0]
    of = row.forward or row.id
    module = f'\nmodule = "{of.module_path}"' if of.module_path else ""
    why = "alone it moves the output most" if not math.isnan(row.alone) else "its own error is the largest"
    why = "it is at fault" if row.verdict in (FAULT, NOT_FINITE) else why
    return [f"To keep the worst in fp32 ({why}):", "[[rule]]", f'op = "{of.op}"{module}', 'action = "full"']


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}"


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else "..." + text[3 - width :]
