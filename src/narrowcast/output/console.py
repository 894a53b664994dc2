"""One way to make text: rich, at a width that tables fit into."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.highlighter import RegexHighlighter
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

from narrowcast.output.screen import PIPED, columns

WIDTH = PIPED


def print_all(console: Console, renderables: list[RenderableType]) -> None:
    """Print one after the other."""
    for renderable in renderables:
        console.print(renderable)


def terminal() -> Console:
    """A console on standard output; where nobody says how wide that is, tables have `WIDTH` columns."""
    return Console(width=columns(), highlight=False)


def print_text(text: str) -> None:
    """Print a first screen: as it is, and on a terminal formats and verdicts in colour."""
    console = Console(width=columns(), theme=_THEME, highlight=False)
    console.print(_Colours()(text), soft_wrap=True)


class _Colours(RegexHighlighter):
    """Formats wherever they stand, and what is said in capitals at the beginning of a line."""

    base_style = "narrowcast."
    highlights = [  # noqa: RUF012 (as the base class has it)
        r"\b(?P<high>fp32)\b",
        r"\b(?P<low>bf16|fp16|e4m3fn|e5m2)\b",
        r"(?m)^(?P<verdict>[A-Z][A-Z' -]{3,}):",
    ]


_THEME = Theme({"narrowcast.high": "green", "narrowcast.low": "yellow", "narrowcast.verdict": "bold"})


def as_text(renderables: list[RenderableType], width: int = WIDTH) -> str:
    """The same as plain text."""
    console = Console(file=io.StringIO(), width=width, color_system=None, highlight=False)
    print_all(console, renderables)
    stream = console.file
    return stream.getvalue() if isinstance(stream, io.StringIO) else ""


class Middle:
    """A cell that never wraps: where it is too narrow, the middle is left out."""

    def __init__(self, markup: str) -> None:
        self.text = Text.from_markup(markup)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """From a few letters up to all."""
        return Measurement(min(len(self.text), _LEAST), len(self.text))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """What there is room for."""
        room = options.max_width
        text = self.text
        if len(text) > room:
            begin = max(room - 3, 0) // 4
            text = Text("...").join((text[:begin], text[len(text) - max(room - 3 - begin, 0) :]))[:room]
        text.no_wrap, text.overflow = True, "crop"
        yield text


_LEAST = 8
_WHOLE = ("op", "rule", "module", "call", "argument", "output", "where", "candidate", "at")
"""Columns whose names hold one of these words: their cells are shortened in the middle, and never wrapped."""


class OpenTable(Table):
    """A table without a frame."""

    def add_row(self, *cells: Any, **options: Any) -> None:
        """Add a row; names and places are shortened where they do not fit."""
        names = [str(column.header) for column in self.columns]
        made = [
            Middle(cell) if isinstance(cell, str) and cell and _is_name(name) else cell
            for name, cell in zip(names, cells, strict=False)
        ]
        super().add_row(*made, **options)


def _is_name(column: str) -> bool:
    return any(word in _WHOLE for word in re.split(r"\W+", column))


def table(title: str, *columns: str) -> Table:
    """An open table; a column whose name starts with `>` is aligned to the right."""
    made = OpenTable(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold", pad_edge=False, padding=(0, 1, 0, 0)
    )
    for name in columns:
        right = name.startswith(">")
        made.add_column(
            name.removeprefix(">"), justify="right" if right else "left",
            no_wrap=right or name in ("line", "cast", "came", "computes"), overflow="fold",
        )  # fmt: skip
    return made


def in_bytes(count: float) -> str:
    """1536 -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return ""


def short_file(file: str) -> str:
    """The name of the file; the JSON and `Cast.site` have the whole path."""
    return Path(file).name if file else "?"


def short_place(file: str, line: int | str) -> str:
    """`model.py:12`; nothing where no line of the user's was on the stack: torch's modules alone make up the model."""
    return f"{short_file(file)}:{line}" if file else ""
