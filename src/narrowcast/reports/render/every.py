"""All of a document as text: its overview, and every row of its tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rich.console import RenderableType
from rich.markup import escape

from narrowcast.output.console import in_bytes, short_place, table
from narrowcast.output.screen import wrapped
from narrowcast.reports.documents.model import Column, Document, Table
from narrowcast.reports.documents.words import in_time
from narrowcast.reports.render.overview import overview_lines
from narrowcast.reports.results.lines import number_text

_STYLES = {"fp32": "green", "bf16": "yellow", "fp16": "yellow", "fp64": "cyan"}
_TEXTS = ("text", "op", "module", "call", "call_b", "line", "format")


def document_parts(page: Document, width: int) -> list[RenderableType]:
    """The overview, and each table, as rich prints them."""
    parts: list[RenderableType] = [escape("\n".join([*overview_lines(page, width), ""]))]
    for one in page.tables:
        is_long = any(column.kind in ("call", "call_b") for column in one.columns)
        parts += _cards(one, width) if is_long else _table(one, width)
    return parts


def cell(value: Any, kind: str) -> str:
    """What a cell says; nothing where it is not known."""
    if value is None or value is False or value == "":
        return "(root)" if kind == "module" and value == "" else ""
    if value is True:
        return "yes"
    if kind in _SAID:
        return str(value) if isinstance(value, str) and kind not in _TEXTS else _SAID[kind](value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def is_text(kind: str) -> bool:
    """Whether cells of that kind are words and names, and not numbers."""
    return kind in _TEXTS


def _place(value: str) -> str:
    file, _, line = value.rpartition(":")
    return short_place(file, line) if file else value


_SAID: dict[str, Callable[[Any], str]] = {
    "op": lambda op: op.removesuffix(".default"), "line": _place, "bytes": in_bytes, "ns": in_time,
    "error": number_text, "decibels": lambda db: f"{db:.1f} dB", "bits": lambda bits: f"{bits:+.1f}",
    "share": lambda share: f"{share:.2%}" if 0 < share < 0.01 else f"{share:.0%}",
}  # fmt: skip


def _table(found: Table, width: int) -> list[RenderableType]:
    """Its rows. A column that says the same of all of them is said once, above."""
    cells = _cells(found)
    columns = list(zip(*cells, strict=True))
    differ = [n for n, column in enumerate(columns) if len(set(column)) > 1 or (len(cells) == 1 and column[0])]
    alike = [
        f"{found.columns[n].name} {column[0]}" for n, column in enumerate(columns) if n not in differ and column[0]
    ]
    shown = differ or list(range(len(columns)))
    made = table("", *(_heading(found.columns[n]) for n in shown))
    for row in cells:
        made.add_row(*(_styled(row[n], found.columns[n].kind) for n in shown))
    return [*_title(found, alike if differ else [], width), made]


def _cards(found: Table, width: int) -> list[RenderableType]:
    """Its rows where calls have names of their own, which are long: each on several lines."""
    lines = []
    for row in _cells(found):
        known = [(column, text) for column, text in zip(found.columns, row, strict=True) if text]
        names = [f"  {column.name}: {text}" for column, text in known if column.kind in ("call", "call_b")]
        others = ", ".join(f"{c.name} {text}" for c, text in known if c.kind not in ("call", "call_b"))
        lines += [*names, *wrapped(f"    {others}", "    ", width)]
    return [*_title(found, [], width), escape("\n".join([*lines, ""]))]


def _cells(found: Table) -> list[list[str]]:
    return [[cell(value, column.kind) for value, column in zip(row, found.columns, strict=True)] for row in found.rows]


def _title(found: Table, alike: list[str], width: int) -> list[RenderableType]:
    said = wrapped(f"all: {', '.join(alike)}", width=width) if alike else []
    return ["\n".join([f"[bold]{escape(found.title)}[/]", *map(escape, said)])]


def _heading(column: Column) -> str:
    return column.name if column.kind in _TEXTS else f">{column.name}"


def _styled(text: str, kind: str) -> str:
    if kind != "format":
        return escape(text)
    return ",".join(f"[{_STYLES[name]}]{name}[/]" if name in _STYLES else name for name in text.split(","))
