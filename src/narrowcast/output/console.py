"""One way to make text: rich, at a width that tables fit into."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.highlighter import RegexHighlighter
from rich.theme import Theme

from narrowcast.output.screen import columns


def terminal() -> Console:
    """Return a console on standard output; where its width is unknown, tables have `PIPED` columns."""
    return Console(width=columns(), highlight=False)


def print_text(text: str) -> None:
    """Print a first screen: as it is, and on a terminal formats and verdicts in colour."""
    console = Console(width=columns(), theme=_THEME, highlight=False)
    console.print(_Colours()(text), soft_wrap=True)


class _Colours(RegexHighlighter):
    """Formats wherever they stand, and words in capitals at the beginning of a line."""

    base_style = "narrowcast."
    highlights = [  # noqa: RUF012 (as the base class has it)
        r"\b(?P<high>fp32)\b",
        r"\b(?P<low>bf16|fp16|e4m3fn|e5m2)\b",
        r"(?m)^(?P<verdict>[A-Z][A-Z' -]{3,}):",
    ]


_THEME = Theme({"narrowcast.high": "green", "narrowcast.low": "yellow", "narrowcast.verdict": "bold"})


def in_bytes(count: float) -> str:
    """Return bytes with a unit: 1536 -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return ""


def short_place(site: str) -> str:
    """Return `model.py:12` for `/home/me/model.py:12`; what is no line of a file, as it is."""
    file, _, line = site.rpartition(":")
    return f"{Path(file).name}:{line}" if file else site
