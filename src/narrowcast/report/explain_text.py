"""An explanation as text for a terminal."""

from __future__ import annotations

import math
import re

from rich.console import RenderableType
from rich.markup import escape

from narrowcast.report.console import as_text, in_bytes, short_file, table
from narrowcast.report.explanation import Comparison, Explanation, ModuleRow, RepeatRow
from narrowcast.report.ledger_text import cast_table, refusals, totals_line

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_STYLES = {"fp32": "green", "bf16": "yellow", "fp16": "yellow", "fp64": "cyan"}


def explanation_text(explanation: Explanation) -> str:
    """The whole report as plain text."""
    return as_text(explanation_parts(explanation))


def explanation_parts(explanation: Explanation, every_cast: bool = False) -> list[RenderableType]:
    """The report, part by part: what was run, ops, modules, costs, refusals, comparison."""
    parts: list[RenderableType] = [_heading(explanation), _ops(explanation)]
    if explanation.ledger.casts:
        parts += [_modules(explanation)]
        casts = explanation.ledger.casts if every_cast else explanation.largest_casts()
        title = f"all {len(casts)} casts" if every_cast else f"the {len(casts)} casts that move most bytes"
        parts += [cast_table(title, casts), _repeats(explanation)]
    parts += refusals(explanation.ledger)
    parts += ["[bold]totals[/bold]", totals_line(explanation.ledger), ""]
    if explanation.comparison is not None:
        parts += _comparison(explanation.comparison, explanation.low)
    return parts


def _heading(explanation: Explanation) -> str:
    text = (
        f"[bold]{escape(explanation.subject)}[/bold] under policy [bold]{escape(explanation.policy)}[/bold] "
        f"({explanation.digest[:8]})\n  {explanation.device_type}, low format {explanation.low}; "
        f"ran on {explanation.ran_on}"
    )
    return f"{text}\n  {escape(explanation.note)}\n" if explanation.note else f"{text}\n"


def _formats(names: str) -> str:
    return ",".join(f"[{_STYLES[n]}]{n}[/]" if n in _STYLES else n for n in names.split(",")) if names else "-"


def _ops(explanation: Explanation) -> RenderableType:
    made = table(
        "each op: in which format it computes, and why", "op", ">calls", "came", "computes", "gave", ">bytes", "why"
    )
    without = [row for row in explanation.op_rows() if not (row.came or row.computes or row.result)]
    for row in explanation.op_rows():
        if row in without:
            continue
        made.add_row(
            row.op.removesuffix(".default") + (" (backward)" if row.direction == "backward" else ""),
            str(row.calls),
            _formats(row.came),
            _formats(row.computes),
            _formats(row.result),
            in_bytes(row.moved_bytes),
            escape(f"{row.action}: {row.reason}"),
        )
    if without:
        calls, moved = sum(row.calls for row in without), sum(row.moved_bytes for row in without)
        ops = f"{len({row.op for row in without})} ops"
        made.add_row(ops, str(calls), "-", "-", "-", in_bytes(moved), "no floating tensors: never cast")
    return made


def _modules(explanation: Explanation) -> RenderableType:
    """Modules that differ by a number only (the layers of a stack), and cast alike, share a line."""
    made = table("casts by module", "module", ">modules", ">casts", ">copied", ">bytes", "formats, per module")
    groups: dict[tuple[str, str, int, int], list[ModuleRow]] = {}
    for row in explanation.module_rows():
        key = (_NUMBER.sub("*", row.module_path), row.kinds, row.casts, row.copied)
        groups.setdefault(key, []).append(row)
    for (pattern, kinds, _, _), rows in groups.items():
        path = pattern if len(rows) > 1 else rows[0].module_path
        casts, copied, moved = (sum(getattr(r, f) for r in rows) for f in ("casts", "copied", "moved_bytes"))
        made.add_row(escape(path or "(root)"), str(len(rows)), str(casts), str(copied), in_bytes(moved), kinds)
    return made


def _repeats(explanation: Explanation) -> RenderableType:
    rows = explanation.repeats()
    if not rows:
        return "[bold]redundant casts[/bold]\n  none: no tensor is cast twice to the same format\n"
    wasted = in_bytes(sum(row.wasted_bytes for row in rows))
    made = table(
        f"redundant casts: the same tensor cast again ({wasted} moved for nothing)",
        "op", "argument", "module", "line", "cast", ">again", ">wasted",
    )  # fmt: skip
    groups: dict[tuple[str, ...], list[RepeatRow]] = {}
    for row in rows:
        key = (row.op, row.argument, _NUMBER.sub("*", row.module_path), row.place, row.src, row.dst)
        groups.setdefault(key, []).append(row)
    for (op, argument, pattern, place, src, dst), alike in groups.items():
        file, _, line = place.rpartition(":")
        made.add_row(
            op.removesuffix(".default"), argument,
            escape((pattern if len(alike) > 1 else alike[0].module_path) or "(root)"),
            escape(f"{short_file(file)}:{line}"), f"{src} -> {dst}", str(sum(r.times - 1 for r in alike)),
            in_bytes(sum(r.wasted_bytes for r in alike)),
        )  # fmt: skip
    return made


def _comparison(comparison: Comparison, low: str) -> list[RenderableType]:
    outputs = table(
        "against fp32: outputs", "output", "fp32 run", "region", ">SQNR", ">relative error", ">largest error"
    )
    for o in comparison.outputs:
        sqnr = "equal" if math.isinf(o.sqnr_db) and o.sqnr_db > 0 else f"{o.sqnr_db:.1f} dB"
        outputs.add_row(
            escape(o.name), o.reference, o.found, sqnr, f"{o.relative_error:.2e}", f"{o.largest_error:.2e}"
        )
    parts: list[RenderableType] = [outputs]
    if comparison.metric_reference:
        metrics = table("against fp32: the model's own metric", "metric", ">fp32", ">region", ">change")
        for name, before in comparison.metric_reference.items():
            after = comparison.metric_found.get(name, math.nan)
            metrics.add_row(escape(name), f"{before:.6g}", f"{after:.6g}", f"{after - before:+.2g}")
        parts.append(metrics)
    cost = table("against fp32: cost on this machine", "", ">fp32", ">region", ">ratio", "")
    low_q, high_q = comparison.time_quartiles
    cost.add_row(
        "time", f"{comparison.reference_ms:.2f} ms", f"{comparison.region_ms:.2f} ms", f"{comparison.time_ratio:.2f} x",
        f"quartiles {low_q:.2f} to {high_q:.2f}, {comparison.repeats} alternating pairs",
    )  # fmt: skip
    cost.add_row(
        "peak memory", in_bytes(comparison.reference_peak_bytes), in_bytes(comparison.region_peak_bytes),
        f"{comparison.memory_ratio:.2f} x", "allocated during one forward, weights not counted",
    )  # fmt: skip
    parts.append(cost)
    if comparison.time_ratio > 1.05:
        parts.append(
            f"[red]Autocasting to {low} makes this model slower on this machine: it has no fast units for {low}, or the "
            "model's calls are too small for them.[/red]"
        )
    return parts
