"""Differences of a model under a policy from a reference: by call, by module, in outputs and gradients."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

from narrowcast.core.ledger.identity import BACKWARD, CallId
from narrowcast.output.screen import COLUMNS, LINES, Part, first_screen, shortened, wrapped
from narrowcast.reports.documents.rules import rule_of_call, rule_text
from narrowcast.reports.results.lines import cut, number_text, without_specials
from narrowcast.reports.results.result import Result
from narrowcast.reports.results.verdicts import AT_FAULT, EXACT, FAULT, KERNEL, NONDETERMINISTIC, NOT_FINITE, PASSED_ON

SCHEMA = "narrowcast.compare/1"


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
    that it really had, against that. total: of what it really gave, against the reference. kernel: of what it gave
    against the same op in fp64 on the same inputs, those that it really had; bound: the largest of these errors, of any
    element, over what its formats and the length of its sums allow; 0 where nothing bounds it. band: how far the call
    was off where everything before it moved by one unit in the last place. sqnr_db: of the total. largest_ulps,
    mean_ulps: of kernel errors, in units in the last place of the result's format; bias_ulps: the mean of roundings
    against rounding to nearest, towards +infinity or away from zero, where that is no accident. overflow, underflow,
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
    bound: float = 0.0
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
    """The error of a parameter's gradient. cosine: of the angle between the two; 1 is the same direction. band: the
    largest error when every call's result moves by one unit in the last place. share: the reference's root mean square
    over the largest of all parameters' gradients.
    """

    parameter: str
    format: str
    relative_error: float
    cosine: float
    underflow: float
    verdict: str
    band: float = 0.0
    share: float = 1.0

    @property
    def is_round_off_alone(self) -> bool:
        """Whether it is as good as zero: what is there is the round-off of the terms of a sum that cancel, as in the
        bias before a batch norm. Of such a gradient neither error nor direction says anything.
        """
        return self.share < 2.0**-10 and self.band >= 0.5


@dataclass(slots=True)
class Differences(Result):
    """What `nc.compare` found.

    subject, device_type, policy, low, reference: what was compared; policy and low are empty where no region was asked
    for around a model that brings its own casts, or none. rows: by call, in order. outputs, gradients: of the
    model; band: how far its output moves by one unit in the last place of each call's formats. unmatched: calls that
    only one side made. runs: how often the model ran. by: what the first screen lists, `op` or `module`.
    not_finite: where an output is not finite and the reference's is, the first call that is to blame;
    reference_not_finite: the first NaN of the reference itself, if its output has any. compiled: how far what a
    compiled program gives is from what its calls give one by one, where that is beyond round-off; else 0.
    """

    WHAT: ClassVar[str] = "a comparison"

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
    compiled: float = 0.0

    @property
    def worst(self) -> list[CallError]:
        """The calls most to blame, worst first: faults, then those that alone move the output most, then own error."""
        order = {NOT_FINITE: 0, FAULT: 1, KERNEL: 1}
        found = [row for row in self.rows if (row.own and row.verdict != PASSED_ON) or row.verdict in order]

        def key(row: CallError) -> tuple[float, ...]:
            alone = -1.0 if math.isnan(row.alone) else row.alone
            return order.get(row.verdict, 2), -alone, -(row.own if math.isfinite(row.own) else 0.0)

        return sorted(found, key=key)

    @property
    def faults(self) -> list[CallError]:
        """The calls to be told of: kernels beyond their bounds, what makes a NaN or an infinity, other arguments."""
        return [row for row in self.rows if row.verdict in AT_FAULT]

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
            faults = sum(row.verdict in AT_FAULT for row in rows)
            found.append(ModuleError(path, len(rows), worst.own, rows[-1].total, faults, worst.id))
        return sorted(found, key=lambda module: -module.own)

    def __repr__(self) -> str:
        return f"<Differences of {self.subject}: {self.verdict}, {len(self.faults)} faults; print shows them>"

    def to_text(self, every: bool = False, width: int = COLUMNS, lines: int = LINES) -> str:
        """The first screen, at most so many lines and columns; or, with every, each call."""
        return differences_text(self, every, width, lines)

    def data(self) -> dict[str, Any]:
        """What is written as JSON."""
        data = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "rows"}
        for key in ("outputs", "gradients"):
            data[key] = [asdict(row) for row in data[key]]
        data["not_finite"] = None if self.not_finite is None else asdict(self.not_finite)
        data["modules"] = [{**asdict(m), "worst": str(m.worst)} for m in self.modules()]
        return {"schema": SCHEMA, **without_specials(data), "rows": [row.data() for row in self.rows]}


# -- as text ----------------------------------------------------------------------------------------------------------

SHOWN, SHOWN_WITH_GRADIENTS = 5, 3
HALF_OF_ITS_SQUARE = math.sqrt(0.5)
"""Errors that have nothing to do with each other add up as squares do."""


def differences_text(found: Differences, every_row: bool = False, width: int = COLUMNS, room: int = LINES) -> str:
    """The first screen, at most `room` lines; or every row."""
    shown = found.rows if every_row else found.worst[: SHOWN_WITH_GRADIENTS if found.gradients else SHOWN]
    head = [
        *wrapped(
            f"{found.subject}: {_under(found)} against {found.reference} on {found.device_type}, {found.runs} runs"
        ),
        *(line for said in [*_verdict(found), *_begins(found)] for line in wrapped(said)),
    ]
    table: list[list[str]] = []
    if found.by == "module":
        table = [["", f"{'module':40} {'calls':>5} {'own':>8} {'total':>8}"], *map(_module_row, found.modules())]
    elif shown:
        table = [["", _COLUMNS], *map(_row, shown)]
    notes = [wrapped(f"note: {note}") for note in found.notes]
    advice, rule = _advice(found)
    if every_row:
        table += [["", _COLUMNS], *map(_row, shown)] if found.by == "module" else []
        table += [[f"only on one side: {call}"] for call in found.unmatched]
        gradients = ["", "gradients", *map(_gradient, found.gradients)] if found.gradients else []
        return "\n".join(line for part in (head, *table, gradients, *notes, advice, rule) for line in part)
    first = [line for row in table[:2] for line in row]
    parts = [Part(head), Part(first), *(Part(row, 3, step=len(row)) for row in table[2:])]
    parts += [Part(_gradients(found.gradients) if found.gradients else [], 1)]
    parts += [Part(note, min(number, 1) * 2, step=len(note)) for number, note in enumerate(notes)]
    parts += [Part(advice), Part(rule, is_copied=True)]
    return first_screen(parts, lambda: differences_text(found, True), width, room)


_COLUMNS = f"{'own':>8} {'inherited':>9} {'total':>8} {'band':>8} {'alone':>8}  of the call below"


def _module_row(m: ModuleError) -> list[str]:
    return [f"{cut(m.module_path or '(root)', 40):40} {m.calls:5} {number_text(m.own):>8} {number_text(m.total):>8}"]


def _under(found: Differences) -> str:
    return f"{found.policy} in {found.low}" if found.policy else "with its own casts"


def _verdict(found: Differences) -> list[str]:
    faults = len(found.faults)
    differing = len(found.differing)
    outputs = [_finite(o.relative_error) for o in found.outputs]
    largest = max((o.largest_error for o in found.outputs), default=0.0)
    error = f"output error {number_text(max(outputs))}" if outputs else "no floating output"
    error += f" (largest {number_text(largest)})" if largest else ""
    band = f"; round-off may make {number_text(found.band)}" if found.band else ""
    said = {0: "no fault", 1: "1 fault"}.get(faults, f"{faults} faults")
    lines = [
        f"{found.verdict.upper()}: {error}{band}",
        f"{len(found.rows)} calls, {differing} differ, {said}"
        + (f", {len(found.unmatched)} without a partner" if found.unmatched else ""),
    ]
    by = f"the compiler: its code is {number_text(found.compiled)} from what these calls give one by one"
    return [*lines, by] if found.compiled else lines


def _begins(found: Differences) -> list[str]:
    """Where values stop being finite."""
    own = f"not finite first: {found.not_finite.text}" if found.not_finite is not None else ""
    theirs = f"{found.reference} itself: {found.reference_not_finite}" if found.reference_not_finite else ""
    return [said for said in (own, theirs) if said]


def _row(row: CallError) -> list[str]:
    alone = "" if math.isnan(row.alone) else number_text(row.alone)
    figures = [number_text(figure) for figure in (row.own, row.inherited, row.total, row.band)]
    numbers = f"{figures[0]:>8} {figures[1]:>9} {figures[2]:>8} {figures[3]:>8}"
    why = f"    {row.verdict.upper()}: {row.why}" if row.verdict in AT_FAULT else ""
    file = "/".join(row.file.split("/")[-2:])
    figures_first = f"{numbers} {alone:>8}  {row.computes or '-'}  "
    place = cut(f"{file}:{row.line}" if file else "", COLUMNS - len(figures_first))
    lines = [figures_first + place, *wrapped(f"    {row.id}", f"{'':6}")]
    return [*lines, *wrapped(why, "    ")] if why else lines


def _gradients(rows: list[GradientError]) -> list[str]:
    zero = [row for row in rows if row.is_round_off_alone and row.verdict != NOT_FINITE]
    others = [row for row in rows if row not in zero]
    worst = sorted(others, key=lambda row: -_finite(row.relative_error))[:3]
    lines = ["", "gradients furthest off:", *(_gradient(row, COLUMNS) for row in worst)]
    if zero:
        said = f"as good as zero, {len(zero)} more: what they hold is round-off alone ({zero[0].parameter}"
        lines += wrapped(f"{said}{', ...' if len(zero) > 1 else ''})")
    return lines


def _gradient(row: GradientError, width: int = 0) -> str:
    """On one line; the parameter's name is shortened, if there is a width."""
    under = f", {row.underflow:.0%} underflow" if row.underflow >= 0.005 else ""
    said = f" ({row.format}), cosine {row.cosine:.4f}{under}"
    name = shortened(row.parameter, width - len(said) - 10) if width else row.parameter
    return f"{number_text(row.relative_error):>8}  {name}{said}"


def _advice(found: Differences) -> tuple[list[str], list[str]]:
    """The rule that keeps the worst call in fp32, and before it why."""
    if found.compiled:
        compiler = (
            "What to do: compile with backend='aot_eager'. If that is right, the backend's code is not: report it."
        )
        return ["", *wrapped(compiler)], []
    low = [row for row in found.worst if row.is_low]
    if not low:
        return [], []
    row, before = low[0], _before_fault(found)
    row = before or row
    rule = rule_of_call(str(row.forward or row.id), row.computes)
    if not rule:
        return [], []
    why = "alone it moves the output most" if not math.isnan(row.alone) else "its own error is the largest"
    why = "it is at fault" if row.verdict in AT_FAULT else _spread(found, row) or why
    why = "it rounds what the call at fault reads" if before else why
    said = ["", *wrapped(f"To keep the worst in fp32 ({why}):")]
    return said, rule_text(rule).split("\n")


def _before_fault(found: Differences) -> CallError | None:
    """The last low call before the first one at fault, if that is not low itself: no rule about it helps."""
    first = next((n for n, row in enumerate(found.rows) if row.verdict in AT_FAULT), None)
    if first is None or found.rows[first].is_low:
        return None
    return next((row for row in reversed(found.rows[:first]) if row.is_low), None)


def _spread(found: Differences, worst: CallError) -> str:
    """What little it helps to keep the worst op high, where no single op makes the most of the output's error."""
    total = max((o.relative_error for o in found.outputs), default=0.0)
    if not worst.alone < HALF_OF_ITS_SQUARE * total < math.inf:
        return ""
    low = {(row.id.module_path, row.id.op) for row in found.rows if row.is_low and row.own and not row.forward}
    made = f"alone it makes {number_text(worst.alone)} of {number_text(total)}"
    return f"{made}: the error is spread over {len(low)} ops"


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf
