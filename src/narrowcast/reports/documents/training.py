"""The pages of training: what is wrong with a checked loop and what to write instead; the scale of a scaler by step."""

from __future__ import annotations

from narrowcast.output.words import counted, number_text
from narrowcast.reports.documents.model import Document, Figure, Series, Todo
from narrowcast.reports.documents.tables import advice_table, table
from narrowcast.reports.documents.words import place
from narrowcast.reports.results.scaler_history import History
from narrowcast.reports.results.storage import StorageCheck
from narrowcast.reports.results.training import COST_TIME, TrainingCheck
from narrowcast.reports.results.verdicts import NOT_JUDGED, SOUND, WRONG

LATEST = 5
"""How many of the steps that were skipped are shown first, the last ones."""


def training_document(result: TrainingCheck) -> Document:
    """Return the page of a check of a training loop; it has no graph."""
    findings, calls = result.findings, result.calls
    number = len(findings)
    page = Document("training-check", "A training loop", training_verdict(result), "good" if result else "bad")
    page.facts = [("steps", str(result.steps))]
    page.figures = [
        Figure("findings", number, "", "bad" if number else "good"),
        Figure("calls in a region", calls.get("inside", 0), "of the forward"),
        Figure("calls outside", calls.get("outside", 0), "that a region would lower"),
    ]
    page.todos = [
        Todo(row.todo, f"{row.kind}, {place(row.file, row.line)}: {row.what}", {}, row.module_path) for row in findings
    ]
    page.notes = list(result.notes)
    page.tables = advice_table({row: result.times.get(row, 1) for row in findings})
    return page


def training_verdict(result: TrainingCheck) -> str:
    """Return the verdict in a sentence. What costs time alone is not wrong."""
    slow = sum(finding.kind in COST_TIME for finding in result.findings)
    number = len(result.findings) - slow
    if number:
        return f"{counted(number, 'thing')} wrong with the precision of this loop"
    if result.not_inspected:
        return "Not all of this loop could be inspected: nothing is said of it as a whole"
    costs = f", and {counted(slow, 'thing')} {'cost' if slow > 1 else 'costs'} time" if slow else ""
    return f"No fault was found in the precision of this loop{costs}"


def storage_document(result: StorageCheck) -> Document:
    """Return the page of a check of storage; it has no graph."""
    findings, elements = result.findings, sum(group.elements for group in result.groups)
    name, tone = f"{result.model}, {result.optimizer}", _TONES[result.verdict]
    page = Document("storage-check", name, storage_verdict(result), tone)
    kinds = ("weight", "master", "gradient", "state")
    sizes = {kind: sum(getattr(group, f"{kind}_bytes") for group in result.groups) for kind in kinds}
    before = result.bytes_before / max(1, elements)
    detail = ", ".join(f"{kind} {size / elements:.3g}" for kind, size in sizes.items() if size)
    page.figures = [
        Figure("bytes", sum(sizes.values()) / max(1, elements), f"per element on this rank: {detail}"),
        *([Figure("bytes before", before, "per element, before nc.store")] if before else []),
        Figure("elements", elements, f"in {counted(sum(group.count for group in result.groups), 'parameter')}"),
    ]
    lost = [group for group in result.groups if group.lost is not None]
    for group in lost:
        from_rate = f"; of half of them below lr={group.lost_from:.2g}" if group.lost_from else ""
        detail = f"of elements in {group.format}, as a share{from_rate}"
        page.figures.append(Figure(f"updates lost, group {group.group}", round(group.lost or 0.0, 3), detail))
    page.todos = [Todo(row.todo, f"{row.kind}: {row.what}", {}, row.module_path) for row in findings]
    page.notes = list(result.notes)
    columns = "group:number, weights:format, parameters:number, elements:number, weight:bytes, master:bytes, "
    columns += "gradient:bytes, states:bytes, bytes per element:number, small updates, lr, an update, lost:share"
    rows = [
        [
            g.group,
            g.format,
            g.count,
            g.elements,
            g.weight_bytes,
            g.master_bytes,
            g.gradient_bytes,
            g.state_bytes,
            round(g.bytes_per_element, 2),
            g.updates,
            "" if g.rate is None else f"{g.rate:g}",
            "" if g.update is None else number_text(g.update),
            g.lost,
        ]
        for g in result.groups
    ]
    page.tables = table("storage", "What is kept of each group's parameters, in bytes", columns, rows)
    return page


_TONES = {SOUND: "good", WRONG: "bad", NOT_JUDGED: ""}


def storage_verdict(result: StorageCheck) -> str:
    """Return the verdict in a sentence."""
    if result.findings:
        return f"{counted(len(result.findings), 'thing')} lost by how this training is stored"
    if result.verdict == NOT_JUDGED:
        return "No loss was found, and some updates were not judged"
    return "No loss was found in how this training is stored"


def scaler_document(history: History) -> Document:
    """Return the page of `scaler.history`; it has no graph."""
    rows, skipped = history.rows, history.skipped
    steps = history.steps
    verdict = f"{skipped or 'None'} of {counted(steps, 'step', 'were')} skipped" if steps else "No step was made"
    page = Document("scaler", "A loss scale", verdict, "" if skipped else "good")
    page.facts = [("steps", str(history.steps))]
    page.figures = [Figure("skipped", skipped, "steps")]
    page.figures += [Figure("scale", rows[-1].scale, "of the last step")] if rows else []
    for loss in dict.fromkeys(row.loss for row in rows):
        own = [row for row in rows if row.loss == loss]
        title = f"Scale by step: {loss}" if loss else "Scale by step"
        lines: list[tuple[str, list[float | None]]] = [("scale", [row.scale for row in own])]
        page.series.append(Series(title, "step", "scale", [row.step for row in own], lines, "whole", log=True))
    lost = [[row.step, row.loss, row.scale, ", ".join(row.parameters), row.why] for row in rows if row.skipped]
    columns = "step:number, loss, scale:number, parameters, why"
    page.tables = table("skipped", "Skipped steps", columns, lost, first=range(len(lost))[-LATEST:])
    return page
