"""The page of what a watch found."""

from __future__ import annotations

from dataclasses import replace

from narrowcast.formats import fp16
from narrowcast.output.words import counted
from narrowcast.reports.documents.ledgers import ORDER, bar_of
from narrowcast.reports.documents.model import Document, Figure, Graph, Node, Series, Shown, Table, Todo, node_of, once
from narrowcast.reports.documents.rules import rule_todo
from narrowcast.reports.documents.tables import finding_table, table
from narrowcast.reports.documents.words import number, place
from narrowcast.reports.results.findings import FOR_SCALER, Finding, Watching
from narrowcast.reports.results.run_records import tensor_text
from narrowcast.reports.results.verdicts import TREND


def watch_document(result: Watching) -> Document:
    """Return the page of the result of a watch."""
    nodes, findings = [], sorted(result.findings, key=lambda finding: finding.made_by == TREND)
    for finding in findings:
        node = node_of(finding.id, finding.formats, finding.file, finding.line)
        node.verdict = finding.made_by
        node.finding = f"{finding.what}, step {finding.step}: {finding.sentence}"
        seen = {**dict(finding.inputs), **dict(finding.outputs)}
        node.facts = tuple((name, tensor_text(facts)) for name, facts in seen.items())
        nodes.append(node)
    bad, skipped = [n for n in nodes if n.verdict != TREND], result.intentional.get(FOR_SCALER, 0)
    page = Document("watch", "A watched run", *watch_verdict(result), graph=Graph(nodes, [], note=ORDER))
    page.facts = [("inspected", counted(result.calls, "call")), ("steps", str(result.steps))]
    page.bars = bar_of(result.formats, "calls", "Calls inspected, by the format of their results")
    page.figures = [
        Figure("findings", len(bad), counted(len(nodes) - len(bad), "trend"), "bad" if bad else "good"),
        Figure("passed on", result.spread, "later calls"),
        Figure("intentional", sum(result.intentional.values()) - skipped, "infinities, such as those of masks"),
    ]
    page.figures += [
        Figure(f"largest |x| in fp16, {direction}", one.magnitude, f"of {fp16.max:.0f}, by {one.call}")
        for direction, one in result.largest.items()
    ]
    page.notes = list(result.notes)
    if skipped:
        page.figures.append(Figure("skipped steps", skipped, "by a scaler, whose scale was too high"))
        page.notes.append(
            "A scaler skips steps whose gradients overflow, and lowers its scale until they do not. If it skips all of "
            "them, the loss or the backward overflows by itself: nc.check_training(step) says which."
        )
    page.todos = once([todo for finding in findings for todo in finding_todos(finding)])
    intentional = [[times, why] for why, times in result.intentional.items()]
    page.tables = finding_table([_with_values(node) for node in nodes], map(_first_rule, findings))
    page.tables += _gradient_table(result) + table(
        "intentional", "Intentional infinities", "times:number, why", intentional
    )
    page.series = _history(result)
    return page


def _with_values(node: Node) -> Node:
    values = ", ".join(f"{name} {text}" for name, text in node.facts)
    return replace(node, finding=f"{node.finding} ({values})") if values else node


def watch_verdict(result: Watching) -> tuple[str, str]:
    """Return the verdict in a sentence, and its tone."""
    makers = sum(finding.made_by != TREND for finding in result.findings)
    if makers:
        passed = f"; {counted(result.spread, 'later call')} passed it on" if result.spread else ""
        again = f", {counted(result.repeated, 'more time')}" if result.repeated else ""
        return f"{counted(makers, 'call')} made a NaN or an infinity{again}{passed}", "bad"
    if result.not_inspected:
        often = counted(result.not_inspected, "time")
        return f"No NaN or infinity was seen, but inspecting failed {often}: see the notes", ""
    if result.findings:
        return "No NaN or infinity was made, but see the trends", ""
    if FOR_SCALER in result.intentional:
        return "No NaN or infinity was made except in steps that the scaler skipped", ""
    return "No NaN or infinity was made", "good"


def _first_rule(row: Finding) -> Shown:
    return row.rules[0].keys if row.rules else {}


def finding_todos(row: Finding) -> list[Todo]:
    """Return a line for each rule that fixes the finding, or its advice."""
    at = place(row.file, row.line)
    sentence = row.sentence if row.made_by == TREND else f"{row.id}{at and f' ({at})'} makes {row.what}: {row.sentence}"
    why = " ".join(filter(None, (f"{sentence}.", row.advice)))
    if not row.rules:
        return [Todo(row.advice or row.sentence, sentence if row.advice else "", path=row.id.module_path)]
    return [rule_todo(rule, why, len(row.rules)) for rule in row.rules]


def _history(result: Watching) -> list[Series]:
    """Return over training steps what inspections of gradients kept, and the scale."""
    rows = [row for row in result.history if row.gradients]
    if len(rows) < 2:
        return []
    xs = [float(row.step) for row in rows]
    lines = [
        ("largest gradient", [number(max(p.largest for p in row.gradients.values())) for row in rows]),
        ("smallest rms of a parameter's", [number(min(p.rms for p in row.gradients.values())) for row in rows]),
    ]
    if any(row.scale is not None for row in rows):
        lines.append(("loss scale", [number(row.scale) for row in rows]))
    series = [Series("Gradients over training steps", "step", "magnitude", xs, lines, "whole", log=True)]
    directions = dict.fromkeys(direction for row in rows for direction in row.largest)
    if directions:
        near = [(name, [number(row.largest.get(name)) for row in rows]) for name in directions]
        near.append(("the largest of fp16", [fp16.max] * len(rows)))
        title = "Largest |x| that calls returned in fp16, over training steps"
        series.append(Series(title, "step", "magnitude", xs, near, "whole", log=True))
    return series


def _gradient_table(result: Watching) -> list[Table]:
    if not result.history:
        return []
    last = result.history[-1]
    rows = [[name, number(p.largest), number(p.rms), p.zeros] for name, p in last.gradients.items()]
    title = f"Gradients in step {last.step}, the last one inspected"
    return table("gradients", title, "parameter, largest:number, rms:number, zeros:share", rows)
