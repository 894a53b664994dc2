"""A comparison's first screen: the verdict, the worst calls, what to do."""

from __future__ import annotations

import math

from narrowcast.report.differences import FAULT, NOT_FINITE, CallError, Differences, GradientError

SHOWN = 5


def differences_text(found: Differences, every_row: bool = False) -> str:
    """The first screen, at most 25 lines; or every row."""
    shown = found.rows if every_row else found.worst[:SHOWN]
    lines = [
        f"{found.subject}: {_under(found)} against {found.reference} on {found.device_type}, {found.runs} runs",
        *_verdict(found),
    ]
    if found.by == "module" and not every_row:
        lines += ["", f"{'module':40} {'calls':>5} {'own':>8} {'total':>8}"]
        lines += [
            f"{_cut(m.module_path or '(root)', 40):40} {m.calls:5} {_number(m.own):>8} {_number(m.total):>8}"
            for m in found.modules()[: 2 * SHOWN]
        ]
    elif shown:
        lines += ["", f"{'own':>8} {'inherited':>9} {'total':>8} {'band':>8} {'alone':>8}  call"]
        for row in shown:
            lines += _row(row)
    if found.gradients and not every_row:
        worst = sorted(found.gradients, key=lambda g: -_finite(g.relative_error))[:3]
        lines += ["", "gradients furthest off:", *(_gradient(g) for g in worst)]
    lines += [f"note: {note}" for note in found.notes]
    advice = _advice(found)
    return "\n".join([*lines, *(["", *advice] if advice else [])])


def _under(found: Differences) -> str:
    return f"{found.policy} in {found.low}" if found.policy else "with its own casts"


def _verdict(found: Differences) -> list[str]:
    faults = len(found.faults)
    differing = len(found.differing)
    outputs = [_finite(o.relative_error) for o in found.outputs]
    error = f"output error {_number(max(outputs))}" if outputs else "no floating output"
    band = f", {_number(found.band)} is what one unit in the last place of each format makes" if found.band else ""
    said = {0: "no fault"}.get(faults, f"{faults} faults")
    return [
        f"{found.verdict.upper()}: {error}{band}",
        f"{len(found.rows)} calls, {differing} differ, {said}"
        + (f", {len(found.unmatched)} without a partner" if found.unmatched else ""),
    ]


def _row(row: CallError) -> list[str]:
    alone = "" if math.isnan(row.alone) else _number(row.alone)
    figures = (row.own, row.inherited, row.total, row.band)
    numbers = f"{_number(figures[0]):>8} {_number(figures[1]):>9} {_number(figures[2]):>8} {_number(figures[3]):>8}"
    why = f" {row.verdict.upper()}: {row.why}" if row.verdict in (FAULT, NOT_FINITE) else ""
    file = "/".join(row.file.split("/")[-2:])
    lines = [f"{numbers} {alone:>8}  {row.id}", f"{'':47}{row.computes or '-'}  {file}:{row.line}"]
    return [*lines, f"{'':46}{why}"] if why else lines


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
