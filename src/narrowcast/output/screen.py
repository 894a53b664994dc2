"""The first screen: what a user needs first, in this many lines, none of them wider than the terminal.

Every command and every `print(result)` says its verdict on it; `--all`, or `to_text(every=True)`, has the rest.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from narrowcast.output.words import counted

LINES, COLUMNS = 25, 80
"""The room that a first screen has at most, and the columns that prose is wrapped to on wider ones, too."""
PIPED = 120
"""Columns where nobody says how wide it is: in a pipe, or a file."""
NARROWEST = 40


def columns() -> int:
    """Return how wide standard output is: as COLUMNS or the terminal says."""
    return max(shutil.get_terminal_size((PIPED, LINES)).columns, NARROWEST)


def wrapped(line: str, indent: str = "  ", width: int = COLUMNS) -> list[str]:
    """Return the line in parts of at most this many columns, broken between words; a wider path stays whole."""
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


@dataclass(frozen=True, slots=True)
class Part:
    """Lines that belong together. rank: those of the highest give up lines first, from their end; 0 does last.

    heading: this many lines say nothing without one below them. least: this many lines stay as long as another part has
    some to give. units: how many lines go together, from the first on; without it each is by itself.
    """

    lines: Sequence[str]
    rank: int = 0
    heading: int = 0
    least: int = 0
    units: Sequence[int] = ()


def first_screen(
    parts: Sequence[Part], whole: Callable[[], str] | None = None, room: int = LINES, besides: str = ""
) -> str:
    """Return the parts on at most `room` lines; what `whole` has besides is counted on the last one. No line is cut.

    besides: what is not here, in words, in place of `whole`.
    """
    more = whole().count("\n") + 1 if whole is not None else 0
    shown = [list(part.lines) for part in parts]
    over = _count(shown) - room
    if over > 0 or more > _count(shown) or besides:
        room -= 1  # for the line that says so
    while _count(shown) > room:
        _take(parts, shown)
    lines = [line.rstrip() for taken in shown for line in taken]
    left = more - len(lines)
    besides = besides or (counted(left, "more line") if left > 0 else "")
    if besides:
        lines.append(f"{besides} with --all, or to_text(every=True)")
    return "\n".join(lines)


def _count(shown: list[list[str]]) -> int:
    return sum(map(len, shown))


def _take(parts: Sequence[Part], shown: list[list[str]]) -> None:
    """Take the last unit of the part that gives next; its heading, too, if that was the last one."""
    having = [n for n, lines in enumerate(shown) if lines]
    giving = [n for n in having if len(shown[n]) > parts[n].least] or having
    number = max(giving, key=lambda n: (parts[n].rank, n))
    part, lines = parts[number], shown[number]
    starts = [0, *accumulate(part.units)] if part.units else range(len(lines))
    del lines[max(start for start in starts if start < len(lines)) :]
    if len(lines) <= part.heading:
        lines.clear()
