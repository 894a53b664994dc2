"""The page's overview as lines of text: what a terminal shows of it first."""

from __future__ import annotations

from collections.abc import Sequence

from narrowcast.output.console import in_bytes
from narrowcast.output.screen import Part, wrapped
from narrowcast.reports.documents.model import Bar, Document, Todo
from narrowcast.reports.documents.rules import rule_text
from narrowcast.reports.documents.words import in_count

TODOS = 3
_NAME = 15
_WORDS = {"multiplications": "multiplied"}


def overview_parts(page: Document, head: str, rows: list[Part], width: int) -> list[Part]:
    """Head, verdict and notes, figures, what is worth doing; `rows`, what is most expensive, stand before that.

    head: what ran, in which region.
    """
    first = [*wrapped(head, width=width), *wrapped(f"VERDICT: {page.verdict}", width=width)]
    notes = [line for note in page.notes for line in wrapped(f"note: {note}", width=width)]
    figures = [(f.name, f.value, f.detail) for f in page.figures]
    column = max((len(value) for _, value, _ in figures), default=0)
    said = [f"{_WORDS.get(bar.unit, bar.title.split()[0].lower()):{_NAME}}{_shares(bar)}" for bar in page.bars]
    said += [f"{name:{_NAME - 1}} {value:{column}}  {detail}" for name, value, detail in figures if name != "calls"]
    return [
        Part(first),
        Part(notes, rank=2, least=2),
        Part(["", *said], rank=1, heading=1, least=7),
        *rows,
        *_todos(page.todos[:TODOS], width),
    ]


def _shares(bar: Bar) -> str:
    whole = sum(amount for _, amount in bar.parts) or 1
    return ", ".join(f"{name} {_amount(bar.unit, n)} {n / whole:.0%}" for name, n in bar.parts)


def _amount(unit: str, amount: float) -> str:
    if unit == "bytes":
        return in_bytes(amount)
    if unit == "multiplications":
        return in_count(amount)
    return f"{amount / 1e6:.3g} ms" if unit == "ns" else f"{amount:.0f}"


def _todos(todos: Sequence[Todo], width: int) -> list[Part]:
    """What to do, and why; the first one has its rule, to copy."""
    parts = []
    for number, todo in enumerate(todos, 1):
        said = wrapped(f"{number}. {todo.what.rstrip('.')}: {todo.why}", "   ", width)
        lines = ["", *said] if number == 1 else said
        parts.append(Part(lines, min(number, 2), step=len(lines), least=len(lines) if number == 1 else 0))
        rule = rule_text(todo.rule).split("\n") if number == 1 and todo.rule else []
        parts += [Part(rule, 2, step=len(rule), is_copied=True)] if rule else []
    return parts
