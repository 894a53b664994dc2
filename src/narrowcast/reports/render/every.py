"""All of a document as text: its overview, and every row of its tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import RenderableType
from rich.markup import escape

from narrowcast.output.console import as_text, in_bytes, short_place, table
from narrowcast.output.screen import shortened, wrapped
from narrowcast.reports.documents.model import Column, Document, Table
from narrowcast.reports.documents.rules import alike_module
from narrowcast.reports.documents.words import in_time
from narrowcast.reports.render.overview import overview_lines
from narrowcast.reports.results.lines import number_text

LEAST = {"op": 16, "module": 16, "text": 16, "line": 20}
"""So much room a column has at least, if it needs that: names are cut in their middle, and text is wrapped."""
_STYLES = {"fp32": "green", "bf16": "yellow", "fp16": "yellow", "fp64": "cyan"}
_TEXTS = ("text", "op", "module", "call", "call_b", "line", "format")


def whole_text(page: Document, width: int) -> str:
    """The overview, and each table. A rule to copy is never broken into lines."""
    parts: list[RenderableType] = []
    for one in page.tables:
        is_long = any(column.kind in ("call", "call_b") for column in one.columns)
        parts += _cards(one, range(len(one.columns)), [], width) if is_long else _table(one, width)
    return "\n".join([*overview_lines(page, width), "", as_text(parts, width)]).rstrip("\n")


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
    """Its rows, one on a line if there is room. A column that says the same of all of them is said once, above."""
    cells = _cells(found)
    columns = list(zip(*cells, strict=True))
    differ = [n for n, column in enumerate(columns) if len(set(column)) > 1 or (len(cells) == 1 and column[0])]
    alike = [
        f"{found.columns[n].name} {column[0]}" for n, column in enumerate(columns) if n not in differ and column[0]
    ]
    shown = differ or list(range(len(columns)))
    widths = [
        min(max(map(len, (column.name, *columns[n]))), LEAST.get(column.kind, width))
        for n, column in ((n, found.columns[n]) for n in shown)
    ]
    if sum(widths) + 2 * len(shown) + 2 > width:
        return _cards(found, shown, alike if differ else [], width)
    made = table("", *(_heading(found.columns[n]) for n in shown))
    for n, column in zip(shown, made.columns, strict=True):
        if found.columns[n].kind in ("op", "module"):
            column.min_width = min(LEAST[found.columns[n].kind], max(len(row[n]) for row in cells))
    for row in cells:
        made.add_row(*(_styled(row[n], found.columns[n].kind) for n in shown))
    return [*_title(found, alike if differ else [], width), made]


def _cards(found: Table, shown: Sequence[int], alike: list[str], width: int) -> list[RenderableType]:
    """Its rows where they need more room, or where calls have names of their own, which are long: each on several
    lines.
    """
    lines = []
    for row in _cells(found):
        known = [(found.columns[n], row[n]) for n in shown if row[n]]
        calls = [f"  {column.name}: {text}" for column, text in known if column.kind in ("call", "call_b")]
        place = " ".join(text for column, text in known if _is_place(column))
        others = [f"{c.name} {text}" for c, text in known if c.kind not in ("call", "call_b") and not _is_place(c)]
        heads = [*calls, *([f"  {shortened(place, width - 2)}"] if place else [])]
        lines += [*heads, *wrapped(f"    {', '.join(others)}", "    ", width)]
    return [*_title(found, alike, width), escape("\n".join([*lines, ""]))]


def _is_place(column: Column) -> bool:
    """Whether cells of it say of which call a row is."""
    return column.kind in ("module", "op") or (column.name == "call" and column.kind == "text")


def _cells(found: Table) -> list[list[str]]:
    rows = alike_rows(found)
    return [[cell(value, column.kind) for value, column in zip(row, found.columns, strict=True)] for row in rows]


def alike_rows(found: Table) -> list[list[Any]]:
    """The rows; those of modules that differ by the number of their layer alone, and that say the same, as one, if what
    they count can be added.
    """
    if found.columns[0].kind != "module" or any(column.kind in ("error", "share") for column in found.columns):
        return found.rows
    counts = [n for n, column in enumerate(found.columns) if not is_text(column.kind)]
    groups: dict[tuple[Any, ...], list[list[Any]]] = {}
    for row in found.rows:
        words = tuple(alike_module(str(value)) if not n else value for n, value in enumerate(row) if n not in counts)
        groups.setdefault(words, []).append(row)
    rows = []
    for (pattern, *_), alike in groups.items():
        made = list(alike[0]) if len(alike) == 1 else [pattern, *alike[0][1:]]
        for n in counts:
            made[n] = sum(row[n] or 0 for row in alike)
        rows.append(made)
    return sorted(rows, key=lambda row: -sum(row[n] for n in counts)) if counts else rows


def _title(found: Table, alike: list[str], width: int) -> list[RenderableType]:
    said = wrapped(f"all: {', '.join(alike)}", width=width) if alike else []
    return ["\n".join([f"[bold]{escape(found.title)}[/]", *map(escape, said)])]


def _heading(column: Column) -> str:
    return column.name if column.kind in _TEXTS else f">{column.name}"


def _styled(text: str, kind: str) -> str:
    if kind != "format":
        return escape(text)
    return ",".join(f"[{_STYLES[name]}]{name}[/]" if name in _STYLES else name for name in text.split(","))
