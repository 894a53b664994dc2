"""An explanation as text for a terminal."""

from __future__ import annotations

import math

from rich.console import RenderableType
from rich.markup import escape

from narrowcast.core.ledger import Cast
from narrowcast.output.console import WIDTH, as_text, in_bytes, short_place, table
from narrowcast.output.screen import COLUMNS
from narrowcast.reports.documents.explanations import spent
from narrowcast.reports.documents.rules import alike_module
from narrowcast.reports.render.explain_screen import explanation_screen
from narrowcast.reports.render.graph_text import graph_parts, short_site
from narrowcast.reports.render.ledger_text import (
    advice_parts,
    argument_text,
    cast_table,
    how_text,
    line_text,
    refusals,
    totals_line,
)
from narrowcast.reports.render.placement_text import placement_parts
from narrowcast.reports.results.explanation import Comparison, Explanation, RepeatRow

_STYLES = {"fp32": "green", "bf16": "yellow", "fp16": "yellow", "fp64": "cyan"}


def explanation_text(found: Explanation, every: bool, width: int | None, lines: int) -> str:
    """The first screen, `lines` of `width` columns (80) at most; or, with every, all tables (120 columns)."""

    def whole() -> str:
        return as_text(explanation_parts(found), width or WIDTH).rstrip("\n")

    return whole() if every else explanation_screen(found, whole, width or COLUMNS, lines)


def explanation_parts(explanation: Explanation) -> list[RenderableType]:
    """The report, part by part: what was run, ops, modules, every cast, costs, refusals, comparison."""
    parts: list[RenderableType] = [_heading(explanation), *advice_parts(explanation.ledger), _ops(explanation)]
    if explanation.rules:
        parts += [_own_rules(explanation)]
    if explanation.ledger.casts:
        parts += [_casts_by_module(explanation), _rules(explanation)]
        casts = explanation.largest_casts(len(explanation.ledger.casts))
        title = f"all {len(casts)} casts, those that move most bytes first"
        parts += [cast_table(title, casts), _repeats(explanation), _files(explanation)]
    if explanation.front_end != "eager":
        parts += [*graph_parts(explanation), *placement_parts(explanation.graphs)]
    parts += refusals(explanation.ledger)
    parts += ["[bold]totals[/bold]", totals_line(explanation.ledger), ""]
    if explanation.comparison is not None:
        parts += _comparison(explanation.comparison, explanation.low, explanation.gradients)
    return parts


def _heading(explanation: Explanation) -> str:
    text = (
        f"[bold]{escape(explanation.subject)}[/bold] under policy [bold]{escape(explanation.policy)}[/bold] "
        f"({explanation.digest[:8]})\n  {explanation.device_type}, low format {explanation.low}; "
        f"{_ran(explanation)}"
    )
    if explanation.failure is not None:
        text += f"\n  [red]{escape(explanation.failure.text)}[/] What ran before is shown."
    return f"{text}\n  {escape(explanation.note)}\n" if explanation.note else f"{text}\n"


def _ran(explanation: Explanation) -> str:
    if explanation.front_end == "eager":
        return f"ran on {explanation.ran_on}"
    captured = sum(graph.is_captured for graph in explanation.graphs)
    return f"front end {explanation.front_end}, {captured} graphs; {explanation.ran_on}"


def _formats(names: str) -> str:
    return ",".join(f"[{_STYLES[n]}]{n}[/]" if n in _STYLES else n for n in names.split(",")) if names else "-"


def _ops(explanation: Explanation) -> RenderableType:
    made = table(
        "each op: in which format it computes, and why", "op", ">calls", "came", "computes", "gave", ">bytes", "why"
    )
    made.columns[0].min_width = 16
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


def _own_rules(explanation: Explanation) -> RenderableType:
    """What each rule of the policy matched. One that matched nothing is probably a mistake."""
    made = table("the policy's rules: what each matched", "rule", "written at", ">calls", "in modules")
    for row in explanation.rules:
        modules = ", ".join(m or "(root)" for m in row.modules[:4]) + (", ..." if len(row.modules) > 4 else "")
        calls = str(row.calls) if row.calls else "[bold red]0[/]"
        matched = escape(modules) if row.calls else "[bold red]matched nothing[/]"
        made.add_row(escape(row.rule), escape(short_site(row.origin)), calls, matched)
    return made


def _casts_by_module(explanation: Explanation) -> RenderableType:
    """Every cast. Modules that differ by a number only (the layers of a stack), and cast alike, share a line."""
    totals = explanation.ledger.totals()
    made = table(
        f"every cast, by module ({totals.casts} casts, {in_bytes(totals.cast_bytes)})",
        "module, op, argument", "line", "cast", ">times", ">bytes", "how", "rule",
    )  # fmt: skip
    made.columns[0].min_width = 14
    made.columns[1].no_wrap = False  # at 80 columns the names of modules need the room
    groups: dict[tuple[str, ...], list[Cast]] = {}
    for c in explanation.ledger.casts:
        pattern = alike_module(c.module_path)
        group = (pattern, c.op, c.argument, c.site, c.src, c.dst, how_text(c), c.action)
        groups.setdefault(group, []).append(c)
    by_module: dict[str, list[list[Cast]]] = {}
    for (pattern, *_), casts in groups.items():
        by_module.setdefault(pattern, []).append(casts)
    for pattern, rows in by_module.items():
        paths = {c.module_path for casts in rows for c in casts}
        module = pattern if len(paths) > 1 else next(iter(paths))
        alike = f" x {len(paths)}" if len(paths) > 1 else ""
        made.add_row(f"[bold]{escape(module or '(root)')}[/bold]{alike}")
        for casts in rows:
            c = casts[0]
            made.add_row(
                f"  {c.op.removesuffix('.default')}  {argument_text(c)}", escape(line_text(c)), f"{c.src} -> {c.dst}",
                str(len(casts)), in_bytes(sum(c.moved_bytes for c in casts)), how_text(c), escape(c.action),
            )  # fmt: skip
    return made


def _rules(explanation: Explanation) -> RenderableType:
    """Why: the rules that asked for casts, with their reasons and sources."""
    made = table("why: the rules that asked for these casts", "rule", ">casts", "reason", "source")
    counts: dict[tuple[str, str, str], int] = {}
    for c in explanation.ledger.casts:
        key = (c.rule, c.reason if c.direction == "forward" else "gradients of its forward casts", c.source)
        counts[key] = counts.get(key, 0) + 1
    for (rule, reason, source), count in counts.items():
        made.add_row(escape(rule), str(count), escape(reason or "-"), escape(source or "-"))
    return made


def _files(explanation: Explanation) -> str:
    """Where the files are that the tables name shortly."""
    files = dict.fromkeys(c.file for c in explanation.ledger.casts if c.file)
    return "\n".join(["[bold]files[/bold]", *(f"  {escape(file)}" for file in files), ""])


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
        key = (row.op, row.argument, alike_module(row.module_path), row.site, row.src, row.dst)
        groups.setdefault(key, []).append(row)
    for (op, argument, pattern, site, src, dst), alike in groups.items():
        file, _, line = site.rpartition(":")
        made.add_row(
            op.removesuffix(".default"), argument,
            escape((pattern if len(alike) > 1 else alike[0].module_path) or "(root)"),
            escape(short_place(file, line)), f"{src} -> {dst}", str(sum(r.times - 1 for r in alike)),
            in_bytes(sum(r.wasted_bytes for r in alike)),
        )  # fmt: skip
    return made


def _not_finite(comparison: Comparison) -> list[RenderableType]:
    """Where values stop being finite, if they do."""
    parts: list[RenderableType] = []
    if comparison.reference_not_finite:
        parts.append(f"[red]fp32 itself is not finite:[/] {escape(comparison.reference_not_finite)}")
    if comparison.not_finite is not None:
        parts.append(f"[red]not finite in the region, and finite in fp32:[/] {escape(comparison.not_finite.text)}")
    return [*parts, ""] if parts else []


def _worst(comparison: Comparison) -> list[RenderableType]:
    """The verdict, and the calls that add the largest errors, as `nc.compare` judges them."""
    differences = comparison.differences
    if comparison.reference_not_finite or not comparison.worst:
        return []
    made = table(
        f"against fp32: {differences.verdict}; the calls that add the largest errors",
        "call", "line", "computes", ">own", ">total", ">round-off", "verdict",
    )  # fmt: skip
    made.columns[0].min_width = 14
    for row in comparison.worst:
        made.add_row(
            escape(str(row.id)), escape(short_place(row.file, row.line)), _formats(row.computes), f"{row.own:.1e}",
            f"{row.total:.1e}", f"{row.band:.1e}", row.verdict,
        )  # fmt: skip
    faults = [f"[red]{escape(str(row.id))}: {escape(row.why)}.[/]" for row in comparison.worst if row.why]
    moves = f"One unit in the last place of every call moves the output by {differences.band:.1e}."
    more = "nc.compare shows every call, and what ops do to the output alone."
    return [made, *faults, f"  {moves} {more}" if differences.band else f"  {more}", ""]


def _comparison(comparison: Comparison, low: str, gradients: bool) -> list[RenderableType]:
    outputs = table(
        "against fp32: outputs", "output", "fp32 run", "region", ">SQNR", ">relative error", ">largest error"
    )
    for o in comparison.outputs:
        sqnr = "equal" if math.isinf(o.sqnr_db) and o.sqnr_db > 0 else f"{o.sqnr_db:.1f} dB"
        outputs.add_row(escape(o.name), o.reference, o.found, sqnr, f"{o.relative_error:.2e}", f"{o.largest_error:.2e}")
    parts: list[RenderableType] = [outputs, *_not_finite(comparison), *_worst(comparison)]
    if comparison.metric_reference:
        metrics = table("against fp32: the model's own metric", "metric", ">fp32", ">region", ">change")
        for name, before in comparison.metric_reference.items():
            after = comparison.metric_found.get(name, math.nan)
            metrics.add_row(escape(name), f"{before:.6g}", f"{after:.6g}", f"{after - before:+.2g}")
        parts.append(metrics)
    cost = table("against fp32: cost on this machine", "", ">fp32", ">region", ">ratio", "")
    low_q, high_q = comparison.time_quartiles
    mode = "with gradients" if gradients else "no_grad"
    cost.add_row(
        "time", f"{comparison.reference_ms:.2f} ms", f"{comparison.region_ms:.2f} ms", f"{comparison.time_ratio:.2f} x",
        f"quartiles {low_q:.2f} to {high_q:.2f}, {comparison.repeats} alternating pairs",
    )  # fmt: skip
    cost.add_row(
        "peak memory", in_bytes(comparison.reference_peak_bytes), in_bytes(comparison.region_peak_bytes),
        f"{comparison.memory_ratio:.2f} x",
        f"beyond weights of {in_bytes(comparison.weight_bytes)}, which the ratio counts; {mode}",
    )  # fmt: skip
    parts.append(cost)
    if on := spent(comparison):
        slower = f"[red]In {low} this model is slower here.[/red] " if comparison.time_ratio > 1.05 else ""
        parts.append(f"{slower}Its time: {on}.")
    return parts
