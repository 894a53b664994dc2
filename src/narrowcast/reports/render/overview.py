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
_WORDS = {"multiplications": "MACs"}


def overview_parts(page: Document, head: str, rows: list[Part], width: int) -> list[Part]:
    """Head, verdict and notes, figures, what is worth doing; `rows`, what is most expensive, stand before that.

    head: what ran, in which region.
    """
    first = [*wrapped(head, width=width), *wrapped(f"VERDICT: {page.verdict}", width=width)]
    notes = [line for note in page.notes for line in wrapped(f"note: {note}", width=width)]
    return [
        Part(first),
        Part(notes, rank=2, least=2),
        Part(["", *_figures(page, width)], rank=1, heading=1, least=7),
        *rows,
        *_todos(page.todos[:TODOS], width),
    ]


def overview_lines(page: Document, width: int) -> list[str]:
    """All of the overview: what was looked at, the verdict, notes, figures, shares by format, and what to do."""
    head = "; ".join(f"{name}: {value}" for name, value in page.facts)
    notes = [line for note in page.notes for line in wrapped(f"note: {note}", width=width)]
    todos = [line for part in _todos(page.todos, width, len(page.todos)) for line in part.lines]
    return [
        *wrapped(head, width=width), *wrapped(f"VERDICT: {page.verdict}", width=width), *notes, "",
        *_figures(page, width), *todos,
    ]  # fmt: skip


def _figures(page: Document, width: int) -> list[str]:
    """A line for each share by format, and for each figure, or two."""
    figures = [(f.name, f.value, f.detail) for f in page.figures if f.name != "calls"]
    titles = [_WORDS.get(bar.unit, bar.title.split()[0].rstrip(",").lower()) for bar in page.bars]
    names = [
        title if titles.count(title) == 1 else bar.title.lower() for title, bar in zip(titles, page.bars, strict=True)
    ]
    column = max((len(value) for _, value, _ in figures), default=0)
    names_column = max(map(len, (*names, *(name for name, _, _ in figures))), default=0)
    names_column = max(names_column, _NAME - 1)
    said = [f"{name:{names_column}} {_shares(bar)}" for name, bar in zip(names, page.bars, strict=True)]
    said += [f"{name:{names_column}} {value:{column}}  {detail}" for name, value, detail in figures]
    return [line for text in said for line in wrapped(text, " " * _NAME, width)]


def _shares(bar: Bar) -> str:
    whole = sum(amount for _, amount in bar.parts) or 1
    return ", ".join(f"{name} {_amount(bar.unit, n)} {n / whole:.0%}" for name, n in bar.parts)


def _amount(unit: str, amount: float) -> str:
    if unit == "bytes":
        return in_bytes(amount)
    if unit == "multiplications":
        return in_count(amount)
    return f"{amount / 1e6:.3g} ms" if unit == "ns" else f"{amount:.0f}"


def _todos(todos: Sequence[Todo], width: int, with_rules: int = 1) -> list[Part]:
    """What to do, and why; the first ones have their rules, to copy."""
    parts = []
    for number, todo in enumerate(todos, 1):
        why = f": {todo.why}" if todo.why else ""
        said = wrapped(f"{number}. {todo.what.rstrip('.')}{why}", "   ", width)
        lines = ["", *said] if number == 1 else said
        parts.append(Part(lines, min(number, 2), step=len(lines), least=len(lines) if number == 1 else 0))
        rule = rule_text(todo.rule).split("\n") if number <= with_rules and todo.rule else []
        least = len(rule) if number == 1 else 0
        parts += [Part(rule, min(number, 2), step=len(rule), least=least)] if rule else []
    return parts
