"""A document as text: its overview, of which a terminal shows the most important first; and every row of its tables."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from narrowcast.core.policy.text import rule_text
from narrowcast.output.console import in_bytes, short_place
from narrowcast.output.screen import Part, wrapped
from narrowcast.output.words import number_text
from narrowcast.reports.documents.model import FIRST_TODOS, Bar, Column, Document, Table, Todo
from narrowcast.reports.documents.rules import alike_module
from narrowcast.reports.documents.words import in_count, in_time

LEAST = 16
"""So much room a column of words has at least."""
TEXTS = ("text", "op", "module", "call", "call_b", "line", "format")
"""Kinds of columns whose cells are words and names, and not numbers."""
NOTE = 5
"""Lines of a note that are shown together."""
_NAME = 15
_WORDS = {"multiplications": "MACs"}


def whole_text(page: Document, width: int) -> str:
    """Return the overview, and each table. A rule to copy is never broken into lines."""
    overview = [line for part in overview_parts(page, width, every=True) for line in part.lines]
    return "\n".join([*overview, *(line for one in page.tables for line in _table(one, width))])


def overview_parts(page: Document, width: int, rows: Sequence[Part] = (), every: bool = False) -> list[Part]:
    """Return facts, verdict and notes, figures, and recommendations (with `every` all of them, and each with its rule);
    `rows`, what is most expensive, stand before these.
    """
    head = "; ".join(f"{name}: {value}" for name, value in page.facts)
    first = [*wrapped(head, width=width), *wrapped(f"VERDICT: {page.verdict}", width=width)]
    notes = [wrapped(f"note: {note}", width=width) for note in page.notes]
    return [
        Part(first, least=len(first)),
        _of_notes(notes),
        part_of([[""], *_figures(page, width)], 1, 1, 7),
        *rows,
        *(_todos(page.todos, width, len(page.todos)) if every else _todos(page.todos[:FIRST_TODOS], width)),
    ]


def _of_notes(notes: Sequence[Sequence[str]]) -> Part:
    """Return notes, each as a whole; but of one with a traceback, too long for any screen, what fits."""
    units = [n for note in notes for n in ([len(note)] if len(note) <= NOTE else [NOTE, *[1] * (len(note) - NOTE)])]
    return Part([line for note in notes for line in note], 2, 0, units[0] if units else 0, tuple(units))


def part_of(units: Sequence[Sequence[str]], rank: int, heading: int, least: int) -> Part:
    """Return a part whose units are taken as a whole."""
    lines = [line for unit in units for line in unit]
    return Part(lines, rank, heading, least, tuple(map(len, units)))


def _figures(page: Document, width: int) -> list[list[str]]:
    figures = [(f.name, f.value, f.detail) for f in page.figures if f.name != "calls"]
    titles = [_WORDS.get(bar.unit, bar.title.split()[0].rstrip(",").lower()) for bar in page.bars]
    names = [
        title if titles.count(title) == 1 else bar.title.lower() for title, bar in zip(titles, page.bars, strict=True)
    ]
    column = max((len(value) for _, value, _ in figures), default=0)
    names_column = max(map(len, (*names, *(name for name, _, _ in figures))), default=0)
    names_column = max(names_column + 1, _NAME - 1)
    texts = [f"{name:{names_column}} {_shares(bar)}" for name, bar in zip(names, page.bars, strict=True)]
    texts += [f"{name:{names_column}} {value:{column}}  {detail}" for name, value, detail in figures]
    return [wrapped(text, " " * (names_column + 1), width) for text in texts]


def _shares(bar: Bar) -> str:
    whole = sum(amount for _, amount in bar.parts) or 1
    return ", ".join(f"{name} {_amount(bar.unit, n)} {n / whole:.0%}" for name, n in bar.parts)


def _amount(unit: str, amount: float) -> str:
    if unit == "bytes":
        return in_bytes(amount)
    if unit == "multiplications":
        return in_count(amount)
    return in_time(amount) if unit == "ns" else f"{amount:.0f}"


def _todos(todos: Sequence[Todo], width: int, with_rules: int = 1) -> list[Part]:
    """Return what to do, and why; the first ones have their rules, to copy."""
    parts = []
    together = max((todo.together for todo in todos), default=1)
    with_rules = max(with_rules, together)
    for number, todo in enumerate(todos, 1):
        why = f": {todo.why}" if todo.why else ""
        words = wrapped(f"{number}. {todo.what.rstrip('.')}{why}", "   ", width)
        lines = ["", *words] if number == 1 else words
        parts.append(Part(lines, min(number, 2), 0, len(lines) if number <= together else 0, (len(lines),)))
        rule = rule_text(todo.rule).split("\n") if number <= with_rules and todo.rule else []
        least = len(rule) if number <= together else 0
        parts += [Part(rule, min(number, 2), 0, least, (len(rule),))] if rule else []
    return parts


def cell(value: Any, kind: str) -> str:
    """Return the text of a cell; nothing where it is not known."""
    if value is None or value is False or value == "":
        return "(root)" if kind == "module" and value == "" else ""
    if value is True:
        return "yes"
    if kind in _SAID:
        return str(value) if isinstance(value, str) and kind not in TEXTS else _SAID[kind](value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


_SAID: dict[str, Callable[[Any], str]] = {
    "op": lambda op: op.removesuffix(".default"), "line": short_place, "bytes": in_bytes, "ns": in_time,
    "error": number_text, "decibels": lambda db: f"{db:.1f} dB", "bits": lambda bits: f"{bits:+.1f}",
    "share": lambda share: f"{share:.2%}" if 0 < share < 0.01 else f"{share:.0%}",
}  # fmt: skip


def _table(table: Table, width: int) -> list[str]:
    """Return its title and its rows, one on a line if there is room, for which one column of words may be wrapped;
    else, and where calls have names of their own, each on several. A column with equal values is one line above.
    """
    cells = [
        [cell(value, column.kind) for value, column in zip(row, table.columns, strict=True)]
        for row in alike_rows(table)
    ]
    columns = list(zip(*cells, strict=True))
    is_long = any(column.kind in ("call", "call_b") for column in table.columns)
    differ, alike = split_columns(table, cells)
    shown = list(range(len(columns))) if is_long or not differ else differ
    common = wrapped(f"all: {alike}", width=width) if alike and shown == differ else []
    widths = [max(map(len, (table.columns[n].name, *columns[n]))) for n in shown]
    over = sum(widths) + 2 * len(shown) - 1 - width
    longest = max(range(len(shown)), key=lambda n: widths[n] * (table.columns[shown[n]].kind == "text"), default=0)
    if over > 0 and table.columns[shown[longest]].kind == "text" and widths[longest] - over >= LEAST:
        widths[longest], over = widths[longest] - over, 0
    rows = _cards(table, cells, shown, width) if is_long or over > 0 else _lines(table, cells, shown, widths)
    return ["", table.title, *common, *rows]


def split_columns(table: Table, cells: list[list[str]]) -> tuple[list[int], str]:
    """Return the columns in which rows differ; and in a line the values of the others, which are equal in all rows."""
    columns = list(zip(*cells, strict=True))
    differ = [n for n, column in enumerate(columns) if len(set(column)) > 1 or (len(cells) == 1 and column[0])]
    alike = [n for n, column in enumerate(columns) if n not in differ and column[0]]
    return differ, ", ".join(f"{table.columns[n].name} {columns[n][0]}" for n in alike)


def _lines(table: Table, cells: list[list[str]], shown: Sequence[int], widths: Sequence[int]) -> list[str]:
    columns = [table.columns[n] for n in shown]

    def line(texts: Sequence[str]) -> str:
        pairs = zip(texts, columns, widths, strict=True)
        return " " + "  ".join(f"{text:{'<' if c.kind in TEXTS else '>'}{width}}" for text, c, width in pairs).rstrip()

    lines = ["", line([column.name for column in columns]), f" {'─' * (sum(widths) + 2 * len(widths) - 2)}"]
    for row in cells:
        parts = [textwrap.wrap(row[n], width) or [""] for n, width in zip(shown, widths, strict=True)]
        lines += [line([part[k] if k < len(part) else "" for part in parts]) for k in range(max(map(len, parts)))]
    return lines


def _cards(table: Table, cells: list[list[str]], shown: Sequence[int], width: int) -> list[str]:
    """Return each row on several lines: first which call it is about."""
    lines = []
    for row in cells:
        known = [(table.columns[n], row[n]) for n in shown if row[n]]
        calls = [f"  {column.name}: {text}" for column, text in known if column.kind in ("call", "call_b")]
        place = " ".join(text for column, text in known if _is_place(column))
        others = [f"{c.name} {text}" for c, text in known if c.kind not in ("call", "call_b") and not _is_place(c)]
        heads = [*calls, *(f"  {line}" for line in wrapped(place, width=width - 2))]
        lines += [*heads, *wrapped(f"    {', '.join(others)}", "    ", width)]
    return lines


def _is_place(column: Column) -> bool:
    return column.kind in ("module", "op") or (column.name == "call" and column.kind == "text")


BY_MODULE = "modules"
FIRST = (
    "findings",
    "errors",
    "differences",
    "skipped",
    "tensors",
    "headroom",
    "pairs",
    "casts",
    "rules",
    "steps",
    "faster",
    "ops",
)
"""Tables of which the first that a document has says most."""


def telling_table(page: Document) -> Table | None:
    """Return the table that says most: what a first screen and a notebook show of."""
    named = {table.name: table for table in reversed(page.tables)}
    names = [BY_MODULE] if page.tables and page.tables[0].name == BY_MODULE else FIRST
    return next((named[name] for name in names if name in named), None)


def first_rows(table: Table) -> list[list[Any]]:
    """Return a table's rows in the order in which they are shown where not all are."""
    return [table.rows[n] for n in table.first] or alike_rows(table)


def alike_rows(table: Table) -> list[list[Any]]:
    """Return the rows; those of modules that differ by the number of their layer alone, and are alike otherwise, as
    one, if what they count can be added.
    """
    if table.columns[0].kind != "module" or any(column.kind in ("error", "share") for column in table.columns):
        return table.rows
    counts = [n for n, column in enumerate(table.columns) if column.kind not in TEXTS]
    groups: dict[tuple[Any, ...], list[list[Any]]] = {}
    for row in table.rows:
        words = tuple(alike_module(str(value)) if not n else value for n, value in enumerate(row) if n not in counts)
        groups.setdefault(words, []).append(row)
    rows = []
    for (pattern, *_), alike in groups.items():
        joined = list(alike[0]) if len(alike) == 1 else [pattern, *alike[0][1:]]
        for n in counts:
            joined[n] = sum(row[n] or 0 for row in alike)
        rows.append(joined)
    return sorted(rows, key=lambda row: -sum(row[n] for n in counts)) if counts else rows
