"""The page of a repair: the rules that it ends with, and the runs that led there."""

from __future__ import annotations

import math

from narrowcast.output.words import counted, number_text
from narrowcast.reports.documents.model import Bar, Document, Figure, Series, Table, Todo, facts_of
from narrowcast.reports.documents.rules import rule_todo
from narrowcast.reports.documents.tables import table
from narrowcast.reports.documents.words import number
from narrowcast.reports.results.repair import Repair, RepairRule, RepairStep
from narrowcast.reports.results.verdicts import BEYOND, CLEAN, OUT_OF_IDEAS, REPAIRED


def repair_document(result: Repair) -> Document:
    """Return the page of the result of `nc.repair`."""
    page = Document("repair", result.subject, repair_verdict(result), "good" if result.is_clean else "bad")
    device, region = result.environment.get("device", result.device_type), f"{result.device_type} in {result.low}"
    page.facts = facts_of(model=result.subject, device=device, policy=result.base, region=region, asked=result.asked)
    page.figures = _figures(result)
    page.bars = _bars(result)
    page.todos = [*_use(result), *map(_todo, result.rules)]
    page.notes = list(result.notes)
    others = [[rule, "was tried, and is not needed"] for rule in result.dropped]
    others += [[rule, "may not be needed: the limit of runs was reached"] for rule in result.untried]
    page.tables = [*_rule_table(result.rules), *_step_table(result.steps)]
    page.tables += table("other rules", "Other rules", "rule, outcome", others)
    page.series = _series(result)
    return page


def repair_verdict(result: Repair) -> str:
    """Return the verdict, a colon, and what was wrong, with how many rules, and what is now."""
    before, after = result.before, result.after
    if result.verdict == CLEAN:
        text = f"{after.found}{_measured(result, after)}"
    elif result.verdict == BEYOND:
        text = before.found
    else:
        end = "what was asked for holds" if result.verdict == REPAIRED else after.found
        rules = counted(len(result.rules), "rule") if result.rules else "no rule"
        text = f"{before.found}{_measured(result, before)}; with {rules}, {end}{_measured(result, after)}"
    return f"{result.verdict.capitalize()}: {text}"


def _measured(result: Repair, step: RepairStep) -> str:
    texts = [] if math.isnan(step.error) else [f"output error {number_text(step.error)}"]
    for name, value in list(step.metric.items())[:2]:
        reference = f", fp32 {result.reference[name]:.6g}" if name in result.reference else ""
        texts.append(f"{name} {value:.6g}{reference}")
    return f" ({'; '.join(texts)})" if texts else ""


def _figures(result: Repair) -> list[Figure]:
    before, after = result.before, result.after
    figures = [Figure("runs", result.runs, "of the model")]
    untested = sum(not row.needed for row in result.rules)
    said = f"needed, or not tried without ({untested})" if untested else "needed"
    figures += [Figure("rules", len(result.rules), f"{said}; {len(result.dropped)} tried and not needed")]
    if number(after.error) is not None:
        figures.append(Figure("output error", after.error, f"before: {number_text(before.error)}", unit="relative"))
    for name, value in after.metric.items():
        known = [("fp32", result.reference.get(name)), ("before", before.metric.get(name))]
        detail = ", ".join(f"{label} {figure:.6g}" for label, figure in known if figure is not None)
        figures.append(Figure(name, value, detail))
    cost = sum(row.cost_ns for row in result.rules)
    if result.rules and math.isfinite(cost):
        detail = "by the profile of the device, casts left out"
        name = "the rules cost a run" if cost >= 0 else "the rules save a run"
        figures.append(Figure(name, abs(cost), detail, unit="ns"))
    was, now = result.matmuls_before, result.matmuls_after
    if now.all:
        detail = f"of {now.all} matrix multiplications; before: {was.low}"
        detail += f" of {was.all}" * (was.all != now.all)
        figures.append(Figure(f"still in {result.low}", now.low, detail))
    return figures


def _bars(result: Repair) -> list[Bar]:
    """Return matrix multiplications by format, before and after; before only where the model ran to its end."""
    before, after = result.matmuls_before, result.matmuls_after
    bars = []
    for when, counts in (("before", before), ("with the rules", after)):
        if counts.all and counts.all == after.all:
            parts = ((result.low, float(counts.low)), ("fp32", float(counts.all - counts.low)))
            title = f"Products {when}"
            bars.append(Bar(title, "calls", tuple(part for part in parts if part[1])))
    return bars


def _use(result: Repair) -> list[Todo]:
    if result.verdict == BEYOND:
        return [Todo("Run it in fp32 under nc.watch()", "no rule fixes that; the watch shows the calls")]
    if result.verdict == OUT_OF_IDEAS:
        return [Todo("See the notes and each run", "no rule about an op or a module fixes what is left")]
    how = 'nc.autocast(..., policy=result.policy); result.policy.save("fixed.toml") keeps it'
    return [Todo("Use the policy", how)] if result.verdict == REPAIRED else []


def _todo(row: RepairRule) -> Todo:
    return rule_todo(row.rule, f"{row.rule.reason}; without it: {row.needed}" if row.needed else row.rule.reason)


def _rule_table(rows: list[RepairRule]) -> list[Table]:
    cells = [
        [row.rule.module or "", row.rule.op, f"#{row.rule.call}" if row.rule.call else "", row.rule.argument or "",
         str(row.rule.action), row.cause, row.share, row.calls, number(row.cost_ns), row.rule.reason, row.needed]
        for row in rows
    ]  # fmt: skip
    columns = (
        "module:module, op:op, call, argument, action, fixes, share:share, calls:number, cost:ns, reason, without it"
    )
    return table("rules", "Rules of the repaired policy", columns, cells, [row.rule.keys for row in rows])


def _step_table(steps: list[RepairStep]) -> list[Table]:
    rows = [
        [at, step.what, step.found, number(step.error), *_low(step),
         ", ".join(f"{name} {value:.6g}" for name, value in step.metric.items()),
         "; ".join(step.added), "; ".join(step.left_out)]
        for at, step in enumerate(steps, 1)
    ]  # fmt: skip
    columns = "run:number, under what, found, output error:error, matmuls in low:number, of:number, metric, then adds, "
    columns += "left out"
    return table("steps", "Each run: findings, and what was tried", columns, rows)


def _low(step: RepairStep) -> tuple[int | None, int | None]:
    return (step.products.low, step.products.all) if step.products.all else (None, None)


def _series(result: Repair) -> list[Series]:
    """Return the error and the share of multiplications in the low format over the runs, as far as they are known."""
    xs = [float(n) for n in range(1, len(result.steps) + 1)]
    errors = [number(step.error) for step in result.steps]
    shares = [100 * low / whole if low is not None and whole else None for low, whole in map(_low, result.steps)]
    series = []
    if sum(error is not None for error in errors) > 1:
        lines: list[tuple[str, list[float | None]]] = [("output error", [error or None for error in errors])]
        series.append(Series("Error by run", "run", "relative error", xs, lines, "whole", "relative", log=True))
    if sum(share is not None for share in shares) > 1:
        title, low = "Share in low formats, by run", [(f"matrix multiplications in {result.low}", shares)]
        note = "Runs in fp32, and runs that raised before their end, have none or fewer."
        series.append(Series(title, "run", "of matrix multiplications", xs, low, "whole", "percent", note=note))
    return series
