"""Results as text: the first screen, or all that was found. Loaded when a result is printed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from narrowcast.output.screen import COLUMNS, PIPED, Part, first_screen, wrapped
from narrowcast.output.words import counted
from narrowcast.reports.documents.model import FIRST_TODOS, Document, Table
from narrowcast.reports.documents.of_results import document_of
from narrowcast.reports.render.every import TEXTS, cell, first_rows, overview_parts, part_of, telling_table, whole_text
from narrowcast.reports.results.result import Result

LISTED = 25
"""Rows of a table that are put into words for a first screen; it has no room for more."""
FIGURES = 3


def text_of(result: Result, every: bool, width: int | None, lines: int) -> str:
    """Return at most this many lines and columns; or, with every, all. width: None for 80 columns, of tables 120."""
    page = document_of(result)
    return whole_text(page, width or PIPED) if every else screen_text(page, width or COLUMNS, lines)


def screen_text(page: Document, width: int, room: int) -> str:
    """Return facts, the verdict, figures, the first rows of the most telling table, and what to do."""
    shown = telling_table(page)
    rows = [] if shown is None else [rows_part(shown, width)]
    todos, cells = len(page.todos) - FIRST_TODOS, sum(len(t.rows) for t in page.tables)
    more = f"and {counted(todos, 'more recommendation')}" if todos > 0 else ""
    parts = [*overview_parts(page, width, rows), Part([more] if more and cells else [], 2)]
    return first_screen(parts, None, room, f"{counted(cells, 'row')} of tables" if cells else more.removeprefix("and "))


def rows_part(table: Table, width: int) -> Part:
    """Return the first rows of a table: the call, formats, figures, its line, and below why."""
    rows = [_row(table, row, width) for row in first_rows(table)[:LISTED]]
    return part_of([["", table.title], *rows], 3, 2, 4)


def _row(table: Table, row: Sequence[Any], width: int) -> list[str]:
    """Return a row on one line, if there is room; else the calls on the first ones, and their figures below."""
    cells = [(column, cell(value, column.kind)) for column, value in zip(table.columns, row, strict=True)]
    known = [(column, text) for column, text in cells if text]
    calls = [f"{column.name}: {text}" for column, text in known if column.kind in ("call", "call_b")]
    names = [text for column, text in known if column.kind in ("module", "op") or column.name in _NAMES]
    formats = [text for column, text in known if column.kind == "format"]
    figures = [f"{column.name} {text}" for column, text in known if column.kind not in TEXTS and text != "0"]
    others = [text for column, text in known if column.name in _WORDS and text != FORWARD]
    places = [text for column, text in known if column.kind == "line"]
    rest = "  ".join(filter(None, [" -> ".join(formats[:2]), *figures[:FIGURES], *others, *places]))
    if names:
        calls.append(" ".join(names))
    fits = len(calls) == 1 and len(calls[0]) + len(rest) + 2 <= width
    calls = [line for call in calls for line in wrapped(call, width=width)]
    lines = [f"{calls[0]}  {rest}"] if fits else [*calls, *wrapped(f"    {rest}", "    ", width)]
    why = [text for column, text in known if column.name in _WHY]
    return [*lines, *(line for text in why for line in wrapped(f"    {text}", "    ", width))]


_NAMES = ("call", "argument", "tensor", "result", "loss", "family")
_WORDS = ("verdict", "direction", "action", "fixes")
_WHY = ("finding", "why", "under what", "found", "then adds", "given")
FORWARD = "forward"
