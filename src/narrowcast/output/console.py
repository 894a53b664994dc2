"""One way to make text: rich, at a width that tables fit into."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

WIDTH = 120


def print_all(console: Console, renderables: list[RenderableType]) -> None:
    """Print one after the other."""
    for renderable in renderables:
        console.print(renderable)


def terminal() -> Console:
    """A console on standard output; where that is no terminal, tables are still `WIDTH` columns wide."""
    console = Console(highlight=False)
    if not console.is_terminal:
        return Console(width=max(WIDTH, shutil.get_terminal_size((WIDTH, 40)).columns), highlight=False)
    return console


def as_text(renderables: list[RenderableType]) -> str:
    """The same as plain text."""
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, highlight=False)
    print_all(console, renderables)
    stream = console.file
    return stream.getvalue() if isinstance(stream, io.StringIO) else ""


def table(title: str, *columns: str) -> Table:
    """An open table; a column whose name starts with `>` is aligned to the right."""
    made = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="bold", pad_edge=False, padding=(0, 1, 0, 0)
    )
    for name in columns:
        right = name.startswith(">")
        made.add_column(
            name.removeprefix(">"),
            justify="right" if right else "left",
            no_wrap=right or name in ("line", "cast", "came", "computes"),
            overflow="fold",
        )
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
