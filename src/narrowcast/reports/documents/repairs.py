"""The page of a repair: the rules that it ends with, and the runs that led there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from narrowcast.reports.documents.model import Bar, Figure, Page, Series, Table, Todo
from narrowcast.reports.documents.tables import table
from narrowcast.reports.documents.words import counted, error_text, number

Data = Mapping[str, Any]
CLEAN, REPAIRED = "nothing to repair", "repaired"
_RULE = ("op", "module", "argument", "action", "reason")


def repair_page(data: Data) -> Page:
    """The page of what `nc.repair` found."""
    is_clean = data["verdict"] in (CLEAN, REPAIRED)
    page = Page("repair", data["subject"], _verdict(data), "good" if is_clean else "bad")
    page.facts = [
        ("model", data["subject"]),
        ("device", str(data["environment"].get("device", data["device_type"]))),
        ("policy", data["base"]),
        ("region", f"{data['device_type']} in {data['low']}"),
        ("asked", data["asked"]),
    ]
    page.figures = [*_figures(data), *_product_figures(data)]
    page.bars = _bars(data)
    rules = [_rule(row) for row in data["rules"]]
    page.todos = [_todo(row, rule) for row, rule in zip(data["rules"], rules, strict=True)][:3]
    page.notes = list(data["notes"])
    page.tables = [*_rule_table(data["rules"], rules), *_step_table(data["steps"]), *_others(data)]
    page.series = _series(data)
    return page


def _verdict(data: Data) -> str:
    before, after = data["before"]["found"], data["after"]["found"]
    if data["verdict"] == CLEAN:
        return f"Nothing to repair: {after}"
    if data["verdict"] == REPAIRED:
        return f"Repaired with {counted(len(data['rules']), 'rule')}: {before}, and now {after}"
    if data["verdict"] == "out of ideas":
        return f"Not repaired: {before}; with {counted(len(data['rules']), 'rule')} {after}"
    return f"{str(data['verdict']).capitalize()}: {before}"


def _figures(data: Data) -> list[Figure]:
    """What was wrong and what is left of it, and what it costs."""
    before, after = data["before"], data["after"]
    found = [Figure("runs", data["runs"], "of the model, its metric included")]
    found += [Figure("rules", len(data["rules"]), f"tried, and not needed: {len(data['dropped'])}")]
    if number(after["error"]) is not None:
        found.append(Figure("output error", after["error"], f"before: {error_text(before['error'])}", unit="relative"))
    for name, value in after["metric"].items():
        known = [("fp32", data["reference"].get(name)), ("before", before["metric"].get(name))]
        detail = ", ".join(f"{said} {_metric(figure)}" for said, figure in known if figure is not None)
        found.append(Figure(name, value, detail))
    cost = sum(float(row["cost_ns"]) for row in data["rules"])
    if data["rules"] and math.isfinite(cost):
        detail = "by the profile of the device, casts left out"
        found.append(Figure("the rules cost a run", cost, detail, unit="more ns"))
    return found


def _metric(value: Any) -> str:
    known = number(value)
    return str(value) if known is None else f"{known:.6g}"


def _product_figures(data: Data) -> list[Figure]:
    before, after = data["products_before"], data["products_after"]
    if not after["all"]:
        return []
    went_through = before["all"] == after["all"]
    detail = f"of {after['all']} products; before"
    detail += f": {before['low']}" if went_through else " it did not run to its end"
    return [Figure(f"still in {data['low']}", after["low"], detail)]


def _bars(data: Data) -> list[Bar]:
    """Products by format, before and after; before only where the model ran to its end."""
    before, after = data["products_before"], data["products_after"]
    found = []
    for title, counts in (("Products by format, before", before), ("Products by format, with the rules", after)):
        if counts["all"] and counts["all"] == after["all"]:
            parts = ((data["low"], float(counts["low"])), ("fp32", float(counts["all"] - counts["low"])))
            found.append(Bar(title, "calls", tuple(part for part in parts if part[1])))
    return found


def _rule(row: Data) -> dict[str, str]:
    return {key: str(row[key]) for key in _RULE if row[key] or (key == "module" and row[key] is not None)}


def _todo(row: Data, rule: Mapping[str, str]) -> Todo:
    where = f" in {row['module']}" if row["module"] else ""
    argument = f" for {row['argument']}" if row["argument"] else ""
    needed = f"; without it: {row['needed']}" if row["needed"] else ""
    path = row["module"] or ""
    what = f"Keep {row['op']}{where}{argument} in fp32"
    if row["action"] != "full":
        what = f"{row['op']}{where}{argument}: {row['action']}"
    return Todo(what, f"{row['reason']}{needed}", rule, path)


def _rule_table(rows: list[Data], rules: list[dict[str, str]]) -> list[Table]:
    cells = [
        [row["module"] or "", row["op"], row["argument"] or "", row["action"], row["cause"], row["share"], row["calls"],
         number(float(row["cost_ns"])), row["reason"], row["needed"]]
        for row in rows
    ]  # fmt: skip
    columns = "module, op:op, argument, action, mends, share:share, calls:number, cost:ns, reason, without it"
    return table("rules", "The rules that it ends with", columns, cells, rules)


def _step_table(steps: list[Data]) -> list[Table]:
    rows = [
        [at, step["what"], step["found"], number(step["error"]), *_low(step),
         ", ".join(f"{name} {_metric(value)}" for name, value in step["metric"].items()),
         "; ".join(step["added"]), "; ".join(step["left_out"])]
        for at, step in enumerate(steps, 1)
    ]  # fmt: skip
    columns = (
        "run:number, under what, found, output error:error, products in low:number, of:number, metric, then adds, "
        "left out"
    )
    return table("steps", "Each run: what was found, and what was done about it", columns, rows)


def _low(step: Data) -> tuple[int | None, int | None]:
    counts = step.get("products") or {"low": 0, "all": 0}
    return (counts["low"], counts["all"]) if counts["all"] else (None, None)


def _others(data: Data) -> list[Table]:
    rows = [[rule, "was tried, and is not needed"] for rule in data["dropped"]]
    rows += [[rule, "may not be needed: the model ran as often as it may"] for rule in data["untried"]]
    return table("other rules", "Rules besides", "rule, what became of it", rows)


def _series(data: Data) -> list[Series]:
    """The error and the share of products in the low format over the runs, as far as they are known."""
    steps = data["steps"]
    xs = [float(n) for n in range(1, len(steps) + 1)]
    errors = [number(step["error"]) for step in steps]
    shares = [100 * low / whole if low is not None and whole else None for low, whole in map(_low, steps)]
    found = []
    if sum(error is not None for error in errors) > 1:
        lines: list[tuple[str, list[float | None]]] = [("output error", [error or None for error in errors])]
        found.append(Series("Error by run", "run", "relative error", xs, lines, "whole", "relative", log=True))
    if sum(share is not None for share in shares) > 1:
        name = f"products in {data['low']}"
        note = "Runs in fp32, and runs that raised before their end, have none or fewer."
        found.append(
            Series("What stays low, by run", "run", "of products", xs, [(name, shares)], "whole", "percent", note=note)
        )
    return found
